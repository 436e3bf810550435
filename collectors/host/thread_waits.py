"""What one thread did since it was first seen: exact run and queue time, and sampled waits."""

from collections import Counter

from perfledger.collectors.host.thread_state import (
    RUNNABLE,
    RUNNING,
    SchedStat,
    ThreadStat,
)

# After so many samples in which a thread had not run at all, it is still in the same wait, and
# only that is checked.
_QUIET_SAMPLES = 3

# (what, state): ("samples", "lock"), ("ns", "running"), ("switches", "voluntary").
Totals = Counter[tuple[str, str]]


class ThreadWaits:
    """Adds up one thread's samples. Times of samples are CLOCK_BOOTTIME, ns.

    The wall time of a thread is its run time, its queue time and the rest; the kernel tells the
    first two exactly, so the rest is what it was blocked for. When a sample finds it blocked, all
    of the rest that is not yet shared out goes to that state.
    """

    def __init__(
        self, tid: int, stat: ThreadStat, at: SchedStat | None, since_ns: int, *, whole: bool
    ) -> None:
        """Start at `since_ns`; `whole` where the thread began then and all that it did counts."""
        self.tid, self.name, self.start_ticks = tid, stat.name, stat.start_ticks
        self._totals: Totals = Counter()
        self.since_ns = self._seen_ns = since_ns
        self.state = ""
        self.quiet = False
        self._schedule = SchedStat(0, 0, 0) if whole and at is not None else at
        self._whole = whole
        self._unchanged = 0
        self._switches: dict[str, int] = {}
        self._switches_at: SchedStat | None = None
        self._told_ns = 0  # wall time that is in a state already
        self._queued_share = 0.0
        # Run and queue time since the last sample that found it running or runnable.
        self._ran_ns = self._queued_ns = 0

    def note(self, at: SchedStat | None, now_ns: int, blocked_in: str | None) -> None:
        """Add a sample; `blocked_in` is what it waits for, None where it does not."""
        self.settle()
        if at is not None:
            self._add_times(at)
        self.state = blocked_in or self._running_or_runnable()
        self._seen_ns = now_ns
        self.settle()
        self._totals["samples", self.state] += 1
        self.quiet = blocked_in is not None and self._unchanged >= _QUIET_SAMPLES

    def note_quiet(self, now_ns: int) -> None:
        """Add a sample in which nothing but time had passed: it is blocked as it was."""
        self._totals["samples", self.state] += 1
        self._seen_ns = now_ns

    def settle(self) -> None:
        """Give the time that is not shared out yet to the state that it was last seen in."""
        if self._schedule is None or self.state in (RUNNING, RUNNABLE, ""):
            return
        rest_ns = self._seen_ns - self.since_ns - self._told_ns
        if rest_ns > 0:
            self._totals["ns", self.state] += rest_ns
            self._told_ns += rest_ns

    def take(self) -> Totals:
        """Return what it did since this was last asked."""
        self.settle()
        taken, self._totals = self._totals, Counter()
        return taken

    def switches_are_old(self) -> bool:
        """Return whether it has been on a CPU since its context switches were last noted."""
        return self._schedule is None or self._schedule != self._switches_at

    def note_switches(self, voluntary: int, involuntary: int) -> None:
        """Add context switches; the counts are cumulative since the thread began."""
        for kind, count in (("voluntary", voluntary), ("involuntary", involuntary)):
            last = self._switches.get(kind, 0 if self._whole else count)
            self._totals["switches", kind] += max(0, count - last)
            self._switches[kind] = count
        self._switches_at = self._schedule

    def _add_times(self, at: SchedStat) -> None:
        last = self._schedule or at
        ran_ns, queued_ns = max(0, at.run_ns - last.run_ns), max(0, at.wait_ns - last.wait_ns)
        self._totals["ns", RUNNING] += ran_ns
        self._totals["ns", RUNNABLE] += queued_ns
        self._told_ns += ran_ns + queued_ns
        self._ran_ns += ran_ns
        self._queued_ns += queued_ns
        self._unchanged = self._unchanged + 1 if at == last else 0
        self._schedule = at

    def _running_or_runnable(self) -> str:
        """Return one of the two, so that their samples have the ratio of the exact times."""
        exact_ns = self._ran_ns + self._queued_ns
        self._queued_share += self._queued_ns / exact_ns if exact_ns else 1.0
        self._ran_ns = self._queued_ns = 0
        if self._schedule is None or self._queued_share < 1:
            return RUNNING
        self._queued_share -= 1
        return RUNNABLE
