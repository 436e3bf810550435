"""The control group that this process is in: CPU quota, memory, its own pressure.

A container sees its own group, and its limits are what holds a service in it back.
"""

from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache

from perfledger.collectors.host.host_metrics import (
    CGROUP_CPU,
    CGROUP_EVENTS,
    CGROUP_MEMORY,
    CGROUP_MEMORY_LIMIT,
    CGROUP_PERIODS,
    CGROUP_THROTTLED,
)
from perfledger.collectors.host.memory import counts_by_name
from perfledger.collectors.host.readings import Reading

MOUNT = "sys/fs/cgroup"
# Version 1 says "no limit" so: the largest number of pages, in bytes.
_NO_LIMIT = 1 << 60
_MEMORY_EVENTS = ("high", "max", "oom", "oom_kill")


@lru_cache(maxsize=8)
def group_folders(cgroup: str) -> Mapping[str, Sequence[str]]:
    """Return candidates for this process's group by controller, from /proc/self/cgroup.

    Paths are below the root; "" is version 2. In a container without a cgroup namespace the path
    is the host's, and the container's own mount shows the group at its top: the second candidate.
    """
    found: dict[str, list[str]] = {}
    for line in cgroup.splitlines():
        number, controllers, path = line.split(":", 2)
        for name in controllers.split(","):
            mounts = [MOUNT, f"{MOUNT}/unified"] if number == "0" else [f"{MOUNT}/{name}"]
            below = [f"{mount}/{path.strip('/')}".rstrip("/") for mount in mounts]
            found["" if number == "0" else name] = [*below, *mounts]
    return found


def quota_readings(cpu_stat: str) -> Iterator[Reading]:
    """Yield CPU time and what a quota held back, from cpu.stat (version 2, us, or 1, ns)."""
    counts = counts_by_name(cpu_stat)
    if "usage_usec" in counts:
        yield Reading(CGROUP_CPU, counts["usage_usec"] * 1000)
    state = "perfledger.host.state"
    if "nr_periods" in counts:
        yield Reading(CGROUP_PERIODS, counts["nr_periods"], ((state, "all"),))
    if "nr_throttled" in counts:
        yield Reading(CGROUP_PERIODS, counts["nr_throttled"], ((state, "throttled"),))
    if "throttled_usec" in counts:
        yield Reading(CGROUP_THROTTLED, counts["throttled_usec"] * 1000)
    elif "throttled_time" in counts:
        yield Reading(CGROUP_THROTTLED, counts["throttled_time"])


def usage_readings(cpuacct_usage: str) -> Iterator[Reading]:
    """Yield CPU time from version 1's cpuacct.usage (ns)."""
    yield Reading(CGROUP_CPU, int(cpuacct_usage))


def group_memory_readings(
    usage: str | None, limit: str | None, events: str | None
) -> Iterator[Reading]:
    """Yield memory, its limit and events, from memory.{current,max,events} or version 1's files."""
    if usage is not None:
        yield Reading(CGROUP_MEMORY, int(usage))
    if limit is not None and limit.strip() != "max" and int(limit) < _NO_LIMIT:
        yield Reading(CGROUP_MEMORY_LIMIT, int(limit))
    counts = counts_by_name(events or "")
    for name in _MEMORY_EVENTS:
        if name in counts:
            yield Reading(CGROUP_EVENTS, counts[name], (("perfledger.host.event", name),))
