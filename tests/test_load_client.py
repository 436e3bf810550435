"""The open-loop client against a real HTTP server of scripted behaviour, on this host."""

import asyncio
import json
import signal
import subprocess
import sys
import threading
import time
from array import array
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from aiohttp import web
from hypothesis import given
from hypothesis import strategies as st

from perfledger.instrumented_runtime.load.generator import generate
from perfledger.instrumented_runtime.load.open_loop import run_load
from perfledger.instrumented_runtime.load.plan import Calibration, LoadPlan, LoadResult, Sample
from perfledger.instrumented_runtime.load.results import write_result
from perfledger.instrumented_runtime.load.sse import Chunk, EventBuffer, Usage, read_chunk
from perfledger.instrumented_runtime.load.summary import Metric, summarise
from perfledger.instrumented_runtime.load.workload import Arrival, Scaling, Workload, scale
from perfledger.schema.clocks import ClockAnchor
from perfledger.schema.errors import PerfledgerError, UsageError
from perfledger.schema.store import Store

MS = 1_000_000
S = 1_000_000_000
TEXT = {"choices": [{"index": 0, "text": "a b c"}]}
ROLE = {"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]}
EMPTY = {"choices": [{"index": 0, "text": ""}]}
FINISH = {"id": "cmpl-1", "choices": [{"index": 0, "text": "", "finish_reason": "length"}]}

Answer = Callable[["Server", web.Request, dict[str, Any]], Awaitable[web.StreamResponse]]


def usage(asked: int, answered: int, **details: object) -> dict[str, object]:
    counts = {"prompt_tokens": asked, "completion_tokens": answered, **details}
    return {"choices": [], "usage": counts}


def delta(**fields: object) -> dict[str, object]:
    return {"choices": [{"index": 0, "delta": fields}]}


@dataclass
class Server:
    """A server in a thread; it keeps what it was sent and answers as `answer` says."""

    answer: Answer
    bodies: list[dict[str, Any]] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    models: object = field(default_factory=lambda: {"data": [{"id": "scripted"}]})
    url: str = ""
    stop: Callable[[], None] = lambda: None

    async def handle(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.bodies.append(body)
        self.headers.append({key.lower(): value for key, value in request.headers.items()})
        return await self.answer(self, request, body)

    async def list_models(self, request: web.Request) -> web.Response:
        if isinstance(self.models, int):
            return web.Response(status=self.models)
        return web.json_response(self.models)


@contextmanager
def serving(answer: Answer, **fields: Any) -> Iterator[Server]:
    server = Server(answer, **fields)
    loop = asyncio.new_event_loop()
    app = web.Application(client_max_size=2**26)
    app.router.add_get("/v1/models", server.list_models)
    app.router.add_post("/v1/completions", server.handle)
    app.router.add_post("/v1/chat/completions", server.handle)
    runner = web.AppRunner(app, shutdown_timeout=0)

    async def start() -> None:
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0, backlog=1024)
        await site.start()
        server.url = "http://127.0.0.1:{}".format(runner.addresses[0][1])

    loop.run_until_complete(start())
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()

    def stop() -> None:
        if thread.is_alive():
            asyncio.run_coroutine_threadsafe(runner.cleanup(), loop).result(10)
            loop.call_soon_threadsafe(loop.stop)
            thread.join(10)

    server.stop = stop
    try:
        yield server
    finally:
        stop()
        loop.close()


async def stream(
    request: web.Request, *events: object, pause_s: float = 0, end: bytes = b"data: [DONE]\n\n"
) -> web.StreamResponse:
    """Answer with events; a number among them is a wait, in s."""
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8"})
    await response.prepare(request)
    for event in events:
        if isinstance(event, float):
            await asyncio.sleep(event)
            continue
        raw = event if isinstance(event, bytes) else b"data: " + json.dumps(event).encode()
        await response.write(raw + b"\n\n")
        await asyncio.sleep(pause_s)
    await response.write(end)
    return response


async def plain(server: Server, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
    """Answer well, 3 chunks for what was asked, and count tokens truly (a chat word is 2)."""
    if "prompt" in body:
        asked, event = len(body["prompt"]), TEXT
    else:
        words = body["messages"][0]["content"].split()
        asked, event = 2 * len(words) + 9, delta(content="a b")
    return await stream(
        request, 0.02, event, event, event, FINISH, usage(asked, body["max_tokens"])
    )


def workload(count: int, gap_ns: int = 0, **fields: Any) -> Workload:
    arrivals = tuple(Arrival(at * gap_ns, 8, 6, **fields) for at in range(count))
    return Workload("test", "here", arrivals)


def load(server: Server, work: Workload, **fields: Any) -> LoadResult:
    fields = {"warm_up": 0, "run_id": "r", **fields}
    return asyncio.run(run_load(LoadPlan(server.url, work, **fields)))


def facts(sample: Sample) -> tuple[object, ...]:
    return (
        sample.outcome,
        sample.error,
        sample.http_status,
        sample.channels,
        sample.input_tokens,
        sample.output_tokens,
    )


# --- What a request sends -----------------------------------------------------------------


def test_a_completion_asks_for_exact_lengths_and_carries_its_context() -> None:
    arrivals = (
        Arrival(0, 5, 3, (1, 2, 3), "chat", "acme", "s1"),
        Arrival(1 * MS, 4, 2, (1, 9)),
        Arrival(2 * MS, 2, 1),
    )
    with serving(plain) as server:
        result = load(server, Workload("test", "here", arrivals, block_tokens=2), model="mine")
    prompts = [body.pop("prompt") for body in server.bodies]
    assert [len(prompt) for prompt in prompts] == [5, 4, 2]
    assert all(300 <= token < 2000 for prompt in prompts for token in prompt)
    assert prompts[0][:2] == prompts[1][:2] != prompts[2]
    assert prompts[0][2:4] != prompts[1][2:4]
    assert server.bodies == [
        {
            "model": "mine",
            "max_tokens": tokens,
            "temperature": 0.0,
            "stream": True,
            "stream_options": {"include_usage": True},
            "ignore_eos": True,
        }
        for tokens in (3, 2, 1)
    ]
    first = result.samples[0]
    sent = [{k: v for k, v in h.items() if k.startswith(("x-", "trace"))} for h in server.headers]
    assert sent[0] == {
        "traceparent": f"00-{first.trace_id.hex()}-{first.span_id.hex()}-01",
        "x-perfledger-class": "chat",
        "x-perfledger-tenant": "acme",
        "x-perfledger-session": "s1",
    }
    assert [sorted(headers) for headers in sent[1:]] == [["traceparent"]] * 2
    assert len({sample.trace_id for sample in result.samples}) == 3


def test_the_same_seed_sends_the_same_prompts() -> None:
    sent = []
    for seed in (1, 1, 2):
        with serving(plain) as server:
            load(server, scale(generate("mooncake", 5), Scaling(max_input=64, rate=500)), seed=seed)
        sent.append([body["prompt"] for body in server.bodies])
    assert sent[0] == sent[1] != sent[2]


def test_chat_words_are_calibrated_by_two_probes() -> None:
    work = Workload("test", "here", tuple(Arrival(0, tokens, 4) for tokens in (30, 101, 12)))
    with serving(plain) as server:
        result = load(server, work, endpoint="chat")
    assert result.calibration == Calibration(2.0, 9.0, probed=True)
    assert len(server.bodies) == 5
    assert [body["max_tokens"] for body in server.bodies] == [1, 1, 4, 4, 4]
    realised = {sample.index: sample.input_tokens for sample in result.samples}
    assert all(abs(realised[i] - asked) <= 1 for i, asked in ((0, 30), (1, 101), (2, 12)))


def test_without_usage_nothing_is_calibrated_and_no_token_is_counted() -> None:
    async def silent(server: Server, request: web.Request, body: object) -> web.StreamResponse:
        return await stream(request, delta(content="x"), delta(content="y"))

    with serving(silent) as server:
        result = load(server, workload(2), endpoint="chat", ignore_eos=False)
    assert result.calibration == Calibration(1.0, 0.0, probed=False)
    assert [facts(s) for s in result.samples] == [("ok", "", 200, "oo", None, None)] * 2
    assert all("ignore_eos" not in body for body in server.bodies)
    summary = summarise(result)
    assert (summary.usage_missing, summary.output_tokens_per_s) == (2, None)
    assert (summary.realised_input_tokens, summary.realised_output_tokens) == (None, None)


def test_a_key_is_sent_and_never_shown() -> None:
    with serving(plain) as server:
        result = load(server, workload(1), api_key="hush")
    assert server.headers[0]["authorization"] == "Bearer hush"
    assert "hush" not in repr(result)


def test_warm_up_goes_one_by_one_with_other_prompts_and_is_marked() -> None:
    under_way: list[int] = []

    async def counting(server: Server, request: web.Request, body: Any) -> web.StreamResponse:
        under_way.append(1)
        assert len(server.bodies) > 3 or sum(under_way) == 1
        response = await plain(server, request, body)
        under_way.pop()
        return response

    work = Workload("test", "here", (Arrival(0, 4, 2, (7, 8)), Arrival(0, 4, 2, (7, 8))), 2)
    with serving(counting) as server:
        result = load(server, work, warm_up=3)
    prompts = [body["prompt"] for body in server.bodies]
    assert [sample.warm_up for sample in result.samples] == [True, True, True, False, False]
    assert prompts[3] == prompts[4]
    assert prompts[0] != prompts[1]
    assert all(prompt != prompts[3] for prompt in prompts[:3])
    assert summarise(result).metrics["e2e_ns"].n == 2


# --- What counts as a token, and when -----------------------------------------------------


def test_only_chunks_with_text_count_and_the_late_tail_does_not() -> None:
    async def scripted(server: Server, request: web.Request, body: object) -> web.StreamResponse:
        return await stream(
            request, b": comment", ROLE, EMPTY, 0.05, TEXT, 0.04, TEXT, FINISH, 0.2, usage(8, 6)
        )

    with serving(scripted) as server:
        result = load(server, workload(1))
    (sample,) = result.samples
    assert facts(sample) == ("ok", "", 200, "oo", 8, 6)
    assert (sample.response_id, sample.finish_reason) == ("cmpl-1", "length")
    assert sample.chunk_ns[0] - sample.sent_ns >= 49 * MS
    assert sample.chunk_ns[1] - sample.chunk_ns[0] >= 35 * MS
    assert sample.end_ns - sample.chunk_ns[1] >= 195 * MS


def test_reasoning_and_tools_count_as_first_token_and_are_kept_apart() -> None:
    async def scripted(server: Server, request: web.Request, body: object) -> web.StreamResponse:
        details = {"completion_tokens_details": {"reasoning_tokens": 2}}
        return await stream(
            request,
            ROLE,
            delta(reasoning_content="hm"),
            delta(reasoning="so"),
            0.05,
            delta(content="yes"),
            delta(tool_calls=[{"index": 0}]),
            usage(30, 4, prompt_tokens_details={"cached_tokens": 16}, **details),
        )

    with serving(scripted) as server:
        result = load(server, workload(1), endpoint="chat")
    (sample,) = result.samples
    assert facts(sample) == ("ok", "", 200, "rrot", 30, 4)
    assert (sample.reasoning_tokens, sample.cached_tokens) == (2, 16)
    metrics = summarise(result).metrics
    assert (metrics["ttfo_ns"].p50 or 0) - (metrics["ttft_ns"].p50 or 0) >= 49 * MS


@given(st.data())
def test_events_are_the_same_however_the_network_cuts_them(data: st.DataObject) -> None:
    events = [b'{"a":1}', b"[DONE]", '{"text":"\u00e9\u6f22"}'.encode()]
    raw = b": ping\r\n" + b"".join(
        b"data:" + space + event + end
        for event, space, end in zip(
            events, (b" ", b"", b" "), (b"\n\n", b"\r\n\r\n", b"\n"), strict=True
        )
    )
    cuts = sorted(data.draw(st.lists(st.integers(0, len(raw)), max_size=8)))
    buffer = EventBuffer()
    pieces = [raw[a:b] for a, b in zip([0, *cuts], [*cuts, len(raw)], strict=True)]
    assert [event for piece in pieces for event in buffer.feed(piece)] == events


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.text(),
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.dictionaries(
                st.sampled_from(["choices", "delta", "text", "content", "usage", "id", "x"]), inner
            )
        ),
    ).filter(lambda value: isinstance(value, dict))
)
def test_any_json_object_is_read_as_a_chunk(fields: dict[str, object]) -> None:
    chunk = read_chunk(json.dumps(fields).encode())
    assert isinstance(chunk, Chunk)
    assert chunk.channel in ("", "o", "r", "t")


