"""An answer on its way, through a real pipe from an engine that the test plays.

Choices come apart and end on their own; refusals are told; the last stages are recorded however
they end: accepted, cancelled or broken off.
"""

import asyncio
import json
import multiprocessing
from collections.abc import Sequence
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from starlette.types import Message

from perfledger.instrumented_runtime.answer_text import AnswerText
from perfledger.instrumented_runtime.checkpoints.resolve import resolve
from perfledger.instrumented_runtime.engine_link import EngineLink, Hears
from perfledger.instrumented_runtime.messages import (
    Abort,
    Admitted,
    Failed,
    FromEngine,
    SamplingParams,
    StepOutput,
    Submit,
    Token,
)
from perfledger.instrumented_runtime.openai_protocol import parse_request
from perfledger.instrumented_runtime.request_trace import RequestTrace
from perfledger.instrumented_runtime.streaming import Completion
from perfledger.instrumented_runtime.telemetry import RequestRecord
from perfledger.instrumented_runtime.tokenizer import Tokenizer
from perfledger.schema.clocks import monotonic_ns

LONG_NS = 60_000_000_000
TOKENIZER = Tokenizer.load(resolve("reference-small"))


async def answer_with(stream: bool, delays_ns: dict[str, int], breaks: bool) -> RequestRecord:
    """Answer with one token; a planted delay is cancelled, as a server that stops does."""
    near, far = multiprocessing.Pipe()
    link = EngineLink(near, Hears())
    link.start()
    asked = parse_request("chat", b'{"messages": [{"role": "user", "content": "a"}]}')
    asked = replace(asked, stream=stream)
    trace = RequestTrace(1, "chat", [], monotonic_ns())
    answer = link.submit(Submit(1, [5], SamplingParams(1), 1, 1, monotonic_ns()))
    far.send(step(Token(1, 50, "length")))
    text = AnswerText(TOKENIZER.detokenizer(), ())
    completion = Completion(answer, [text], asked, trace, 1, delays_ns)

    async def receive() -> Message:
        await asyncio.sleep(60)
        raise AssertionError

    async def send(message: Message) -> None:
        if breaks and message.get("body"):
            raise OSError("the client is gone")

    running = asyncio.ensure_future(completion({}, receive, send))
    if delays_ns:
        await asyncio.sleep(0.05)
        running.cancel()
    await asyncio.wait([running])
    assert running.cancelled() or running.done() and breaks == bool(running.exception())
    link.shut_down()
    return trace.record()


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize(
    ("delays_ns", "breaks", "stages", "outcome"),
    [
        ({}, False, ["detokenize", "stream"], "ok"),
        ({}, True, ["detokenize", "stream"], "error"),
        ({"stream": LONG_NS}, False, ["detokenize", "stream"], "aborted"),
        ({"detokenize": LONG_NS}, False, ["detokenize"], "aborted"),
    ],
)
def test_the_last_stages(
    stream: bool, delays_ns: dict[str, int], breaks: bool, stages: list[str], outcome: str
) -> None:
    record = asyncio.run(answer_with(stream, delays_ns, breaks))
    assert ([span.name for span in record.spans], record.outcome) == (stages, outcome)
    times = [time for span in record.spans for time in (span.start_ns, span.end_ns)]
    assert times == sorted(times) and times[-1] <= record.end_ns
    if len(stages) == 2:
        assert record.spans[0].end_ns == record.spans[1].start_ns


@dataclass
class Answered:
    """What the client got, what the engine was told, and what was recorded."""

    status: int
    headers: dict[str, str]
    body: bytes
    told: list[object]
    record: RequestRecord

    @property
    def choices(self) -> dict[int, tuple[str, str | None]]:
        """Text and finish reason of each choice, of either form."""
        if self.headers["content-type"] == "application/json":
            found = json.loads(self.body)["choices"]
            return {one["index"]: (one["text"], one["finish_reason"]) for one in found}
        texts: dict[int, str] = {}
        finishes: dict[int, str | None] = {}
        for event in self.events:
            for one in event["choices"]:
                assert finishes.get(one["index"]) is None, "text after the end"
                texts[one["index"]] = texts.get(one["index"], "") + one["text"]
                finishes[one["index"]] = one["finish_reason"]
        return {index: (texts[index], finishes[index]) for index in sorted(texts)}

    @property
    def events(self) -> list[Any]:
        *events, done = self.body.decode().split("\n\n")[:-1]
        assert done == "data: [DONE]"
        return [json.loads(event.removeprefix("data: ")) for event in events]

    @property
    def usage(self) -> dict[str, Any]:
        streamed = self.headers["content-type"] != "application/json"
        body = self.events[-1] if streamed else json.loads(self.body)
        usage: dict[str, Any] = body["usage"]
        return usage


