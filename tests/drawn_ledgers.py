"""Ledgers to draw: a busy one with every kind of line in it, and one that knows nothing."""

from dataclasses import replace

from perfledger.analyzers.contention import Contender
from perfledger.analyzers.edges import (
    DATASHEET,
    DERIVED,
    MEASURED,
    NOT_OBSERVABLE,
    CeilingShare,
    CeilingSource,
    EdgeLedger,
    EdgeLine,
    Flow,
    Held,
    Nearest,
    NodeLine,
    Part,
)
from perfledger.analyzers.roofline import (
    ALL,
    COMPUTE,
    LAUNCH,
    MEMORY,
    UNDECIDED,
    Point,
    Roof,
    Roofline,
)
from perfledger.schema.edges import EDGES, NODES

OPERATORS = ("embedding", "norm", "linear", "attention", "moe", "elementwise", "sampling")
# FLOPs a byte of one operator class; embedding only moves bytes.
INTENSITY = {
    "embedding": 0.0,
    "norm": 0.25,
    "linear": 0.5,
    "attention": 0.45,
    "moe": 0.5,
    "elementwise": 0.12,
    "sampling": 0.25,
}
GROWTH = {"decode": 1.0, "mixed": 8.0, "prefill": 120.0}  # of linear layers, by rows at once
MEMORY_ROOF = Roof("read, 256 MiB working set", MEMORY, 19.5e9, MEASURED)
COMPUTE_ROOF = Roof("matmul float32 m=512 k=1024 n=3072", COMPUTE, 98.2e9, MEASURED)
SHEET_MEMORY = Roof("DDR5-4800, two channels", MEMORY, 76.8e9, DATASHEET)
SHEET_COMPUTE = Roof("AVX2 FMA at 3.1 GHz, two cores", COMPUTE, 198.4e9, DATASHEET)


def unobserved(name: str) -> EdgeLine:
    """Return an edge that nobody can tell."""
    edge = next(edge for edge in EDGES if edge.name == name)
    return EdgeLine(
        name,
        edge.source,
        edge.target,
        *edge.ways,
        provenance=NOT_OBSERVABLE,
        why=f"nobody tells of it here: {edge.meaning}",
        flows=(),
        ceiling=None,
        no_ceiling="nothing to hold against one",
        latency_floor_ns=None,
        contenders=(),
        contention="",
        topology="",
    )


def flowing(name: str, provenance: str, told_by: str, forward: int, backward: int) -> EdgeLine:
    """Return an edge with one flow of `forward` and `backward` bytes in 40 s."""
    flow = Flow(
        told_by=told_by,
        provenance=provenance,
        forward_bytes=forward,
        backward_bytes=backward,
        transfers=8_124,
        active_ns=40_000_000_000,
        bytes_per_s=(forward + backward) / 40,
        transfers_per_s=203.1,
        latency_ns=1_234_567.0,
        bytes_per_token=(forward + backward) / 52_000,
        devices=1,
        parts=(Part("linear", forward, backward, None),),
        note="",
    )
    return replace(unobserved(name), provenance=provenance, why="", flows=(flow,))


def ceiling(share: float | None, bytes_per_s: float, provenance: str = MEASURED) -> CeilingShare:
    """Return a ceiling that was reached to `share`."""
    return CeilingShare("read", "256 MiB working set", bytes_per_s, provenance, share, "")


