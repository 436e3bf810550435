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
from opentelemetry.trace import Tracer

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
from perfledger.schema.clocks import ClockAnchor, monotonic_ns

MOST_QUEUED = 32_768
TURN_S = 0.2
STOP_S, END_S = 5.0, 0.5


class _Waiting(NamedTuple):
    name: str
    start_ns: int
    end_ns: int
    attributes: Attributes
    parent: Context


class SpanSink:
    """A CollectiveSink over a tracer. `place` returns attributes of every span: replica and rank.

    `send` is called after spans were made, to send them, and `end` at the end; both return how
    many could not be sent.
    """

    def __init__(
        self,
        tracer: Tracer,
        anchor: ClockAnchor,
        place: Callable[[], Attributes],
        send: Callable[[], int],
        end: Callable[[], int] = lambda: 0,
    ) -> None:
        self.step_seq = NOT_OBSERVED
        self.step_context: Context | None = None  # the span of the step that runs now
        self._send, self._end = send, end
        self.told = 0  # spans made
        self.lost = 0  # calls that found the queue full, or could not be made a span
        self._tracer, self._anchor, self.place = tracer, anchor, place
        self._queue: deque[_Waiting] = deque()
        self._lost_since_ns = 0
        self._lost_said = 0
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="collective spans", daemon=True)
        self._thread.start()

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
        self.lost += len(self._queue) + self._end()
        self._thread.join(END_S)

    def _put(self, name: str, start_ns: int, end_ns: int, attributes: Attributes) -> None:
        if len(self._queue) >= MOST_QUEUED:
            self._lost_since_ns = self._lost_since_ns or monotonic_ns()
            self.lost += 1
            return
        parent = self.step_context or otel_context.get_current()
        self._queue.append(_Waiting(name, start_ns, end_ns, attributes, parent))

    def _run(self) -> None:
        stopping = False
        while not stopping:
            stopping = self._stopping.wait(TURN_S)
            while self._queue:
                self._make(self._queue.popleft())
            self._say_lost()
            self.lost += self._send()

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
            self.lost += 1

    def _say_lost(self) -> None:
        missing = self.lost - self._lost_said
        if missing and self._lost_since_ns:
            self._lost_said += missing
            since_ns, self._lost_since_ns = self._lost_since_ns, 0
            dropped: Attributes = {"perfledger.dropped": missing}
            self._make(_Waiting("telemetry_dropped", since_ns, monotonic_ns(), dropped, Context()))