def test_counts_that_are_none_are_unknown() -> None:
    counts = {"prompt_tokens": True, "completion_tokens": -1, "prompt_tokens_details": None}
    assert read_chunk(json.dumps({"usage": counts}).encode()).usage == Usage()


# --- The open loop ------------------------------------------------------------------------


def test_a_stalled_server_does_not_delay_later_sends() -> None:
    """Every answer waits until all 150 requests are in: a closed loop would never get there."""
    everything = 150

    async def waiting(server: Server, request: web.Request, body: Any) -> web.StreamResponse:
        while len(server.bodies) < everything:
            await asyncio.sleep(0.01)
        return await plain(server, request, body)

    with serving(waiting) as server:
        result = load(server, workload(everything, 2 * MS), timeout_s=60)
    assert [facts(s) for s in result.samples] == [("ok", "", 200, "ooo", 8, 6)] * everything
    assert [s.index for s in result.samples] == list(range(everything))
    assert [s.scheduled_ns - result.started_ns for s in result.samples] == [
        at * 2 * MS for at in range(everything)
    ]
    assert all(s.lateness_ns >= 0 for s in result.samples)
    assert result.samples[0].chunk_ns[0] >= result.samples[-1].sent_ns


def test_each_failure_is_kept_with_its_kind_and_never_averaged() -> None:
    async def scripted(server: Server, request: web.Request, body: Any) -> web.StreamResponse:
        match body["max_tokens"]:
            case 1:
                return web.Response(status=500, text="canary one")
            case 2:
                return web.Response(status=429, text="later")
            case 3:
                await stream(request, TEXT, end=b"")
                request.transport.close()  # type: ignore[union-attr]
                await asyncio.sleep(1)
            case 4:
                await asyncio.sleep(5)
            case 5:
                return await stream(request, EMPTY, FINISH, usage(8, 6))
            case 6:
                return await stream(request, TEXT, end=b"")
            case 7:
                return await stream(request, TEXT, {"error": {"message": "canary two"}})
            case 8:
                return await stream(request, b"data: {not json")
            case 9:
                return web.json_response({"choices": [{"text": "whole"}]})
        return await plain(server, request, body)

    arrivals = tuple(Arrival(at * MS, 8, at) for at in range(1, 11))
    with serving(scripted) as server:
        result = load(server, Workload("test", "here", arrivals), timeout_s=1.0)
    assert [facts(sample) for sample in result.samples] == [
        ("error", "http_500", 500, "", None, None),
        ("refused", "http_429", 429, "", None, None),
        ("error", "disconnected", 200, "o", None, None),
        ("error", "timeout", None, "", None, None),
        ("error", "no_content", 200, "", 8, 6),
        ("error", "incomplete", 200, "o", None, None),
        ("error", "stream_error", 200, "o", None, None),
        ("error", "malformed", 200, "", None, None),
        ("error", "not_streamed", 200, "", None, None),
        ("ok", "", 200, "ooo", 8, 10),
    ]
    summary = summarise(result)
    assert summary.failed == {
        kind: 1
        for kind in (
            *("http_500", "http_429", "disconnected", "timeout", "no_content"),
            *("incomplete", "stream_error", "malformed", "not_streamed"),
        )
    }
    assert (summary.sent, summary.ok, summary.ended) == (10, 1, "finished")
    only = result.samples[-1]
    assert summary.metrics["ttft_ns"].p99 == only.chunk_ns[0] - only.sent_ns
    assert [summary.metrics[name].n for name in ("ttft_ns", "itl_ns", "lateness_ns")] == [1, 2, 10]


