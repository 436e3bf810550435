"""Text of /proc and /sys about memory -> readings: use, swap, huge pages, faults, nodes."""

from collections.abc import Iterable, Iterator, Mapping

from perfledger.collectors.host.host_metrics import (
    DIRTY,
    HUGEPAGES_LIMIT,
    HUGEPAGES_SIZE,
    HUGEPAGES_USAGE,
    MEMORY_AVAILABLE,
    MEMORY_LIMIT,
    MEMORY_SHARED,
    MEMORY_USAGE,
    NUMA_ALLOCATIONS,
    NUMA_MEMORY,
    OOM_KILLS,
    PAGING_FAULTS,
    PAGING_OPERATIONS,
    PAGING_USAGE,
    SLAB,
)
from perfledger.collectors.host.readings import Attributes, Reading
from perfledger.schema.metrics import Metric

_PLAIN: tuple[tuple[str, Metric, Attributes], ...] = (
    ("MemTotal", MEMORY_LIMIT, ()),
    ("MemAvailable", MEMORY_AVAILABLE, ()),
    ("MemFree", MEMORY_USAGE, (("system.memory.state", "free"),)),
    ("Buffers", MEMORY_USAGE, (("system.memory.state", "buffers"),)),
    ("Cached", MEMORY_USAGE, (("system.memory.state", "cached"),)),
    ("Shmem", MEMORY_SHARED, ()),
    ("SReclaimable", SLAB, (("system.memory.linux.slab.state", "reclaimable"),)),
    ("SUnreclaim", SLAB, (("system.memory.linux.slab.state", "unreclaimable"),)),
    ("Dirty", DIRTY, (("perfledger.host.state", "dirty"),)),
    ("Writeback", DIRTY, (("perfledger.host.state", "writeback"),)),
    ("SwapFree", PAGING_USAGE, (("system.paging.state", "free"),)),
    ("HugePages_Total", HUGEPAGES_LIMIT, ()),
    ("HugePages_Free", HUGEPAGES_USAGE, (("system.memory.linux.hugepages.state", "free"),)),
    ("Hugepagesize", HUGEPAGES_SIZE, ()),
)


def counts_by_name(text: str) -> dict[str, int]:
    """Return `name value` or `name: value kB` lines; kB become bytes. Others are left out."""
    found = {}
    for line in text.splitlines():
        words = line.split()
        if len(words) >= 2 and words[1].isdigit():
            scale = 1024 if words[-1] == "kB" else 1
            found[words[0].rstrip(":")] = int(words[1]) * scale
    return found


def counts_of(text: str, names: Iterable[str]) -> dict[str, int]:
    """Return those of the named counts of `name value` lines that are there.

    For a long text of which little is wanted: it is searched, not split.
    """
    text, found = f"\n{text}\n", {}
    for name in names:
        start = text.find(f"\n{name} ")
        if start >= 0:
            first = start + len(name) + 2
            found[name] = int(text[first : text.index("\n", first)])
    return found


def memory_readings(meminfo: str) -> Iterator[Reading]:
    """Yield memory, swap and huge pages in use, from /proc/meminfo.

    used = total - free - buffers - cached - reclaimable slab, as free(1) has it without the
    reclaimable part of cached; a state that the kernel does not tell is absent.
    """
    sizes = counts_by_name(meminfo)
    for name, metric, attributes in _PLAIN:
        if name in sizes:
            yield Reading(metric, sizes[name], attributes)
    parts = ("MemFree", "Buffers", "Cached", "SReclaimable")
    if "MemTotal" in sizes and all(name in sizes for name in parts):
        used = sizes["MemTotal"] - sum(sizes[name] for name in parts)
        yield Reading(MEMORY_USAGE, used, (("system.memory.state", "used"),))
    if "SwapTotal" in sizes and "SwapFree" in sizes:
        used = sizes["SwapTotal"] - sizes["SwapFree"]
        yield Reading(PAGING_USAGE, used, (("system.paging.state", "used"),))
    if "HugePages_Total" in sizes and "HugePages_Free" in sizes:
        used = sizes["HugePages_Total"] - sizes["HugePages_Free"]
        state = ("system.memory.linux.hugepages.state", "used")
        yield Reading(HUGEPAGES_USAGE, used, (state,))


def fault_readings(vmstat: str) -> Iterator[Reading]:
    """Yield page faults, swapped pages and kills for want of memory, from /proc/vmstat."""
    counts = counts_of(vmstat, ("pgfault", "pgmajfault", "pswpin", "pswpout", "oom_kill"))
    if "pgfault" in counts and "pgmajfault" in counts:
        kind = "system.paging.fault.type"
        minor = counts["pgfault"] - counts["pgmajfault"]
        yield Reading(PAGING_FAULTS, minor, ((kind, "minor"),))
        yield Reading(PAGING_FAULTS, counts["pgmajfault"], ((kind, "major"),))
    for name, direction in (("pswpin", "in"), ("pswpout", "out")):
        if name in counts:
            where = (("system.paging.direction", direction),)
            yield Reading(PAGING_OPERATIONS, counts[name], where)
    if "oom_kill" in counts:
        yield Reading(OOM_KILLS, counts["oom_kill"])


def node_readings(meminfos: Mapping[str, str], numastats: Mapping[str, str]) -> Iterator[Reading]:
    """Yield memory and allocations of each NUMA node, from node*/meminfo and node*/numastat.

    A machine with one node has no placement to tell about: nothing is yielded.
    """
    if len(meminfos) < 2:
        return
    for node, text in meminfos.items():
        where = ("perfledger.host.numa_node", int(node.removeprefix("node")))
        lines = [line.split(maxsplit=2)[2] for line in text.splitlines() if line.strip()]
        sizes = counts_by_name("\n".join(lines))
        for name, state in (("MemFree", "free"), ("MemUsed", "used")):
            if name in sizes:
                yield Reading(NUMA_MEMORY, sizes[name], (where, ("perfledger.host.state", state)))
    for node, text in numastats.items():
        where = ("perfledger.host.numa_node", int(node.removeprefix("node")))
        for name, count in counts_by_name(text).items():
            placement = _PLACEMENTS.get(name)
            if placement:
                what = ("perfledger.host.placement", placement)
                yield Reading(NUMA_ALLOCATIONS, count, (where, what))


_PLACEMENTS = {
    "numa_hit": "hit",
    "numa_miss": "miss",
    "numa_foreign": "foreign",
    "local_node": "local",
    "other_node": "other",
}
