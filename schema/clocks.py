"""Two clocks and how they meet: durations come from the monotonic one, stamps are shown as wall.

Processes on one host (one boot id) share CLOCK_MONOTONIC. A service takes ONE anchor and hands it
to all its processes, so that their wall stamps differ by exactly what their monotonic ones do.
"""

import time
from dataclasses import dataclass
from pathlib import Path

BOOT_ID_FILE = Path("/proc/sys/kernel/random/boot_id")


def monotonic_ns() -> int:
    """Return CLOCK_MONOTONIC in ns: shared by all processes of this boot."""
    return time.clock_gettime_ns(time.CLOCK_MONOTONIC)


@dataclass(frozen=True)
class ClockAnchor:
    """One instant read on both clocks, on the host booted as `boot_id` ("" where unknown)."""

    monotonic_ns: int
    wall_ns: int
    boot_id: str

    def to_wall_ns(self, at_monotonic_ns: int) -> int:
        """Return the wall stamp (ns since 1970) of a monotonic stamp of the same boot."""
        return at_monotonic_ns - self.monotonic_ns + self.wall_ns


def take_anchor(attempts: int = 16) -> ClockAnchor:
    """Read both clocks; of several attempts keep the one with the narrowest window."""
    best_width_ns, best = None, (0, 0)
    for _ in range(attempts):
        before_ns = monotonic_ns()
        wall_ns = time.time_ns()
        after_ns = monotonic_ns()
        if best_width_ns is None or after_ns - before_ns < best_width_ns:
            best_width_ns, best = after_ns - before_ns, ((before_ns + after_ns) // 2, wall_ns)
    return ClockAnchor(best[0], best[1], read_boot_id())


def read_boot_id(path: Path = BOOT_ID_FILE) -> str:
    """Return the kernel's boot id, or "" where it has none (not Linux)."""
    try:
        return path.read_text().strip()
    except OSError:
        return ""