def test_stopping_cuts_what_is_under_way_and_keeps_the_rest() -> None:
    async def scripted(server: Server, request: web.Request, body: Any) -> web.StreamResponse:
        if len(server.bodies) > 2:
            return await stream(request, TEXT, 30.0)
        return await plain(server, request, body)

    async def run(url: str) -> LoadResult:
        stop = asyncio.Event()
        seen: list[Sample] = []

        async def end() -> None:
            while len(seen) < 2:
                await asyncio.sleep(0.01)
            await asyncio.sleep(0.3)
            stop.set()

        ending = asyncio.create_task(end())
        plan = LoadPlan(url, Workload("t", "t", arrivals), warm_up=0)
        result = await run_load(plan, on_sample=seen.append, stop=stop)
        await ending
        assert len(seen) == 3
        return result

    arrivals = tuple(Arrival(at, 8, 6) for at in (0, MS, 2 * MS, 3600 * S))
    with serving(scripted) as server:
        result = asyncio.run(run(server.url))
    assert (result.ended, result.unsent) == ("interrupted", 1)
    assert [facts(sample) for sample in result.samples] == [
        ("ok", "", 200, "ooo", 8, 6),
        ("ok", "", 200, "ooo", 8, 6),
        ("aborted", "interrupted", 200, "o", None, None),
    ]
    summary = summarise(result)
    assert (summary.aborted, summary.failed, summary.metrics["ttft_ns"].n) == (1, {}, 2)


