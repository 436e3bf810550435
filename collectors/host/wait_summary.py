"""What held a process up in a window of time: low CPU use is not headroom.

A process whose busiest thread runs or waits for its turn all the time is at its limit, whatever
the machine's CPU use says; and one whose busiest thread waits has the reason in its states.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from perfledger.collectors.host.thread_state import RUNNABLE, RUNNING, STATES
from perfledger.collectors.host.thread_waits import Totals

_SHOWN = 0.005


@dataclass(frozen=True)
class ThreadWindow:
    """One thread in a window: its wall time there, and the time in each state (ns)."""

    tid: int
    name: str
    wall_ns: int
    state_ns: Mapping[str, int]

    @property
    def busy_ns(self) -> int:
        """Return how long it ran or waited for a CPU."""
        return self.state_ns.get(RUNNING, 0) + self.state_ns.get(RUNNABLE, 0)

    def shares(self) -> dict[str, float]:
        """Return the share of each state of the time that is known, in the order of STATES."""
        known_ns = sum(self.state_ns.values())
        return {
            state: self.state_ns[state] / known_ns
            for state in STATES
            if known_ns and self.state_ns.get(state)
        }


def thread_window(tid: int, name: str, wall_ns: int, totals: Totals) -> ThreadWindow:
    """Return a thread's window from the totals of what it did in it.

    Where the kernel keeps no times, samples share the wall time out.
    """
    times = {state: count for (what, state), count in totals.items() if what == "ns" and count}
    if not times:
        seen = {state: count for (what, state), count in totals.items() if what == "samples"}
        whole = sum(seen.values())
        times = {state: wall_ns * count // whole for state, count in seen.items()}
    return ThreadWindow(tid, name, wall_ns, times)


def busiest(threads: Iterable[ThreadWindow]) -> ThreadWindow | None:
    """Return the thread that ran and queued most; of none there is none."""
    return max(threads, key=lambda thread: (thread.busy_ns, -thread.tid), default=None)


def summarise(pid: int, threads: Iterable[ThreadWindow]) -> str:
    """Return what the busiest thread of a process spent the window on, as one sentence."""
    thread = busiest(threads)
    if thread is None:
        return f"process {pid}: no thread was seen"
    shares = [
        f"{share:.0%} {state}"
        for state, share in sorted(thread.shares().items(), key=lambda item: -item[1])
        if share >= _SHOWN
    ]
    what = ", ".join(shares) or "nothing that the kernel tells"
    who = f"process {pid}: its busiest thread {thread.name} ({thread.tid})"
    return f"{who} in {thread.wall_ns / 1e9:.1f} s: {what}"
