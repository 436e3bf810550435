"""Workload files of others become arrivals, or an error that says where and what was expected."""

import csv
import hashlib
import io
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perfledger.instrumented_runtime.load.formats import read_workload
from perfledger.instrumented_runtime.load.workload import (
    Arrival,
    Scaling,
    Workload,
    WorkloadFacts,
    describe,
    scale,
    with_defaults,
)
from perfledger.schema.errors import UsageError

S = 1_000_000_000


def written(folder: Path, text: str) -> Path:
    path = folder / "trace"
    path.write_text(text, encoding="utf-8", newline="")
    return path


def test_azure_2023_stamps_are_naive_with_seven_digits(tmp_path: Path) -> None:
    path = written(
        tmp_path,
        "TIMESTAMP,ContextTokens,GeneratedTokens\r\n"
        "2023-11-16 18:17:03.9799600,4808,10\r\n"
        "2023-11-16 18:17:04.0319600,3180,8\r\n",
    )
    assert read_workload(path) == Workload(
        "azure", "trace", (Arrival(0, 4808, 10), Arrival(52_000_000, 3180, 8))
    )


def test_azure_2024_stamps_have_an_offset_and_columns_any_order(tmp_path: Path) -> None:
    path = written(
        tmp_path,
        "\ufeffGeneratedTokens,TIMESTAMP,ContextTokens\n"
        "44,2024-05-10 00:00:00.009930+00:00,2162\n"
        "109,2024-05-10 02:00:00.017335+02:00,2399\n",
    )
    assert read_workload(path).arrivals == (Arrival(0, 2162, 44), Arrival(7_405_000, 2399, 109))


def test_azure_2025_has_images_and_a_z(tmp_path: Path) -> None:
    path = written(
        tmp_path,
        "TIMESTAMP,NumImages,ContextTokens,GeneratedTokens\n2025-01-01T00:00:00Z,1,10,20\n",
    )
    assert read_workload(path).arrivals == (Arrival(0, 10, 20),)


BURSTGPT_1 = """\
Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type
5,ChatGPT,472,18,490,Conversation log
45.5,ChatGPT,1087,230,1317,Conversation log
118,GPT-4,417,0,417,API log
120,GPT-4,9,7,16,API log
"""
BURSTGPT_3 = """\
Timestamp,Session ID,Elapsed time,Model,Request tokens,Response tokens,Total tokens,Log Type
5,aa,3,ChatGPT,472,18,490,Conversation log
45.5,bb,3,ChatGPT,1087,230,1317,Conversation log
118,bb,0,GPT-4,417,0,417,API log
120,,1,GPT-4,9,7,16,API log
"""


@pytest.mark.parametrize(
    ("text", "sessions"), [(BURSTGPT_1, ("", "", "")), (BURSTGPT_3, ("aa", "bb", ""))]
)
def test_burstgpt_in_both_layouts_skips_and_counts_failed_rows(
    tmp_path: Path, text: str, sessions: tuple[str, str, str]
) -> None:
    chat, api = "Conversation log", "API log"
    assert read_workload(written(tmp_path, text)) == Workload(
        "burstgpt",
        "trace",
        (
            Arrival(0, 472, 18, traffic_class=chat, session=sessions[0]),
            Arrival(40_500_000_000, 1087, 230, traffic_class=chat, session=sessions[1]),
            Arrival(115_000_000_000, 9, 7, traffic_class=api, session=sessions[2]),
        ),
        skipped=1,
        notes=("1 rows with 0 output tokens skipped",),
    )


def test_mooncake_is_in_ms_with_blocks_of_512_tokens(tmp_path: Path) -> None:
    rows = [
        {"timestamp": 0, "input_length": 513, "output_length": 5, "hash_ids": [0, 7]},
        {"timestamp": 27, "input_length": 512, "output_length": 1, "hash_ids": [0]},
    ]
    rows[1] |= {"tenant": "acme", "class": "batch", "session_id": "s1"}
    rows[1] |= {"priority": -1, "deadline_ms": 900}
    path = written(tmp_path, "\n".join(json.dumps(row) for row in rows))
    assert read_workload(path) == Workload(
        "mooncake",
        "trace",
        (
            Arrival(0, 513, 5, (0, 7)),
            Arrival(27_000_000, 512, 1, (0,), "batch", "acme", "s1", -1, 900),
        ),
        block_tokens=512,
    )


def test_the_limit_stops_reading_before_what_follows(tmp_path: Path) -> None:
    path = written(tmp_path, BURSTGPT_1 + "this is, no row\n")
    assert len(read_workload(path, limit=2).arrivals) == 2
    with pytest.raises(UsageError, match="line 6"):
        read_workload(path)


AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens\n"
FIRST = "2023-11-16 18:17:03.9799600,4808,10\n"
MOON = '{"timestamp": 0, "input_length": 10, "output_length": 1}\n'


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("", ["holds no rows", "expected a header and at least one request"]),
        (AZURE, ["holds no rows"]),
        ("a,b\n1,2\n", ["unknown columns: a, b", "TIMESTAMP, ContextTokens, GeneratedTokens"]),
        (
            "Timestamp,Request tokens\n1,2\n",
            ["line 2, column Response tokens", "unknown columns: Timestamp, Request tokens"],
        ),
        (AZURE[:-1] + ",Surprise\n" + FIRST[:-1] + ",1\n", ["column Surprise", "expected only"]),
        (AZURE[:-1] + ",ContextTokens\n" + FIRST[:-1] + ",1\n", ["a column named twice"]),
        (AZURE + FIRST + "2023-11-16 18:17:03,4808\n", ["2 cells under 3", "line 3"]),
        (
            AZURE + FIRST + "2023-11-16 18:17:03.9,1,1\n",
            ["line 3, column TIMESTAMP", "rows in order of time"],
        ),
        (AZURE + "1700158623,1,1\n", ["not a time: '1700158623'", "expected a wall-clock time"]),
        (AZURE + "2023-13-16 18:17:03,1,1\n", ["not a time"]),
        (AZURE + "2023-11-16 18:17:03,1.5,1\n", ["column ContextTokens", "a whole number"]),
        (AZURE + "2023-11-16 18:17:03,-1,1\n", ["not a length: '-1'"]),
        (AZURE + "2023-11-16 18:17:03,1_0,1\n", ["not a length: '1_0'"]),
        (AZURE + "2023-11-16 18:17:03,99999999999,1\n", ["from 0 to 10000000"]),
        (AZURE + "2023-11-16 18:17:03,0,1\n", ["a request without input", "at least 1 token"]),
        (AZURE + "2023-11-16 18:17:03,0,0\n", ["no request left: all 1 rows have 0"]),
        (AZURE + FIRST + "2023-12-16 18:17:03,1,1\n", ["the times are in another unit"]),
        (MOON * 200 + MOON.replace("0,", "50,", 1), ["201 requests within 0.05 s", "milliseconds"]),
        (MOON.replace("0,", "0.2,", 1), ["not a time: 0.2", "whole milliseconds"]),
        (MOON.replace("0,", "true,", 1), ["not a time: True"]),
        (MOON + '{"timestamp": 1, "input_length": 10}', ["line 2, column output_length"]),
        (MOON + "[1]", ["line 2", "not an object"]),
        (MOON + "{", ["line 2", "not JSON"]),
        (MOON.replace("}", ', "hash_ids": [1, 2]}'), ["2 ids for 10 tokens", "expected 1, one a"]),
        (MOON.replace("}", ', "hash_ids": [-1]}'), ["not block ids: [-1]", "a list of integers"]),
        (MOON.replace("}", ', "delay": 5}'), ["column delay", "an unknown column"]),
        (MOON.replace("}", ', "tenant": "a\\nb"}'), ["column tenant", "not a label"]),
        (MOON.replace("}", ', "priority": 1.5}'), ["column priority", "not a number: 1.5"]),
        (MOON.replace("}", ', "deadline_ms": 0}'), ["column deadline_ms", "from 1 to 999999999"]),
        ("x" * 2_000_000, ["a line too long"]),
        (AZURE + '"2023\n', ["not CSV"]),
    ],
)
def test_errors_name_file_line_column_and_what_was_expected(
    tmp_path: Path, text: str, parts: list[str]
) -> None:
    path = written(tmp_path, text)
    with pytest.raises(UsageError) as caught:
        read_workload(path)
    message = str(caught.value)
    assert [part for part in [str(path), *parts] if part not in message] == []


def test_what_is_no_text_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "binary").write_bytes(b"PAR1\xff\xfe\x00")
    for path in (tmp_path / "binary", tmp_path / "missing", tmp_path):
        with pytest.raises(UsageError, match=str(path)):
            read_workload(path)


tokens = st.integers(1, 100_000)
label = st.text(st.characters(min_codepoint=32, max_codepoint=126), max_size=20)
offsets = st.lists(st.integers(0, 5_000 * S), min_size=1, max_size=20).map(sorted)