@pytest.mark.parametrize("gap_ns", [0, 700 * MS])
def test_a_server_that_goes_away_ends_the_run(gap_ns: int) -> None:
    """Noticed on the way where the schedule is long, and at its end where it is short."""

    async def dying(server: Server, request: web.Request, body: Any) -> web.StreamResponse:
        response = await plain(server, request, body)
        if len(server.bodies) == 2:
            threading.Thread(target=server.stop).start()
        return response

    arrivals = [0, 300 * MS, *(1500 * MS + at * gap_ns for at in range(20))]
    work = Workload("test", "here", tuple(Arrival(at, 8, 6) for at in arrivals))
    with serving(dying) as server:
        result = load(server, work)
    outcomes = [sample.error for sample in result.samples]
    assert result.ended == "server_gone"
    assert outcomes[:2] == ["", ""]
    assert set(outcomes[2:]) == {"connection_refused"}
    assert result.unsent == len(arrivals) - len(outcomes)
    assert (result.unsent > 0) == (gap_ns > 0)


def test_nothing_that_listens_is_an_error_at_once() -> None:
    with serving(plain) as server:
        url = server.url
    for plan in (
        LoadPlan(url, workload(1)),
        LoadPlan(url, workload(1), model="mine"),
        LoadPlan(url, workload(1), model="mine", endpoint="chat"),
    ):
        with pytest.raises(PerfledgerError, match="no server answers: connection_refused"):
            asyncio.run(run_load(plan))


