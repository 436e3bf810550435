"""What a real runtime tells a real collector about requests that went in every way.

Each request carries a trace id of its own choice, by which it is found in the store.
"""

import json
import socket
import urllib.error
import urllib.request
from collections.abc import Iterator
from typing import Any

import polars as pl
import pytest

from perfledger.schema.stages import STAGE_NAMES
from perfledger.schema.store import Store

CANARY = "canary-5f1b"
PARENT_SPAN = "b7ad6b7169203331"
API_STAGES = ("template", "tokenize", "detokenize", "stream")
ENGINE_STAGES = ("queue", "context", "prefill", "decode", "sample", "host_gap")
REPEATS = 8  # the least of several is free of most noise of a shared machine
DELAY_NS = 50_000_000
TOLERANCE_NS = 2_000_000


def ask(url: str, trace: int, fault: str = "", **fields: Any) -> int:
    body = {
        "messages": [{"role": "user", "content": f"Hello {CANARY}"}],
        "max_tokens": 4,
        "temperature": 0,
        "ignore_eos": True,
        **fields,
    }
    headers = {
        "Content-Type": "application/json",
        "traceparent": f"00-{trace:032x}-{PARENT_SPAN}-01",
        "x-perfledger-tenant": "acme",
        "x-perfledger-class": "chat",
        "x-perfledger-session": "s1",
        "x-perfledger-deadline-ms": "900000",
    }
    if fault:
        headers["x-perfledger-fault"] = fault
    request = urllib.request.Request(
        f"{url}/v1/chat/completions", json.dumps(body).encode(), headers
    )
    try:
        with urllib.request.urlopen(request, timeout=60) as response:
            response.read()
            return int(response.status)
    except urllib.error.HTTPError as error:
        return error.code


def leave_in_the_middle(url: str, trace: int) -> None:
    body = json.dumps({"prompt": CANARY, "max_tokens": 900, "ignore_eos": True, "stream": True})
    head = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    head += f"traceparent: 00-{trace:032x}-{PARENT_SPAN}-01\r\nContent-Length: {len(body)}\r\n\r\n"
    address = ("127.0.0.1", int(url.rsplit(":", 1)[1]))
    with socket.create_connection(address, timeout=60) as connection:
        connection.sendall((head + body).encode())
        received = b""
        while b'"text":' not in received:
            received += connection.recv(65536)


WHOLE, STREAMED, REFUSED, STOPPED, LEFT, AFTER = range(1, 7)
# Trace ids of the repeats start here: of each stage with its delay, and ("") without any.
PLANTED = {stage: 100 * (1 + at) for at, stage in enumerate(("", *API_STAGES, *ENGINE_STAGES))}


@pytest.fixture(scope="module")
def ledger(
    tmp_path_factory: pytest.TempPathFactory, start_collector: Any, start_runtime: Any
) -> Iterator[Store]:
    """The store after all requests were served and everything ended."""
    folder = tmp_path_factory.mktemp("ledger")
    with start_collector(folder) as collector:
        flags = ("--allow-faults", "--run-id", "r1", "--max-model-len", "1024")
        with start_runtime(folder, *flags, otlp_port=collector.grpc_port) as runtime:
            url = runtime.url
            assert ask(url, WHOLE) == 200
            assert ask(url, STREAMED, stream=True, seed=7, top_p=0.5) == 200
            assert ask(url, REFUSED, logprobs=True) == 400
            assert ask(url, STOPPED, max_tokens=60, stop=[" ", "e", "a", "i"]) == 200
            leave_in_the_middle(url, LEFT)
            assert ask(url, AFTER) == 200
            for repeat in range(REPEATS):
                for stage, trace in PLANTED.items():
                    fault = f"{stage}=50ms" if stage else ""
                    assert ask(url, trace + repeat, fault, max_tokens=3) == 200
    yield Store.at(str(collector.store))


@pytest.fixture(scope="module")
def spans(ledger: Store) -> pl.DataFrame:
    return ledger.scan("spans").sort("start_ns").collect()


@pytest.fixture(scope="module")
def requests(ledger: Store) -> dict[int, dict[str, Any]]:
    rows = ledger.scan("requests").collect().to_dicts()
    return {int.from_bytes(row["trace_id"]): row for row in rows}


