"""NUMA nodes and network cards, from /sys below a root; a captured tree stands in for a machine.

Kernel documentation: ABI/stable/sysfs-devices-node, ABI/testing/sysfs-class-net,
ABI/stable/sysfs-class-infiniband.
"""

import os
import re
from collections.abc import Iterator
from pathlib import Path

from perfledger.schema.topology import Nic, NumaNode

LARGEST_FILE_BYTES = 65_536
MOST_NODES = 1024
MOST_NICS = 256
_HOST_BRIDGE = re.compile(r"pci[0-9a-f]{4,8}:[0-9a-f]{2}")
_UP = frozenset({"up", "unknown"})  # drivers that do not tell say unknown


def numa_nodes(root: Path) -> tuple[NumaNode, ...]:
    """Return the nodes of the machine, by number. Raises OSError where the kernel shows none."""
    folder = root / "sys/devices/system/node"
    names = [name[4:] for name in os.listdir(folder) if name.startswith("node")]
    numbers = sorted(int(name) for name in names if name.isdigit())
    return tuple(_numa_node(folder / f"node{number}", number) for number in numbers[:MOST_NODES])


def nics(root: Path) -> tuple[Nic, ...]:
    """Return the network cards that are up, by name; virtual interfaces are left out.

    An RDMA device without an interface of its own stands under its own name.
    Raises OSError where there are no interfaces to see.
    """
    found = list(_interfaces(root / "sys/class/net"))[:MOST_NICS]
    known = {name for nic in found for name in nic.rdma}
    alone = (nic for nic in _rdma_devices(root / "sys/class/infiniband") if nic.name not in known)
    return tuple(found + list(alone)[: MOST_NICS - len(found)])


def pci_chain(device: Path) -> tuple[str, ...]:
    """Return the bridges from the host to a device, and itself; nothing where it is on no PCI bus.

    `device` is its link in /sys: /sys/class/net/eth0/device, /sys/bus/pci/devices/0000:1b:00.0.
    """
    parts = os.path.realpath(device).split("/")
    starts = [at for at, part in enumerate(parts) if _HOST_BRIDGE.fullmatch(part)]
    return tuple(part for part in parts[starts[-1] :] if ":" in part) if starts else ()


def path_between(a: tuple[str, ...], b: tuple[str, ...], same_node: bool | None) -> str | None:
    """Return how two PCI devices reach each other, one of PATHS; None where that is not known.

    The ports of one switch hang below its upstream port, so two devices on it differ in their last
    two parts at most. Whether two host bridges are of one NUMA node only the nodes can tell.
    """
    if not a or not b:
        return None
    common = len(os.path.commonprefix([list(a), list(b)]))
    if common == 0:
        return None if same_node is None else ("NODE" if same_node else "SYS")
    if common == 1:
        return "PHB"
    return "PIX" if max(len(a), len(b)) - common <= 2 else "PXB"


def numa_node_of(device: Path) -> int | None:
    """Return the NUMA node of a device or of the nearest bridge above that tells one."""
    here = Path(os.path.realpath(device))
    for folder in (here, *here.parents):
        if folder.name in ("devices", ""):
            return None
        text = read_text(folder / "numa_node")
        if text is not None:
            node = _integer(text)
            return None if node is None or node < 0 else node
    return None


def read_text(path: Path) -> str | None:
    """Return a small file's text, or None where it cannot be read."""
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.read(LARGEST_FILE_BYTES).strip()
    except OSError:
        return None


def _numa_node(folder: Path, number: int) -> NumaNode:
    distances = [_integer(word) for word in (read_text(folder / "distance") or "").split()]
    return NumaNode(
        number=number,
        cpus=read_text(folder / "cpulist") or "",
        memory_bytes=_memory_bytes(read_text(folder / "meminfo") or ""),
        distances=tuple(distance for distance in distances if distance is not None),
    )


def _memory_bytes(meminfo: str) -> int | None:
    """Return MemTotal of a line `Node 0 MemTotal:  16384 kB`."""
    for line in meminfo.splitlines():
        words = line.split()
        if len(words) >= 4 and words[2] == "MemTotal:":
            kib = _integer(words[3])
            return None if kib is None else kib * 1024
    return None


def _interfaces(folder: Path) -> Iterator[Nic]:
    for name in sorted(os.listdir(folder)):
        interface, device = folder / name, folder / name / "device"
        if not device.exists() or read_text(interface / "operstate") not in _UP:
            continue
        rdma = tuple(_names(device / "infiniband"))
        speed = _integer(read_text(interface / "speed") or "")
        yield Nic(
            name=name,
            # -1, or 2^32 - 1 of older drivers: not known
            speed_bits_per_s=speed * 10**6 if speed and 0 < speed < 2**31 else _rate(device, rdma),
            numa_node=numa_node_of(device),
            driver=_driver(device),
            rdma=rdma,
        )


def _rdma_devices(folder: Path) -> Iterator[Nic]:
    for name in _names(folder):
        device = folder / name / "device"
        ports = folder / name / "ports"
        states = [read_text(ports / port / "state") or "" for port in _names(ports)]
        if any("ACTIVE" in state for state in states):
            node = numa_node_of(device)
            yield Nic(name, _rate(device, (name,), folder), node, _driver(device), (name,))


def _rate(device: Path, rdma: tuple[str, ...], folder: Path | None = None) -> int | None:
    """Return the speed of a card's first RDMA port: `400 Gb/sec (4X NDR)`."""
    for name in rdma:
        ports = (folder or device / "infiniband") / name / "ports"
        for port in _names(ports):
            gigabits, _, rest = (read_text(ports / port / "rate") or "").partition(" ")
            try:
                return round(float(gigabits) * 1e9) if rest.startswith("Gb/sec") else None
            except ValueError:
                return None
    return None


def _driver(device: Path) -> str:
    link = device / "driver"
    return os.path.basename(os.path.realpath(link)) if link.exists() else ""


def _names(folder: Path) -> list[str]:
    try:
        return sorted(os.listdir(folder))
    except OSError:
        return []


def _integer(text: str) -> int | None:
    try:
        return int(text)
    except ValueError:
        return None