@pytest.mark.parametrize(
    ("models", "error", "what"),
    [
        (401, UsageError, "refused us: HTTP 401"),
        (404, PerfledgerError, "names no model"),
        ({"data": []}, PerfledgerError, "names no model"),
    ],
)
def test_a_server_that_names_no_model(models: object, error: type, what: str) -> None:
    with serving(plain, models=models) as server, pytest.raises(error, match=what):
        load(server, workload(1))


@pytest.mark.parametrize(
    "fields",
    [
        {"url": "ftp://host"},
        {"url": "localhost:8000"},
        {"workload": Workload("t", "t", ())},
        {"timeout_s": 0},
        {"token_ids": (5, 5)},
    ],
)
def test_plans_that_cannot_be_are_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        LoadPlan(**{"url": "http://localhost", "workload": workload(1), **fields})


# --- Numbers and rows ---------------------------------------------------------------------


def sample(
    index: int, scheduled_ms: int, sent_ms: int, chunks_ms: list[int], **fields: Any
) -> Sample:
    return Sample(
        index=index,
        warm_up=fields.pop("warm_up", False),
        arrival=Arrival(scheduled_ms * MS, 8, 6, (), "chat"),
        trace_id=bytes([index + 1]) * 16,
        span_id=bytes([index + 1]) * 8,
        scheduled_ns=scheduled_ms * MS,
        sent_ns=sent_ms * MS,
        end_ns=fields.pop("end_ms", 400) * MS,
        chunk_ns=array("q", [ms * MS for ms in chunks_ms]),
        channels=fields.pop("channels", "o" * len(chunks_ms)),
        **fields,
    )


