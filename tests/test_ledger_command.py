"""`perfledger ledger`: what it prints, its exit codes, and the bytes of a real server."""

import json
import urllib.request
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from ledger_rows import (
    GB_CEILINGS,
    Row,
    ceiling,
    ceilings,
    fill,
    step,
    step_span,
    work,
)

from perfledger.cli import main
from perfledger.schema.edges import EDGES
from perfledger.schema.step_work import READ_TOTAL, WRITTEN_TOTAL
from perfledger.schema.store import Store

TOKENS = 8
DECODE = work({"linear_weights_read": 9_000_000}, {"linear": 10_000_000}, launches=10)


def filled(folder: Path, **more: Any) -> str:
    rows = tuple(step(seq, "decode", 2 * seq, 2 * seq + 1, DECODE) for seq in range(4))
    fill(Store(folder), steps=rows, spans=tuple(step_span(row) for row in rows), **more)
    return str(folder)


def test_the_first_lines_say_which_edge_with_what_certainty_and_who_contends(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    store = filled(tmp_path, runs=(ceilings(*GB_CEILINGS),))
    assert main(["ledger", "--store", store]) == 0
    out = capsys.readouterr().out
    assert all(len(line) <= 80 for line in out.splitlines())
    assert out.splitlines()[:7] == [
        "The edge nearest its ceiling is device_memory: 90.0 % of 10 GB/s (likely:",
        "  derived bytes, measured ceiling).",
        "  contending on it: nobody seen (no host sampler: other processes of the host",
        "    are not known)",
        "  decode steps: bound by memory, explains 90% of the time (memory 90%, compute",
        "    10%, launch 1%)",
        "all requests: 4 steps, 4 tokens computed in 0.01 s (steps ran 57.1 %)",
    ]
    for edge in EDGES:
        assert edge.name in out
    assert "missing: nothing known" in out


def test_where_no_edge_is_near_its_ceiling_it_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    far = ceilings(ceiling("device_memory", "read", "4MiB", "bytes/s", 90e9))
    assert main(["ledger", "--store", filled(tmp_path, runs=(far,))]) == 0
    assert " ".join(capsys.readouterr().out.split()).startswith(
        "No edge is near its ceiling. The nearest is device_memory: 10.0 % of 90 GB/s"
        " (likely: derived bytes, measured ceiling)."
    )


def test_one_edge_in_full(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["ledger", "--store", filled(tmp_path), "--edge", "device_memory"]) == 0
    out = capsys.readouterr().out
    assert all(len(line) <= 80 for line in out.splitlines())
    assert "bytes read                36,000,000" in out
    assert "ceiling: none: no ceilings measured here" in out


def test_json_has_all_numbers_and_integers_of_any_size(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    huge = work({"linear_weights_read": 2**62}, {"linear": 2**62})
    rows = tuple(step(seq, "prefill", 2 * seq, 2 * seq + 1, huge) for seq in range(5))
    fill(Store(tmp_path), steps=rows, spans=(step_span(rows[0]),))
    assert main(["ledger", "--store", str(tmp_path), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [line["edge"] for line in found["edges"]] == [edge.name for edge in EDGES]
    whole = found["roofline"]["points"][0]
    assert (whole["read_bytes"], whole["flops"]) == (5 * 2**62, 5 * 2**62)
    assert found["energy"]["counters"] == []
    assert set(found["definitions"]) == {"ledger", "energy"}


def test_exit_codes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["ledger", "--store", str(tmp_path / "none")]) == 4
    lossy: list[Row] = [step(1, "decode", 0, 1, DECODE), step(2, "decode", 1, 2, None)]
    fill(Store(tmp_path / "lossy"), steps=tuple(lossy), spans=(step_span(lossy[0]),))
    assert main(["ledger", "--store", str(tmp_path / "lossy")]) == 3
    assert "steps whose bytes are lost, of engines that tell them: 1" in capsys.readouterr().err
    store = filled(tmp_path / "other", runs=(ceilings(*GB_CEILINGS, boot_id="x", cpu="another"),))
    # Nobody said which host the steps ran on: its boot is not that of the ceilings.
    assert main(["ledger", "--store", store]) == 0
    assert "weak: derived bytes, measured" in " ".join(capsys.readouterr().out.split())
    assert main(["ledger", "--store", store, "--ceilings", "datasheet"]) == 0
    assert main(["ledger", "--store", store, "--ceilings", "nothing"]) == 2


def ask(url: str) -> None:
    body = {"prompt": "One, two, three", "max_tokens": TOKENS, "temperature": 0, "ignore_eos": True}
    request = urllib.request.Request(
        f"{url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=120) as response:
        assert json.load(response)["usage"]["completion_tokens"] == TOKENS


@pytest.mark.timeout(600)
def test_a_real_servers_bytes(
    tmp_path: Path, start_collector: Any, start_runtime: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tmp_path / "collect.toml"
    config.write_text("[host]\ninterval_s = 0.2\n")
    with (
        start_collector(tmp_path, "--config", str(config)) as collector,
        start_runtime(tmp_path, otlp_port=collector.grpc_port) as runtime,
    ):
        ask(runtime.url)
    store = Store.at(str(collector.store))
    assert main(["ledger", "--store", str(collector.store), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    lines = {line["edge"]: line for line in found["edges"]}
    steps = store.collect("steps").filter(pl.col(READ_TOTAL).is_not_null())
    flow = lines["device_memory"]["flows"][0]
    assert flow["forward_bytes"] == steps[READ_TOTAL].sum() > 0
    assert flow["backward_bytes"] == steps[WRITTEN_TOTAL].sum() > 0
    assert sum(part["forward_bytes"] for part in flow["parts"]) == flow["forward_bytes"]
    assert (found["steps_without_work"], found["losses"]) == (0, [])
    assert lines["network"]["provenance"] == "measured"
    assert lines["host_device"]["why"].startswith("the engine computes on the CPU")
    nodes = {node["node"]: node for node in found["nodes"]}
    assert {held["name"] for held in nodes["device_memory"]["held"]} >= {"weights", "kv"}
    others = [one["name"] for one in lines["device_memory"]["contenders"]]
    assert others == ["processes other than the engines"]
    decode = [p for p in found["roofline"]["points"] if p["step_kind"] == "decode"]
    assert {p["operator"] for p in decode} >= {"all", "linear", "attention", "norm"}
