"""Spans of a user's collectives: each one was accepted or is counted as lost, whatever the way."""

import threading
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult

from perfledger.instrumented_runtime.collectives import span_sink, tracing
from perfledger.instrumented_runtime.collectives.observed import CopyCall
from perfledger.instrumented_runtime.collectives.span_sink import SpanSink
from perfledger.instrumented_runtime.collectives.tracing import Batches, Destination
from perfledger.schema.clocks import take_anchor

COPY = CopyCall("h2d", "cpu", "cuda:0", "float32", 64, 0, 1, 2)


class Scripted(SpanExporter):
    """Does with each batch what it was told, then the last for ever; counts what it accepted."""

    def __init__(self, script: Sequence[str]) -> None:
        self.script, self.accepted = list(script), 0
        self.down = threading.Event()

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        todo = self.script.pop(0) if len(self.script) > 1 else self.script[0]
        if todo == "raise":
            raise OSError
        if todo.startswith("hang"):
            self.down.wait(30)
        if todo in ("refuse", "hang, refuse"):
            return SpanExportResult.FAILURE
        if todo == "hang for good":
            threading.Event().wait(2)
            return SpanExportResult.FAILURE
        self.accepted += len(spans)
        return SpanExportResult.SUCCESS

    def shutdown(self) -> None:
        self.down.set()


class DroppedSpans(SpanProcessor):
    """Counts the sink's own spans, which go the same way as those of calls."""

    def __init__(self) -> None:
        self.ended = 0

    def on_end(self, span: ReadableSpan) -> None:
        self.ended += span.name == "telemetry_dropped"


def sink_over(exporter: SpanExporter, dropped: DroppedSpans) -> SpanSink:
    batches = Batches(exporter)
    provider = TracerProvider(resource=Resource({}), shutdown_on_exit=False)
    provider.add_span_processor(dropped)
    provider.add_span_processor(batches)
    tracer = provider.get_tracer("test")
    going = Destination(tracer, batches.send, batches.end, lambda: batches.lost)
    return SpanSink(going, take_anchor(), dict)


TODO = st.sampled_from(
    ["accept", "refuse", "raise", "hang, accept", "hang, refuse", "hang for good"]
)


@given(
    script=st.lists(TODO, min_size=1, max_size=5),
    turns=st.lists(st.integers(1, 40), max_size=5),
    most=st.sampled_from([8, 1000]),
)
@settings(max_examples=25)
def test_every_call_is_accepted_or_counted_as_lost(
    script: list[str], turns: list[int], most: int
) -> None:
    exporter, dropped = Scripted(script), DroppedSpans()
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(span_sink, "MOST_QUEUED", most)
        patched.setattr(span_sink, "TURN_S", 0.01)
        patched.setattr(span_sink, "STOP_S", 0.1)
        patched.setattr(tracing, "BATCH_SPANS", 16)
        patched.setattr(tracing, "END_S", 0.5)
        sink = sink_over(exporter, dropped)
        for count in turns:
            for _ in range(count):
                sink.copy(COPY)
            threading.Event().wait(0.02)
        sink.stop()
        lost, accepted = sink.lost, exporter.accepted
    assert accepted + lost == sum(turns) + dropped.ended
