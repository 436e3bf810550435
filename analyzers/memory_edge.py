"""The edge device_memory: what steps read and wrote, by operator class, and its roofline."""

from collections.abc import Iterable, Sequence
from dataclasses import replace

import numpy as np
import polars as pl

from perfledger.analyzers.ceiling_choice import ChosenCeilings
from perfledger.analyzers.edges import (
    DATASHEET,
    DERIVED,
    MEASURED,
    CeilingShare,
    Flow,
    Part,
)
from perfledger.analyzers.engine_facts import Device, EngineFacts, active_ns
from perfledger.analyzers.roofline import Roof, Roofline, Roofs, Work, roofline
from perfledger.analyzers.step_sums import KINDS, RankSums, StepSums, tokens_of
from perfledger.schema.ceilings import HOST, Ceiling, MatmulShape, size_text, text_size
from perfledger.schema.intervals import Coverage
from perfledger.schema.step_work import (
    CELL_COLUMNS,
    FLOP_COLUMNS,
    FLOPS_TOTAL,
    LAUNCHES,
    OPERATORS,
    READ_TOTAL,
    WRITTEN_TOTAL,
)

# A rate counts as one while busy where steps ran for so much of the sample's time.
BUSY_SHARE, FEWEST_BUSY = 0.9, 3


def operator_work(sums: Sequence[RankSums]) -> dict[str, tuple[int, int, int]]:
    """Return read bytes, written bytes and FLOPs of each operator class that did anything."""
    found = {}
    for operator in OPERATORS:
        read, written = (
            _total(sums, (CELL_COLUMNS[c] for c in CELL_COLUMNS if (c[0], c[2]) == (operator, way)))
            for way in ("read", "written")
        )
        flops = _total(sums, [FLOP_COLUMNS[operator]] if operator in FLOP_COLUMNS else [])
        if read or written or flops:
            found[operator] = read, written, flops
    return found


def derived_flow(steps: StepSums, devices: Sequence[Device]) -> Flow | None:
    """Return what the steps' shapes say that they moved; None where no step says it."""
    sums = [one for one in steps.sums if one.steps > one.without_work]
    if not sums:
        return None
    read, written = _total(sums, [READ_TOTAL]), _total(sums, [WRITTEN_TOTAL])
    count, time_ns = steps.steps, active_ns(steps, devices)
    parts = [Part(name, *work[:2], None) for name, work in operator_work(sums).items()]
    return Flow(
        told_by="shapes of the model and the batch, at each step",
        provenance=DERIVED,
        forward_bytes=read,
        backward_bytes=written,
        transfers=count,
        active_ns=time_ns,
        bytes_per_s=(read + written) * 1e9 / time_ns if time_ns else None,
        transfers_per_s=count * 1e9 / time_ns if time_ns else None,
        latency_ns=_mean_ns(steps, devices),
        bytes_per_token=(read + written) / steps.tokens if steps.tokens else None,
        devices=len(devices),
        parts=tuple(parts),
        note="what operators ask for; caches may have answered some of it. A transfer is a step",
    )


def _mean_ns(steps: StepSums, devices: Sequence[Device]) -> float | None:
    start, end = steps.intervals([rank for device in devices for rank in device.ranks])
    return float((end - start).mean()) if len(start) else None


