"""The `openai` package against a real server, and what the store says of the same requests.

Both read one monotonic clock (one host, one boot), so instants of client and server have an order:
a chunk cannot arrive before it was written, nor be written before its token was sampled.
"""

import json
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import openai
import polars as pl
import pytest

from perfledger.schema.clocks import take_anchor
from perfledger.schema.store import Store

MESSAGES: Any = [{"role": "user", "content": "Tell me about the licence, please, at length."}]
SETTINGS: dict[str, Any] = {
    "model": "reference-small",
    "messages": MESSAGES,
    "temperature": 0,
    "extra_body": {"ignore_eos": True},
}
SPAN_ID = "b7ad6b7169203331"
# Nothing of this test is that slow; it bounds what a busy machine adds to the transport.
BOUND_NS = 5_000_000_000


def traced(trace: int, **headers: str) -> dict[str, str]:
    return {"traceparent": f"00-{trace:032x}-{SPAN_ID}-01", **headers}


@dataclass
class Seen:
    """A streamed answer as the client saw it; wall ns."""

    start_ns: int = 0
    chunk_ns: list[int] = field(default_factory=list)
    texts: dict[int, str] = field(default_factory=dict)
    finishes: dict[int, str] = field(default_factory=dict)
    usage: Any = None


def follow(client: openai.OpenAI, trace: int, **fields: Any) -> Seen:
    """Stream an answer to its end."""
    wall = take_anchor().to_wall_ns
    seen = Seen(start_ns=wall(time.monotonic_ns()))
    stream = client.chat.completions.create(
        **SETTINGS | fields,
        stream=True,
        stream_options={"include_usage": True},
        extra_headers=traced(trace, **{"x-perfledger-tenant": "acme"}),
    )
    for chunk in stream:
        at_ns = wall(time.monotonic_ns())
        for choice in chunk.choices:
            if choice.delta.content:
                seen.chunk_ns.append(at_ns)
            text = seen.texts.get(choice.index, "") + (choice.delta.content or "")
            seen.texts[choice.index] = text
            if choice.finish_reason:
                seen.finishes[choice.index] = choice.finish_reason
        seen.usage = chunk.usage or seen.usage
    return seen


@dataclass
class Run:
    """What the client saw, by trace id, and the store after everything has ended."""

    store: Store
    streamed: dict[int, Seen]
    whole: Any
    errors: dict[str, openai.APIStatusError]
    refused_in_time: openai.APIStatusError


ONE, THREE, AGAIN, LEFT, LATE = 1, 3, 4, 5, 6


@pytest.fixture(scope="module")
def run(
    tmp_path_factory: pytest.TempPathFactory, start_collector: Any, start_runtime: Any
) -> Iterator[Run]:
    """One server, driven by the client in every way; then all of it ends."""
    folder = tmp_path_factory.mktemp("openai")
    with start_collector(folder) as collector:
        flags = ("--max-num-seqs", "4", "--max-model-len", "1024", "--allow-faults")
        with start_runtime(folder, *flags, otlp_port=collector.grpc_port) as runtime:
            client = openai.OpenAI(base_url=f"{runtime.url}/v1", api_key="none", max_retries=0)
            streamed = {
                ONE: follow(client, ONE, max_tokens=12),
                THREE: follow(client, THREE, max_tokens=6, n=3, temperature=1, seed=7),
                AGAIN: follow(client, AGAIN, max_tokens=4),
            }
            whole = client.chat.completions.create(
                **SETTINGS | {"temperature": 1}, n=3, seed=7, max_tokens=6
            )
            leave(client)
            errors = {name: error_of(client, **fields) for name, fields in BAD.items()}
            late = error_of(
                client,
                extra_headers=traced(
                    LATE,
                    **{"x-perfledger-deadline-ms": "20", "x-perfledger-fault": "tokenize=60ms"},
                ),
            )
    yield Run(Store.at(str(collector.store)), streamed, whole, errors, late)


BAD: dict[str, dict[str, Any]] = {
    "model": {"model": "gpt-4"},
    "n": {"n": 9},
    "logprobs": {"logprobs": True},
    "priority": {"extra_body": {"priority": "high"}},
    "deadline": {"extra_headers": {"x-perfledger-deadline-ms": "-1"}},
}


def error_of(client: openai.OpenAI, **fields: Any) -> openai.APIStatusError:
    with pytest.raises(openai.APIStatusError) as caught:
        client.chat.completions.create(**SETTINGS | fields)
    return caught.value


def leave(client: openai.OpenAI) -> None:
    """Close the stream after two chunks."""
    stream = client.chat.completions.create(
        **SETTINGS, max_tokens=900, stream=True, extra_headers=traced(LEFT)
    )
    for _ in range(2):
        next(stream)
    stream.close()


def request_row(run: Run, trace: int) -> dict[str, Any]:
    rows = run.store.scan("requests").filter(pl.col("trace_id") == trace.to_bytes(16)).collect()
    (row,) = rows.to_dicts()
    return row


