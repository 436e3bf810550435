"""Requests as our own runtime sends them: LLM requests with their stages, engine steps with links.

    python benchmarks/llm_payload.py [--requests 8] [--seed 0]    prints their figures

One request holds 512 spans of one service: 16 chats of 11 spans, and the 84 engine steps of 4
spans that computed them. The collector derives one row of `requests` from each chat and one of
`steps` from each step.
"""

import argparse
import random
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import InstrumentationScope
from opentelemetry.proto.resource.v1.resource_pb2 import Resource
from opentelemetry.proto.trace.v1.trace_pb2 import ResourceSpans, ScopeSpans, Span

from perfledger.schema.attributes import SCHEMA_VERSION, SCOPE_NAME

sys.path.insert(0, str(Path(__file__).parent))  # python -P leaves it out
from reference_payload import CLASSES, START_NS, TENANTS, Value, figures, key_values  # noqa: E402

CHATS, STEPS, STEPS_A_CHAT, PROMPT_CHUNKS = 16, 84, 52, 2
CHUNK_TOKENS = 128
MS, US = 1_000_000, 1000
STEP_NS, SCHEDULE_NS, SAMPLE_NS, BETWEEN_NS = 10 * MS, 200 * US, 500 * US, 100 * US
REQUEST_NS = STEPS * (STEP_NS + BETWEEN_NS)
_TRUSTED = 0x100  # W3C flags as the SDK sends them


@dataclass(frozen=True)
class Step:
    """An engine step and when each of its parts ended."""

    span_id: bytes
    start_ns: int

    @property
    def forward_ns(self) -> int:
        return self.start_ns + SCHEDULE_NS

    @property
    def sample_ns(self) -> int:
        return self.start_ns + STEP_NS - SAMPLE_NS - BETWEEN_NS

    @property
    def sampled_ns(self) -> int:
        return self.sample_ns + SAMPLE_NS

    @property
    def end_ns(self) -> int:
        return self.start_ns + STEP_NS


@dataclass(frozen=True)
class Chat:
    """A chat that is in the steps [first, last]."""

    trace_id: bytes
    span_id: bytes
    first: int
    last: int


def llm_requests(count: int, seed: int = 0) -> list[bytes]:
    """Return `count` different requests as protobuf; the same seed gives the same bytes."""
    return [one_request(random.Random(f"{seed}/{n}"), n).SerializeToString() for n in range(count)]


def one_request(draw: random.Random, number: int) -> ExportTraceServiceRequest:
    start_ns = START_NS + number * REQUEST_NS
    steps = [Step(draw.randbytes(8), start_ns + at * (STEP_NS + BETWEEN_NS)) for at in range(STEPS)]
    chats = [_chat(draw, at) for at in range(CHATS)]
    spans = [span for chat in chats for span in _chat_spans(draw, chat, steps)]
    engine = draw.randbytes(16)
    for at, step in enumerate(steps):
        members = [chat for chat in chats if chat.first <= at <= chat.last]
        spans += _step_spans(draw, engine, number * STEPS + at, step, members, at)
    scope = InstrumentationScope(name=SCOPE_NAME, version=SCHEMA_VERSION)
    group = ResourceSpans(
        resource=Resource(attributes=key_values(_resource())),
        scope_spans=[ScopeSpans(scope=scope, spans=spans)],
    )
    return ExportTraceServiceRequest(resource_spans=[group])


def _chat(draw: random.Random, at: int) -> Chat:
    first = 2 * at
    return Chat(draw.randbytes(16), draw.randbytes(8), first, first + STEPS_A_CHAT - 1)


def _resource() -> dict[str, Value]:
    return {
        "service.name": "chat-server",
        "service.instance.id": "chat-server-0",
        "telemetry.sdk.language": "python",
        "telemetry.sdk.name": "opentelemetry",
        "telemetry.sdk.version": "1.45.2",
        "perfledger.run.id": "run-0001",
        "perfledger.clock.boot_id": "8f3c1f6e-1d0b-4a3e-9a39-2f4f0c1d7b55",
        "perfledger.clock.monotonic_ns": 81_000_000_000,
        "perfledger.clock.wall_ns": START_NS,
    }


def _chat_spans(draw: random.Random, chat: Chat, steps: Sequence[Step]) -> Iterator[Span]:
    admitted, last = steps[chat.first], steps[chat.last]
    sampled = steps[chat.first + PROMPT_CHUNKS - 1]
    arrival_ns = admitted.start_ns - 2 * MS - int(draw.expovariate(1 / (20 * MS)))
    end_ns = last.end_ns + int(draw.uniform(1 * MS, 4 * MS))
    attributes = _root_attributes(draw, sampled.sampled_ns + MS - arrival_ns)
    root = _span(chat.trace_id, chat.span_id, b"", "chat", arrival_ns, end_ns, attributes)
    root.kind = Span.SPAN_KIND_SERVER
    yield root
    left_ns, tokens = last.sampled_ns, {"perfledger.tokens": CHUNK_TOKENS}
    for name, start_ns, until_ns, values in (
        ("template", arrival_ns + 50 * US, arrival_ns + 300 * US, {}),
        ("tokenize", arrival_ns + 300 * US, arrival_ns + 900 * US, {}),
        ("queue", arrival_ns + 950 * US, admitted.start_ns, {"perfledger.reason": "admission"}),
        ("context", admitted.start_ns, admitted.start_ns + 100 * US, {}),
        *(
            ("prefill", step.forward_ns, step.sample_ns, tokens)
            for step in steps[chat.first : chat.first + PROMPT_CHUNKS]
        ),
        ("sample", sampled.sample_ns, sampled.sampled_ns, {"perfledger.tokens": 1}),
        ("decode", sampled.sampled_ns, left_ns, {"perfledger.tokens": STEPS_A_CHAT - 2}),
        ("detokenize", left_ns + 50 * US, left_ns + 150 * US, {}),
        ("stream", left_ns + 150 * US, end_ns - 20 * US, {}),
    ):
        child = draw.randbytes(8)
        yield _span(chat.trace_id, child, chat.span_id, name, start_ns, until_ns, values)


