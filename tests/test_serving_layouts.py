"""The same requests over HTTP, served by one rank and by two in each dimension: equal answers."""

import http.client
import json
import random
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import polars as pl
import pytest

from perfledger.schema.store import Store

StartRuntime = Callable[..., AbstractContextManager[Any]]
REQUESTS = 20
AT_ONCE = 6


def answers(url: str, model: str) -> list[tuple[str, str, int]]:
    """Ask for greedy answers, some at once; return text, reason of the end and tokens of each."""
    draw = random.Random(9)
    words = ["the", "of", "and", "to", "in", "is", "that", "for", "it", "as", "with", "on", "by"]
    prompts = [" ".join(draw.choices(words, k=3 + 4 * number)) for number in range(REQUESTS)]
    host = url.removeprefix("http://")

    def ask(prompt: str) -> tuple[str, str, int]:
        connection = http.client.HTTPConnection(host, timeout=120)
        body = {"model": model, "prompt": prompt, "max_tokens": 8 + len(prompt) % 7}
        content = json.dumps({**body, "temperature": 0})
        headers = {"Content-Type": "application/json"}
        connection.request("POST", "/v1/completions", content, headers)
        response = connection.getresponse()
        answer = json.loads(response.read())
        connection.close()
        assert response.status == 200, answer
        (choice,) = answer["choices"]
        return choice["text"], choice["finish_reason"], answer["usage"]["completion_tokens"]

    with ThreadPoolExecutor(AT_ONCE) as pool:
        return list(pool.map(ask, prompts))


@pytest.mark.parametrize(
    ("model", "flags"),
    [
        ("reference-small", ("--tp", "--pp", "--cp")),
        ("reference-moe-small", ("--ep",)),
    ],
)
def test_answers_over_two_ranks_are_those_of_one(
    model: str, flags: tuple[str, ...], start_runtime: StartRuntime, tmp_path: Path
) -> None:
    with start_runtime(tmp_path, "--model", model) as runtime:
        expected = answers(runtime.url, model)
    assert len({text for text, _, _ in expected}) == REQUESTS
    for flag in flags:
        folder = tmp_path / flag.strip("-")
        folder.mkdir()
        with start_runtime(folder, "--model", model, flag, "2") as runtime:
            assert answers(runtime.url, model) == expected, flag


def attributes(span: dict[str, Any]) -> dict[str, Any]:
    pairs: dict[str, Any] = {}
    for pair in span["attributes"]:
        (pairs[pair["key"]],) = [v for k, v in pair.items() if k != "key" and v is not None]
    return pairs


def test_the_store_tells_what_experts_and_context_cost(
    start_collector: StartRuntime, start_runtime: StartRuntime, tmp_path: Path
) -> None:
    """Layers of both models: 3. Of the MoE model: 8 experts, 2 a token."""
    layers, per_token = 3, 2
    with start_collector(tmp_path) as collector:
        for model, flag in (("reference-moe-small", "--ep"), ("reference-small", "--cp")):
            told = {"otlp_port": collector.grpc_port}
            with start_runtime(tmp_path, "--model", model, flag, "2", **told) as runtime:
                assert len(answers(runtime.url, model)) == REQUESTS
    store = Store.at(str(collector.store))
    calls = store.scan("collectives").collect()
    steps = store.scan("spans").filter(pl.col("name").str.ends_with("_step")).collect()

    per_step = (
        calls.filter(pl.col("dimension").is_in(["ep", "cp"]), pl.col("step_seq").is_not_null())
        .group_by("dimension", "rank", "step_seq")
        .agg(pl.col("op").sort().str.join(" "))
    )
    of_experts = " ".join(["all_gather"] * 2 * layers + ["all_to_all"] * 2 * layers)
    ring = ["recv", "send"]
    decode, prefill = ["all_gather"] * layers, sorted(ring * layers)
    one = ["all_reduce"]  # of the sampled rows
    kinds = {
        "ep": {of_experts},
        "cp": {" ".join(decode + one), " ".join(one + prefill), " ".join(decode + one + prefill)},
    }
    for dimension, expected in kinds.items():
        found = per_step.filter(pl.col("dimension") == dimension)
        assert set(found["op"]) <= expected
        seqs = [set(found.filter(pl.col("rank") == rank)["step_seq"]) for rank in range(2)]
        assert seqs[0] == seqs[1] and len(seqs[0]) > 10

    routed = [(span, told) for span in steps.to_dicts() if (told := routing_of(span))]
    assert {span["rank"] for span, _ in routed} == {0, 1}
    by_step: dict[int, list[dict[str, Any]]] = {}
    for span, told in routed:
        by_step.setdefault(span["step_seq"], []).append(told)
        rows = sum(attributes(span)[f"perfledger.step.{of}_tokens"] for of in ("prefill", "decode"))
        assert told["layers"] == layers
        assert told["assignments"] == rows * per_token * layers
        assert sum(map(int, told["expert_tokens"].split(","))) == told["assignments"]
        assert 1 / 8 <= told["busiest_share"] <= 1 / per_token
        assert per_token * layers <= told["touched_experts"] <= 8 * layers
    assert all(one == other for one, other in by_step.values())  # both tell of all rows

    # Each assignment's row of 256 float32 is sent to its expert, and its answer back.
    sent = calls.filter(pl.col("op") == "all_to_all", pl.col("step_seq").is_not_null())
    for seq, of_step in sent.group_by("step_seq"):
        assert of_step["bytes"].sum() == 2 * by_step[seq[0]][0]["assignments"] * 256 * 4
    # A rank's half of each block of 16 tokens: keys and values of 4 heads of 64 float32.
    passed = calls.filter(pl.col("op") == "send", pl.col("dimension") == "cp")["bytes"]
    assert {size % (2 * 8 * 4 * 64 * 4) for size in passed} == {0} and passed.min() > 0


def routing_of(span: dict[str, Any]) -> dict[str, Any]:
    told = attributes(span)
    return {
        name.removeprefix("perfledger.moe."): value
        for name, value in told.items()
        if name.startswith("perfledger.moe.")
    }