def busy() -> EdgeLedger:
    """Return a ledger in which every edge, node and operator class has something to say."""
    memory = replace(
        flowing("device_memory", DERIVED, "model shapes and the batch", 492_000 * 10**6, 9 * 10**9),
        ceiling=ceiling(0.643, 19.5e9),
        contenders=(
            Contender("telemetry-collector (pid 4711)", "process", 12 * 10**9, 0.31, 10**9, ""),
            Contender("replica 1, rank 0", "rank", 40 * 10**9, 0.99, None, ""),
            Contender("another", "service", None, None, None, "seen, not measured"),
        ),
        latency_floor_ns=96.4,
        topology="NUMA node 0; 2 of 2 cores",
    )
    scale_up = replace(
        flowing("scale_up", MEASURED, "collective spans", 81 * 10**9, 81 * 10**9),
        ceiling=replace(ceiling(0.042, 450e9, DATASHEET), operation="NVLink", variant="one way"),
        contention="no counter tells who else uses it",
    )
    host_device = replace(
        flowing("host_device", MEASURED, "copy spans", 3 * 10**9, 0),
        no_ceiling="no device was there when the ceilings were measured",
    )
    network = replace(
        flowing("network", MEASURED, "the host sampler's NIC counters", 12_345_678, 1_234),
        ceiling=replace(ceiling(None, 1.25e9), note="the window holds other traffic too"),
    )
    disk = replace(
        flowing("storage_local", MEASURED, "disk counters", 0, 734 * 10**6),
        ceiling=replace(ceiling(1.18, 520e6), operation="write", variant="fsync"),
    )
    return EdgeLedger(
        selection="run demo-1a2b3c4d",
        from_ns=0,
        to_ns=60 * 10**9,
        steps=8_124,
        steps_without_work=24,
        tokens=52_000,
        nodes=_nodes(),
        edges=(
            unobserved("registers_sram"),
            memory,
            host_device,
            scale_up,
            network,
            disk,
            unobserved("storage_object"),
        ),
        nearest=Nearest("device_memory", 0.643, "likely", "derived bytes, measured ceiling"),
        unranked=("storage_object: not observable",),
        roofline=crowded(),
        ceilings=CeilingSource(MEASURED, "host-a", 0, "measured 2 hours before"),
        losses=("3 spans were dropped on the way",),
    )


def unknown() -> EdgeLedger:
    """Return a ledger of telemetry that tells nothing of bytes."""
    return EdgeLedger(
        selection="all requests",
        from_ns=0,
        to_ns=10**9,
        steps=0,
        steps_without_work=0,
        tokens=0,
        nodes=tuple(
            NodeLine(node.name, node.meaning, None, (), NOT_OBSERVABLE, "nobody told it")
            for node in NODES
        ),
        edges=tuple(unobserved(edge.name) for edge in EDGES),
        nearest=None,
        unranked=tuple(f"{edge.name}: not observable" for edge in EDGES),
        roofline=Roofline((), (), "no step says its bytes and FLOPs"),
        ceilings=CeilingSource(NOT_OBSERVABLE, "", None, "run `perfledger ceilings`"),
        losses=(),
    )


def crowded() -> Roofline:
    """Return a plot with every step kind and operator class, many of them in one place."""
    points = tuple(
        point(kind, operator) for kind in (*GROWTH, ALL) for operator in (ALL, *OPERATORS)
    )
    roofs = (MEMORY_ROOF, COMPUTE_ROOF, SHEET_MEMORY, SHEET_COMPUTE)
    return Roofline(points, roofs, "")


def point(step_kind: str, operator: str) -> Point:
    """Return a point of plausible numbers."""
    growth = GROWTH.get(step_kind, 4.0)
    grows = operator in ("linear", "moe", ALL)
    intensity = INTENSITY.get(operator, 0.48) * (growth if grows else 1.0)
    best = min(COMPUTE_ROOF.value, intensity * MEMORY_ROOF.value)
    whole = operator == ALL
    bound = {"decode": MEMORY, "prefill": COMPUTE, "mixed": LAUNCH}.get(step_kind, UNDECIDED)
    return Point(
        step_kind=step_kind,
        operator=operator,
        steps=8_100,
        tokens=52_000,
        read_bytes=10**9,
        written_bytes=0,
        flops=int(intensity * 10**9),
        intensity=intensity,
        time_ns=10**9 if whole else None,
        flops_per_s=best * 0.6 if whole else None,
        bytes_per_s=12e9 if whole else None,
        attainable_flops_per_s=best,
        memory_roof=MEMORY_ROOF.name,
        compute_roof=COMPUTE_ROOF.name,
        memory_share=0.6 if whole else None,
        compute_share=0.1 if whole else None,
        launch_share=0.1 if whole else None,
        bound=bound if whole else UNDECIDED,
        why="" if whole else "its own time is not observed",
    )


def _nodes() -> tuple[NodeLine, ...]:
    known = {
        "device_memory": (
            8_000_000_000,
            (
                Held("weights", 1_234_000_000),
                Held("kv", 512_000_000),
                Held("activations", 64_000_000),
            ),
            MEASURED,
        ),
        "host_memory": (16_000_000_000, (Held("swap", 256_000_000),), MEASURED),
        "storage_local": (None, (Held("store", 73_000_000),), MEASURED),
    }
    nodes = []
    for node in NODES:
        limit, held, provenance = known.get(node.name, (None, (), NOT_OBSERVABLE))
        why = "" if held else "nobody told it"
        nodes.append(NodeLine(node.name, node.meaning, limit, held, provenance, why))
    return tuple(nodes)
