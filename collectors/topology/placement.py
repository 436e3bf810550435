"""Where processes are placed, and in what container: from /proc below a root."""

import os
import re
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

from perfledger.collectors.host.process_search import parents, with_descendants
from perfledger.collectors.topology.host_topology import read_text
from perfledger.schema.host_facts import ranges
from perfledger.schema.topology import NumaNode, Placement, nodes_of, numbers

NO_CONTAINER = "none seen"
# Marks that runtimes leave at the top of the file system, and words in the control group's path.
_MARKS = ((".dockerenv", "docker"), ("run/.containerenv", "podman"))
_GROUPS = re.compile(r"(kubepods)|(docker)|(libpod|podman)|(containerd|cri-)|(lxc)")
_GROUP_NAMES = ("kubernetes", "docker", "podman", "containerd", "lxc")
_MOST_PROCESSES = 4096


def placements(root: Path, pid: int, nodes: Iterable[NumaNode]) -> tuple[Placement, ...]:
    """Return the distinct placements of a process and all that it started, by its CPUs.

    Raises OSError where there is no such process.
    """
    proc, nodes = root / "proc", tuple(nodes)
    first = _allowed(proc / str(pid))
    family = with_descendants([pid], parents(proc))[1:_MOST_PROCESSES]
    counts = Counter([first])
    for child in family:
        try:
            counts[_allowed(proc / str(child))] += 1
        except OSError:  # it has ended
            continue
    return tuple(
        Placement(cpus, _memory_nodes(memory, nodes), nodes_of(cpus, nodes), count)
        for (cpus, memory), count in sorted(counts.items())
    )


def container(root: Path, pid: int) -> str:
    """Return the kind of container that a process is in, as far as it leaves marks.

    One with its own control group namespace and no marks looks like none: hence "none seen".
    Raises OSError where the process does not let us look.
    """
    groups = read_text(root / "proc" / str(pid) / "cgroup") or ""
    found = _GROUPS.search(groups)
    if found and found.lastindex:
        return _GROUP_NAMES[found.lastindex - 1]
    own = root if pid == os.getpid() else root / "proc" / str(pid) / "root"
    for mark, kind in _MARKS:
        if (own / mark).exists():
            return kind
    return NO_CONTAINER


def _allowed(process: Path) -> tuple[str, str]:
    """Return the CPUs and the memory nodes that a process may use, in the kernel's list format."""
    with open(process / "status", encoding="utf-8", errors="replace") as file:
        pairs = dict(line.split(":", 1) for line in file if ":" in line)
    return pairs.get("Cpus_allowed_list", "").strip(), pairs.get("Mems_allowed_list", "").strip()


def _memory_nodes(allowed: str, nodes: tuple[NumaNode, ...]) -> str:
    """Return the nodes that are there of those that are allowed: some kernels allow all 1,024."""
    present = {node.number for node in nodes}
    return ranges(sorted(present.intersection(numbers(allowed)))) if present else allowed
