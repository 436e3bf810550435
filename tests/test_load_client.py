"""The open-loop client against a real HTTP server of scripted behaviour, on this host."""

import asyncio
import json
import threading
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
from aiohttp import web

from perfledger.instrumented_runtime.load.client import label_header
from perfledger.instrumented_runtime.load.generator import generate
from perfledger.instrumented_runtime.load.open_loop import run_load
from perfledger.instrumented_runtime.load.plan import Calibration, LoadPlan, LoadResult, Sample
from perfledger.instrumented_runtime.load.summary import summarise
from perfledger.instrumented_runtime.load.workload import Arrival, Scaling, Workload, scale
from perfledger.instrumented_runtime.traffic_headers import parse_traffic
from perfledger.schema.errors import PerfledgerError, UsageError

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
    runner = web.AppRunner(app, shutdown_timeout=0, handler_cancellation=True)

    async def start() -> None:
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0, backlog=1024)
        await site.start()
        server.url = f"http://127.0.0.1:{runner.addresses[0][1]}"

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
        Arrival(0, 5, 3, (1, 2, 3), "chat", "acme", "s1", -2, 900),
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
        "x-perfledger-priority": "-2",
        "x-perfledger-deadline-ms": "900",
    }
    assert [sorted(headers) for headers in sent[1:]] == [["traceparent"]] * 2
    assert len({sample.trace_id for sample in result.samples}) == 3


def test_choices_come_apart() -> None:
    async def two(server: Server, request: web.Request, body: Any) -> web.StreamResponse:
        texts = [{"choices": [{"index": index, "text": "a"}]} for index in (0, 1, 1, 0)]
        return await stream(request, *texts, FINISH, usage(8, 12))

    with serving(two) as server:
        result = load(server, workload(1), n=2)
    assert server.bodies[0]["n"] == 2
    (sample,) = result.samples
    assert (facts(sample), list(sample.choices)) == (
        ("ok", "", 200, "oooo", 8, 12),
        [0, 1, 1, 0],
    )
    assert summarise(result).metrics["itl_ns"].n == 2


def test_refusals_are_counted_by_their_reason() -> None:
    codes: list[object] = ["deadline", "shed", "deadline", "Free text!", 5, None]

    async def refusing(server: Server, request: web.Request, body: Any) -> web.StreamResponse:
        error = {"message": "canary", "code": codes[body["max_tokens"]]}
        return web.json_response({"error": error}, status=429)

    arrivals = tuple(Arrival(0, 8, at) for at in range(len(codes)))
    with serving(refusing) as server:
        summary = summarise(load(server, Workload("test", "here", arrivals)))
    assert summary.failed == {"http_429_deadline": 2, "http_429_shed": 1, "http_429": 3}


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
            0.3,
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
    assert (metrics["ttfo_ns"].p50 or 0) - (metrics["ttft_ns"].p50 or 0) >= 100 * MS


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


def test_a_caller_that_cancels_is_not_held_up() -> None:
    async def hanging(server: Server, request: web.Request, body: object) -> web.StreamResponse:
        return await stream(request, TEXT, 60.0)

    async def run(url: str) -> set[str]:
        plan = LoadPlan(url, workload(3, MS), warm_up=0)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(run_load(plan), 1)
        return {task.get_name() for task in asyncio.all_tasks() - {asyncio.current_task()}}

    with serving(hanging) as server:
        assert asyncio.run(run(server.url)) == set()
    assert len(server.bodies) == 3


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


@pytest.mark.parametrize(
    ("label", "header"),
    [
        ("Conversation log", "Conversation-log"),
        ("ok/a@b", "ok/a@b"),
        ("x;y" * 90, ("x-y" * 90)[:128]),
    ],
)
def test_labels_of_traces_become_headers_that_the_runtime_takes(label: str, header: str) -> None:
    assert label_header(label) == header
    assert parse_traffic({"x-perfledger-class": header}).traffic_class == header
