"""What each source says went over an edge: transfers seen one by one, and counters. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass

import polars as pl

from perfledger.analyzers.ceiling_choice import ChosenCeilings
from perfledger.analyzers.counter_growth import growth
from perfledger.analyzers.edges import MEASURED, Flow, Part
from perfledger.analyzers.engine_facts import Device, EngineFacts
from perfledger.analyzers.step_sums import StepSums, union_ns

LOOPBACK = "lo"
# Points that the lines are made of, and the attributes that tell their series apart.
POINT_NAMES = (
    "hw.gpu.io",
    "perfledger.gpu.memory.bandwidth.share",
    "perfledger.gpu.memory.bandwidth.limit",
    "perfledger.gpu.process.memory",
    "system.network.io",
    "system.disk.io",
    "system.disk.operations",
    "system.disk.operation_time",
    "system.disk.io_time",
    "system.cpu.time",
)
POINT_KEYS = (
    "hw.id",
    "perfledger.edge",
    "perfledger.device.source",
    "process.pid",
    "system.device",
    "disk.io.direction",
    "network.interface.name",
    "network.io.direction",
    "cpu.mode",
    "cpu.logical_number",
)
# Block devices made of others: what goes over them is counted there once more.
_STACKED = r"^(dm-|md)\d+$"


@dataclass(frozen=True)
class Seen:
    """All that the lines are made of. `window` is in wall ns; `points` are those of the hosts,
    with a column for each of POINT_KEYS; `neighbours` are services of the same hosts."""

    window: tuple[int, int]
    hosts: tuple[str, ...]
    steps: StepSums
    devices: Sequence[Device]
    facts: dict[int, EngineFacts]
    traffic: pl.DataFrame  # edge_traffic.TRAFFIC
    points: pl.DataFrame
    neighbours: frozenset[str]
    ceilings: ChosenCeilings

    @property
    def on_cpu(self) -> bool:
        """Whether all engines compute on the CPU."""
        return bool(self.devices) and all(device.is_cpu for device in self.devices)

    def of(self, *names: str) -> pl.DataFrame:
        """Return the points of some metrics."""
        return self.points.filter(pl.col("name").is_in(names))

    def grown(self, name: str, *keys: str) -> pl.DataFrame:
        """Return how far a counter grew in the window, by attributes."""
        return growth(self.of(name), ["boot_id", "instance", *keys], self.window)


def traffic_flow(seen: Seen, edge: str, provenance: str, told_by: str) -> Flow | None:
    """Return what the transfers that were seen one by one add up to; None without any."""
    rows = seen.traffic.filter((pl.col("edge") == edge) & pl.col("selected"))
    if rows.is_empty():
        return None
    forward = int(rows["forward_bytes"].sum())
    one_way = rows["backward_bytes"].null_count() == len(rows)
    backward = None if one_way else int(rows["backward_bytes"].sum())
    took_ns = union_ns(rows["start_ns"].to_numpy(), rows["end_ns"].to_numpy())
    unknown = rows["forward_bytes"].null_count()
    parts = rows.group_by("part").agg(
        pl.col("forward_bytes").sum(), pl.col("backward_bytes").sum(), pl.len()
    )
    notes = [f"{unknown} of unknown size are not in the bytes"] if unknown else []
    notes += ["what is sent is received once: counted once"] if one_way else []
    return _flow(
        told_by,
        provenance,
        (forward, backward),
        took_ns,
        seen.steps.tokens,
        transfers=len(rows),
        latency_ns=float((rows["end_ns"] - rows["start_ns"]).mean()),  # type: ignore[arg-type]
        parts=[
            Part(name, there, None if one_way else back, count)
            for name, there, back, count in parts.sort("part").iter_rows()
        ],
        note="; ".join(notes),
    )


def device_counters(seen: Seen, edge: str, told_by: str) -> Flow | None:
    keys = ("hw.id", "perfledger.edge", "perfledger.device.source", "network.io.direction")
    grown = seen.grown("hw.gpu.io", *keys).filter(pl.col("perfledger.edge") == edge)
    # The device's own counter is exact; GPM's is a rate added up.
    sources = grown["perfledger.device.source"].unique().to_list()
    if "counter" in sources:
        grown = grown.filter(pl.col("perfledger.device.source") == "counter")
    # A device receives what goes forward to it; over NVLink what it sends goes forward.
    forward = "receive" if edge == "host_device" else "transmit"
    return _counted(seen, grown, "hw.id", forward, told_by)


def interfaces(seen: Seen, edge: str, *, loopback: bool) -> Flow | None:
    keys = ("network.interface.name", "network.io.direction")
    grown = seen.grown("system.network.io", *keys)
    is_loopback = pl.col("network.interface.name") == LOOPBACK
    grown = _cards(seen, grown.filter(is_loopback if loopback else ~is_loopback))
    told_by = "counters of the loopback" if loopback else "counters of the host's interfaces"
    if loopback:  # what it sends it receives
        grown = grown.filter(pl.col("network.io.direction") == "transmit")
    return _counted(seen, grown, "network.interface.name", "transmit", told_by)


def _cards(seen: Seen, grown: pl.DataFrame) -> pl.DataFrame:
    """Leave out bridges and the like, which count a card's bytes again, where cards are known."""
    texts = seen.ceilings.topology.get("topology.nics")
    names = [text.partition(":")[0] for text in texts] if isinstance(texts, list) else []
    cards = grown.filter(pl.col("network.interface.name").is_in(names))
    return grown if cards.is_empty() else cards


