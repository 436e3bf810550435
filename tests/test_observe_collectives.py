"""A user's own torch.distributed program, observed: the example over a real collector."""

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from conftest import free_port, wait_until
from observed_programs import observed
from spawned_ranks import run_ranks

from perfledger.instrumented_runtime.collectives.observed import NOT_OBSERVED, CollectiveCall
from perfledger.instrumented_runtime.parallel.layout import Layout
from perfledger.schema.collective_waits import with_waits
from perfledger.schema.communication import data_parallel_bytes, fsdp_bytes, wire_bytes
from perfledger.schema.store import Store

EXAMPLE = Path(__file__).parents[1] / "examples" / "observe_collectives.py"
PARAMETERS = 64 * 256 + 256 + 256 * 64 + 64
STEPS, SAMPLED = 6, (0, 3)

pytestmark = pytest.mark.timeout(600)


def run_example(**environment: str) -> list[str]:
    """Run the example on two ranks, as its first lines say; return its output."""
    meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": "2"}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-P", str(EXAMPLE)],
            env={**os.environ, **meeting, **environment, "RANK": str(rank), "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        output = [rank.communicate(timeout=300)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [rank.returncode for rank in ranks] == [0, 0], output
    return output


def test_the_example_over_a_real_collector(collector: Any) -> None:
    output = run_example(
        OTEL_EXPORTER_OTLP_ENDPOINT=f"http://127.0.0.1:{collector.grpc_port}",
        OTEL_SERVICE_NAME="my-training",
    )
    assert "step 5: loss" in output[0]
    store = Store.at(str(collector.store))
    calls = STEPS + len(SAMPLED)  # of each rank

    def arrived() -> bool:
        return len(store.collect("collectives")) >= 2 * calls

    wait_until(arrived, 60, "the collectives")
    rows = store.collect("collectives")
    assert "0 lost" in output[0] and "0 lost" in output[1]
    assert set(rows["service_name"]) == {"my-training"}
    for rank in range(2):
        mine = rows.filter(rank=rank).sort("enqueue_ns")
        assert Counter(mine["step_seq"]) == {n: 2 if n in SAMPLED else 1 for n in range(STEPS)}
        gradients = mine.filter(pl.col("bytes") > 4)
        assert gradients["step_seq"].to_list() == list(SAMPLED)
        assert gradients["bytes"].to_list() == [PARAMETERS * 4] * 2
        expected = data_parallel_bytes(PARAMETERS * 4, 2)
        assert gradients["wire_bytes"].to_list() == [expected] * 2
        assert set(mine["group"]) == {"world"}
        assert set(mine["members"]) == {"0-1"}
        assert mine["sequence"].to_list() == list(range(calls))
        assert mine["start_ns"].null_count() == calls  # not observable on gloo
    waits = with_waits(rows)
    explicit = waits.filter(pl.col("bytes") == 4)
    assert explicit["transfer_ns"].null_count() == 0
    assert explicit["wait_ns"].min() == 0
    steps = store.collect("spans").filter(name="step")
    parents = rows.join(
        steps, left_on=["trace_id", "parent_span_id"], right_on=["trace_id", "span_id"], how="semi"
    )
    assert len(parents) == 2 * calls


def test_without_a_collector_the_program_is_what_it_was() -> None:
    plain = run_example(OTEL_TRACES_EXPORTER="none")
    nobody = run_example(
        OTEL_EXPORTER_OTLP_ENDPOINT=f"http://127.0.0.1:{free_port()}", OTEL_SERVICE_NAME="alone"
    )
    losses = [[line for line in one[0].splitlines() if "loss" in line] for one in (plain, nobody)]
    assert losses[0] == losses[1]
    assert len(losses[0]) == STEPS
    assert "rank 0: 0 spans, 0 lost" in plain[0]
    assert "collectives were lost" in nobody[0]


def test_a_wrong_environment_is_said_and_stops_nothing() -> None:
    output = run_example(OTEL_TRACES_EXPORTER="jaeger")
    assert "collectives are not observed" in output[0]
    assert "step 5: loss" in output[0]


def heard(
    folder: Path, program: str, ranks: int = 2, *, full: bool = False
) -> list[list[CollectiveCall]]:
    """Return what was told of a program on each rank; it must compute the same as unobserved."""
    answers = run_ranks(
        observed, Layout(tp=ranks), folder / f"meet-{full}", program, full, timeout_s=200
    )
    for answer in answers:
        assert answer["plain"] == answer["observed"]
        assert answer["errors"] == (0, "")
    return [[CollectiveCall(*call) for call in answer["calls"]] for answer in answers]


def told(calls: list[CollectiveCall]) -> list[tuple[str, int, int, int]]:
    return [(c.op, c.bytes, c.wire_bytes, c.sequence) for c in calls]


def test_explicit_calls_are_seen_whatever_their_form(tmp_path: Path) -> None:
    calls = heard(tmp_path, "explicit", 4)
    size = 8 * 4
    both = ["all_reduce", "all_gather", "all_gather", "reduce_scatter", "reduce_scatter"]
    both += ["all_to_all", "all_to_all", "broadcast", "reduce", "gather", "scatter"]
    for rank, mine in enumerate(calls):
        collective = [c for c in mine if c.op not in ("send", "recv")]
        assert [c.op for c in collective] == [*both, "barrier"]
        assert [c.sequence for c in collective] == list(range(12))
        whole = {"all_reduce": size, "broadcast": size, "reduce": size, "barrier": 0}
        assert [c.bytes for c in collective] == [whole.get(c.op, 4 * size) for c in collective]
        hops = (rank - 1) % 4
        assert [c.wire_bytes for c in collective] == [
            wire_bytes(c.op, c.bytes, 4, "gloo", hops if c.peer == 1 else 0) for c in collective
        ]
        pairs = [(c.op, c.peer, c.sequence) for c in mine if c.op in ("send", "recv")]
        expected = [("send", (rank + 1) % 4, 0), ("recv", (rank - 1) % 4, 0)]
        expected += {0: [("send", 1, 1)], 1: [("recv", 0, 1)]}.get(rank, [])
        assert sorted(pairs) == sorted(expected)
        assert all(c.start_ns == NOT_OBSERVED and c.end_ns >= c.enqueue_ns for c in mine)


def test_an_end_is_that_of_the_wait_or_the_future_or_not_known(tmp_path: Path) -> None:
    for calls in heard(tmp_path, "asynchronous"):
        ends = {call.sequence: call.end_ns != NOT_OBSERVED for call in calls}
        assert ends == {0: True, 1: True, 2: False}


def test_functional_collectives_end_where_their_result_is_used(tmp_path: Path) -> None:
    size = 8 * 2 * 4
    for calls in heard(tmp_path, "functional_calls"):
        assert sorted(told(calls), key=lambda one: one[3]) == [
            ("all_reduce", size, size, 0),
            ("all_gather", 2 * size, size, 1),
            ("reduce_scatter", 2 * size, 2 * size, 2),
            ("all_to_all", 2 * size, size, 3),
        ]
        assert all(call.end_ns >= call.enqueue_ns for call in calls)


def test_what_cpp_calls_is_seen_in_full_observation_only(tmp_path: Path) -> None:
    parameter_bytes = (8 * 8 + 8) * 4
    for calls in heard(tmp_path, "ddp"):
        assert not [call for call in calls if call.op == "all_reduce"]
    for calls in heard(tmp_path, "ddp", full=True):
        reduced = [call for call in calls if call.op == "all_reduce"]
        assert [call.bytes for call in reduced] == [parameter_bytes]
        assert sum(call.wire_bytes for call in reduced) == data_parallel_bytes(parameter_bytes, 2)
        assert reduced[0].end_ns > reduced[0].enqueue_ns


@pytest.mark.parametrize("full", [False, True])
def test_fsdp_moves_what_the_formula_says(tmp_path: Path, full: bool) -> None:
    parameter_bytes = 2 * (8 * 8 + 8) * 4
    for calls in heard(tmp_path, "fsdp", full=full):
        gathered = sum(c.wire_bytes for c in calls if c.op == "all_gather")
        scattered = sum(c.wire_bytes for c in calls if c.op == "reduce_scatter")
        logical = sum(c.bytes for c in calls if c.op == "reduce_scatter")
        # The last layers are not gathered again: they are used at once in the backward pass.
        passes = gathered / ((2 - 1) / 2 * parameter_bytes)
        assert passes in (1.5, 2.0)
        assert logical == parameter_bytes
        assert scattered == 2 * (2 - 1) / 2 * parameter_bytes  # an all-reduce inside, on gloo
        ring = gathered + logical / 2
        assert ring <= fsdp_bytes(parameter_bytes, 2)


@pytest.mark.parametrize("full", [False, True])
def test_dtensor_is_seen_in_both_ways(tmp_path: Path, full: bool) -> None:
    size = 2 * 8 * 4
    for calls in heard(tmp_path, "tensor_parallel", full=full):
        forward = [call for call in calls if call.op == "all_reduce" and call.bytes == size]
        assert forward
        assert all(call.end_ns != NOT_OBSERVED for call in forward)


def test_importing_the_package_imports_no_torch() -> None:
    code = (
        "import sys, json; import perfledger.instrumented_runtime as r;"
        "print(json.dumps(['torch' in sys.modules, 'observe_collectives' in r.__all__]))"
    )
    run = subprocess.run(
        [sys.executable, "-P", "-c", code], capture_output=True, text=True, check=True
    )
    assert json.loads(run.stdout) == [False, True]
