"""/proc/diskstats -> readings (kernel documentation, admin-guide/iostats)."""

import re
from collections.abc import Iterator

from perfledger.collectors.host.host_metrics import (
    DISK_FLUSH_TIME,
    DISK_FLUSHES,
    DISK_IN_FLIGHT,
    DISK_IO,
    DISK_IO_TIME,
    DISK_MERGED,
    DISK_OPERATION_TIME,
    DISK_OPERATIONS,
)
from perfledger.collectors.host.readings import Reading

# The unit of /proc/diskstats, whatever the device's own sectors are.
SECTOR_BYTES = 512


def disk_readings(
    diskstats: str, whole_devices: frozenset[str] | None, exclude: re.Pattern[str]
) -> Iterator[Reading]:
    """Yield what each device did.

    `whole_devices` are the names in /sys/block: partitions would count everything twice. None
    takes every line. A device whose name matches `exclude` whole is left out.
    """
    for line in diskstats.splitlines():
        _, _, name, *fields = line.split()
        if whole_devices is not None and name not in whole_devices:
            continue
        if not exclude.fullmatch(name):
            yield from _device(name, [int(field) for field in fields])


def _device(name: str, numbers: list[int]) -> Iterator[Reading]:
    device = ("system.device", name)
    for direction, start in (("read", 0), ("write", 4)):
        operations, merged, sectors, milliseconds = numbers[start : start + 4]
        where = (device, ("disk.io.direction", direction))
        yield Reading(DISK_OPERATIONS, operations, where)
        yield Reading(DISK_MERGED, merged, where)
        yield Reading(DISK_IO, sectors * SECTOR_BYTES, where)
        yield Reading(DISK_OPERATION_TIME, milliseconds / 1000, where)
    yield Reading(DISK_IN_FLIGHT, numbers[8], (device,))
    yield Reading(DISK_IO_TIME, numbers[9] / 1000, (device,))
    if len(numbers) >= 17:  # since Linux 5.5
        yield Reading(DISK_FLUSHES, numbers[15], (device,))
        yield Reading(DISK_FLUSH_TIME, numbers[16] / 1000, (device,))