def answer_to(
    said: Sequence[FromEngine], *, n: int, stream: bool, unread_s: float = 0, **fields: Any
) -> Answered:
    """Submit a completion request of 5 prompt tokens and answer with what an engine says.

    The client reads nothing of its body for `unread_s`.
    """
    return asyncio.run(_answer_to(said, n, stream, unread_s, fields))


async def _answer_to(
    said: Sequence[FromEngine], n: int, stream: bool, unread_s: float, fields: dict[str, Any]
) -> Answered:
    near, far = multiprocessing.Pipe()
    link = EngineLink(near, Hears())
    link.start()
    options = {"stream_options": {"include_usage": True}} if stream else {}
    body = {"prompt": "x", "n": n, "stream": stream, **options, **fields}
    asked = parse_request("text_completion", json.dumps(body).encode())
    trace = RequestTrace(1, "text_completion", [], monotonic_ns())
    answer = link.submit(Submit(1, [5] * 5, SamplingParams(8, n=n), 1, 1, monotonic_ns()))
    texts = [AnswerText(TOKENIZER.detokenizer(), asked.stop) for _ in range(n)]
    completion = Completion(answer, texts, asked, trace, 5, {})
    sent: list[Any] = []

    async def receive() -> Message:
        await asyncio.sleep(60)
        raise AssertionError

    async def send(message: Message) -> None:
        sent.append(message)
        if len(sent) == 2:
            await asyncio.sleep(unread_s)

    for message in said:
        far.send(message)
    async with asyncio.timeout(20):
        await completion({}, receive, send)
    assert link.in_flight == 0
    link.shut_down()
    headers = {name.decode(): value.decode() for name, value in sent[0]["headers"]}
    content = b"".join(message["body"] for message in sent[1:])
    return Answered(sent[0]["status"], headers, content, _read(far)[1:], trace.record())


def _read(connection: Connection) -> list[object]:
    messages = []
    try:
        while True:
            messages.append(connection.recv())
    except (EOFError, ConnectionResetError):
        return messages


def step(*tokens: Token, admitted: Sequence[Admitted] = ()) -> StepOutput:
    return StepOutput(1, monotonic_ns(), list(tokens), admitted)


@pytest.mark.parametrize("stream", [True, False])
def test_each_choice_ends_on_its_own(stream: bool) -> None:
    go, stop, more = (TOKENIZER.encode(text)[0] for text in (" the", " stop", " of"))
    said = [
        step(Token(1, go, None, 0), Token(1, stop, "length", 2), admitted=[Admitted(1, 4)]),
        step(Token(1, go, None, 1), Token(1, stop, None, 0)),
        step(Token(1, more, None, 0), Token(1, more, "length", 1)),  # choice 0 was sampled on
    ]
    got = answer_to(said, n=3, stream=stream, stop=["stop"])
    assert got.choices == {0: (" the ", "stop"), 1: (" the of", "length"), 2: (" ", "stop")}
    assert got.told == [Abort(1, "stop_string", 0)]
    assert got.usage == {
        "prompt_tokens": 5,
        "completion_tokens": 5,
        "total_tokens": 10,
        "prompt_tokens_details": {"cached_tokens": 4},
    }
    finish = got.record.attributes["gen_ai.response.finish_reasons"]
    assert (got.record.outcome, finish) == ("ok", ["stop", "length", "stop"])


def test_the_last_choice_that_stops_ends_the_request() -> None:
    stop = TOKENIZER.encode(" stop")[0]
    said = [step(Token(1, stop, None, 1)), step(Token(1, stop, None, 0))]
    got = answer_to(said, n=2, stream=True, stop="stop")
    assert got.choices == {0: (" ", "stop"), 1: (" ", "stop")}
    assert got.told == [Abort(1, "stop_string", 1), Abort(1, "stop_string")]


