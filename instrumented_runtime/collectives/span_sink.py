"""Collectives of a user's program as OpenTelemetry spans, made and sent behind the program's back.

The program's threads only append to a bounded queue; one thread of ours makes the spans. What does
not fit is counted, and said in a `telemetry_dropped` span.
"""

import threading
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

from opentelemetry import context as otel_context
from opentelemetry.context import Context

from perfledger.instrumented_runtime.collectives.call_attributes import (
    Attributes,
    collective_attributes,
    copy_attributes,
    members_text,
)
from perfledger.instrumented_runtime.collectives.observed import (
    NOT_OBSERVED,
    CollectiveCall,
    CopyCall,
)
from perfledger.instrumented_runtime.collectives.tracing import Destination
from perfledger.schema.clocks import ClockAnchor, monotonic_ns

MOST_QUEUED = 32_768
TURN_S = 0.2
STOP_S = 5.0


class _Waiting(NamedTuple):
    name: str
    start_ns: int
    end_ns: int
    attributes: Attributes
    parent: Context


class SpanSink:
    """A CollectiveSink over a destination; `place` returns what every span has: replica, rank."""

    def __init__(
        self, going: Destination, anchor: ClockAnchor, place: Callable[[], Attributes]
    ) -> None:
        self.step_seq = NOT_OBSERVED
        self.step_context: Context | None = None  # the span of the step that runs now
        self._going = going
        self.told = 0  # spans made
        self._overflowed = 0  # by the program's threads
        self._unmade = 0  # by ours, or left in the queue
        self._tracer, self._anchor, self.place = going.tracer, anchor, place
        self._queue: deque[_Waiting] = deque()
        self._lost_since_ns = 0
        self._lost_said = 0
        self._stopping, self._abandoned = threading.Event(), False
        self._thread = threading.Thread(target=self._run, name="collective spans", daemon=True)
        self._thread.start()

    @property
    def lost(self) -> int:
        """Spans lost so far: no room in the queue, not made, not accepted, or left at the end."""
        return self._overflowed + self._unmade + self._going.lost()

    def collective(self, call: CollectiveCall) -> None:
        """See CollectiveSink. Its parent is the step's span, else the one that is current."""
        end_ns = call.end_ns if call.end_ns != NOT_OBSERVED else call.enqueue_ns
        told = collective_attributes(call, len(call.ranks), members_text(call.ranks))
        self._put("collective", call.enqueue_ns, end_ns, told)

    def copy(self, call: CopyCall) -> None:
        """See CollectiveSink."""
        self._put("copy", call.start_ns, call.end_ns, copy_attributes(call))

    def stop(self) -> None:
        """Make and send what is left, for at most about STOP_S; count the rest as lost."""
        self._stopping.set()
        self._thread.join(STOP_S)
        self._abandoned = True
        self._going.end()
        self._unmade += len(self._queue)

    def _put(self, name: str, start_ns: int, end_ns: int, attributes: Attributes) -> None:
        if len(self._queue) >= MOST_QUEUED:
            self._lost_since_ns = self._lost_since_ns or monotonic_ns()
            self._overflowed += 1
            return
        parent = self.step_context or otel_context.get_current()
        self._queue.append(_Waiting(name, start_ns, end_ns, attributes, parent))

    def _run(self) -> None:
        stopping = False
        while not stopping:
            stopping = self._stopping.wait(TURN_S)
            while self._queue and not self._abandoned:
                self._make(self._queue.popleft())
            self._say_lost()
            self._going.send()

    def _make(self, one: _Waiting) -> None:
        try:
            span = self._tracer.start_span(
                one.name,
                context=one.parent,
                attributes=self.place() | one.attributes,
                start_time=self._anchor.to_wall_ns(one.start_ns),
            )
            span.end(self._anchor.to_wall_ns(one.end_ns))
            self.told += 1
        except Exception:  # of somebody's span processor: the next one may go
            self._unmade += 1

    def _say_lost(self) -> None:
        missing = self.lost - self._lost_said
        if missing and self._lost_since_ns:
            self._lost_said += missing
            since_ns, self._lost_since_ns = self._lost_since_ns, 0
            dropped: Attributes = {"perfledger.dropped": missing}
            self._make(_Waiting("telemetry_dropped", since_ns, monotonic_ns(), dropped, Context()))