def of_trace(spans: pl.DataFrame, trace: int) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Return the root of a request and its children."""
    mine = spans.filter(pl.col("trace_id") == trace.to_bytes(16)).to_dicts()
    (root,) = [span for span in mine if span["kind"] == "server"]
    children = [span for span in mine if span is not root]
    assert {span["parent_span_id"] for span in children} <= {root["span_id"]}
    return root, children


def attributes(span: dict[str, Any]) -> dict[str, Any]:
    pairs: dict[str, Any] = {}
    for pair in span["attributes"]:
        (pairs[pair["key"]],) = [v for k, v in pair.items() if k != "key" and v is not None]
    return pairs


def test_a_streamed_chat_has_every_span_in_order(spans: pl.DataFrame) -> None:
    root, children = of_trace(spans, STREAMED)
    assert [span["name"] for span in children] == [
        "template",
        "tokenize",
        "queue",
        "context",
        "prefill",
        "sample",
        "decode",
        "detokenize",
        "stream",
    ]
    times = [(span["start_ns"], span["end_ns"]) for span in children]
    flat = [root["start_ns"], *(stamp for pair in times for stamp in pair)]
    assert flat == sorted(flat)
    assert root["end_ns"] == children[-1]["end_ns"]
    assert children[-1]["start_ns"] == children[-2]["end_ns"]


def test_the_root_says_who_asked_what(spans: pl.DataFrame) -> None:
    root, _ = of_trace(spans, STREAMED)
    promoted = (
        "name", "operation", "model", "outcome", "tenant", "traffic_class", "session",
        "deadline_ms", "output_tokens", "cached_tokens", "run_id", "service_name", "error_type",
    )  # fmt: skip
    assert {key: root[key] for key in promoted} == {
        "name": "chat",
        "operation": "chat",
        "model": "reference-small",
        "outcome": "ok",
        "tenant": "acme",
        "traffic_class": "chat",
        "session": "s1",
        "deadline_ms": 900_000,
        "output_tokens": 4,
        "cached_tokens": 16,  # one block, computed for the request before
        "run_id": "r1",
        "service_name": "perfledger-runtime",
        "error_type": None,
    }
    assert root["parent_span_id"].hex() == PARENT_SPAN
    assert root["input_tokens"] > 5
    assert 0 < root["ttfc_ns"] < root["end_ns"] - root["start_ns"]
    rest = attributes(root)
    hashes = [
        len(rest.pop(name)) for name in ("perfledger.model.hash", "perfledger.tokenizer.hash")
    ]
    assert (hashes, rest.pop("gen_ai.response.id")[:9]) == ([64, 64], "chatcmpl-")
    assert rest == {
        "gen_ai.request.max_tokens": 4,
        "gen_ai.request.temperature": 0.0,
        "gen_ai.request.top_p": 0.5,
        "gen_ai.request.seed": 7,
        "gen_ai.request.stream": True,
        "gen_ai.request.choice.count": 1,
        "gen_ai.response.model": "reference-small",
        "gen_ai.response.finish_reasons": '["length"]',
        "perfledger.kv_blocks_held": -(-(root["input_tokens"] + 3) // 16),
        "perfledger.computed_tokens": root["input_tokens"] - root["cached_tokens"] + 3,
    }


def test_outcomes(spans: pl.DataFrame) -> None:
    columns = ("outcome", "error_type", "reason")
    found = {}
    for trace in (WHOLE, REFUSED, STOPPED, LEFT):
        root, _ = of_trace(spans, trace)
        finish = attributes(root).get("gen_ai.response.finish_reasons")
        found[trace] = (*(root[column] for column in columns), finish)
    assert found == {
        WHOLE: ("ok", None, None, '["length"]'),
        REFUSED: ("refused", "unsupported_parameter", None, None),
        STOPPED: ("ok", None, None, '["stop"]'),
        LEFT: ("aborted", None, "client_disconnect", '["abort"]'),
    }


def test_a_client_that_left_holds_no_blocks(spans: pl.DataFrame) -> None:
    """Each step of the next request counts its own blocks only."""
    root, _ = of_trace(spans, AFTER)
    steps = spans.filter(
        pl.col("name").str.ends_with("_step"),
        pl.col("start_ns").is_between(root["start_ns"], root["end_ns"]),
    ).to_dicts()
    used = {attributes(step)["perfledger.step.kv_blocks_used"] for step in steps}
    assert (len(steps), used) == (
        4,
        {-(-root["input_tokens"] // 16), -(-(root["input_tokens"] + 3) // 16)},
    )


def test_no_content_is_anywhere_on_disk(ledger: Store) -> None:
    files = [path for path in ledger.root.rglob("*") if path.is_file()]
    assert files
    assert not [path for path in files if CANARY.encode() in path.read_bytes()]
    kept = [ledger.scan(table).collect().to_dicts() for table in ("spans", "requests", "points")]
    assert CANARY not in repr(kept)


def test_stages_add_up_to_the_request(requests: dict[int, dict[str, Any]]) -> None:
    for row in requests.values():
        assert sum(row[f"{stage}_ns"] for stage in STAGE_NAMES) == row["e2e_ns"]


@pytest.mark.parametrize("planted", API_STAGES + ENGINE_STAGES)
def test_a_planted_delay_is_found_in_its_stage_and_nowhere_else(
    requests: dict[int, dict[str, Any]], planted: str
) -> None:
    """But for the delay, each stage takes what it takes without it, within 2 ms."""

    def times(stage: str, fault: str) -> list[int]:
        rows = [requests[PLANTED[fault] + repeat] for repeat in range(REPEATS)]
        return [int(row[f"{stage}_ns"]) for row in rows]

    for stage in STAGE_NAMES:
        rest_ns = min(times(stage, planted)) - (DELAY_NS if stage == planted else 0)
        assert 0 <= rest_ns < max(times(stage, "")) + TOLERANCE_NS, stage
