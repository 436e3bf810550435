"""Finished spans and counters to a collector, by OpenTelemetry's own OTLP exporters.

Everything that OTEL_* says holds: endpoint, protocol, headers, timeouts, certificates, resource.
The reader of the ring never waits for a collector: sending has a thread and a bounded buffer of
its own, and what does not fit or is not accepted is counted as lost.
"""

import logging
import os
import threading
from collections import deque
from collections.abc import Callable, Iterable, Mapping

from opentelemetry.metrics import CallbackOptions, Observation
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import MetricExporter, PeriodicExportingMetricReader
from opentelemetry.sdk.resources import OTELResourceDetector, Resource
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import Link, SpanContext, SpanKind, Status, StatusCode, TraceFlags

from perfledger.instrumented_runtime.finished_spans import FinishedSpan
from perfledger.instrumented_runtime.ring_spans import AllRings
from perfledger.schema.attributes import SCHEMA_VERSION, SCOPE_NAME
from perfledger.schema.clocks import ClockAnchor
from perfledger.schema.metrics import METRICS, Metric

BUFFER_SPANS = 32_768
BATCH_WEIGHT = 2048  # spans and links of one request: about 1 MB, of the 4 MB that gRPC takes
SEND_INTERVAL_S = 1.0
METRIC_INTERVAL_MS = 5000.0

_SCOPE = InstrumentationScope(SCOPE_NAME, SCHEMA_VERSION)
_SAMPLED = TraceFlags(TraceFlags.SAMPLED)
_STATUS = {False: Status(StatusCode.UNSET), True: Status(StatusCode.ERROR)}

logger = logging.getLogger("perfledger.exporter")


def span_exporter(protocol: str) -> SpanExporter:
    """Return OpenTelemetry's span exporter for a protocol; the environment configures it."""
    if protocol == "grpc":
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter

        return OTLPSpanExporter()
    from opentelemetry.exporter.otlp.proto.http import trace_exporter

    return trace_exporter.OTLPSpanExporter()


def metric_exporter(protocol: str) -> MetricExporter:
    """Return OpenTelemetry's metric exporter for a protocol; the environment configures it."""
    if protocol == "grpc":
        from opentelemetry.exporter.otlp.proto.grpc.metric_exporter import OTLPMetricExporter

        return OTLPMetricExporter()
    from opentelemetry.exporter.otlp.proto.http import metric_exporter

    return metric_exporter.OTLPMetricExporter()


def build_resource(attributes: Mapping[str, str | int], anchor: ClockAnchor) -> Resource:
    """Return the resource of all that a service sends, with the clock that its times follow.

    OTEL_SERVICE_NAME and the like win; an empty attribute is left out.
    """
    ours: dict[str, str | int] = {
        **attributes,
        "perfledger.clock.boot_id": anchor.boot_id,
        "perfledger.clock.monotonic_ns": anchor.monotonic_ns,
        "perfledger.clock.wall_ns": anchor.wall_ns,
    }
    known = Resource.create({name: value for name, value in ours.items() if value != ""})
    return known.merge(OTELResourceDetector().detect())


