"""A request's collectives in the store: served on two ranks, over a real collector, by join."""

import json
import urllib.request
from pathlib import Path
from typing import Any

import polars as pl
import pytest

from perfledger.schema.collective_waits import of_requests, with_waits
from perfledger.schema.communication import pipeline_bytes, tensor_parallel_bytes
from perfledger.schema.store import Store

HIDDEN, LAYERS, FLOAT_BYTES = 256, 3, 4  # of reference-small, in float32
TOKENS = 6

pytestmark = pytest.mark.timeout(600)


def ask(url: str) -> None:
    body = {"prompt": "One, two, three", "max_tokens": TOKENS, "temperature": 0, "ignore_eos": True}
    request = urllib.request.Request(
        f"{url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=120) as response:
        assert json.load(response)["usage"]["completion_tokens"] == TOKENS


def served(way: str, folder: Path, start_collector: Any, start_runtime: Any) -> Store:
    """Return the store after one request on two ranks, when everything has ended."""
    with start_collector(folder) as collector:
        flags = (f"--{way}", "2", "--dtype", "float32")
        with start_runtime(folder, *flags, otlp_port=collector.grpc_port) as runtime:
            ask(runtime.url)
    return Store.at(str(collector.store))


def of_the_request(store: Store) -> tuple[pl.DataFrame, pl.DataFrame]:
    """Return the request's steps on rank 0, and its collectives on all ranks."""
    requests, steps = store.collect("requests"), store.collect("steps")
    assert len(requests) == 1
    assert requests["output_tokens"].to_list() == [TOKENS]
    collectives = with_waits(store.collect("collectives"))
    mine = of_requests(requests, steps, collectives)
    leading = steps.filter(rank=0).filter(pl.col("members").list.len() == 1).sort("step_seq")
    assert len(leading) == TOKENS
    assert set(mine["step_seq"]) == set(leading["step_seq"])
    return leading, mine


def tokens_of(step: dict[str, Any]) -> int:
    return int(step["prefill_tokens"] + step["decode_tokens"])


def test_tensor_parallel(tmp_path: Path, start_collector: Any, start_runtime: Any) -> None:
    store = served("tp", tmp_path, start_collector, start_runtime)
    leading, mine = of_the_request(store)
    reduced = mine.filter(op="all_reduce", group="tp")
    for step in leading.to_dicts():
        expected = tensor_parallel_bytes(tokens_of(step), HIDDEN, FLOAT_BYTES, LAYERS, 2)
        for rank in range(2):
            here = reduced.filter(step_seq=step["step_seq"], rank=rank)
            assert len(here) == 2 * LAYERS
            assert here["wire_bytes"].sum() == expected
            assert set(here["dtype"]) == {"float32"}
    assert reduced["transfer_ns"].null_count() == 0
    assert reduced["wait_ns"].min() == 0
    assert reduced["start_ns"].null_count() == len(reduced)
    inside = mine.filter(rank=0).join(leading, on="step_seq", suffix="_step")
    assert inside.filter(pl.col("enqueue_ns") < pl.col("start_ns_step")).is_empty()
    assert inside.filter(pl.col("end_ns") > pl.col("end_ns_step")).is_empty()
    assert inside["parent_span_id"].to_list() == inside["span_id_step"].to_list()


def test_pipeline_parallel(tmp_path: Path, start_collector: Any, start_runtime: Any) -> None:
    store = served("pp", tmp_path, start_collector, start_runtime)
    leading, mine = of_the_request(store)
    for step in leading.to_dicts():
        here = mine.filter(step_seq=step["step_seq"], group="pp")
        forward = here.filter(rank=0, op="send")
        expected = pipeline_bytes(tokens_of(step), HIDDEN, FLOAT_BYTES)
        assert forward["bytes"].sum() == expected
        assert set(forward["peer"]) == {1}
        assert here.filter(rank=1, op="recv")["bytes"].sum() == expected
    assert mine.filter(group="pp")["transfer_ns"].null_count() == 0
    copies = store.collect("spans").filter(name="copy")
    told = copies.select("rank", "step_seq", "attributes").explode("attributes")
    told = told.unnest("attributes").filter(key="perfledger.copy.bytes")
    into_rank_1 = told.filter(rank=1).group_by("step_seq").agg(pl.col("int").sum())
    expected = {
        step["step_seq"]: pipeline_bytes(tokens_of(step), HIDDEN, FLOAT_BYTES)
        for step in leading.to_dicts()
    }
    assert dict(into_rank_1.rows()) == expected
