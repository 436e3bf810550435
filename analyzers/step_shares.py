"""Which engine step owns each instant, so that what a machine used then can be shared out. Pure.

A step that goes on with sequences owns the time since the step before it: a token's interval begins
where the last one ended. Where the steps of several replicas run at once, each owns an equal part.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from perfledger.analyzers.counter_curve import Curve, Floats
from perfledger.schema.intervals import Ints


@dataclass(frozen=True)
class OwnedTime:
    """The interval `[start_ns, end_ns)` that each step owns; disjoint within an engine."""

    engine: Ints
    start_ns: Ints
    end_ns: Ints

    @classmethod
    def of(
        cls, engine: Ints, seq: Ints, start_ns: Ints, end_ns: Ints, goes_on: NDArray[np.bool_]
    ) -> "OwnedTime":
        """Take the steps of one rank an engine, in any order. `seq` tells where steps are lost."""
        own_start, own_end = start_ns.copy(), end_ns.copy()
        for one in np.unique(engine):
            rows = np.flatnonzero(engine == one)
            rows = rows[np.lexsort((end_ns[rows], start_ns[rows]))]
            later, latest = rows[1:], np.maximum.accumulate(end_ns[rows])[:-1]
            joined = goes_on[later] & (np.diff(seq[rows]) <= 1)
            own_start[later] = np.where(joined, latest, np.maximum(start_ns[later], latest))
            own_end[rows] = np.maximum(end_ns[rows], own_start[rows])
        return cls(engine, own_start, own_end)


@dataclass(frozen=True)
class Pieces:
    """Pieces of time between `bound_ns`; `steps` says which step of each engine owns one, or -1."""

    bound_ns: Ints
    steps: tuple[Ints, ...]
    running: Ints

    @classmethod
    def cut(cls, owned: OwnedTime, bounds: Sequence[Ints]) -> "Pieces":
        """Cut at the steps' ends and at `bounds`."""
        bound = np.concatenate([owned.start_ns, owned.end_ns, *bounds])
        bound.sort(kind="stable")  # np.unique takes ten times as long
        bound = bound[np.append(True, bound[1:] != bound[:-1])]
        steps = tuple(_owners(owned, one, bound[:-1]) for one in np.unique(owned.engine))
        running = np.zeros(len(bound) - 1, np.int64)
        for step in steps:
            running += step >= 0
        return cls(bound, steps, running)

    def share(self, of_step: Floats) -> Floats:
        """Return what part of each piece belongs to something, given its part of each step."""
        parts = np.append(of_step, 0.0)  # for -1
        whole = np.zeros(len(self.running))
        for step in self.steps:
            whole += parts[step]
        return whole / np.maximum(self.running, 1)

    def of_steps(self, amount: Floats, steps: int) -> Floats:
        """Return the amount of each step, given that of each piece."""
        part = amount / np.maximum(self.running, 1)
        whole = np.zeros(steps)
        for step in self.steps:
            whole += np.bincount(step[step >= 0], part[step >= 0], steps)
        return whole

    def between(self, curve: Curve) -> Floats:
        """Return by how much a counter rose in each piece."""
        return np.diff(curve.at(self.bound_ns))

    def bounds_of(self, share: Floats, curve: Curve) -> tuple[float, float]:
        """Return the least and the most that a share of the pieces can have of a counter.

        A rise may have come at any instant of its window, in the one piece there that has the least
        share of it, or the most.
        """
        rises = curve.rises()
        if not len(rises.amount):
            return 0.0, 0.0
        padded = np.concatenate([[0.0], share, [0.0, 0.0]])  # nothing before, after, and a stop
        first = np.searchsorted(self.bound_ns, rises.start_ns, side="right")
        stop = np.searchsorted(self.bound_ns, rises.end_ns, side="left") + 1
        windows = np.stack([first, stop], axis=1).ravel()
        least = np.minimum.reduceat(padded, windows)[::2]
        most = np.maximum.reduceat(padded, windows)[::2]
        return float(least @ rises.amount), float(most @ rises.amount)


def _owners(owned: OwnedTime, engine: int, at_ns: Ints) -> Ints:
    rows = np.flatnonzero(owned.engine == engine)
    rows = rows[np.lexsort((owned.end_ns[rows], owned.start_ns[rows]))]
    place = np.searchsorted(owned.start_ns[rows], at_ns, side="right") - 1
    step = rows[np.maximum(place, 0)]
    inside = (place >= 0) & (at_ns < owned.end_ns[step])
    owner: Ints = np.where(inside, step, -1)
    return owner
