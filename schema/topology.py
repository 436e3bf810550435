"""Topology, the nouns: NUMA nodes, GPUs, links between devices, network cards, placement.

`facts` makes the manifest's `topology.*` fields of it and `edge_lines` a line for each edge of the
hierarchy. What is unknown is None and has its reason in `not_available`; an empty tuple is none.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from perfledger.schema.host_facts import ranges
from perfledger.schema.manifest import Value

# How two devices reach each other, nearest first. The words are those of `nvidia-smi topo -m`;
# NV and a number are that many NVLinks.
PATHS: Mapping[str, str] = {
    "SOC": "on one board",
    "PIX": "through one PCIe switch at most",
    "PXB": "through several PCIe switches, but not the host bridge",
    "PHB": "through a PCIe host bridge, which mostly is the CPU",
    "NODE": "through several host bridges of one NUMA node",
    "SYS": "through the link between NUMA nodes",
}
_MOST_NUMBERS = 65_536


@dataclass(frozen=True)
class NumaNode:
    """CPUs in the kernel's list format; a node of memory alone has none.

    `distances` are relative access times to every node in order: 10 is the node's own (ACPI SLIT).
    """

    number: int
    cpus: str
    memory_bytes: int | None
    distances: tuple[int, ...]

    def __str__(self) -> str:
        memory = "memory unknown" if self.memory_bytes is None else _gib(self.memory_bytes)
        distances = ",".join(map(str, self.distances)) or "unknown"
        return f"node {self.number}: cpus {self.cpus or 'none'}, {memory}, distances {distances}"


@dataclass(frozen=True)
class Gpu:
    """One GPU. `pcie_generation` is the highest that card and slot can do: at rest it is lower.

    `pcie_width` is in use now, `pcie_max_width` what could be: fewer lanes are a fault.
    """

    index: int
    name: str
    uuid: str
    bus_id: str
    numa_node: int | None
    pcie_generation: int | None
    pcie_width: int | None
    pcie_max_width: int | None

    def __str__(self) -> str:
        return f"gpu{self.index}: {node_text(self.numa_node)}, {self.pcie}"

    @property
    def pcie(self) -> str:
        """The link to the host, as a text."""
        if self.pcie_generation is None or self.pcie_width is None:
            return "PCIe unknown"
        of = f" of x{self.pcie_max_width}" if self.is_degraded else ""
        return f"PCIe {self.pcie_generation} x{self.pcie_width}{of}"

    @property
    def is_degraded(self) -> bool:
        """Whether fewer lanes are in use than there are."""
        return bool(self.pcie_width and self.pcie_max_width) and (
            self.pcie_width != self.pcie_max_width
        )


@dataclass(frozen=True)
class Link:
    """How two devices reach each other: one of PATHS, or NV and a number."""

    a: str
    b: str
    path: str

    def __str__(self) -> str:
        return f"{self.a}-{self.b} {self.path}"


@dataclass(frozen=True)
class Nic:
    """A network card that is up. `rdma` are its RDMA devices."""

    name: str
    speed_bits_per_s: int | None
    numa_node: int | None
    driver: str
    rdma: tuple[str, ...] = ()

    def __str__(self) -> str:
        parts = [self.speed, node_text(self.numa_node), self.driver or "driver unknown"]
        return f"{self.name}: {', '.join([*parts, *self.rdma])}"

    @property
    def speed(self) -> str:
        """The speed as a text; virtual cards have none."""
        if self.speed_bits_per_s is None:
            return "speed unknown"
        return f"{self.speed_bits_per_s / 1e9:g} Gb/s"


@dataclass(frozen=True)
class Placement:
    """Where some processes may run and take memory from; lists in the kernel's format.

    `numa_nodes` are the nodes of those CPUs. `processes` counts those that are placed so.
    """

    cpus: str
    memory_nodes: str
    numa_nodes: str
    processes: int = 1

    def __str__(self) -> str:
        on = f" (nodes {self.numa_nodes})" if self.numa_nodes else ""
        return f"cpus {self.cpus}{on}, memory of nodes {self.memory_nodes}"


@dataclass(frozen=True)
class Topology:
    """One machine as a process saw it. None is unknown, and `not_available` says why."""

    numa: tuple[NumaNode, ...] | None = None
    gpus: tuple[Gpu, ...] | None = None
    links: tuple[Link, ...] | None = None
    nics: tuple[Nic, ...] | None = None
    placement: tuple[Placement, ...] | None = None
    container: str | None = None
    not_available: Mapping[str, str] = field(default_factory=dict)

    def facts(self) -> dict[str, Value]:
        """Return the manifest's `topology.*` fields."""
        return {
            "topology.numa": _texts(self.numa),
            "topology.gpus": _texts(self.gpus),
            "topology.links": _texts(self.links),
            "topology.nics": _texts(self.nics),
            "topology.placement": _texts(self.placement),
            "topology.container": self.container,
        }


