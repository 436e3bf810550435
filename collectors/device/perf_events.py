"""Software events of perf, over all CPUs: what /proc does not tell, above all moves between CPUs.

perf_event_open(2). The kernel counts while the files are open; each CPU's are one group, read in
one call. It takes CAP_PERFMON, or kernel.perf_event_paranoid at 0 or below.
"""

import ctypes
import errno
import os
import platform
import resource
import struct
from collections.abc import Iterator
from pathlib import Path

from perfledger.collectors.device.device_metrics import PERF_EVENTS
from perfledger.collectors.host.readings import Reading

SOURCE = "perf"
_CALLS = {"x86_64": 298, "aarch64": 241}
# PERF_COUNT_SW_* of linux/perf_event.h.
_EVENTS = {"context_switches": 3, "cpu_migrations": 4, "minor_faults": 5, "major_faults": 6}
_SOFTWARE, _FORMAT_GROUP, _CLOSE_ON_EXEC = 1, 1 << 3, 1 << 3
# struct perf_event_attr as of its first version: type, size, config, sample_period, sample_type,
# read_format, flags, wakeup_events, bp_type, config1.
_ATTRIBUTES = struct.Struct("=IIQQQQQIIQ")
_ONLINE = Path("/sys/devices/system/cpu/online")
_PARANOID = Path("/proc/sys/kernel/perf_event_paranoid")


class SoftwareEvents:
    """The events of all CPUs. `why_not` is why they cannot be counted, or ""."""

    def __init__(self) -> None:
        self.why_not = ""
        self._groups: list[list[int]] = []
        self._names = list(_EVENTS)
        try:
            self._open()
        except OSError as error:
            self.why_not = _reason(error)
            self.close()

    def read(self) -> Iterator[Reading]:
        """Yield the count of each event since this was made. Raises OSError."""
        totals = [0] * len(self._names)
        for group in self._groups:
            found = os.read(group[0], 8 * (1 + len(group)))
            for at, count in enumerate(struct.unpack(f"={1 + len(group)}Q", found)[1:]):
                totals[at] += count
        if self._groups:
            for name, total in zip(self._names, totals, strict=True):
                yield Reading(PERF_EVENTS, total, (("perfledger.perf.event", name),))

    def close(self) -> None:
        """Stop counting."""
        while self._groups:
            for file in self._groups.pop():
                os.close(file)

    def _open(self) -> None:
        cpus = online_cpus(_ONLINE.read_text())
        limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 4
        if len(cpus) * len(_EVENTS) > limit:
            raise OSError(errno.EMFILE, f"would take over {limit} files, a quarter of the limit")
        for cpu in cpus:
            group: list[int] = []
            self._groups.append(group)
            for config in _EVENTS.values():
                group.append(_opened(config, cpu, group[0] if group else -1))


def online_cpus(text: str) -> list[int]:
    """Return the numbers of the kernel's list format, as 0-3,8."""
    found: list[int] = []
    for part in text.strip().split(","):
        first, _, last = part.partition("-")
        found += range(int(first), int(last or first) + 1)
    return found


def _opened(config: int, cpu: int, group: int) -> int:
    number = _CALLS.get(platform.machine())
    if number is None:
        raise OSError(errno.ENOSYS, f"not known how to ask on {platform.machine()}")
    attributes = _ATTRIBUTES.pack(
        _SOFTWARE, _ATTRIBUTES.size, config, 0, 0, _FORMAT_GROUP, 0, 0, 0, 0
    )
    library = ctypes.CDLL(None, use_errno=True)
    everyone = -1
    file = library.syscall(
        ctypes.c_long(number),
        ctypes.c_char_p(attributes),
        ctypes.c_int(everyone),
        ctypes.c_int(cpu),
        ctypes.c_int(group),
        ctypes.c_ulong(_CLOSE_ON_EXEC),
    )
    if file < 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    return int(file)


def _reason(error: OSError) -> str:
    if error.errno in (errno.EACCES, errno.EPERM) and _PARANOID.exists():
        level = _PARANOID.read_text().strip()
        return f"not permitted: perf_event_paranoid is {level}, and no CAP_PERFMON"
    return error.strerror or str(error)
