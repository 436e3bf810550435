"""One machine's topology, put together. A part that cannot be read is unknown, with its reason."""

import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TypeVar

from perfledger.collectors.device.nvml_calls import Calls, NvmlFailure, NvmlLibrary
from perfledger.collectors.topology.gpu_topology import gpu_places
from perfledger.collectors.topology.host_topology import (
    nics,
    numa_node_of,
    numa_nodes,
    path_between,
    pci_chain,
)
from perfledger.collectors.topology.placement import container, placements
from perfledger.schema.topology import Gpu, Link, Nic, Topology

ROOT = Path("/")
NVIDIA_DRIVER = "proc/driver/nvidia/version"
T = TypeVar("T")


def read_topology(
    root: Path = ROOT, *, pid: int | None = None, nvml: Calls | None = None
) -> Topology:
    """Read /proc and /sys below `root`, and the placement of a process (on this machine, ours).

    `nvml` is asked for GPUs. By default that is the library, which is closed again, where the
    machine has an NVIDIA driver; without a driver there are none.
    """
    missing: dict[str, str] = {}
    process = os.getpid() if pid is None and root == ROOT else pid
    numa = _read("numa", lambda: numa_nodes(root), missing)
    cards = _read("nics", lambda: nics(root), missing)
    placed, kind = None, None
    if process is None:
        missing["placement"] = missing["container"] = "no process was named"
    else:
        placed = _read("placement", lambda: placements(root, process, numa or ()), missing)
        kind = _read("container", lambda: container(root, process), missing)
    gpus, links = _gpus_and_links(root, nvml, cards or (), missing)
    return Topology(
        numa=numa,
        gpus=gpus,
        links=links,
        nics=cards,
        placement=placed,
        container=kind,
        not_available=missing,
    )


def _read(part: str, read: Callable[[], T], missing: dict[str, str]) -> T | None:
    try:
        return read()
    except OSError as error:
        missing[part] = error.strerror or str(error)
    except ValueError as error:
        missing[part] = f"not understood: {error}"
    return None


def _gpus_and_links(
    root: Path, nvml: Calls | None, cards: Iterable[Nic], missing: dict[str, str]
) -> tuple[tuple[Gpu, ...] | None, tuple[Link, ...] | None]:
    if nvml is None and not (root / NVIDIA_DRIVER).exists():
        return (), ()
    calls = NvmlLibrary() if nvml is None else nvml
    try:
        places = gpu_places(calls, lambda bus_id: numa_node_of(_pci_device(root, bus_id)))
    except NvmlFailure as failure:
        missing["gpus"] = missing["links"] = f"NVML: {failure.name}"
        return None, None
    finally:
        if nvml is None:
            calls.close()
    missing.update(places.refused)
    if places.links is None:
        missing["links"] = "NVML does not tell the path between some GPUs"
        return places.gpus, None
    return places.gpus, (*places.links, *_links_to_cards(root, places.gpus, cards))


def _links_to_cards(root: Path, gpus: Iterable[Gpu], cards: Iterable[Nic]) -> Iterator[Link]:
    """Yield how each GPU reaches each network card: the nearer, the sooner they talk directly."""
    for gpu in gpus:
        chain = pci_chain(_pci_device(root, gpu.bus_id))
        for card in cards:
            nodes = (gpu.numa_node, card.numa_node)
            same_node = None if None in nodes else nodes[0] == nodes[1]
            path = path_between(chain, pci_chain(_card_device(root, card)), same_node)
            if path is not None:
                yield Link(f"gpu{gpu.index}", card.name, path)


def _pci_device(root: Path, bus_id: str) -> Path:
    return root / "sys/bus/pci/devices" / bus_id


def _card_device(root: Path, card: Nic) -> Path:
    interface = root / "sys/class/net" / card.name / "device"
    return interface if interface.exists() else root / "sys/class/infiniband" / card.name / "device"
