"""A topology as a tree of text, tables and remarks, within 80 columns."""

import textwrap
from collections.abc import Iterable, Iterator, Sequence

from perfledger.output import WIDTH, print_table
from perfledger.schema.topology import PATHS, Gpu, Link, Nic, NumaNode, Topology, grouped, numbers

_MOST_COLUMNS = 9


def print_topology(topology: Topology) -> None:
    """Print everything that is known, then what is not and why."""
    print("\n".join(tree(topology)))
    _print_distances(topology.numa or ())
    _print_links(topology.links or ())
    if topology.placement:
        print()
        rows = [
            (one.cpus, one.numa_nodes or "unknown", one.memory_nodes, one.processes)
            for one in topology.placement
        ]
        columns = ("placement: CPUs", "of NUMA nodes", "memory of nodes", "processes")
        print_table("", columns, rows)
    print()
    for line in (*_said(topology), *remarks(topology)):
        print(textwrap.fill(line, WIDTH, subsequent_indent="  "))


def tree(topology: Topology) -> Iterator[str]:
    """Yield the picture: below each NUMA node its GPUs and network cards."""
    nodes = topology.numa or ()
    places: list[tuple[str, int | None]] = [(_node_text(node), node.number) for node in nodes]
    known = {node.number for node in nodes}
    devices: list[Gpu | Nic] = [*(topology.gpus or ()), *(topology.nics or ())]
    if any(device.numa_node not in known for device in devices):
        places.append(("no NUMA node", None))
    count = "unknown" if topology.numa is None else len(nodes)
    yield f"machine, NUMA nodes: {count}"
    for at, (text, number) in enumerate(places):
        is_last = at == len(places) - 1
        yield _cut(f"{'└─' if is_last else '├─'} {text}")
        here = [device for device in devices if _place(device, known) == number]
        for row, device in enumerate(here, 1):
            branch = "└─" if row == len(here) else "├─"
            yield _cut(f"{'   ' if is_last else '│  '}{branch} {_device_text(device)}")


def remarks(topology: Topology) -> Iterator[str]:
    """Yield what is likely to cost speed: far memory, far GPUs, PCIe lanes that are not used."""
    for gpu in topology.gpus or ():
        if gpu.is_degraded:
            yield f"look: gpu{gpu.index} uses {gpu.pcie_width} of {gpu.pcie_max_width} PCIe lanes"
    for placed in topology.placement or ():
        on = set(numbers(placed.numa_nodes))
        if len(on) > 1:
            yield (
                f"look: CPUs {placed.cpus} are of NUMA nodes {placed.numa_nodes}: memory may be "
                "far from the thread that uses it"
            )
        far = [gpu for gpu in topology.gpus or () if on and gpu.numa_node is not None]
        names = ", ".join(f"gpu{gpu.index}" for gpu in far if gpu.numa_node not in on)
        if names:
            yield f"look: no CPU of {placed.cpus} is of the NUMA node of {names}"


def _said(topology: Topology) -> Iterator[str]:
    if topology.gpus == ():
        yield "no GPU: there is no NVIDIA driver here"
    if topology.nics == ():
        yield "no network card that is up (virtual interfaces are left out)"
    if topology.container is not None:
        yield f"container: {topology.container}"
    for part, why in topology.not_available.items():
        yield f"not available: {part}: {why}"


def _print_distances(nodes: Sequence[NumaNode]) -> None:
    if not 1 < len(nodes) <= _MOST_COLUMNS or not all(node.distances for node in nodes):
        return
    print()
    columns = ("NUMA distance", *(f"node {node.number}" for node in nodes))
    print_table("", columns, [(f"node {node.number}", *node.distances) for node in nodes])


def _print_links(links: Sequence[Link]) -> None:
    """Print a matrix of the paths, or where it is too wide which pairs have which path."""
    if not links:
        return
    print()
    names = list(dict.fromkeys(name for link in links for name in (link.a, link.b)))
    paths = {(a, b): link.path for link in links for a, b in _both_ways(link)}
    cells = [(one, *(_cell(paths, one, other) for other in names)) for one in names]
    width = sum(max(len(name), 4) + 2 for name in names) + max(map(len, names))
    if width <= WIDTH:
        print_table("", ("link", *names), cells)
    else:
        for path, those in grouped(links).items():
            pairs = " ".join(f"{link.a}-{link.b}" for link in those)
            print(textwrap.fill(f"{path}: {pairs}", WIDTH, subsequent_indent="  "))
    print("\n".join(_legend(links)))


def _legend(links: Iterable[Link]) -> Iterator[str]:
    used = {link.path for link in links}
    yield from (f"  {path}: {meaning}" for path, meaning in PATHS.items() if path in used)
    yield from (f"  {path}: {path[2:]} NVLinks" for path in sorted(used) if path.startswith("NV"))


def _both_ways(link: Link) -> tuple[tuple[str, str], tuple[str, str]]:
    return (link.a, link.b), (link.b, link.a)


def _cell(paths: dict[tuple[str, str], str], one: str, other: str) -> str:
    return "·" if one == other else paths.get((one, other), "")


def _node_text(node: NumaNode) -> str:
    memory = "" if node.memory_bytes is None else f", {node.memory_bytes / 2**30:.1f} GiB"
    return f"NUMA node {node.number}: cpus {node.cpus or 'none'}{memory}"


def _device_text(device: Gpu | Nic) -> str:
    if isinstance(device, Gpu):
        return f"gpu{device.index}  {device.name or 'name unknown'}, {device.pcie}"
    return f"{device.name}  " + ", ".join([device.speed, device.driver, *device.rdma])


def _place(device: Gpu | Nic, known: set[int]) -> int | None:
    return device.numa_node if device.numa_node in known else None


def _cut(line: str) -> str:
    """Return a line of the terminal's: a recording's names may hold what would move its cursor."""
    line = "".join(filter(str.isprintable, line))
    return line if len(line) <= WIDTH else line[: WIDTH - 1] + "…"