def finished(*samples: Sample, **fields: Any) -> LoadResult:
    work = Workload("test", "here", tuple(s.arrival for s in samples if not s.warm_up))
    return LoadResult(
        plan=LoadPlan("http://user:hush@host:1/v1?key=hush", work, run_id="r1", seed=3),
        model="m",
        anchor=ClockAnchor(0, 1_000 * S, "boot"),
        started_ns=0,
        samples=samples,
        loop_lag_ns=array("q", [MS, 3 * MS]),
        ended="finished",
        unsent=0,
        **fields,
    )


RESULT = finished(
    sample(0, 0, 0, [5], warm_up=True, input_tokens=8, output_tokens=1),
    sample(0, 0, 2, [52, 62, 92], input_tokens=9, output_tokens=6, http_status=200),
    sample(1, 100, 104, [124, 302], channels="ro", input_tokens=8, output_tokens=4),
    sample(2, 200, 203, [], error="http_500", detail="canary", http_status=500),
)


def test_a_summary_is_computed_from_raw_samples() -> None:
    summary = asdict(summarise(RESULT))
    metrics = {
        name: (m["mean"], m["p50"], m["p95"], m["n"]) for name, m in summary["metrics"].items()
    }
    assert metrics == {
        "ttft_ns": (35 * MS, 35 * MS, pytest.approx(48.5 * MS), 2),
        "ttft_from_schedule_ns": (38 * MS, 38 * MS, pytest.approx(50.6 * MS), 2),
        "ttfo_ns": (124 * MS, 124 * MS, pytest.approx(190.6 * MS), 2),
        "itl_ns": (pytest.approx(218 / 3 * MS), 30 * MS, pytest.approx(163.2 * MS), 3),
        "e2e_ns": (144 * MS, 144 * MS, pytest.approx(192.6 * MS), 2),
        "e2e_from_schedule_ns": (147 * MS, 147 * MS, pytest.approx(196.5 * MS), 2),
        "lateness_ns": (3 * MS, 3 * MS, pytest.approx(3.9 * MS), 3),
        "loop_lag_ns": (2 * MS, 2 * MS, pytest.approx(2.9 * MS), 2),
    }
    counted = ("sent", "ok", "failed", "aborted", "unsent", "warm_up", "usage_missing")
    assert [summary[name] for name in counted] == [3, 2, {"http_500": 1}, 0, 0, 1, 0]
    assert summary["rate_asked"] == 10
    assert summary["rate_achieved"] == pytest.approx(2 / 0.201)
    assert summary["window_s"] == pytest.approx(0.3)
    assert summary["output_tokens_per_s"] == pytest.approx(10 / 0.3)
    assert summary["realised_input_tokens"]["mean"] == 8.5
    assert summary["client_is_bottleneck"] is False
    assert set(summary["metrics"]) <= set(summary["definition"])


