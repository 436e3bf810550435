"""Who else was active on an edge in the same intervals. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from perfledger.schema.intervals import Coverage, Ints


@dataclass(frozen=True)
class Activity:
    """When somebody was active on an edge (wall ns, any order), and the bytes, where known."""

    name: str
    kind: str  # rank, service, collective or copy
    start_ns: Ints
    end_ns: Ints
    bytes: int | None


@dataclass(frozen=True)
class Contender:
    """Who was active on an edge at the same time as others.

    `overlap_ns` is the time that it shared with any other, and `share` that time over the time in
    which anyone was active; both are null for what is known as a sum only, not as intervals.
    """

    name: str
    kind: str  # rank, service, collective, copy, process or traffic
    overlap_ns: int | None
    share: float | None
    bytes: int | None
    note: str


def contenders(activities: Sequence[Activity]) -> tuple[Contender, ...]:
    """Return those that shared an edge with another one, the longest overlap first.

    Time is the length of a union of intervals; intervals of no length share nothing.
    """
    if len(activities) < 2:
        return ()
    unions = [Coverage.of(one.start_ns, one.end_ns) for one in activities]
    alone_ns, active_ns = _alone(unions)
    found = []
    for at, (one, union) in enumerate(zip(activities, unions, strict=True)):
        if overlap_ns := union.length - int(alone_ns[at]):
            share = overlap_ns / active_ns
            found.append(Contender(one.name, one.kind, overlap_ns, share, one.bytes, ""))
    return tuple(sorted(found, key=lambda one: (-(one.overlap_ns or 0), one.name)))


def _alone(unions: Sequence[Coverage]) -> tuple[Ints, int]:
    """Return how long each was active with no other, and how long at least one was."""
    position = np.concatenate([times for u in unions for times in (u.start, u.end)])
    change = [np.full(len(u.start), sign) for u in unions for sign in (1, -1)]
    number = [
        at * one for one, at in zip(change, np.repeat(np.arange(len(unions)), 2), strict=True)
    ]
    order = np.argsort(position, kind="stable")  # fast: each part is in order
    length = np.diff(position[order])
    active = np.cumsum(np.concatenate(change)[order])[:-1]
    who = np.cumsum(np.concatenate(number)[order])[:-1]  # the sum of their numbers
    alone = (active == 1) & (length > 0)
    alone_ns = np.zeros(len(unions), np.int64)
    for at in range(len(unions)):
        alone_ns[at] = length[alone & (who == at)].sum()
    return alone_ns, int(length[active >= 1].sum())
