"""The hierarchy of data movement, declared once: where bytes can be, and over what they go.

The order is from the arithmetic outwards. On a machine whose engine computes on the CPU,
`device_memory` is DRAM and there is no `host_device` edge to cross.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Node:
    """A place that holds bytes. `capacity_metrics` name what is held there and how much fits."""

    name: str
    meaning: str
    capacity_metrics: tuple[str, ...] = ()


@dataclass(frozen=True)
class Edge:
    """A way between two nodes. `observable_by` says who can tell its bytes at all."""

    name: str
    source: str
    target: str
    meaning: str
    observable_by: str


NODES = (
    Node("compute", "registers and SRAM of the compute units"),
    Node(
        "device_memory",
        "HBM of the device; DRAM where the CPU computes",
        ("perfledger.capacity.memory", "perfledger.capacity.weights", "perfledger.capacity.kv"),
    ),
    Node("host_memory", "DRAM of the host, apart from the device's", ("perfledger.capacity.swap",)),
    Node("peer_device", "memory of another device of the same host or scale-up domain"),
    Node("other_host", "another machine"),
    Node("storage_local", "a file system of this host"),
    Node("storage_object", "an object store"),
)

EDGES = (
    Edge(
        "registers_sram",
        "compute",
        "compute",
        "between registers, SRAM and caches",
        "a profiler's import only",
    ),
    Edge(
        "device_memory",
        "device_memory",
        "compute",
        "what operators read and write: HBM, or DRAM behind the caches of a CPU",
        "model shapes and the batch (derived); GPM or DCGM (measured)",
    ),
    Edge(
        "host_device",
        "host_memory",
        "device_memory",
        "PCIe or C2C: copies and swapped KV",
        "copy spans; NVML's PCIe counters",
    ),
    Edge(
        "scale_up",
        "device_memory",
        "peer_device",
        "NVLink, xGMI or shared memory: collectives inside a host",
        "collective spans; NVML's NVLink counters",
    ),
    Edge(
        "network",
        "host_memory",
        "other_host",
        "NICs: collectives between hosts, requests, telemetry",
        "collective spans; the host sampler's NIC counters",
    ),
    Edge(
        "storage_local",
        "storage_local",
        "host_memory",
        "checkpoints, weights, the store",
        "checkpoint spans; the host sampler's disk counters",
    ),
    Edge(
        "storage_object",
        "storage_object",
        "host_memory",
        "checkpoints and the store on S3",
        "checkpoint spans",
    ),
)
EDGE: dict[str, Edge] = {edge.name: edge for edge in EDGES}
