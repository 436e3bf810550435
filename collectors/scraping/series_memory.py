"""What one target told before: when its counts began, when they began anew, and what is gone.

A start is where the target says one (`_created`); else the time at which the series was first
seen, as the OpenTelemetry data model asks for ("Cumulative streams: handling unknown start time").
Where a count is lower than before, or was created later, the target has begun anew: the new start
is the creation time, else the time it was last seen, so that nothing was counted before the start.
"""

from typing import NamedTuple

from perfledger.collectors.scraping.exposition import Header, Labels

_LATEST_S = 9_223_372_036  # 2262, where a time in ns ends


class Cumulative(NamedTuple):
    """Counts of a series that only grow, and when they began according to the target (s)."""

    totals: tuple[float, ...]
    created_s: float | None


class _Seen(NamedTuple):
    header: Header
    time_ns: int
    start_ns: int
    cumulative: Cumulative | None


class SeriesMemory:
    """The series of one target, from one scrape to the next. `resets` counts those seen."""

    def __init__(self) -> None:
        self.resets = 0
        self._before: dict[tuple[str, Labels], _Seen] = {}
        self._now: dict[tuple[str, Labels], _Seen] = {}
        self._has_marked_all = False

    def begin_scrape(self) -> None:
        """Forget what an earlier scrape left that did not come to its end."""
        self._now = {}

    def take(
        self, header: Header, labels: Labels, time_ns: int, cumulative: Cumulative | None = None
    ) -> int | None:
        """Note a point of this scrape and return its start; None where it is there already.

        The start of a point that is no count is 0.
        """
        key = (header.name, labels)
        if key in self._now:
            return None
        start_ns = 0 if cumulative is None else self._start_ns(key, time_ns, cumulative)
        self._now[key] = _Seen(header, time_ns, start_ns, cumulative)
        return min(start_ns, time_ns)

    def end_scrape(self) -> list[tuple[Header, Labels]]:
        """Return the points that the scrape before had and this one has not."""
        before, self._before, self._now = self._before, self._now, {}
        if self._has_marked_all:
            self._has_marked_all = False
            return []
        return [(seen.header, key[1]) for key, seen in before.items() if key not in self._before]

    def mark_all_gone(self) -> list[tuple[Header, Labels]]:
        """Return the points of the last good scrape, once; they are remembered all the same."""
        self._now = {}
        if self._has_marked_all:
            return []
        self._has_marked_all = True
        return [(seen.header, key[1]) for key, seen in self._before.items()]

    def _start_ns(self, key: tuple[str, Labels], time_ns: int, now: Cumulative) -> int:
        created_ns = _ns(now.created_s)
        seen = self._before.get(key)
        if seen is None or seen.cumulative is None:
            return created_ns or time_ns
        is_reset = _began_anew(seen.cumulative, now)
        self.resets += is_reset
        if created_ns:
            return created_ns
        return seen.time_ns if is_reset else seen.start_ns


def _began_anew(before: Cumulative, now: Cumulative) -> bool:
    if len(before.totals) != len(now.totals):
        return True
    if any(new < old for old, new in zip(before.totals, now.totals, strict=True)):
        return True
    return _ns(now.created_s) > _ns(before.created_s) > 0


def _ns(created_s: float | None) -> int:
    """Return ns since 1970, or 0 where that is no time; a double holds no more than us."""
    if created_s is None or not 0 < created_s < _LATEST_S:
        return 0
    return round(created_s * 1e6) * 1000