def root_of(run: Run, trace: int) -> dict[str, Any]:
    mine = (pl.col("trace_id") == trace.to_bytes(16)) & (pl.col("kind") == "server")
    (root,) = run.store.scan("spans").filter(mine).collect().to_dicts()
    return root


def attributes(span: dict[str, Any]) -> dict[str, Any]:
    return {
        pair["key"]: next(v for k, v in pair.items() if k != "key" and v is not None)
        for pair in span["attributes"]
    }


def test_one_answer_in_chunks(run: Run) -> None:
    seen = run.streamed[ONE]
    assert (list(seen.texts), seen.finishes) == ([0], {0: "length"})
    assert seen.texts[0] and len(seen.chunk_ns) <= 12
    assert (seen.usage.completion_tokens, seen.usage.total_tokens) == (
        12,
        seen.usage.prompt_tokens + 12,
    )


def test_three_choices_whole_and_in_chunks_are_the_same(run: Run) -> None:
    """Equal seeds; each choice is sampled on its own."""
    seen, whole = run.streamed[THREE], run.whole
    texts = [choice.message.content for choice in whole.choices]
    assert [choice.index for choice in whole.choices] == [0, 1, 2]
    assert [seen.texts[index] for index in range(3)] == texts
    assert len(set(texts)) == 3
    assert [seen.finishes[index] for index in range(3)] == ["length"] * 3
    assert [choice.finish_reason for choice in whole.choices] == ["length"] * 3
    assert whole.usage.completion_tokens == seen.usage.completion_tokens == 18
    assert whole.usage.prompt_tokens == run.streamed[ONE].usage.prompt_tokens


def test_usage_says_what_was_cached(run: Run) -> None:
    """Within a tenant, and only whole blocks of 16 tokens."""
    first, again = run.streamed[ONE].usage, run.streamed[AGAIN].usage
    assert first.prompt_tokens_details.cached_tokens == 0
    assert again.prompt_tokens_details.cached_tokens == (again.prompt_tokens - 1) // 16 * 16 > 0
    other_tenant = run.whole.usage.prompt_tokens_details.cached_tokens
    assert other_tenant == 0


@pytest.mark.parametrize("trace", [ONE, THREE, AGAIN])
def test_counts_agree_with_the_servers(run: Run, trace: int) -> None:
    usage, row = run.streamed[trace].usage, request_row(run, trace)
    found = (row["status"], row["input_tokens"], row["cached_tokens"], row["output_tokens"])
    cached = usage.prompt_tokens_details.cached_tokens
    assert found == ("ok", usage.prompt_tokens, cached, usage.completion_tokens)
    assert row["tenant"] == "acme"
    reasons = attributes(root_of(run, trace))["gen_ai.response.finish_reasons"]
    assert json.loads(reasons) == ["length"] * len(run.streamed[trace].texts)


@pytest.mark.parametrize("trace", [ONE, THREE, AGAIN])
def test_times_agree_with_the_servers(run: Run, trace: int) -> None:
    """Sent, arrived, sampled, written, received: in this order, and close together."""
    seen, row = run.streamed[trace], request_row(run, trace)
    first_sampled_ns = row["arrival_ns"] + row["ttft_ns"]
    first_written_ns = row["arrival_ns"] + row["ttfc_ns"]
    order = [seen.start_ns, row["arrival_ns"], first_sampled_ns, seen.chunk_ns[0]]
    assert order == sorted(order)
    assert first_sampled_ns < first_written_ns
    ttft_ns = seen.chunk_ns[0] - seen.start_ns
    assert 0 <= ttft_ns - row["ttft_ns"] < BOUND_NS
    assert row["token_times_ns"][-1] <= seen.chunk_ns[-1] < row["end_ns"] + BOUND_NS


def test_a_client_that_leaves_is_seen_to_leave(run: Run) -> None:
    root = root_of(run, LEFT)
    assert (root["outcome"], root["reason"]) == ("aborted", "client_disconnect")
    assert 0 < root["output_tokens"] < 900


@pytest.mark.parametrize(
    ("name", "kind", "param", "code"),
    [
        ("model", openai.NotFoundError, "model", "model_not_found"),
        ("n", openai.BadRequestError, "n", "invalid_value"),
        ("logprobs", openai.BadRequestError, "logprobs", "unsupported_parameter"),
        ("priority", openai.BadRequestError, "priority", "invalid_type"),
        ("deadline", openai.BadRequestError, "x-perfledger-deadline-ms", "invalid_header"),
    ],
)
def test_errors_are_typed(run: Run, name: str, kind: type, param: str, code: str) -> None:
    error = run.errors[name]
    assert (type(error), error.param, error.code) == (kind, param, code)


def test_a_deadline_that_passes_before_the_engine_is_a_rate_limit_error(run: Run) -> None:
    error, root = run.refused_in_time, root_of(run, LATE)
    assert isinstance(error, openai.RateLimitError)
    assert (error.code, error.type) == ("deadline", "rate_limit_error")
    assert "the deadline of 20 ms has passed" in error.message
    found = [root[name] for name in ("outcome", "error_type", "reason", "deadline_ms")]
    assert found == ["refused", "deadline", "deadline", 20]
