"""The hierarchy of data movement, declared once: where bytes can be, and over what they go.

The order is from the arithmetic outwards. On a machine whose engine computes on the CPU,
`device_memory` is DRAM and there is no `host_device` edge to cross.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Node:
    """A place that holds bytes."""

    name: str
    meaning: str


@dataclass(frozen=True)
class Edge:
    """A way between two nodes. `ways` are what its bytes are called there and back."""

    name: str
    source: str
    target: str
    meaning: str
    ways: tuple[str, str]


NODES = (
    Node("compute", "registers and SRAM of the compute units"),
    Node("device_memory", "HBM of the device; DRAM where the CPU computes"),
    Node("host_memory", "DRAM of the host, apart from the device's"),
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
        ("read", "written"),
    ),
    Edge(
        "device_memory",
        "device_memory",
        "compute",
        "what operators read and write: HBM, or DRAM behind the caches of a CPU",
        ("read", "written"),
    ),
    Edge(
        "host_device",
        "host_memory",
        "device_memory",
        "PCIe or C2C: copies and swapped KV",
        ("to device", "to host"),
    ),
    Edge(
        "scale_up",
        "device_memory",
        "peer_device",
        "NVLink, xGMI or shared memory: collectives inside a host",
        ("sent", "received"),
    ),
    Edge(
        "network",
        "host_memory",
        "other_host",
        "NICs: collectives between hosts, requests, telemetry",
        ("sent", "received"),
    ),
    Edge(
        "storage_local",
        "storage_local",
        "host_memory",
        "checkpoints, weights, the store",
        ("read", "written"),
    ),
    Edge(
        "storage_object",
        "storage_object",
        "host_memory",
        "checkpoints and the store on S3",
        ("read", "written"),
    ),
)
EDGE: dict[str, Edge] = {edge.name: edge for edge in EDGES}
