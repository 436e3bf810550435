"""Interval algebra on integer ns, for many intervals at once. Intervals are half-open.

Time is the length of a union of intervals, never a sum of durations; everything here is exact.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]
_EARLIEST = np.iinfo(np.int64).min


@dataclass(frozen=True)
class Timeline:
    """Ranges of wall time laid one after another on one axis, so that one sort serves them all."""

    start: Ints
    end: Ints
    offset: Ints

    @classmethod
    def of(cls, start: Ints, end: Ints) -> "Timeline":
        """Lay out the ranges `[start, end]`; the sum of their lengths must fit 63 bits."""
        offset = np.zeros(len(start), np.int64)
        np.cumsum((end - start + 1)[:-1], out=offset[1:])
        return cls(start, end, offset)

    def at(self, index: Ints, time_ns: Ints) -> Ints:
        """Return the positions of times, each clipped to its range `index`."""
        start = self.start[index]
        return np.clip(time_ns, start, self.end[index]) - start + self.offset[index]

    def index(self, position: Ints) -> Ints:
        """Return the range that each position lies in."""
        return np.searchsorted(self.offset, position, side="right") - 1

    def time_ns(self, index: Ints, position: Ints) -> Ints:
        """Return the wall times of positions within their range `index`."""
        return position - self.offset[index] + self.start[index]


@dataclass(frozen=True)
class Pieces:
    """Disjoint intervals in order, each with the rank that won it."""

    start: Ints
    end: Ints
    rank: Ints

    def take(self, rows: NDArray[np.int64] | NDArray[np.bool_]) -> "Pieces":
        """Return some of the pieces."""
        return Pieces(self.start[rows], self.end[rows], self.rank[rows])


def first_match(start: Ints, end: Ints, rank: Ints) -> Pieces:
    """Cut the intervals into disjoint pieces; where several cover an instant, the lowest rank wins.

    An interval that ends before it starts covers nothing.
    """
    rows = np.flatnonzero(end > start)
    position = np.concatenate([start[rows], end[rows]])
    order = np.argsort(position)
    position = position[order]
    opens = order < len(rows)
    change = np.where(opens, np.int8(1), np.int8(-1))
    rank_here = rank[rows[np.where(opens, order, order - len(rows))]]
    winner = np.full(len(position), -1, np.int64)
    for one in np.unique(rank[rows])[::-1]:
        winner[np.cumsum(np.where(rank_here == one, change, 0), dtype=np.int32) > 0] = one
    kept = np.flatnonzero((winner[:-1] >= 0) & (position[1:] > position[:-1]))
    return Pieces(position[kept], position[kept + 1], winner[kept])


class Coverage:
    """A union of intervals that answers how much of it lies before a position."""

    def __init__(self, start: Ints, end: Ints) -> None:
        """Take intervals that are sorted and do not overlap."""
        self.start = start
        self.end = end
        self._end = np.concatenate([[_EARLIEST], end])
        self._length = np.concatenate([[0], np.cumsum(end - start)])

    @classmethod
    def of(cls, start: Ints, end: Ints) -> "Coverage":
        """Take any intervals. One that ends before it starts covers nothing."""
        rows = np.flatnonzero(end > start)
        rows = rows[np.argsort(start[rows], kind="stable")]  # fast where most are in order
        if not len(rows):
            return cls(start[rows], end[rows])
        start, reached = start[rows], np.maximum.accumulate(end[rows])
        first = np.concatenate([[0], 1 + np.flatnonzero(start[1:] > reached[:-1])])
        return cls(start[first], reached[np.append(first[1:] - 1, len(rows) - 1)])

    def before(self, position: Ints) -> Ints:
        """Return the covered length before each position."""
        begun = np.searchsorted(self.start, position, side="right")
        last_end = self._end[begun]
        covered: Ints = self._length[begun] - (last_end - np.minimum(last_end, position))
        return covered

    def within(self, start: Ints, end: Ints) -> Ints:
        """Return the covered length of each interval `[start, end)`."""
        return self.before(end) - self.before(start)

    @property
    def length(self) -> int:
        """The whole covered length."""
        return int(self._length[-1])
