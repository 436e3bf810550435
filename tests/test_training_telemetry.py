"""What a training run of two pipeline stages tells a real collector, prints, and saves."""

import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import polars as pl
import pytest
from safetensors.numpy import load_file

from perfledger.schema.store import Store

STEPS, MICROBATCHES, STAGES = 3, 4, 2
TOKENS, HIDDEN_SIZE = 8 * 16, 32


class Trained(NamedTuple):
    """What came of the run."""

    printed: dict[str, Any]
    spans: pl.DataFrame
    collectives: pl.DataFrame
    saved: Path


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, start_collector: Any) -> Iterator[Trained]:
    folder = tmp_path_factory.mktemp("training")
    saved = folder / "whole.safetensors"
    with start_collector(folder) as collector:
        arguments = ["train", "--pp", str(STAGES), "--model-size", "tiny", "--sequence", "16"]
        arguments += ["--steps", str(STEPS), "--observe", "2", "--run-id", "t1"]
        arguments += ["--json", "--save", str(saved)]
        done = subprocess.run(
            [sys.executable, "-P", "-m", "perfledger", *arguments],
            capture_output=True,
            env=os.environ
            | {
                "OTEL_EXPORTER_OTLP_ENDPOINT": f"http://127.0.0.1:{collector.grpc_port}",
                "OMP_WAIT_POLICY": "passive",
                "GOMP_SPINCOUNT": "0",
            },
            timeout=200,
        )
        assert done.returncode == 0, done.stderr.decode()
    store = Store.at(str(collector.store))
    yield Trained(
        json.loads(done.stdout),
        store.scan("spans").sort("start_ns").collect(),
        store.scan("collectives").collect(),
        saved,
    )


def attributes(span: dict[str, Any]) -> dict[str, Any]:
    pairs: dict[str, Any] = {}
    for pair in span["attributes"]:
        (pairs[pair["key"]],) = [v for k, v in pair.items() if k != "key" and v is not None]
    return pairs


def steps_of(spans: pl.DataFrame, rank: int) -> list[dict[str, Any]]:
    of_rank = (pl.col("name") == "train_step") & (pl.col("rank") == rank)
    return spans.filter(of_rank).sort("step_seq").to_dicts()


def test_each_rank_has_a_span_for_each_step(trained: Trained) -> None:
    assert trained.printed["telemetry"] == {
        "dropped": 0,
        "exported": len(trained.spans),
        "lost": 0,
    }
    traces = set()
    for rank in range(STAGES):
        steps = steps_of(trained.spans, rank)
        assert [step["step_seq"] for step in steps] == list(range(STEPS))
        assert {(step["run_id"], step["service_name"]) for step in steps} == {
            ("t1", "perfledger-train")
        }
        traces |= {step["trace_id"] for step in steps}
        held = attributes(steps[-1])
        (printed,) = [one for one in trained.printed["memory"] if one["rank"] == rank]
        assert held["perfledger.train.parameter_bytes"] == printed["parameters"]
        assert held["perfledger.train.optimizer_bytes"] == printed["optimizer"]
        assert held["perfledger.layout"] == "pp=2"
    assert len(traces) == STAGES  # each rank has a trace of its own


def test_loss_is_said_by_the_last_stage(trained: Trained) -> None:
    said = [attributes(step) for step in steps_of(trained.spans, STAGES - 1)]
    losses = [one["perfledger.train.loss"] for one in said]
    assert losses == pytest.approx([one["loss"] for one in trained.printed["steps"]], abs=1e-6)
    assert losses[-1] < losses[0]
    assert all(
        "perfledger.train.loss" not in attributes(step) for step in steps_of(trained.spans, 0)
    )


def test_each_microbatch_has_its_parts(trained: Trained) -> None:
    for rank in range(STAGES):
        for step in steps_of(trained.spans, rank):
            children = trained.spans.filter(pl.col("parent_span_id") == step["span_id"]).to_dicts()
            parts = [one for one in children if one["name"] not in ("collective", "copy")]
            found = Counter(
                (one["name"], attributes(one).get("perfledger.microbatch")) for one in parts
            )
            each = {(name, at) for name in ("forward", "backward") for at in range(MICROBATCHES)}
            assert found == Counter(each | {("optimizer", None)})
            for one in children:
                assert step["start_ns"] <= one["start_ns"] <= one["end_ns"] <= step["end_ns"]


def test_collectives_of_observed_steps_stand_under_them(trained: Trained) -> None:
    collectives = trained.spans.filter(pl.col("name") == "collective")
    for rank in range(STAGES):
        for step in steps_of(trained.spans, rank):
            mine = collectives.filter(pl.col("parent_span_id") == step["span_id"]).to_dicts()
            sent = [attributes(one) for one in mine]
            sizes = Counter(
                (one["perfledger.collective.op"], one["perfledger.collective.dimension"])
                for one in sent
                if one["perfledger.collective.bytes"] == TOKENS * HIDDEN_SIZE * 4 // MICROBATCHES
            )
            observed = step["step_seq"] % 2 == 0
            each = {("send", "pp"): MICROBATCHES, ("recv", "pp"): MICROBATCHES}
            assert sizes == (each if observed else {})
            assert attributes(step)["perfledger.train.observed"] is observed


def test_sends_and_receives_of_two_ranks_meet_in_the_table(trained: Trained) -> None:
    rows = trained.collectives.filter(pl.col("step_seq") == 2)
    assert set(rows["dimension"]) == {"pp"}
    assert set(rows["op"]) == {"send", "recv"}
    total = sum(row["bytes"] for row in trained.printed["traffic"])
    assert rows["bytes"].sum() == total == 4 * TOKENS * HIDDEN_SIZE * 4
    sent = rows.filter(pl.col("op") == "send").select("rank", "peer", "sequence")
    received = rows.filter(pl.col("op") == "recv").select("peer", "rank", "sequence")
    assert sorted(sent.rows()) == sorted(received.rows())


def test_json_names_each_conversion(trained: Trained) -> None:
    changes = {
        (row["op"], row["part"]): row["conversion"]["tensor"] for row in trained.printed["traffic"]
    }
    assert changes == {
        ("send", "forward"): "activations",
        ("recv", "forward"): "activations",
        ("send", "backward"): "gradients of activations",
        ("recv", "backward"): "gradients of activations",
    }
    assert trained.printed["layout"] == {"pp": 2}
    assert [step["wire_bytes"] is None for step in trained.printed["steps"]] == [False, True, False]


def test_both_stages_are_saved_in_one_file(trained: Trained) -> None:
    whole = load_file(trained.saved)
    layers = {name.split(".")[1] for name in whole if name.startswith("layers.")}
    assert layers == {"0", "1"}
    assert {"embed_tokens.weight", "norm.weight", "lm_head.weight"} < set(whole)
    assert sum(value.nbytes for value in whole.values()) == sum(
        one["parameters"] for one in trained.printed["memory"]
    )
    assert list(trained.saved.parent.glob("whole.*")) == [trained.saved]