class SpanSender:
    """A thread that sends spans once a second, in batches, from a buffer of BUFFER_SPANS."""

    def __init__(self, exporter: SpanExporter, resource: Resource, anchor: ClockAnchor) -> None:
        self.exported = 0
        self.failing = False
        self._overflowed = 0  # by the caller's thread
        self._refused = 0  # by ours
        self._left = 0  # at the end
        self._exporter, self._resource, self._anchor = exporter, resource, anchor
        self._waiting: deque[FinishedSpan] = deque()
        self._in_flight = 0
        self._stop = threading.Event()
        # Each span is waiting, in flight or counted: no count may fall between two of them.
        self._lock = threading.Lock()
        self._abandoned = False
        self._said_unsendable = False
        self._thread = threading.Thread(target=self._run, name="span sender", daemon=True)
        self._thread.start()

    @property
    def lost(self) -> int:
        """Spans lost so far: no room in the buffer, not accepted, or left at the end."""
        return self._overflowed + self._refused + self._left

    def put(self, spans: list[FinishedSpan]) -> None:
        """Add spans to the buffer; what does not fit is lost. Never waits."""
        room = BUFFER_SPANS - len(self._waiting)
        self._waiting.extend(spans[:room])
        self._overflowed += max(0, len(spans) - room)

    def stop(self, timeout_s: float) -> None:
        """Send what is left, for at most about `timeout_s`; count the rest as lost."""
        self._stop.set()
        self._thread.join(timeout_s)
        self._exporter.shutdown()
        self._thread.join(0.2)
        with self._lock:
            self._abandoned = True
            self._left = self._in_flight + len(self._waiting)

    def _run(self) -> None:
        stopping = False
        while not stopping:
            stopping = self._stop.wait(SEND_INTERVAL_S)
            while batch := self._next_batch():
                accepted = self._send(batch)
                with self._lock:
                    if not self._abandoned:
                        self._in_flight = 0
                        self._note(len(batch), accepted)

    def _next_batch(self) -> list[FinishedSpan]:
        batch: list[FinishedSpan] = []
        weight = 0
        with self._lock:
            while self._waiting and weight < BATCH_WEIGHT and not self._abandoned:
                batch.append(self._waiting.popleft())
                weight += 1 + len(batch[-1].links)
            self._in_flight = len(batch)
        return batch

    def _send(self, batch: list[FinishedSpan]) -> bool | None:
        """Return whether the collector has it, or None where it could not be put in OTLP."""
        try:
            spans = [to_readable(span, self._resource, self._anchor) for span in batch]
            return self._exporter.export(spans) is SpanExportResult.SUCCESS
        except Exception as error:  # the end of this thread would be the end of all telemetry
            if not self._said_unsendable and not self._stop.is_set():
                logger.warning("spans that cannot be sent are counted as lost: %r", error)
            self._said_unsendable = True
            return None

    def _note(self, count: int, accepted: bool | None) -> None:
        if accepted:
            self.exported += count
        else:
            self._refused += count
        if accepted is None:
            return  # that says nothing of the collector
        if accepted and self.failing:
            logger.warning("the collector takes spans again; %d were lost", self.lost)
        elif not accepted and not self.failing and not self._stop.is_set():
            logger.warning("the collector takes no spans: they are counted as lost until it does")
        self.failing = not accepted


def to_readable(span: FinishedSpan, resource: Resource, anchor: ClockAnchor) -> ReadableSpan:
    """Return a span as OpenTelemetry's exporters take it, its times on the wall clock."""
    parent = None
    if span.parent_span_id is not None:
        parent = SpanContext(span.trace_id, span.parent_span_id, is_remote=span.server)
    return ReadableSpan(
        span.name,
        context=SpanContext(span.trace_id, span.span_id, is_remote=False, trace_flags=_SAMPLED),
        parent=parent,
        resource=resource,
        attributes=span.attributes,
        links=[
            Link(SpanContext(link.trace_id, link.span_id, is_remote=False), link.attributes)
            for link in span.links
        ],
        kind=SpanKind.SERVER if span.server else SpanKind.INTERNAL,
        status=_STATUS[span.error],
        start_time=anchor.to_wall_ns(span.start_ns),
        end_time=anchor.to_wall_ns(span.end_ns),
        instrumentation_scope=_SCOPE,
    )


def start_metrics(protocol: str, resource: Resource, rings: AllRings) -> Callable[[float], None]:
    """Send the counters and gauges of `rings` every OTEL_METRIC_EXPORT_INTERVAL ms (5000).

    Returns what sends them a last time and ends that, in at most about so many seconds.
    """
    given = "OTEL_METRIC_EXPORT_INTERVAL" in os.environ
    reader = PeriodicExportingMetricReader(
        metric_exporter(protocol), None if given else METRIC_INTERVAL_MS
    )
    provider = MeterProvider([reader], resource, shutdown_on_exit=False)
    meter = provider.get_meter(SCOPE_NAME, SCHEMA_VERSION)
    for metric in METRICS:
        if metric.kind == "gauge":
            observe = _gauge(metric, rings)
            meter.create_observable_gauge(metric.name, [observe], metric.unit, metric.meaning)
        else:
            observe = _counter(metric, rings)
            meter.create_observable_counter(metric.name, [observe], metric.unit, metric.meaning)
    return lambda timeout_s: reader.shutdown(timeout_s * 1000)


Callback = Callable[[CallbackOptions], Iterable[Observation]]


def _counter(metric: Metric, rings: AllRings) -> Callback:
    def observe(_: CallbackOptions) -> Iterable[Observation]:
        for (counted, value), count in rings.counts().items():
            if counted is metric:
                yield Observation(count, {metric.attribute: value} if metric.attribute else {})

    return observe


def _gauge(metric: Metric, rings: AllRings) -> Callback:
    def observe(_: CallbackOptions) -> Iterable[Observation]:
        # Said once: no step since means nothing to say.
        return [Observation(value, of) for value, of in rings.take_gauge(metric)]

    return observe