def measured_flow(
    points: pl.DataFrame, steps: StepSums, devices: Sequence[Device], window: tuple[int, int]
) -> Flow | None:
    """Return what the devices' own bandwidth counters say (GPM); None without.

    `points` are those of `perfledger.gpu.memory.bandwidth.share` and `….limit`, by `hw.id`.
    """
    shares = points.filter(pl.col("name") == "perfledger.gpu.memory.bandwidth.share")
    limits = points.filter(pl.col("name") == "perfledger.gpu.memory.bandwidth.limit")
    peaks = limits.sort("time_ns").group_by("hw.id").agg(peak=pl.col("value").last())
    rows = shares.join(peaks, on="hw.id").unique(["hw.id", "time_ns"]).sort("hw.id", "time_ns")
    rows = rows.with_columns(
        began_ns=pl.col("time_ns").shift().over("hw.id"), rate=pl.col("value") * pl.col("peak")
    ).filter((pl.col("began_ns") >= window[0]) & (pl.col("time_ns") <= window[1]))
    if rows.is_empty():
        return None
    took_ns = (rows["time_ns"] - rows["began_ns"]).to_numpy()
    moved = rows["rate"].to_numpy() * took_ns / 1e9
    start, end = steps.intervals([rank for device in devices for rank in device.ranks])
    covered = Coverage.of(start, end).within(
        rows["began_ns"].to_numpy(), rows["time_ns"].to_numpy()
    )
    busy = covered >= BUSY_SHARE * took_ns
    chosen = busy if int(busy.sum()) >= FEWEST_BUSY else np.ones(len(busy), np.bool_)
    when = f"{int(busy.sum())} of {len(busy)} samples while steps ran"
    told = when if chosen is busy else f"over the whole window: only {when}"
    return Flow(
        told_by="the device's counters (GPM)",
        provenance=MEASURED,
        forward_bytes=round(float(moved.sum())),
        backward_bytes=None,
        transfers=None,
        active_ns=int(took_ns[chosen].sum()),
        bytes_per_s=float(moved[chosen].sum() * 1e9 / took_ns[chosen].sum()),
        transfers_per_s=None,
        latency_ns=None,
        bytes_per_token=float(moved.sum()) / steps.tokens if steps.tokens else None,
        devices=rows["hw.id"].n_unique(),
        parts=(),
        note=f"both ways together, of all processes; rate {told}",
    )


def memory_ceiling(
    flow: Flow, steps: StepSums, devices: Sequence[Device], ceilings: ChosenCeilings
) -> tuple[CeilingShare | None, str]:
    """Return the ceiling of the memory for what a step touches, or why there is none."""
    roof = _memory_roof(_works(steps, devices, None), ceilings)
    if roof is None:
        return None, ceilings.note or "the memory's bandwidth was not measured"
    share = flow.bytes_per_s / roof.value if flow.bytes_per_s is not None else None
    beyond = share is not None and share > 1 and flow.provenance == DERIVED
    note = "more than the memory can give: caches answered some of it" if beyond else ""
    operation, _, variant = roof.name.partition(" ")
    return CeilingShare(operation, variant, roof.value, roof.provenance, share, note), ""


def memory_roofline(
    steps: StepSums,
    devices: Sequence[Device],
    facts: dict[int, EngineFacts],
    ceilings: ChosenCeilings,
    traffic: pl.DataFrame,
) -> Roofline:
    """Return the roofline of each kind of step. `traffic` are rows of edge_traffic.TRAFFIC."""
    calls = traffic.filter((pl.col("kind") == "collective") & pl.col("selected"))
    dtypes = sorted({fact.weights for fact in facts.values()} - {""})
    pairs = []
    for kind in KINDS:
        if any(one.steps > one.without_work for one in steps.of(kind)):
            work = _works(steps, devices, kind)
            if len(calls):
                share = _collective_share(steps, devices, kind, calls)
                work = replace(work, collective_share=share)
            pairs.append((work, _roofs(work, dtypes, ceilings)))
    return roofline(pairs, _sheet_roofs(dtypes, ceilings))


def _collective_share(
    steps: StepSums, devices: Sequence[Device], kind: str, calls: pl.DataFrame
) -> float:
    """Return the share of the steps of a kind in which their rank was in a collective, waiting
    too: the mean over ranks, for while one waits another one computes."""
    inside_ns, running_ns = 0, 0
    for rank in (rank for device in devices for rank in device.ranks):
        mine = calls.filter(pl.col("rank") == str(steps.ranks[rank]))
        inside = Coverage.of(mine["called_ns"].to_numpy(), mine["end_ns"].to_numpy())
        running = Coverage.of(*steps.intervals([rank], kind))
        inside_ns += int(inside.within(running.start, running.end).sum())
        running_ns += running.length
    return inside_ns / running_ns if running_ns else 0.0