def _root_attributes(draw: random.Random, ttfc_ns: int) -> dict[str, Value]:
    return {
        "gen_ai.operation.name": "chat",
        "gen_ai.response.id": f"chatcmpl-{draw.getrandbits(128):032x}",
        "gen_ai.request.temperature": draw.choice((0.0, 0.7, 1.0)),
        "gen_ai.request.top_p": 0.95,
        "gen_ai.request.stream": True,
        "gen_ai.request.choice.count": 1,
        "gen_ai.request.model": "llama-3.1-8b",
        "gen_ai.response.model": "llama-3.1-8b",
        "gen_ai.request.max_tokens": draw.choice((256, 512, 1024)),
        "gen_ai.usage.input_tokens": PROMPT_CHUNKS * CHUNK_TOKENS,
        "gen_ai.usage.output_tokens": STEPS_A_CHAT - PROMPT_CHUNKS + 1,
        "gen_ai.usage.cache_read.input_tokens": draw.choice((0, 16, 64)),
        "gen_ai.response.finish_reasons": ["stop"],
        "perfledger.model.hash": "sha256:5d2f0e",
        "perfledger.tokenizer.hash": "sha256:99a1c0",
        "perfledger.tenant": draw.choice(TENANTS),
        "perfledger.class": draw.choice(CLASSES),
        "perfledger.session": f"session-{draw.getrandbits(64):016x}",
        "perfledger.status": "ok",
        "perfledger.ttfc_ns": ttfc_ns,
    }


def _step_spans(
    draw: random.Random, trace_id: bytes, seq: int, step: Step, members: Sequence[Chat], at: int
) -> Iterator[Span]:
    prefilling = [chat for chat in members if at < chat.first + PROMPT_CHUNKS]
    decoding = len(members) - len(prefilling)
    mixed = "mixed_step" if decoding else "prefill_step"
    attributes = _step_attributes(draw, seq, len(members), CHUNK_TOKENS * len(prefilling), decoding)
    name = mixed if prefilling else "decode_step"
    root = _span(trace_id, step.span_id, b"", name, step.start_ns, step.end_ns, attributes)
    root.links.extend(_link(chat, chat in prefilling) for chat in members)
    yield root
    for name, start_ns, end_ns in (
        ("schedule", step.start_ns, step.forward_ns),
        ("forward", step.forward_ns, step.sample_ns),
        ("sample", step.sample_ns, step.sampled_ns),
    ):
        yield _span(trace_id, draw.randbytes(8), step.span_id, name, start_ns, end_ns, {})


def _step_attributes(
    draw: random.Random, seq: int, width: int, prefill_tokens: int, decode_tokens: int
) -> dict[str, Value]:
    return {
        "perfledger.device": "cpu",
        "perfledger.dtype": "float32",
        "perfledger.kernel_path": "paged",
        "perfledger.replica": "0",
        "perfledger.rank": 0,
        "perfledger.step.cpu_ns": draw.randrange(9 * MS, 10 * MS),
        "perfledger.step.seq": seq,
        "perfledger.step.width": width,
        "perfledger.step.prefill_tokens": prefill_tokens,
        "perfledger.step.decode_tokens": decode_tokens,
        "perfledger.step.waiting": draw.randrange(4),
        "perfledger.step.kv_blocks_used": width * 17,
        "perfledger.step.kv_blocks_total": 1024,
    }


def _link(chat: Chat, prefills: bool) -> Span.Link:
    attributes: dict[str, Value] = {"perfledger.phase": "decode", "perfledger.tokens": 1}
    if prefills:
        attributes = {"perfledger.phase": "prefill", "perfledger.tokens": CHUNK_TOKENS}
    return Span.Link(
        trace_id=chat.trace_id,
        span_id=chat.span_id,
        attributes=key_values(attributes),
        flags=_TRUSTED,
    )


def _span(
    trace_id: bytes,
    span_id: bytes,
    parent: bytes,
    name: str,
    start_ns: int,
    end_ns: int,
    attributes: dict[str, Value],
) -> Span:
    return Span(
        trace_id=trace_id,
        span_id=span_id,
        parent_span_id=parent,
        name=name,
        kind=Span.SPAN_KIND_INTERNAL,
        start_time_unix_nano=start_ns,
        end_time_unix_nano=end_ns,
        attributes=key_values(attributes),
        flags=_TRUSTED,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--requests", type=int, default=8)
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()
    for name, value in vars(figures(llm_requests(asked.requests, asked.seed))).items():
        print(f"{name:16} {value:8.2f}")


if __name__ == "__main__":
    main()
