"""Where the spans of a user's program go: to its own TracerProvider, or to one that we make.

Ours sends by OpenTelemetry's OTLP exporter, as OTEL_* say, from our thread only; what cannot be
sent is counted.
"""

import logging
import os
import threading
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
END_S = 0.5  # for what is on its way when the exporter is shut down


@dataclass(frozen=True, slots=True)
class Destination:
    """A tracer, what sends its spans and ends it, and how many spans were lost on the way."""

    tracer: trace.Tracer
    send: Callable[[], None]
    end: Callable[[], None]
    lost: Callable[[], int]


def destination(anchor: ClockAnchor) -> Destination | None:
    """Return where spans go; None where the environment turns traces off.

    Raises UsageError for a protocol or an exporter that we do not speak.
    """
    provider = trace.get_tracer_provider()
    if not isinstance(provider, trace.ProxyTracerProvider):
        tracer = provider.get_tracer(SCOPE_NAME, SCHEMA_VERSION)
        return Destination(tracer, lambda: None, lambda: None, lambda: 0)  # it sends by itself
    protocol = protocol_of("TRACES", os.environ)
    if protocol is None:
        return None
    # Its warnings, a line each try, would be in the program's own output.
    logging.getLogger("opentelemetry.exporter").setLevel(logging.CRITICAL)
    batches = Batches(span_exporter(protocol))
    resource = build_resource({"service.name": SERVICE_NAME}, anchor)
    ours = TracerProvider(resource=resource, shutdown_on_exit=False)
    ours.add_span_processor(batches)
    tracer = ours.get_tracer(SCOPE_NAME, SCHEMA_VERSION)
    return Destination(tracer, batches.send, batches.end, lambda: batches.lost)


class Batches(SpanProcessor):
    """Keeps ended spans until `send`, and drops none: the sink before it is bounded."""

    def __init__(self, exporter: SpanExporter) -> None:
        self._exporter = exporter
        self._ended: deque[ReadableSpan] = deque()
        # Each span has ended, is on its way or is counted: no count may fall between two of them.
        self._turn = threading.Condition()
        self._on_its_way = 0
        self._closed = False
        self.lost = 0  # not accepted, not sent in the end, or ended later

    def on_end(self, span: ReadableSpan) -> None:
        """See SpanProcessor."""
        if span.context is not None and span.context.trace_flags.sampled:
            with self._turn:
                self._ended.append(span)
                self.lost += self._closed

    def send(self) -> None:
        """Send all spans that have ended."""
        while batch := self._next_batch():
            try:
                accepted = self._exporter.export(batch) is SpanExportResult.SUCCESS
            except Exception:  # the program goes on, and so does the next batch
                accepted = False
            with self._turn:
                if not self._closed:  # else `end` has counted it
                    self._on_its_way = 0
                    self.lost += 0 if accepted else len(batch)
                self._turn.notify()

    def end(self) -> None:
        """Send no more; count what was not sent, what is still on its way among it."""
        self._exporter.shutdown()
        with self._turn:
            self._turn.wait_for(lambda: not self._on_its_way, END_S)
            self._closed = True
            self.lost += self._on_its_way + len(self._ended)

    def _next_batch(self) -> list[ReadableSpan]:
        with self._turn:
            count = 0 if self._closed else min(BATCH_SPANS, len(self._ended))
            self._on_its_way = self._on_its_way if self._closed else count
            return [self._ended.popleft() for _ in range(count)]