def _works(steps: StepSums, devices: Sequence[Device], kind: str | None) -> Work:
    sums = steps.of(kind)
    return Work(
        step_kind=kind or "all",
        steps=sum(one.steps for one in sums),
        tokens=tokens_of(steps, sums),
        time_ns=active_ns(steps, devices, kind),
        read_bytes=_total(sums, [READ_TOTAL]),
        written_bytes=_total(sums, [WRITTEN_TOTAL]),
        flops=_total(sums, [FLOPS_TOTAL]),
        launches=_total(sums, [LAUNCHES]),
        operators=operator_work(sums),
    )


def _roofs(work: Work, dtypes: list[str], ceilings: ChosenCeilings) -> Roofs:
    compute = _compute_roof(work, dtypes, ceilings) if len(dtypes) == 1 else None
    launch_ns = None
    if ceilings.measured is not None:
        costs = [item.value for item in ceilings.measured.of(HOST, "launch")]
        launch_ns = min(costs, default=None)
    step_ns = _step_ns(_rows(work), ceilings)
    return Roofs(_memory_roof(work, ceilings), compute, launch_ns, step_ns)


def _rows(work: Work) -> int:
    return max(1, round(work.tokens / work.steps)) if work.steps else 1


def _step_ns(rows: int, ceilings: ChosenCeilings) -> float:
    """Return what the host does for a step beside its operators, at the rows measured nearest."""
    found = ceilings.measured.of(HOST, "step") if ceilings.measured is not None else ()
    told = {int(item.variant.removeprefix("rows=")): item.value for item in found}
    return told[min(told, key=lambda m: abs(np.log(m / rows)))] if told else 0.0


def _memory_roof(work: Work, ceilings: ChosenCeilings) -> Roof | None:
    """Return the bandwidth for as many bytes as a step touches on one device."""
    measured = ceilings.measured
    if measured is not None and work.steps:
        touched = max(1, work.read_bytes // work.steps)
        copies = work.written_bytes * 2 > work.read_bytes
        for operation in ("copy", "read") if copies else ("read", "copy"):
            if value := measured.bandwidth(operation, touched):
                return Roof(f"{operation} {_near(touched)}", "memory", value, MEASURED)
    if ceilings.peak is not None:
        return Roof("datasheet memory", "memory", ceilings.peak.memory_bytes_per_s, DATASHEET)
    return None


def _near(size: int) -> str:
    """Return a size to two digits or so, in a unit that people read."""
    for unit, scale in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if size >= scale:
            return f"{size / scale:.3g}{unit}"
    return size_text(size)


def _compute_roof(work: Work, dtypes: list[str], ceilings: ChosenCeilings) -> Roof | None:
    """Return the matrix rate of the dtype at the number of rows nearest the steps' own."""
    rows = _rows(work)
    if ceilings.measured is not None:
        found = [
            (MatmulShape.parse(item.variant), item)
            for item in ceilings.measured.of("registers_sram", "matmul")
        ]
        mine = [(shape, item) for shape, item in found if shape.dtype in dtypes]
        if mine:
            m = min((shape.m for shape, _ in mine), key=lambda m: abs(np.log(m / rows)))
            best = max((i for s, i in mine if s.m == m), key=lambda item: item.value)
            return Roof(f"matmul {dtypes[0]} m={m}", "compute", best.value, MEASURED)
    return next((r for r in _sheet_roofs(dtypes, ceilings) if r.kind == "compute"), None)


def _sheet_roofs(dtypes: list[str], ceilings: ChosenCeilings) -> list[Roof]:
    """Return what the device's datasheet promises; nothing for a device that no sheet here has."""
    peak = ceilings.peak
    if peak is None:
        return []
    rates = [(dtype, peak.flops.get(dtype)) for dtype in dtypes]
    compute = [
        Roof(f"datasheet {dtype}", "compute", rate, DATASHEET)
        for dtype, rate in rates
        if rate is not None
    ]
    return [Roof("datasheet memory", "memory", peak.memory_bytes_per_s, DATASHEET), *compute]


def latency_floor_ns(items: Sequence[Ceiling]) -> float | None:
    """Return the latency of an access to the largest set measured (ns)."""
    if not items:
        return None
    return max(items, key=lambda item: text_size(item.variant)).value


def _total(sums: Sequence[RankSums], columns: Iterable[str]) -> int:
    names = list(columns)
    return sum(one.work[name] for one in sums for name in names)
