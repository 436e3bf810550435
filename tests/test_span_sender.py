"""The sender thread: every span is exported or counted as lost, whenever it is stopped."""

import random
import time
from collections.abc import Sequence

import pytest
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult

from perfledger.instrumented_runtime.finished_spans import FinishedSpan
from perfledger.instrumented_runtime.otlp import SpanSender
from perfledger.schema.clocks import ClockAnchor

SPANS = [FinishedSpan("work", 1, at + 1, None, 10, 20, {}) for at in range(9_000)]


class Moody(SpanExporter):
    """Takes its time, and takes a batch or does not."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        time.sleep(self._random.uniform(0, 0.08))
        return self._random.choice([SpanExportResult.SUCCESS, SpanExportResult.FAILURE])

    def shutdown(self) -> None:
        """Nothing to close."""


@pytest.mark.parametrize("seed", range(12))
def test_a_stop_at_any_moment_counts_every_span(seed: int) -> None:
    sender = SpanSender(Moody(seed), Resource({}), ClockAnchor(0, 0, ""))
    sender.put(SPANS)
    sender.stop(random.Random(seed).uniform(0, 0.1))
    assert sender.exported + sender.lost == len(SPANS)
