"""The reference payload: what a batching agent of an LLM application sends, made from a seed.

    python benchmarks/reference_payload.py [--requests 8] [--seed 0]    prints its figures

One request is an ExportTraceServiceRequest of 512 spans: 4 services with 16 traces of 8 spans
each. A span has 12 attributes on average and 2 events of 2 attributes each. Ids are random, the
request id is new in each trace, and most other values come from short lists, as they do in life.
No span is the root of an LLM request; llm_payload.py makes those.
"""

import argparse
import gzip
import random
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import (
    AnyValue,
    ArrayValue,
    InstrumentationScope,
    KeyValue,
)
from opentelemetry.proto.resource.v1.resource_pb2 import Resource
from opentelemetry.proto.trace.v1.trace_pb2 import ResourceSpans, ScopeSpans, Span, Status

Value = str | int | float | bool | Sequence["Value"]

SPANS_A_REQUEST, SPANS_A_TRACE = 512, 8
SERVICES = ("answers-api", "retrieval", "session-store", "batch-answers")
TRACES_A_SERVICE = SPANS_A_REQUEST // SPANS_A_TRACE // len(SERVICES)
START_NS = 1_790_000_000_000_000_000
REQUEST_EVERY_NS = 2_000_000  # requests follow each other this closely
ID_DIGITS = 16  # of an app.request.id, hexadecimal


@dataclass(frozen=True)
class Work:
    """One of the 8 spans of a trace; `parent` is the place of its parent, -1 at the root."""

    name: str
    parent: int
    kind: "Span.SpanKind.ValueType"
    scope: str
    events: tuple[str, str]


WORK = (
    Work("POST /v1/answers", -1, Span.SPAN_KIND_SERVER, "http", ("admitted", "answered")),
    Work("authorize", 0, Span.SPAN_KIND_INTERNAL, "app", ("key.found", "quota.read")),
    Work("retrieve", 0, Span.SPAN_KIND_INTERNAL, "app", ("planned", "joined")),
    Work("SELECT documents", 2, Span.SPAN_KIND_CLIENT, "db", ("pool.acquired", "pool.released")),
    Work("embeddings", 2, Span.SPAN_KIND_CLIENT, "genai", ("sent", "received")),
    Work("rank", 0, Span.SPAN_KIND_INTERNAL, "app", ("loaded", "ordered")),
    Work("generate", 0, Span.SPAN_KIND_CLIENT, "genai", ("first.chunk", "last.chunk")),
    Work("publish usage", 0, Span.SPAN_KIND_PRODUCER, "queue", ("queued", "confirmed")),
)

MODELS = ("llama-3.1-8b", "llama-3.1-70b", "qwen3-32b", "mistral-small-3.2")
EMBEDDERS = ("bge-m3", "e5-large-v2")
TENANTS = tuple(f"tenant-{number:02}" for number in range(40))
CLASSES = ("interactive", "batch", "internal")
AGENTS = tuple(f"answers-python/{minor}.{patch}" for minor in (3, 4) for patch in range(6))
COLLECTIONS = ("manuals", "tickets", "wiki", "contracts", "release-notes")


def requests(count: int, seed: int = 0) -> list[bytes]:
    """Return `count` different requests as protobuf; the same seed gives the same bytes."""
    return [one_request(random.Random(f"{seed}/{n}"), n).SerializeToString() for n in range(count)]


def one_request(draw: random.Random, number: int) -> ExportTraceServiceRequest:
    start_ns = START_NS + number * REQUEST_EVERY_NS
    groups = [_resource_spans(draw, service, start_ns) for service in SERVICES]
    return ExportTraceServiceRequest(resource_spans=groups)


def _resource_spans(draw: random.Random, service: str, start_ns: int) -> ResourceSpans:
    spans = []
    for _ in range(TRACES_A_SERVICE):
        spans += _trace(draw, start_ns + int(draw.uniform(0, REQUEST_EVERY_NS)))
    resource = Resource(attributes=key_values(_resource(service)))
    scope = InstrumentationScope(name="answers.instrumentation", version="2.4.1")
    return ResourceSpans(resource=resource, scope_spans=[ScopeSpans(scope=scope, spans=spans)])


def _resource(service: str) -> dict[str, Value]:
    return {
        "service.name": service,
        "service.instance.id": f"{service}-7f9c6d5b8-x2x9q",
        "service.version": "2026.11.3",
        "deployment.environment.name": "production",
        "host.name": "node-17.eu-west-1.internal",
        "k8s.namespace.name": "answers",
        "telemetry.sdk.language": "python",
        "telemetry.sdk.version": "1.45.2",
        "process.pid": 41,
    }


