"""A real server tells a real collector what each step moved and computed, on every rank."""

import json
import urllib.request
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from typing import Any

import polars as pl
import pytest

from perfledger.schema.step_work import (
    CELL_COLUMNS,
    CELLS,
    READ_TOTAL,
    WORK_COLUMNS,
    WRITTEN_TOTAL,
)
from perfledger.schema.store import Store

Start = Callable[..., AbstractContextManager[Any]]
LAYERS, HIDDEN, VOCABULARY = 3, 256, 8192
QUERIES, KEYS = 8 * 64, 4 * 64  # elements of a row
# Of a layer, as elements: what each row goes through, and one expert of the MoE model.
ATTENTION, MLP, EXPERT = 256 * (2 * QUERIES + 2 * KEYS), 3 * 256 * 688, 3 * 256 * 344
SERVED = {
    "tp": ("--model", "reference-small", "--tp", "2"),
    "pp": ("--model", "reference-small", "--pp", "2"),
    "moe": ("--model", "reference-moe-small"),
}
PROMPT_WORDS = (3, 30, 90, 90)  # the last is as the one before: its prefix is found
OUTPUTS, ANSWERS = (5, 12, 8, 8), (1, 1, 3, 1)


def ask(url: str, words: int, max_tokens: int, n: int) -> dict[str, int]:
    prompt = " ".join(["and", "of", "the"][at % 3] for at in range(words))
    body = {"prompt": prompt, "max_tokens": max_tokens, "n": n, "temperature": 0}
    request = urllib.request.Request(
        f"{url}/v1/completions",
        json.dumps(body | {"ignore_eos": True}).encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=120) as response:
        usage: dict[str, int] = json.load(response)["usage"]
        return usage


@pytest.fixture(scope="module")
def served(
    tmp_path_factory: pytest.TempPathFactory, start_collector: Start, start_runtime: Start
) -> tuple[pl.DataFrame, dict[str, int]]:
    """All steps, and the tokens that each service sampled."""
    folder, sampled = tmp_path_factory.mktemp("served"), {}
    limits = ("--max-num-batched-tokens", "48", "--max-model-len", "512")
    with start_collector(folder) as collector:
        for name, flags in SERVED.items():
            own = (*flags, *limits, "--service-name", name)
            with (
                start_runtime(folder, *own, otlp_port=collector.grpc_port) as runtime,
                ThreadPoolExecutor(4) as pool,
            ):
                urls = [runtime.url] * len(OUTPUTS)
                usages = list(pool.map(ask, urls, PROMPT_WORDS, OUTPUTS, ANSWERS))
            sampled[name] = sum(one["completion_tokens"] for one in usages)
    return Store.at(str(collector.store)).scan("steps").collect(), sampled


def of(steps: pl.DataFrame, service: str) -> pl.DataFrame:
    return steps.filter(pl.col("service_name") == service)


def test_every_step_tells_its_work(served: tuple[pl.DataFrame, dict[str, int]]) -> None:
    steps, _ = served
    assert steps.height > 60
    assert steps.select(WORK_COLUMNS).null_count().transpose().to_series().sum() == 0
    for total, direction in ((READ_TOTAL, "read"), (WRITTEN_TOTAL, "written")):
        cells = [CELL_COLUMNS[cell] for cell in CELLS if cell[2] == direction]
        assert steps.select(pl.sum_horizontal(cells)).to_series().to_list() == (
            steps[total].to_list()
        )
    assert set(steps["kind"]) == {"prefill_step", "decode_step", "mixed_step"}


@pytest.mark.parametrize("service", ["tp", "pp", "moe"])
def test_ranks_together_compute_the_model(
    served: tuple[pl.DataFrame, dict[str, int]], service: str
) -> None:
    """FLOPs of matrices, logits, and K and V stored: counted by hand, of all ranks together."""
    steps, sampled = served
    rows = of(steps, service).with_columns(
        rows=pl.col("prefill_tokens") + pl.col("decode_tokens"),
    )
    ranks = 1 if service == "moe" else 2
    whole = rows.group_by("step_seq").agg(
        pl.len(), pl.col("rows").unique(), *(pl.col(name).sum() for name in WORK_COLUMNS)
    )
    assert set(whole["len"]) == {ranks}
    whole = whole.with_columns(pl.col("rows").list.first())
    assert whole["linear_logits_written_bytes"].sum() == sampled[service] * VOCABULARY * 4
    assert whole["sampling_logits_read_bytes"].sum() == sampled[service] * VOCABULARY * 4
    for one in whole.to_dicts():
        logits = one["linear_logits_written_bytes"] // (VOCABULARY * 4)
        matrices = ATTENTION + (0 if service == "moe" else MLP)
        computed = one["rows"] * LAYERS * matrices + logits * HIDDEN * VOCABULARY
        assert one["linear_flops"] == 2 * computed
        experts = one["rows"] * LAYERS * (2 * EXPERT + HIDDEN * 8) if service == "moe" else 0
        assert one["moe_flops"] == 2 * experts
        assert one["attention_kv_written_bytes"] == one["rows"] * LAYERS * 2 * KEYS * 4


def test_a_found_prefix_spares_its_rows_and_not_its_keys(
    served: tuple[pl.DataFrame, dict[str, int]],
) -> None:
    rows = of(served[0], "moe").filter(pl.col("prefill_tokens") > 0)
    assert (rows["attention_kv_read_bytes"] > rows["attention_kv_written_bytes"]).any()
    decoding = of(served[0], "moe").filter(pl.col("kind") == "decode_step")
    padded = decoding["decode_gathered_blocks"] * 16
    assert (decoding["decode_context_tokens"] <= padded).all()
    assert (decoding["attention_kv_read_bytes"] == padded * 2 * KEYS * 4 * LAYERS).all()