@given(offsets, st.data())
def test_azure_round_trip(
    tmp_path_factory: pytest.TempPathFactory, at: list[int], data: st.DataObject
) -> None:
    at = [ns // 100 * 100 for ns in at]  # seven digits
    arrivals = tuple(
        Arrival(
            ns - at[0],
            data.draw(tokens),
            data.draw(tokens),
            (),
            *data.draw(labels()),
            data.draw(st.none() | st.integers(-(2**31) + 1, 2**31 - 1)),
            data.draw(st.none() | st.integers(1, 999_999_999)),
        )
        for ns in at
    )
    text = io.StringIO(newline="")
    writer = csv.writer(text)
    columns = ["TIMESTAMP", "ContextTokens", "GeneratedTokens", "class", "tenant", "session"]
    writer.writerow([*columns, "priority", "deadline_ms"])
    for ns, a in zip(at, arrivals, strict=True):
        stamp = f"2023-11-16 {20 + ns // S // 3600:02d}:{ns // S // 60 % 60:02d}:{ns // S % 60:02d}"
        labels_of = (a.traffic_class, a.tenant, a.session, a.priority, a.deadline_ms)
        cells = (a.input_tokens, a.output_tokens, *labels_of)
        writer.writerow([f"{stamp}.{ns % S // 100:07d}", *cells])
    path = written(tmp_path_factory.mktemp("azure"), text.getvalue())
    assert read_workload(path) == Workload("azure", "trace", arrivals)


@st.composite
def labels(draw: st.DrawFn) -> tuple[str, str, str]:
    return draw(label), draw(label), draw(label)


@given(offsets, st.data())
def test_mooncake_round_trip(
    tmp_path_factory: pytest.TempPathFactory, at: list[int], data: st.DataObject
) -> None:
    at = [ns // 1_000_000 for ns in at]
    rows = []
    for ms in at:
        asked = data.draw(st.integers(1, 4000))
        ids = data.draw(st.lists(st.integers(0, 2**63 - 1), min_size=-(-asked // 512)))
        rows.append((ms, asked, data.draw(tokens), tuple(ids[: -(-asked // 512)])))
    names = ("timestamp", "input_length", "output_length", "hash_ids")
    text = "\n\n".join(json.dumps(dict(zip(names, row, strict=True))) for row in rows)
    read = read_workload(written(tmp_path_factory.mktemp("mooncake"), text))
    assert read.block_tokens == 512
    assert read.arrivals == tuple(
        Arrival((ms - at[0]) * 1_000_000, asked, answer, ids) for ms, asked, answer, ids in rows
    )


@given(st.lists(st.decimals(0, 5000, places=3), min_size=1, max_size=20).map(sorted), st.data())
def test_burstgpt_round_trip(
    tmp_path_factory: pytest.TempPathFactory, at: list[object], data: st.DataObject
) -> None:
    rows = [(when, data.draw(tokens), data.draw(st.integers(0, 3))) for when in at]
    text = "Timestamp,Request tokens,Response tokens\n" + "".join(
        f"{when},{asked},{answer}\n" for when, asked, answer in rows
    )
    path = written(tmp_path_factory.mktemp("burstgpt"), text)
    kept = [(int(when * S), asked, answer) for when, asked, answer in rows if answer]  # type: ignore[operator]
    if not kept:
        with pytest.raises(UsageError, match="no request left"):
            read_workload(path)
        return
    read = read_workload(path)
    assert read.skipped == len(rows) - len(kept)
    assert read.arrivals == tuple(Arrival(ns - kept[0][0], *both) for ns, *both in kept)


BASE = Workload(
    "mooncake",
    "trace",
    (
        Arrival(0, 1024, 10, (0, 1)),
        Arrival(4 * S, 1500, 100, (0, 1, 2)),
        Arrival(10 * S, 3, 4, (9,)),
    ),
    block_tokens=512,
)


def test_scaling_multiplies_then_cuts_and_is_kept() -> None:
    scaling = Scaling(
        time_scale=0.5, input_scale=0.25, output_scale=2, max_input=300, max_output=50, limit=2
    )
    assert scale(BASE, scaling) == replace(
        BASE,
        arrivals=(Arrival(0, 256, 20, (0, 1)), Arrival(2 * S, 300, 50, (0, 1, 2))),
        block_tokens=128,
        scaling=scaling,
    )


def test_a_rate_sets_the_mean_rate() -> None:
    scaled = scale(BASE, Scaling(rate=4))
    assert [arrival.offset_ns for arrival in scaled.arrivals] == [0, S // 5, S // 2]
    assert scaled.rate == 4


@pytest.mark.parametrize(
    "scaling",
    [
        Scaling(rate=1, time_scale=2),
        Scaling(rate=1, limit=1),
        Scaling(input_scale=0),
        Scaling(output_scale=-1),
        Scaling(time_scale=float("inf")),
        Scaling(max_input=0),
        Scaling(limit=0),
    ],
)
def test_impossible_factors_are_refused(scaling: Scaling) -> None:
    with pytest.raises(UsageError):
        scale(BASE, scaling)


@given(st.floats(0.001, 20), st.integers(1, 2000))
def test_scaled_prompts_name_no_more_blocks_than_they_have(factor: float, most: int) -> None:
    scaled = scale(BASE, Scaling(input_scale=factor, max_input=most))
    for arrival in scaled.arrivals:
        assert 1 <= arrival.input_tokens <= most
        assert len(arrival.prefix_ids) <= -(-arrival.input_tokens // scaled.block_tokens)


def test_the_hash_is_of_the_work_and_not_of_its_name() -> None:
    other = replace(BASE, name="other", notes=("said",))
    moved = replace(BASE, arrivals=(*BASE.arrivals[:2], replace(BASE.arrivals[2], offset_ns=1)))
    assert BASE.sha256() == other.sha256()
    assert len({BASE.sha256(), moved.sha256(), replace(BASE, block_tokens=16).sha256()}) == 3


def test_a_coarse_grid_is_declared_and_spread_on_demand() -> None:
    on_grid = Workload(
        "mooncake", "trace", tuple(Arrival(at // 10 * 3 * S, 1, 1) for at in range(200))
    )
    said = scale(on_grid, Scaling())
    assert [arrival.offset_ns for arrival in said.arrivals] == [
        arrival.offset_ns for arrival in on_grid.arrivals
    ]
    assert said.notes == (
        "arrivals of the trace lie on a grid of 3 s, so they come in bursts"
        " (spread-grid spreads them)",
    )
    spread = scale(on_grid, Scaling(spread_grid=True), seed=3)
    offsets = [arrival.offset_ns for arrival in spread.arrivals]
    assert spread.notes == ("arrivals of the trace lie on a grid of 3 s; spread over it",)
    assert offsets == sorted(offsets)
    assert offsets[0] == 0
    assert len(set(offsets)) > 190
    assert spread == scale(on_grid, Scaling(spread_grid=True), seed=3)


def rounded(facts: WorkloadFacts) -> tuple[object, ...]:
    lengths = [
        (round(s.mean, 1), round(s.p50), round(s.p95), round(s.p99))
        for s in (facts.input_tokens, facts.output_tokens)
    ]
    reuse = None if facts.leading_reuse is None else round(facts.leading_reuse, 3)
    return (facts.requests, round(facts.span_s), round(facts.gap_cv or 0, 2), *lengths, reuse)


def test_the_public_files_have_their_published_statistics(shared_data: Path) -> None:
    folder = shared_data / "workloads"
    azure = describe(read_workload(folder / "azure_llm_2023_code.csv"))
    mooncake = describe(read_workload(folder / "mooncake_conversation.jsonl"))
    burstgpt = read_workload(folder / "burstgpt3_34_rows.csv")
    assert rounded(azure) == (
        8819,
        3436,
        13.15,
        (2047.8, 1469, 7303, 7436),
        (27.9, 13, 90, 251),
        None,
    )
    assert round(azure.empty_seconds or 0, 2) == 0.73
    assert rounded(mooncake) == (
        12031,
        3537,
        3.03,
        (12035.1, 6909, 39550, 85400),
        (342.6, 350, 698, 1119),
        0.366,
    )
    assert (len(burstgpt.arrivals), burstgpt.skipped, burstgpt.span_ns) == (33, 1, 33_391 * S)


def test_defaults_fill_what_a_workload_leaves_open() -> None:
    own = Arrival(0, 1, 1, (), "", "own", "", 0, 5)
    work = Workload("test", "here", (own, Arrival(1, 1, 1)))
    filled = with_defaults(work, tenant="acme", priority=3, deadline_ms=900)
    assert filled.arrivals == (own, Arrival(1, 1, 1, (), "", "acme", "", 3, 900))
    assert with_defaults(work, priority=None, deadline_ms=None) == work


def test_the_hash_tells_labels_apart_and_is_as_before_without() -> None:
    def hashed(**fields: Any) -> str:
        return Workload("test", "here", (Arrival(0, 8, 6, **fields),)).sha256()

    found = [hashed(), hashed(priority=5), hashed(deadline_ms=5), hashed(priority=5, deadline_ms=5)]
    assert len(set(found)) == 4
    before = hashlib.sha256(b'0\n[0, 8, 6, [], "", "", ""]').hexdigest()
    assert found[0] == before