def _trace(draw: random.Random, start_ns: int) -> list[Span]:
    """Return the spans of one trace, children after their parents and inside them."""
    trace_id, ids = draw.randbytes(16), [draw.randbytes(8) for _ in WORK]
    times = [(start_ns, start_ns + int(draw.lognormvariate(17.5, 0.8)))]
    for work in WORK[1:]:
        begin, end = times[work.parent]
        first = begin + int((end - begin) * draw.uniform(0.02, 0.4))
        times.append((first, first + int((end - first) * draw.uniform(0.2, 0.95))))
    common = _of_trace(draw)
    failed = draw.random() < 0.01
    return [
        _span(draw, at, trace_id, ids, times[at], {**common, **_of_span(draw, at, failed)}, failed)
        for at in range(len(WORK))
    ]


def _span(
    draw: random.Random,
    at: int,
    trace_id: bytes,
    ids: Sequence[bytes],
    times: tuple[int, int],
    attributes: dict[str, Value],
    failed: bool,
) -> Span:
    work, (start_ns, end_ns) = WORK[at], times
    code = Status.STATUS_CODE_ERROR if failed and at in (0, 6) else Status.STATUS_CODE_UNSET
    return Span(
        trace_id=trace_id,
        span_id=ids[at],
        parent_span_id=ids[work.parent] if work.parent >= 0 else b"",
        name=work.name,
        kind=work.kind,
        start_time_unix_nano=start_ns,
        end_time_unix_nano=end_ns,
        attributes=key_values(attributes),
        events=_events(draw, work.events, start_ns, end_ns),
        status=Status(code=code) if code else None,
        flags=0x101,
    )


def _events(
    draw: random.Random, names: tuple[str, str], start_ns: int, end_ns: int
) -> list[Span.Event]:
    first_ns = start_ns + int((end_ns - start_ns) * draw.uniform(0, 0.5))
    return [
        Span.Event(
            name=name,
            time_unix_nano=time_ns,
            attributes=key_values(
                {"event.source": "answers.tracing", "elapsed.ns": time_ns - start_ns}
            ),
        )
        for name, time_ns in zip(names, (first_ns, end_ns), strict=True)
    ]


def _of_trace(draw: random.Random) -> dict[str, Value]:
    """Return the attributes that every span of a trace repeats: 5."""
    return {
        "app.request.id": f"{draw.getrandbits(4 * ID_DIGITS):0{ID_DIGITS}x}",
        "perfledger.tenant": _mostly_first(draw, TENANTS),
        "perfledger.class": _mostly_first(draw, CLASSES),
        "perfledger.session": f"session-{draw.getrandbits(64):016x}",
        "app.retried": draw.random() < 0.03,
    }


def _of_span(draw: random.Random, at: int, failed: bool) -> dict[str, Value]:
    """Return the attributes of one span, 7 on average over the trace."""
    cpu: dict[str, Value] = {"process.cpu.milliseconds": draw.expovariate(1 / 3)}
    return {**cpu, **_OF_SPAN[at](draw, failed)}


def _of_server(draw: random.Random, failed: bool) -> dict[str, Value]:
    return {
        "http.request.method": "POST",
        "http.route": "/v1/answers",
        "http.response.status_code": 500 if failed else 200,
        "http.request.size": draw.randrange(200, 9000),
        "url.scheme": "https",
        "server.address": "answers.example.com",
        "client.address": f"10.{draw.randrange(256)}.{draw.randrange(256)}.{draw.randrange(256)}",
        "user_agent.original": draw.choice(AGENTS),
    }


def _of_authorize(draw: random.Random, failed: bool) -> dict[str, Value]:
    return {
        "code.function.name": "answers.auth.authorize",
        "code.line.number": 88,
        "auth.scheme": "bearer",
        "auth.cached": draw.random() < 0.9,
        "auth.scopes": ["answers.read", "answers.write"],
    }


def _of_retrieve(draw: random.Random, failed: bool) -> dict[str, Value]:
    return {
        "code.function.name": "answers.retrieval.retrieve",
        "code.line.number": 131,
        "retrieval.collection": draw.choice(COLLECTIONS),
        "retrieval.top_k": draw.choice((8, 16, 32)),
        "retrieval.hybrid": True,
    }