def test_a_late_client_says_so() -> None:
    late = finished(sample(0, 0, 200, [210], output_tokens=1))
    assert summarise(late).client_is_bottleneck is True


def test_without_a_success_nothing_is_a_number() -> None:
    summary = summarise(finished(sample(0, 0, 0, [], error="timeout")))
    nothing = Metric(None, None, None, None, None, 0)
    assert {summary.metrics[name] for name in ("ttft_ns", "itl_ns", "e2e_ns")} == {nothing}
    assert (summary.output_tokens_per_s, summary.rate_achieved, summary.window_s) == (None,) * 3


def test_spans_and_run_are_written_without_content(tmp_path: Path) -> None:
    store = Store.at(str(tmp_path))
    write_result(store, RESULT)
    rows = store.scan("spans").sort("start_ns").collect().to_dicts()
    full = {k: v for k, v in rows[2].items() if v is not None and k != "received_ns"}
    attributes = {
        pair["key"]: next(v for k, v in pair.items() if k != "key" and v is not None)
        for pair in full.pop("attributes")
    }
    events = [
        (e["time_ns"], e["name"], [a["text"] for a in e["attributes"] or []])
        for e in full.pop("events")
    ]
    assert full == {
        "trace_id": b"\2" * 16,
        "span_id": b"\2" * 8,
        "name": "text_completion",
        "kind": "client",
        "start_ns": 1000 * S + 104 * MS,
        "end_ns": 1000 * S + 400 * MS,
        "status": "ok",
        "run_id": "r1",
        "service_name": "perfledger-load",
        "boot_id": "boot",
        "scope_name": "perfledger.load",
        "scope_version": "1",
        "operation": "text_completion",
        "model": "m",
        "input_tokens": 8,
        "output_tokens": 4,
        "outcome": "ok",
        "traffic_class": "chat",
    }
    assert attributes == {
        "perfledger.client.index": 1,
        "perfledger.client.warmup": False,
        "perfledger.client.scheduled_ns": 1000 * S + 100 * MS,
        "perfledger.client.lateness_ns": 4 * MS,
        "perfledger.client.input_tokens": 8,
        "gen_ai.request.max_tokens": 6,
        "gen_ai.request.stream": True,
    }
    assert events == [
        (1000 * S + 124 * MS, "chunk", ["reasoning"]),
        (1000 * S + 302 * MS, "chunk", []),
    ]
    assert [(row["outcome"], row["error_type"]) for row in rows] == [
        ("ok", None),
        ("ok", None),
        ("ok", None),
        ("error", "http_500"),
    ]
    (run,) = store.scan("runs").collect().to_dicts()
    samples, manifest = json.loads(run["samples"]), json.loads(run["manifest"])
    assert (run["run_id"], run["kind"], run["created_ns"]) == ("r1", "load", 1000 * S)
    assert samples["workload_sha256"] == manifest["workload.hash"] == RESULT.plan.workload.sha256()
    assert samples["scaling"] == asdict(Scaling())
    assert (samples["seed"], samples["failed"]) == (3, {"http_500": 1})
    everything = str(rows) + str(run)
    assert [word for word in ("canary", "hush") if word in everything] == []


# --- The command --------------------------------------------------------------------------


def command(server: Server, store: Path, *extra: str) -> list[str]:
    words = [sys.executable, "-P", "-m", "perfledger", "load", "--url", server.url]
    return [*words, "--store", str(store), *extra]


def perfledger_load(server: Server, store: Path, *extra: str) -> subprocess.CompletedProcess[str]:
    arguments = command(server, store, *extra)
    return subprocess.run(arguments, capture_output=True, text=True, timeout=120, check=False)


SMALL = ("--generate", "azure-code", "--limit", "8", "--rate", "40", "--max-input", "64")