def edge_lines(values: Mapping[str, Value]) -> dict[str, str]:
    """Return a line about each edge of schema/edges.py that a manifest's topology tells of.

    An edge whose topology is unknown is absent.
    """
    numa, gpus = _known(values, "topology.numa"), _known(values, "topology.gpus")
    lines = {
        "device_memory": _memory_line(values, numa, gpus),
        "host_device": "; ".join(gpus) if gpus else None,
        "scale_up": _links_line(values),
        "network": _joined(_known(values, "topology.nics"), "no network card seen"),
    }
    return {edge: line for edge, line in lines.items() if line}


def numbers(text: str) -> tuple[int, ...]:
    """Return the numbers of the kernel's list format: 0-2,8 is 0, 1, 2, 8. Raises ValueError."""
    found: set[int] = set()
    for part in filter(None, text.strip().split(",")):
        first, dash, last = part.partition("-")
        several = range(int(first), int(last if dash else first) + 1)
        if not 0 < len(several) <= _MOST_NUMBERS - len(found):
            raise ValueError(f"no range, or more than {_MOST_NUMBERS} numbers: {part!r}")
        found.update(several)
    return tuple(sorted(found))


def nodes_of(cpus: str, nodes: Iterable[NumaNode]) -> str:
    """Return which NUMA nodes some CPUs are of, both in the kernel's list format."""
    wanted = set(numbers(cpus))
    return ranges(sorted(n.number for n in nodes if wanted.intersection(numbers(n.cpus))))


def node_text(number: int | None) -> str:
    """Return a node as a text; one CPU socket, and most virtual machines, tell none."""
    return "no NUMA node" if number is None else f"NUMA node {number}"


def grouped(links: Iterable[Link]) -> dict[str, list[Link]]:
    """Return links by their path, in order of first occurrence."""
    found: dict[str, list[Link]] = {}
    for link in links:
        found.setdefault(link.path, []).append(link)
    return found


def _memory_line(
    values: Mapping[str, Value], numa: list[str] | None, gpus: list[str] | None
) -> str | None:
    """Return where device memory is: on the GPUs, or where the process is placed."""
    if gpus:
        return f"{len(gpus)} GPUs, each with its own"
    placed = _joined(_known(values, "topology.placement"), "")
    if not numa:
        return placed or None
    return "; ".join(numa) + (f"; placed on {placed}" if placed else "")


def _links_line(values: Mapping[str, Value]) -> str | None:
    links, gpus = _known(values, "topology.links"), _known(values, "topology.gpus")
    if gpus == [] or (gpus is not None and len(gpus) == 1):
        return "no second GPU"
    if links is None:
        return None
    counts: dict[str, int] = {}
    for text in links:
        pair, _, path = text.rpartition(" ")
        if all(end.startswith("gpu") for end in pair.split("-", 1)):
            counts[path] = counts.get(path, 0) + 1
    texts = (f"{path} between {_pairs(count)}" for path, count in counts.items())
    return ", ".join(texts) or None


def _pairs(count: int) -> str:
    return "1 pair" if count == 1 else f"{count} pairs"


def _known(values: Mapping[str, Value], name: str) -> list[str] | None:
    value = values.get(name)
    return value if isinstance(value, list) else None


def _joined(texts: list[str] | None, none: str) -> str | None:
    return None if texts is None else "; ".join(texts) or none


def _texts(things: Iterable[object] | None) -> Value:
    return None if things is None else [str(thing) for thing in things]


def _gib(size_bytes: int) -> str:
    """Return a size so coarse that it is the same after each start of the machine."""
    return f"{size_bytes / 2**30:.0f} GiB"