def test_an_answer_that_the_client_does_not_read_is_no_detokenizing() -> None:
    words = [TOKENIZER.encode(text)[0] for text in (" the", " of", " a")]
    said = [step(Token(1, word, "length" if word == words[-1] else None)) for word in words]
    spans = answer_to(said, n=1, stream=True, unread_s=0.05).record.spans
    told = [(span.name, span.attributes) for span in spans]
    unread = ("stream", {"perfledger.reason": "unread"})
    assert told == [("detokenize", {}), unread, ("detokenize", {}), ("stream", {})]
    assert spans[0].start_ns == said[-1].sent_ns
    assert [one.end_ns for one in spans[:-1]] == [one.start_ns for one in spans[1:]]
    assert spans[1].end_ns - spans[1].start_ns >= 45_000_000


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_choices_are_what_they_would_be_alone(data: st.DataObject) -> None:
    """Whatever the order in which their tokens come, and whole as in chunks."""
    words = [TOKENIZER.encode(text)[0] for text in (" a", " b", " the", " stop", "\n", " END")]
    n = data.draw(st.integers(1, 4))
    lists = [data.draw(st.lists(st.sampled_from(words), min_size=1, max_size=6)) for _ in range(n)]
    stops = data.draw(st.sampled_from([[], ["b"], ["the", "END"], [" a b"]]))
    order = data.draw(st.permutations([c for c in range(n) for _ in lists[c]]))
    said, at = [], [0] * n
    for choice in order:
        at[choice] += 1
        last = "length" if at[choice] == len(lists[choice]) else None
        said.append(step(Token(1, lists[choice][at[choice] - 1], last, choice)))
    alone = []
    for tokens in lists:
        ends = [None] * (len(tokens) - 1) + ["length"]
        one = [step(Token(1, token, end)) for token, end in zip(tokens, ends, strict=True)]
        alone.append(answer_to(one, n=1, stream=False, stop=stops).choices[0])
    for stream in (True, False):
        got = answer_to(said, n=n, stream=stream, stop=stops)
        assert got.choices == dict(enumerate(alone))
        assert got.usage["completion_tokens"] <= sum(map(len, lists))


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("reason", ["deadline", "shed", "degraded"])
def test_a_refusal_before_any_token(stream: bool, reason: str) -> None:
    detail = "812 ms of waiting expected, 500 ms left"
    got = answer_to([Failed(1, reason, detail, retry_after_s=2)], n=2, stream=stream)
    assert (got.status, got.headers["retry-after"]) == (429, "2")
    assert json.loads(got.body) == {
        "error": {"message": detail, "type": "rate_limit_error", "param": None, "code": reason}
    }
    record = got.record
    assert (record.outcome, record.attributes["error.type"]) == ("refused", reason)
    assert record.attributes["perfledger.reason"] == reason
    assert record.attributes["gen_ai.usage.output_tokens"] == 0
    assert "gen_ai.response.finish_reasons" not in record.attributes
    again = answer_to([Failed(1, reason, detail)], n=1, stream=stream)
    assert "retry-after" not in again.headers


@pytest.mark.parametrize("stream", [True, False])
def test_what_was_degraded_is_said(stream: bool) -> None:
    said = [step(Token(1, 50, "length"), admitted=[Admitted(1, 0, "cap_max_tokens=1")])]
    got = answer_to(said, n=1, stream=stream)
    assert (got.status, got.headers["x-perfledger-degraded"]) == (200, "cap_max_tokens=1")


def test_a_failure_after_the_first_token_is_an_event() -> None:
    said = [step(Token(1, 50, None, 1)), Failed(1, "deadline", "too late")]
    got = answer_to(said, n=2, stream=True)
    *_, last = got.body.decode().split("\n\n")[:-1]
    error = json.loads(last.removeprefix("data: "))["error"]
    assert (got.status, error["code"], error["type"]) == (200, "deadline", "server_error")
    assert (got.record.outcome, got.record.attributes["error.type"]) == ("error", "deadline")
