"""Trees of /proc and /sys and sessions of NVML for the tests of topology.

Synthetic: written by hand in the kernel's and NVML's documented forms, not recorded.
"""

import json
import os
from collections.abc import Mapping
from pathlib import Path

from perfledger.collectors.device.nvml_recording import FORMAT, Replay, read_recording

GIB = 2**30
SERVER, ENGINE = 4711, 4712

# Two sockets; a PCIe switch with a GPU and a card below each, and a card on the second's bridge.
DEVICES = {
    "0000:18:00.0": ("pci0000:15/0000:15:01.0/0000:16:00.0/0000:17:00.0", 0),
    "0000:19:00.0": ("pci0000:15/0000:15:01.0/0000:16:00.0/0000:17:01.0", 0),
    "0000:9a:00.0": ("pci0000:97/0000:97:01.0/0000:98:00.0/0000:99:00.0", 1),
    "0000:a1:00.0": ("pci0000:97/0000:97:05.0", 1),
}


def two_sockets(root: Path, *, driver: bool = True) -> Path:
    """Make a machine: two NUMA nodes, GPUs at 18: and 9a:, an RDMA card, an Ethernet card."""
    for number, cpus in ((0, "0-31,64-95"), (1, "32-63,96-127")):
        node = f"sys/devices/system/node/node{number}"
        write(root, f"{node}/cpulist", cpus)
        write(root, f"{node}/distance", ("10 21", "21 10")[number])
        write(root, f"{node}/meminfo", f"Node {number} MemTotal:       {252 * 2**20} kB\n")
    for bus_id, (bridges, numa_node) in DEVICES.items():
        device = f"sys/devices/{bridges}/{bus_id}"
        write(root, f"{device}/numa_node", str(numa_node))
        link(root, f"sys/bus/pci/devices/{bus_id}", device)
    card(root, "ib0", "0000:19:00.0", "mlx5_core", speed=None, rdma="mlx5_0")
    card(root, "eno1", "0000:a1:00.0", "ice", speed="25000")
    write(root, "sys/devices/virtual/net/lo/operstate", "unknown")
    link(root, "sys/class/net/lo", "sys/devices/virtual/net/lo")
    process(root, SERVER, parent=1, cpus="0-31", memory="0-1023")
    process(root, ENGINE, parent=SERVER, cpus="0-15,32-47", memory="0-1023")
    process(root, 1, parent=0, cpus="0-127", memory="0-1023")
    if driver:
        write(root, "proc/driver/nvidia/version", "NVRM version: NVIDIA UNIX Open Kernel Module")
    return root


def card(
    root: Path, name: str, bus_id: str, driver: str, *, speed: str | None, rdma: str = ""
) -> None:
    """Make a network card that is up; its RDMA port does 400 Gb/s."""
    device = f"sys/devices/{DEVICES[bus_id][0]}/{bus_id}"
    interface = f"{device}/net/{name}"
    write(root, f"{interface}/operstate", "up")
    if speed is not None:
        write(root, f"{interface}/speed", speed)
    link(root, f"{interface}/device", device)
    link(root, f"sys/class/net/{name}", interface)
    (root / "sys/bus/pci/drivers" / driver).mkdir(parents=True)
    link(root, f"{device}/driver", f"sys/bus/pci/drivers/{driver}")
    if rdma:
        write(root, f"{device}/infiniband/{rdma}/ports/1/rate", "400 Gb/sec (4X NDR)")
        write(root, f"{device}/infiniband/{rdma}/ports/1/state", "4: ACTIVE")
        link(root, f"{device}/infiniband/{rdma}/device", device)
        link(root, f"sys/class/infiniband/{rdma}", f"{device}/infiniband/{rdma}")


def process(root: Path, pid: int, *, parent: int, cpus: str, memory: str) -> None:
    """Make a process, in a pod of Kubernetes."""
    rest = f"S {parent} " + " ".join("0" for _ in range(30))
    write(root, f"proc/{pid}/stat", f"{pid} (engine) {rest}")
    allowed = f"Cpus_allowed_list:\t{cpus}\nMems_allowed_list:\t{memory}\n"
    write(root, f"proc/{pid}/status", f"Name:\tengine\nPid:\t{pid}\n{allowed}")
    write(root, f"proc/{pid}/cgroup", "0::/kubepods.slice/kubepods-pod1.slice/cri-1.scope\n")


def write(root: Path, name: str, content: str) -> None:
    """Write a file and the folders above it."""
    path = root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(content if content.endswith("\n") else content + "\n")


def link(root: Path, name: str, target: str) -> None:
    """Make a relative link, as the kernel does."""
    path = root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.symlink_to(os.path.relpath(root / target, path.parent))


Answers = Mapping[tuple[str | int, ...], object]


def gpus(*bus_ids: str, width: int = 16) -> dict[tuple[str | int, ...], object]:
    """Return NVML's answers about GPUs: 16 lanes of PCIe 5 each, `width` of them in use."""
    found: dict[tuple[str | int, ...], object] = {
        ("nvmlInit",): None,
        ("nvmlDeviceGetCount",): len(bus_ids),
    }
    for index, bus_id in enumerate(bus_ids):
        for function, value in (
            ("HandleByIndex", None),
            ("PciInfo", f"0000{bus_id.upper()}"),
            ("Name", "NVIDIA H100 80GB HBM3"),
            ("UUID", f"GPU-{index}"),
            ("MaxPcieLinkGeneration", 5),
            ("CurrPcieLinkWidth", width),
            ("MaxPcieLinkWidth", 16),
        ):
            found[f"nvmlDeviceGet{function}", index] = value
    return found


def session(folder: Path, answers: Answers, errors: Mapping[tuple[str | int, ...], int]) -> Path:
    """Write a synthetic session in the recorder's format; what is in neither is not there."""
    lines: list[dict[str, object]] = [{"recording": FORMAT, "synthetic": True, "note": "by hand"}]
    for (function, *arguments), value in answers.items():
        lines.append({"call": function, "args": arguments, "value": value})
    for (function, *arguments), code in errors.items():
        lines.append({"call": function, "args": arguments, "error": code})
    path = folder / "nvml.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def replay(
    folder: Path, answers: Answers, errors: Mapping[tuple[str | int, ...], int] | None = None
) -> Replay:
    """Return what answers as NVML would."""
    return Replay(read_recording(session(folder, answers, errors or {})))