def test_the_command_prints_within_80_columns_and_keeps_samples(tmp_path: Path) -> None:
    with serving(plain) as server:
        done = perfledger_load(server, tmp_path, *SMALL, "--max-output", "5", "--run", "mine")
        again = perfledger_load(server, tmp_path, *SMALL, "--run", "mine")
    assert done.returncode == 0, done.stderr
    assert max(len(line) for line in done.stdout.splitlines()) <= 80
    assert [
        w for w in ("TTFT, from schedule", "CV of gaps", "rate 40") if w not in done.stdout
    ] == []
    spans = Store.at(str(tmp_path)).scan("spans").filter(pl.col("run_id") == "mine").collect()
    assert len(spans) == 10
    assert again.returncode == 2
    assert "run 'mine' is already there" in again.stderr


def test_json_carries_numbers_and_definitions(tmp_path: Path) -> None:
    trace = tmp_path / "trace.csv"
    rows = "".join(f"2024-05-10 00:00:00.{at}00000+00:00,20,3\n" for at in range(4))
    trace.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n" + rows)
    with serving(plain) as server:
        done = perfledger_load(
            server, tmp_path / "store", "--workload", str(trace), "--json", "--warmup", "0"
        )
    summary = json.loads(done.stdout)
    assert (done.returncode, summary["ok"], summary["warm_up"]) == (0, 4, 0)
    assert (summary["workload"], summary["workload_source"]) == ("azure", "trace.csv")
    assert summary["asked"]["span_s"] == 0.3
    assert summary["realised_output_tokens"]["mean"] == 3
    assert set(summary["metrics"]["ttft_ns"]) == {"mean", "std", "p50", "p95", "p99", "n"}
    assert summary["definition"]["itl_ns"].startswith("gaps between chunks")


def test_ctrl_c_keeps_what_was_measured(tmp_path: Path) -> None:
    arguments = ("--generate", "servegen", "--limit", "50", "--rate", "0.2", "--max-input", "9")
    with serving(plain) as server:
        process = subprocess.Popen(
            command(server, tmp_path, *arguments),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        deadline = time.monotonic() + 60
        while len(server.bodies) < 3 and time.monotonic() < deadline:
            time.sleep(0.05)
        time.sleep(0.3)
        process.send_signal(signal.SIGINT)
        out, error = process.communicate(timeout=60)
    assert process.returncode == 130, error
    assert "interrupted: what was measured until then is kept" in out
    spans = Store.at(str(tmp_path)).scan("spans").collect()
    assert len(spans) == len(server.bodies) >= 3


@pytest.mark.parametrize(
    ("extra", "said"),
    [
        (("--generate", "azure-code", "--rate", "0"), "must be above 0"),
        (("--generate", "azure-code", "--rate", "2", "--time-scale", "2"), "both set the time"),
        (("--workload", "/nowhere/trace.csv"), "no such workload file"),
        (("--generate", "azure-code", "--token-ids", "9:9"), "not a range of token ids"),
        (("--generate", "azure-code", "--workload", "x"), "not allowed with"),
        ((), "one of the arguments --workload --generate is required"),
    ],
)
def test_wrong_usage_is_said(tmp_path: Path, extra: tuple[str, ...], said: str) -> None:
    with serving(plain) as server:
        done = perfledger_load(server, tmp_path, *extra)
    assert (done.returncode, said in done.stderr) == (2, True), done.stderr


def test_no_success_is_exit_1(tmp_path: Path) -> None:
    async def refusing(server: Server, request: web.Request, body: object) -> web.StreamResponse:
        return web.Response(status=400, text="too long")

    with serving(refusing) as server:
        done = perfledger_load(server, tmp_path, *SMALL)
    assert done.returncode == 1
    assert "http_400, for example: too long" in done.stdout
    assert Store.at(str(tmp_path)).scan("spans").collect()["outcome"].to_list() == ["refused"] * 10
