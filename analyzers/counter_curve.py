"""What a cumulative counter, read now and then, tells of the time between two reads. Pure.

A counter shows its state at its own last update, and does not date that. A value that one read does
not show and the next one does was true at some instant between the two: so bounds need no update
period to be assumed, only that the counter never falls. It is taken to be right when it updates;
what a device averages before that (NVML's power, over some tens of ms) is in no bound.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from perfledger.schema.intervals import Coverage, Ints

Floats = NDArray[np.float64]
_EVER = 2**62


@dataclass(frozen=True)
class Rises:
    """By how much the counter rose, each time within `(start_ns, end_ns)`, and no longer known."""

    start_ns: Ints
    end_ns: Ints
    amount: Floats


@dataclass(frozen=True)
class Curve:
    """The values of a counter: each was there from some instant in `(before_ns, first_ns]` on.

    `total` is what it rose by since the first; a fall (a reset, or a wrap) adds nothing to it and
    begins another `stretch`. Times are wall ns. `refused` values were no amounts.
    """

    before_ns: Ints
    first_ns: Ints
    last_ns: Ints
    total: Floats
    stretch: Ints
    reads: int
    refused: int
    read_every_ns: int | None

    @classmethod
    def of(cls, time_ns: Ints, value: Floats, start_ns: Ints | None = None) -> "Curve":
        """Take reads in any order. A changed `start_ns` is a reset too (as OTLP defines it)."""
        start_ns = np.zeros(len(time_ns), np.int64) if start_ns is None else start_ns
        usable = np.flatnonzero(np.isfinite(value) & (value >= 0))
        order = usable[np.lexsort((value[usable], time_ns[usable]))]
        order = order[_ends(time_ns[order])]
        time_ns, start_ns, amount = time_ns[order], start_ns[order], value[order]
        last = np.flatnonzero(_ends(amount) | _ends(start_ns))
        rise = np.diff(amount[last])
        broken = (rise < 0) | (np.diff(start_ns[last]) != 0)
        begin = np.zeros(min(1, len(last)), np.int64)
        first = np.concatenate([begin, last[:-1] + 1])
        return cls(
            before_ns=np.where(first > 0, time_ns[first - 1], -_EVER),
            first_ns=time_ns[first],
            last_ns=time_ns[last],
            total=np.concatenate([begin, np.cumsum(np.where(broken, 0.0, rise))]).astype(float),
            stretch=np.concatenate([begin, np.cumsum(broken)]),
            reads=len(order),
            refused=len(value) - len(usable),
            read_every_ns=int(np.median(np.diff(time_ns))) if len(order) > 1 else None,
        )

    @property
    def breaks(self) -> int:
        """How often it fell or began anew."""
        return int(self.stretch[-1]) if len(self.stretch) else 0

    @property
    def rises_every_ns(self) -> int | None:
        """The median time between two values that differ; None where there is only one."""
        gaps = np.diff(self.first_ns)[self._unbroken()]
        return int(np.median(gaps)) if len(gaps) else None

    def covered(self) -> Coverage:
        """Return when it is known: from the first read to the last before the last rise was seen.

        After that it may have risen without showing it, by an amount that nothing bounds.
        """
        ends = np.flatnonzero(_ends(self.stretch))
        starts = np.searchsorted(self.stretch, self.stretch[ends])
        known = ends > starts
        start, end = self.first_ns[starts[known]], self.last_ns[ends[known] - 1]
        return Coverage(start[end > start], end[end > start])

    def rises(self) -> Rises:
        """Return the rises, whose windows overlap, without those over a break."""
        kept = np.flatnonzero(self._unbroken())
        amount = np.diff(self.total)[kept]
        return Rises(self.before_ns[kept], self.first_ns[kept + 1], amount)

    def at(self, time_ns: Ints) -> Floats:
        """Return the total at each time, as if it rose evenly between the reads that saw it."""
        origin = self.first_ns[0]
        at: Floats = np.interp(time_ns - origin, self.first_ns - origin, self.total)
        return at

    def _unbroken(self) -> NDArray[np.bool_]:
        unbroken: NDArray[np.bool_] = np.diff(self.stretch) == 0
        return unbroken


def _ends(values: NDArray[np.generic]) -> NDArray[np.bool_]:
    """Return where each run of equal values ends."""
    ends = np.ones(len(values), np.bool_)
    ends[:-1] = values[1:] != values[:-1]
    return ends
