"""What the ranks sent each other in a step: totals by dimension, and what each was for.

A collective of a training step changes the layout of something: shards become a whole copy, sums
of parts become whole, rows go from the order of sequences to that of experts. CONVERSIONS names
the change for each dimension and operation.
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from perfledger.instrumented_runtime.collectives.observed import (
    NOT_OBSERVED,
    POINT_TO_POINT,
    CollectiveCall,
    CollectiveSink,
    CopyCall,
)

BETWEEN = "exchange"  # in a step, but in none of its parts
WHOLE_BATCH = -1  # in the place of a microbatch


class Part(NamedTuple):
    """One part of a step, or of one microbatch of it. Monotonic ns."""

    name: str  # of records.TRAIN_PARTS
    microbatch: int  # WHOLE_BATCH without a pipeline
    start_ns: int
    end_ns: int


class Conversion(NamedTuple):
    """What changes its layout, and from which to which."""

    tensor: str
    before: str
    after: str


_GRADIENTS = Conversion("gradients", "of each rank's tokens", "mean over all")
_TO_NEXT = Conversion("activations", "stage", "next stage")
_TO_PREVIOUS = Conversion("gradients of activations", "stage", "stage before")
_SUMS = Conversion("activations", "partial sums", "whole")
_INPUT_SUMS = Conversion("gradients of activations", "partial sums", "whole")
_RING = Conversion("keys and values", "own piece", "next rank's")
_RING_BACK = Conversion("keys, values, their gradients", "own piece", "next rank's")
_FULL_COPY = Conversion("parameters", "shards", "full copy")
_ROWS = Conversion("rows", "by sequence", "by expert and back")
_ROW_GRADIENTS = Conversion("gradients of rows", "by sequence", "by expert and back")
# By dimension, operation and part of the step; part "" stands for any other.
CONVERSIONS: dict[tuple[str, str, str], Conversion] = {
    ("dp", "all_reduce", ""): _GRADIENTS,
    ("cp", "all_reduce", ""): _GRADIENTS,
    ("ep", "all_reduce", ""): _GRADIENTS,
    ("dp_ep", "all_reduce", ""): _GRADIENTS,
    ("fsdp", "all_gather", ""): _FULL_COPY,
    ("fsdp", "reduce_scatter", ""): Conversion(
        "gradients", "of each rank's tokens", "shards of the mean"
    ),
    ("tp", "all_reduce", "forward"): _SUMS,
    ("tp", "all_reduce", "backward"): _INPUT_SUMS,
    ("tp", "all_gather", ""): Conversion("parameters", "columns or rows", "whole"),
    ("pp", "send", "forward"): _TO_NEXT,
    ("pp", "recv", "forward"): _TO_NEXT,
    ("pp", "send", "backward"): _TO_PREVIOUS,
    ("pp", "recv", "backward"): _TO_PREVIOUS,
    ("cp", "send", "forward"): _RING,
    ("cp", "recv", "forward"): _RING,
    ("cp", "send", "backward"): _RING_BACK,
    ("cp", "recv", "backward"): _RING_BACK,
    ("ep", "all_to_all", "forward"): _ROWS,
    ("ep", "all_to_all", "backward"): _ROW_GRADIENTS,
    ("ep", "all_gather", "forward"): Conversion("row counts", "of each rank", "of all"),
    ("ep", "all_gather", "save"): Conversion("experts", "shares", "whole"),
}
UNNAMED = Conversion("", "", "")


class Traffic(NamedTuple):
    """Calls of one operation in one dimension and one part of a step, on one rank or several."""

    dimension: str
    op: str
    part: str  # forward, backward, optimizer, exchange (none of them) or save
    calls: int
    bytes: int  # of the messages, as CollectiveCall counts them
    wire_bytes: int | None  # sent by the ranks; None where the backend's algorithm is not known


class TrafficCount:
    """Keeps a rank's calls until its step has ended, and passes each on as it ends."""

    def __init__(self, rank: int, then: CollectiveSink | None = None) -> None:
        self.step = NOT_OBSERVED
        self._rank, self._then = rank, then
        self._calls: list[CollectiveCall] = []  # threads of torch append to it, too

    @property
    def step_seq(self) -> int:
        """Number of the step that runs now, or NOT_OBSERVED."""
        return self.step

    def collective(self, call: CollectiveCall) -> None:
        """See CollectiveSink."""
        self._calls.append(call)
        if self._then is not None:
            self._then.collective(call)

    def copy(self, call: CopyCall) -> None:
        """See CollectiveSink."""
        if self._then is not None:
            self._then.copy(call)

    def take(self, parts: Sequence[Part], other: str = BETWEEN) -> tuple[Traffic, ...]:
        """Return the totals since the last call. A call belongs to the part in which it was
        enqueued, and to `other` outside of all."""
        calls, self._calls = self._calls, []
        return tuple(
            summed(
                Traffic(
                    call.dimension,
                    call.op,
                    self._part_of(call, parts) or other,
                    1,
                    call.bytes,
                    None if call.wire_bytes == NOT_OBSERVED else call.wire_bytes,
                )
                for call in calls
            )
        )

    def _part_of(self, call: CollectiveCall, parts: Sequence[Part]) -> str:
        """A pipeline sends between the parts: to later stages forward, to earlier ones back."""
        if call.dimension == "pp" and call.op in POINT_TO_POINT:
            ahead = call.peer > self._rank
            return "forward" if ahead == (call.op == "send") else "backward"
        within = (p.name for p in parts if p.start_ns <= call.enqueue_ns < p.end_ns)
        return next(within, "")


def summed(traffic: Iterable[Traffic]) -> list[Traffic]:
    """Add up the rows of equal dimension, operation and part."""
    totals: dict[tuple[str, str, str], Traffic] = {}
    for row in traffic:
        old = totals.get(row[:3])
        totals[row[:3]] = (
            row
            if old is None
            else Traffic(
                *row[:3],
                old.calls + row.calls,
                old.bytes + row.bytes,
                _add(old.wire_bytes, row.wire_bytes),
            )
        )
    return [totals[key] for key in sorted(totals)]


def conversion_of(traffic: Traffic) -> Conversion:
    """Return what an operation of a dimension is for."""
    key = (traffic.dimension, traffic.op)
    return CONVERSIONS.get((*key, traffic.part)) or CONVERSIONS.get((*key, "")) or UNNAMED


def _add(one: int | None, other: int | None) -> int | None:
    return None if one is None or other is None else one + other