def _of_select(draw: random.Random, failed: bool) -> dict[str, Value]:
    return {
        "db.system.name": "postgresql",
        "db.namespace": "documents",
        "db.operation.name": "SELECT",
        "db.collection.name": draw.choice(COLLECTIONS),
        "db.response.returned_rows": draw.randrange(1, 65),
        "server.address": "pg-2.internal",
        "server.port": 5432,
    }


def _of_embeddings(draw: random.Random, failed: bool) -> dict[str, Value]:
    return {
        "gen_ai.request.model": _mostly_first(draw, EMBEDDERS),
        "gen_ai.provider.name": "in-house",
        "gen_ai.usage.input_tokens": draw.randrange(8, 512),
        "gen_ai.embeddings.dimension.count": 1024,
        "server.address": "embed.internal",
        "server.port": 8080,
    }


def _of_rank(draw: random.Random, failed: bool) -> dict[str, Value]:
    return {
        "code.function.name": "answers.ranking.rank",
        "code.line.number": 57,
        "rank.candidates": draw.randrange(8, 65),
        "rank.best_score": draw.betavariate(8, 2),
    }


def _of_generate(draw: random.Random, failed: bool) -> dict[str, Value]:
    error: dict[str, Value] = {"error.type": "timeout"} if failed else {}
    return {
        "gen_ai.request.model": _mostly_first(draw, MODELS),
        "gen_ai.provider.name": "in-house",
        "gen_ai.request.temperature": draw.choice((0.0, 0.2, 0.7, 1.0)),
        "gen_ai.usage.input_tokens": draw.randrange(200, 6000),
        "gen_ai.usage.output_tokens": draw.randrange(16, 1024),
        "gen_ai.response.finish_reasons": ["length" if draw.random() < 0.1 else "stop"],
        "server.address": "models.internal",
        **error,
    }


def _of_publish(draw: random.Random, failed: bool) -> dict[str, Value]:
    return {
        "messaging.system": "kafka",
        "messaging.destination.name": "usage",
        "messaging.destination.partition.id": str(draw.randrange(12)),
        "messaging.kafka.offset": 81_000_000 + draw.randrange(1_000_000),
        "messaging.message.body.size": draw.randrange(180, 420),
        "usage.cost_microdollars": draw.expovariate(1 / 900),
    }


_OF_SPAN = (
    *(_of_server, _of_authorize, _of_retrieve, _of_select),
    *(_of_embeddings, _of_rank, _of_generate, _of_publish),
)


def _mostly_first(draw: random.Random, values: Sequence[str]) -> str:
    """Draw so that the first values come much more often than the last."""
    return values[int(len(values) * draw.random() ** 2.5)]


def key_values(values: dict[str, Value]) -> list[KeyValue]:
    return [KeyValue(key=key, value=any_value(value)) for key, value in values.items()]


def any_value(value: Value) -> AnyValue:
    if isinstance(value, str):
        return AnyValue(string_value=value)
    if isinstance(value, bool):
        return AnyValue(bool_value=value)
    if isinstance(value, int):
        return AnyValue(int_value=value)
    if isinstance(value, float):
        return AnyValue(double_value=value)
    return AnyValue(array_value=ArrayValue(values=[any_value(item) for item in value]))


@dataclass(frozen=True)
class Figures:
    """What requests are made of, a span on average unless it says otherwise."""

    spans_a_request: float
    protobuf_bytes: float
    gzip_bytes: float
    attributes: float
    events: float
    event_attributes: float


def figures(bodies: Sequence[bytes]) -> Figures:
    """Measure requests; gzip's is each request alone at level 6, as exporters send it."""
    spans = [span for body in bodies for span in spans_of(body)]
    events = [event for span in spans for event in span.events]
    return Figures(
        len(spans) / len(bodies),
        sum(map(len, bodies)) / len(spans),
        sum(len(gzip.compress(body, 6)) for body in bodies) / len(spans),
        statistics.fmean(len(span.attributes) for span in spans),
        len(events) / len(spans),
        statistics.fmean(len(event.attributes) for event in events) if events else 0.0,
    )


def spans_of(body: bytes) -> list[Span]:
    groups = ExportTraceServiceRequest.FromString(body).resource_spans
    return [span for group in groups for scope in group.scope_spans for span in scope.spans]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--requests", type=int, default=8)
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()
    for name, value in vars(figures(requests(asked.requests, asked.seed))).items():
        print(f"{name:16} {value:8.2f}")


if __name__ == "__main__":
    main()