def _counted(
    seen: Seen, grown: pl.DataFrame, device: str, forward: str, told_by: str
) -> Flow | None:
    """Return what counters with a direction say, a part for each device that moved anything."""
    if grown.is_empty():
        return None
    ahead = pl.col("network.io.direction") == forward
    per = (
        grown.group_by(device)
        .agg(
            pl.col("growth").filter(ahead).sum().alias("forward"),
            pl.col("growth").filter(~ahead).sum().alias("backward"),
            took_ns=(pl.col("to_ns") - pl.col("from_ns")).max(),
        )
        .sort(device)
    )
    used = per.filter(pl.col("forward") + pl.col("backward") > 0)
    moved = int(per["forward"].sum()), int(per["backward"].sum())
    parts = [
        Part(str(name), int(there), int(back), None)
        for name, there, back, _ in (used if len(used) else per).iter_rows()
    ]
    return _flow(
        told_by,
        MEASURED,
        moved,
        int((used if len(used) else per)["took_ns"].sum()),
        seen.steps.tokens,
        devices=max(1, len(used)),
        parts=parts,
        note="of all processes, over the whole window",
    )


def disks_flow(seen: Seen) -> Flow | None:
    """Return what the disks' counters say; a disk is active while it has any operation."""
    keys = ("system.device", "disk.io.direction")
    moved = seen.grown("system.disk.io", *keys)
    if moved.is_empty():
        return None
    moved = moved.filter(pl.col("growth") > 0)
    disks = moved.filter(~pl.col("system.device").str.contains(_STACKED))
    moved = moved if disks.is_empty() else disks
    ours = pl.col("system.device").is_in(moved["system.device"].unique().implode())
    reads = pl.col("disk.io.direction") == "read"
    busy = seen.grown("system.disk.io_time", "system.device")
    count, took_s = (
        float(seen.grown(f"system.disk.{name}", *keys).filter(ours)["growth"].sum())
        for name in ("operations", "operation_time")
    )
    per = moved.group_by("system.device").agg(
        pl.col("growth").filter(reads).sum().alias("read"),
        pl.col("growth").filter(~reads).sum().alias("written"),
    )
    parts = [Part(n, int(r), int(w), None) for n, r, w in per.sort("system.device").iter_rows()]
    read, written = (int(per[way].sum()) for way in ("read", "written"))
    return _flow(
        "counters of the host's disks",
        MEASURED,
        (read, written),
        round(float(busy.filter(ours)["growth"].sum()) * 1e9),
        seen.steps.tokens,
        transfers=int(count),
        latency_ns=took_s * 1e9 / count if count else None,
        devices=max(1, len(parts)),
        parts=parts,
        note="of all processes; active while a disk had any operation",
    )


def _flow(
    told_by: str,
    provenance: str,
    moved: tuple[int, int | None],
    active_ns: int,
    tokens: int,
    *,
    transfers: int | None = None,
    latency_ns: float | None = None,
    devices: int = 1,
    parts: Sequence[Part] = (),
    note: str = "",
) -> Flow:
    forward, backward = moved
    size = forward + (backward or 0)
    return Flow(
        told_by,
        provenance,
        forward,
        backward,
        transfers,
        active_ns,
        size * 1e9 / active_ns if active_ns else None,
        transfers * 1e9 / active_ns if active_ns and transfers is not None else None,
        latency_ns,
        size / tokens if tokens else None,
        devices,
        tuple(parts),
        note,
    )
