"""Records of collectives and copies as finished spans under the step that they ran in. Pure.

A record waits for its step's span, which is made when the step has ended. One of a step that is
behind (a device's times come late) goes under it at once; one whose step never came, or that ran
outside of steps, stands alone in the engine's trace. Times are monotonic ns.
"""

from collections.abc import Callable
from typing import NamedTuple

from perfledger.instrumented_runtime.collectives.call_attributes import (
    collective_attributes,
    copy_attributes,
)
from perfledger.instrumented_runtime.collectives.observed import NOT_OBSERVED
from perfledger.instrumented_runtime.collectives.recording import call_of, copy_of, unpack_ranks
from perfledger.instrumented_runtime.finished_spans import FinishedSpan
from perfledger.instrumented_runtime.records import Collective, Copy
from perfledger.instrumented_runtime.telemetry import AttributeValue

# Name, start, end, attributes and parent to a span of the engine's trace.
MakeSpan = Callable[[str, int, int, dict[str, AttributeValue], int | None], FinishedSpan]

MOST_WAITING = 16_384  # records, of a step that has not ended
MOST_STEPS = 64  # behind, whose spans are remembered


class _Traffic(NamedTuple):
    """What a span of a collective or copy is made of."""

    name: str
    start_ns: int
    end_ns: int
    attributes: dict[str, AttributeValue]


class StepTraffic:
    """The collectives and copies of one rank, until their steps have ended."""

    def __init__(self, make: MakeSpan, place: dict[str, AttributeValue]) -> None:
        """`make` makes a span; `place` names replica and rank on each."""
        self._make, self._place = make, place
        self._waiting: dict[int, list[_Traffic]] = {}
        self._count = 0
        self._steps: dict[int, int] = {}

    def take(self, record: Collective | Copy) -> list[FinishedSpan]:
        """Take a record; return the spans that can be made now."""
        traffic = _of_collective(record) if isinstance(record, Collective) else _of_copy(record)
        seq = record.step_seq
        if seq == NOT_OBSERVED or seq in self._steps:
            return [self._span(traffic, self._steps.get(seq))]
        self._waiting.setdefault(seq, []).append(traffic)
        self._count += 1
        return self.leave() if self._count > MOST_WAITING else []

    def step_ended(self, seq: int, span_id: int) -> list[FinishedSpan]:
        """Return the children of a step's span, and what earlier steps without a span left."""
        mine = self._waiting.pop(seq, [])
        self._count -= len(mine)
        if len(self._steps) >= MOST_STEPS:
            del self._steps[next(iter(self._steps))]
        self._steps[seq] = span_id
        return self.leave(before=seq) + [self._span(traffic, span_id) for traffic in mine]

    def leave(self, before: int | None = None) -> list[FinishedSpan]:
        """Let what waits stand alone: all, or that of steps before one."""
        gone = [seq for seq in self._waiting if before is None or seq < before]
        spans = [self._span(traffic, None) for seq in gone for traffic in self._waiting.pop(seq)]
        self._count -= len(spans)
        return spans

    def _span(self, traffic: _Traffic, parent: int | None) -> FinishedSpan:
        attributes = self._place | traffic.attributes
        return self._make(traffic.name, traffic.start_ns, traffic.end_ns, attributes, parent)


def _of_collective(record: Collective) -> _Traffic:
    call, ranks = call_of(record), unpack_ranks(record.ranks)
    end_ns = record.end_ns if record.end_ns != NOT_OBSERVED else record.enqueue_ns
    told = collective_attributes(call, ranks.size, ranks.text())
    return _Traffic("collective", record.enqueue_ns, end_ns, dict(told))


def _of_copy(record: Copy) -> _Traffic:
    return _Traffic("copy", record.start_ns, record.end_ns, dict(copy_attributes(copy_of(record))))
