"""The last stages of an answer are recorded however they end: accepted, cancelled or broken off."""

import asyncio
import multiprocessing
from dataclasses import replace

import pytest
from starlette.types import Message

from perfledger.instrumented_runtime.answer_text import AnswerText
from perfledger.instrumented_runtime.checkpoints.resolve import resolve
from perfledger.instrumented_runtime.engine_link import Answer, EngineLink, Sampled
from perfledger.instrumented_runtime.openai_protocol import parse_request
from perfledger.instrumented_runtime.request_trace import RequestTrace
from perfledger.instrumented_runtime.streaming import Completion
from perfledger.instrumented_runtime.telemetry import RequestRecord
from perfledger.instrumented_runtime.tokenizer import Tokenizer
from perfledger.schema.clocks import monotonic_ns

LONG_NS = 60_000_000_000


async def answer_with(stream: bool, delays_ns: dict[str, int], breaks: bool) -> RequestRecord:
    """Answer with one token; a planted delay is cancelled, as a server that stops does."""
    near, _far = multiprocessing.Pipe()
    link = EngineLink(near, lambda: None)
    link.start()
    asked = parse_request("chat", b'{"messages": [{"role": "user", "content": "a"}]}')
    asked = replace(asked, stream=stream)
    trace = RequestTrace(1, "chat", [], monotonic_ns())
    answer = Answer(link, 1)
    answer.arrived.put_nowait(Sampled(50, "length", monotonic_ns()))
    text = AnswerText(Tokenizer.load(resolve("reference-small")).detokenizer(), ())
    completion = Completion(answer, text, asked, trace, 1, delays_ns)

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
