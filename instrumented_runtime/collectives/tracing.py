"""Where the spans of a user's program go: to its own TracerProvider, or to one that we make.

Ours sends by OpenTelemetry's OTLP exporter, as OTEL_* say, from our thread only; what cannot be
sent is counted.
"""

import logging
import os
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult

from perfledger.instrumented_runtime.otel_environment import protocol_of
from perfledger.instrumented_runtime.otlp import build_resource, span_exporter
from perfledger.schema.attributes import SCHEMA_VERSION, SCOPE_NAME
from perfledger.schema.clocks import ClockAnchor

SERVICE_NAME = "torch-distributed"  # where OTEL_SERVICE_NAME says nothing
BATCH_SPANS = 1024


@dataclass(frozen=True, slots=True)
class Destination:
    """A tracer, what sends its spans, and what ends it; both return how many were lost."""

    tracer: trace.Tracer
    send: Callable[[], int]
    end: Callable[[], int]


def destination(anchor: ClockAnchor) -> Destination | None:
    """Return where spans go; None where the environment turns traces off.

    Raises UsageError for a protocol or an exporter that we do not speak.
    """
    provider = trace.get_tracer_provider()
    if not isinstance(provider, trace.ProxyTracerProvider):
        tracer = provider.get_tracer(SCOPE_NAME, SCHEMA_VERSION)
        return Destination(tracer, lambda: 0, lambda: 0)  # it sends by itself
    protocol = protocol_of("TRACES", os.environ)
    if protocol is None:
        return None
    # Its warnings, a line each try, would be in the program's own output.
    logging.getLogger("opentelemetry.exporter").setLevel(logging.CRITICAL)
    batches = _Batches(span_exporter(protocol))
    resource = build_resource({"service.name": SERVICE_NAME}, anchor)
    ours = TracerProvider(resource=resource, shutdown_on_exit=False)
    ours.add_span_processor(batches)
    tracer = ours.get_tracer(SCOPE_NAME, SCHEMA_VERSION)
    return Destination(tracer, batches.send, batches.end)


class _Batches(SpanProcessor):
    """Keeps ended spans until `send`, and drops none: the sink before it is bounded."""

    def __init__(self, exporter: SpanExporter) -> None:
        self._exporter = exporter
        self._ended: deque[ReadableSpan] = deque()

    def on_end(self, span: ReadableSpan) -> None:
        """See SpanProcessor."""
        if span.context is not None and span.context.trace_flags.sampled:
            self._ended.append(span)

    def send(self) -> int:
        """Send all spans that have ended; return how many were not accepted."""
        lost = 0
        while self._ended:
            count = min(BATCH_SPANS, len(self._ended))
            batch = [self._ended.popleft() for _ in range(count)]
            try:
                accepted = self._exporter.export(batch) is SpanExportResult.SUCCESS
            except Exception:  # the program goes on, and so does the next batch
                accepted = False
            lost += 0 if accepted else count
        return lost

    def end(self) -> int:
        """Send no more; return how many were not sent."""
        self._exporter.shutdown()
        return len(self._ended)
