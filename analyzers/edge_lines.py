"""A line of the ledger for each edge: what tells of it, its ceiling, and who contends. Pure."""

from collections.abc import Sequence
from dataclasses import replace

import polars as pl

from perfledger.analyzers.contention import Activity, Contender, contenders
from perfledger.analyzers.edge_ceilings import (
    NO_LINK_SPEED,
    bus_ceiling,
    link_ceiling,
    rate_ceiling,
)
from perfledger.analyzers.edge_flows import (
    Seen,
    device_counters,
    disks_flow,
    interfaces,
    traffic_flow,
)
from perfledger.analyzers.edges import (
    DERIVED,
    MEASURED,
    NOT_OBSERVABLE,
    CeilingShare,
    EdgeLine,
    Flow,
)
from perfledger.analyzers.memory_edge import (
    derived_flow,
    latency_floor_ns,
    measured_flow,
    memory_ceiling,
)
from perfledger.analyzers.step_sums import StepSums
from perfledger.schema import topology
from perfledger.schema.edges import EDGE

WHOLE_HOST = "counters are of the whole host: whose bytes they are, nobody tells"


def edge_lines(seen: Seen) -> tuple[EdgeLine, ...]:
    """Return a line for each edge of schema/edges.py, in its order."""
    lines = (
        _registers(),
        _device_memory(seen),
        _host_device(seen),
        _scale_up(seen),
        _network(seen),
        _storage_local(seen),
        _not_observable("storage_object", "no span or counter tells of an object store"),
    )
    links = topology.edge_lines(seen.ceilings.topology)
    return tuple(
        replace(line, topology="; ".join(filter(None, (line.topology, links.get(line.edge)))))
        for line in lines
    )


def _registers() -> EdgeLine:
    why = "only a profiler sees registers, SRAM and caches, and no profile is imported here"
    return _not_observable("registers_sram", why)


def _device_memory(seen: Seen) -> EdgeLine:
    measured = measured_flow(
        seen.of("perfledger.gpu.memory.bandwidth.share", "perfledger.gpu.memory.bandwidth.limit"),
        seen.steps,
        seen.devices,
        seen.window,
    )
    derived = derived_flow(seen.steps, seen.devices)
    flows = [flow for flow in (measured, derived) if flow]
    if not flows:
        why = (
            "the steps do not say what they moved: their engine does not tell its model's shape"
            if seen.steps.steps
            else "no engine step in this selection"
        )
        return _not_observable("device_memory", why)
    ceiling, no_ceiling = memory_ceiling(flows[0], seen.steps, seen.devices, seen.ceilings)
    line = _line("device_memory", flows, ceiling, no_ceiling)
    who, unknown = _memory_contenders(seen)
    names = ", ".join(device.name for device in seen.devices[:4])
    count = sum(len(device.ranks) for device in seen.devices)
    floor = seen.ceilings.measured
    return replace(
        line,
        latency_floor_ns=latency_floor_ns(floor.of("device_memory", "latency")) if floor else None,
        contenders=who,
        contention=unknown,
        topology=f"{count} rank{'' if count == 1 else 's'} on {names}",
    )


def _memory_contenders(seen: Seen) -> tuple[tuple[Contender, ...], str]:
    """Return who else used the memories: ranks and services that share one, other processes."""
    steps = seen.steps
    if seen.on_cpu:
        sharing = [
            at
            for at, rank in enumerate(steps.ranks)
            if rank.selected or rank.service in seen.neighbours
        ]
        activities = [_rank_activity(steps, at) for at in sharing]
        others = _other_processes(seen)
        unknown = "" if others else "no host sampler: other processes of the host are not known"
        return (*contenders(activities), *others), unknown
    pids = seen.of("perfledger.gpu.process.memory")
    held = pids.group_by("hw.id", "process.pid").agg(pl.col("value").max())
    who = [
        Contender(
            f"process {pid} on {device}", "process", None, None, None, f"holds {value:,.0f} B"
        )
        for device, pid, value in held.sort("hw.id", "process.pid").iter_rows()
    ]
    crowded = {d for d, n in held.group_by("hw.id").len().iter_rows() if n > 1}
    who = [one for one in who if any(one.name.endswith(f" on {device}") for device in crowded)]
    return tuple(who), "" if len(held) else "no counter tells which processes use the device"


def _rank_activity(steps: StepSums, rank: int) -> Activity:
    who = steps.ranks[rank]
    start, end = steps.intervals([rank])
    services = {one.service for one in steps.ranks if one.selected}
    kind = "rank" if who.service in services else "service"
    return Activity(str(who), kind, start, end, None)


def _other_processes(seen: Seen) -> list[Contender]:
    """Return what other processes of the host used of its CPUs, beside the selected engines."""
    grown = seen.grown("system.cpu.time", "cpu.mode", "cpu.logical_number")
    busy = grown.filter(~pl.col("cpu.mode").is_in(["idle", "iowait", "steal"]))
    if busy.is_empty():
        return []
    took_s = float((busy["to_ns"] - busy["from_ns"]).max()) / 1e9  # type: ignore[arg-type]
    engines_s = sum(one.cpu_ns for one in seen.steps.sums) / 1e9
    others = max(0.0, float(busy["growth"].sum()) - engines_s) / took_s
    note = f"used {others:.2f} CPUs on average, what they moved is not known"
    return [Contender("processes other than the engines", "process", None, None, None, note)]


def _host_device(seen: Seen) -> EdgeLine:
    if seen.on_cpu:
        why = "the engine computes on the CPU: nothing has to cross it"
        return _not_observable("host_device", why)
    seen_by_one = traffic_flow(seen, "host_device", MEASURED, "copy spans")
    counted = device_counters(seen, "host_device", "PCIe counters of the device")
    flows = [flow for flow in (seen_by_one, counted) if flow]
    if not flows:
        return _not_observable("host_device", "no copy span, and no PCIe counter of a device")
    backward = flows[0].backward_bytes or 0
    way = "h2d" if flows[0].forward_bytes >= backward else "d2h"
    ceiling, why = rate_ceiling(seen, "host_device", way, flows[0].bytes_per_s)
    line = _line("host_device", flows, ceiling, why)
    return replace(
        line,
        contenders=(*_traffic_contenders(seen, "host_device"), *_unseen(flows)),
        contention="" if counted else "no PCIe counter: traffic of other processes is not known",
    )


def _scale_up(seen: Seen) -> EdgeLine:
    flow = traffic_flow(seen, "scale_up", DERIVED, "collective spans")
    counted = device_counters(seen, "scale_up", "NVLink counters of the device")
    loopback = interfaces(seen, "scale_up", loopback=True) if seen.on_cpu and flow else None
    flows = [one for one in (flow, counted, loopback) if one]
    if not flows:
        why = "no collective and no NVLink counter: engines of one rank send nothing over it"
        return _not_observable("scale_up", why)
    ceiling, why = bus_ceiling(seen)
    line = _line("scale_up", flows, ceiling, why)
    groups = seen.traffic.filter((pl.col("edge") == "scale_up") & pl.col("selected"))
    names = groups.select("owner", "ranks").unique().sort("owner").head(8).iter_rows()
    way = "over the loopback of the host (gloo); " if seen.on_cpu else ""
    told = "; ".join(f"{owner}, {ranks or 'unknown'} ranks" for owner, ranks in names)
    return replace(
        line,
        contenders=_traffic_contenders(seen, "scale_up"),
        contention="" if counted or loopback else "traffic of other processes is not counted here",
        topology=f"{way}{told}" if told else "links as NVML counts them",
    )


def _network(seen: Seen) -> EdgeLine:
    counted = interfaces(seen, "network", loopback=False)
    flow = traffic_flow(seen, "network", DERIVED, "collective spans between hosts")
    flows = [one for one in (flow, counted) if one]
    if not flows:
        return _not_observable("network", "no host sampler, and no collective between hosts")
    ceiling, why = link_ceiling(seen, flows[-1]) if counted else (None, NO_LINK_SPEED)
    line = _line("network", flows, ceiling, why)
    return replace(
        line,
        contenders=(*_traffic_contenders(seen, "network"), *(_unseen(flows) if flow else ())),
        contention="" if flow else WHOLE_HOST,
        topology=f"interfaces {', '.join(part.name for part in counted.parts)}" if counted else "",
    )


def _storage_local(seen: Seen) -> EdgeLine:
    flow = traffic_flow(seen, "storage_local", MEASURED, "checkpoint spans")
    disks = disks_flow(seen)
    flows = [one for one in (flow, disks) if one]
    if not flows:
        return _not_observable("storage_local", "no host sampler, and no checkpoint span")
    backward = flows[0].backward_bytes or 0
    way = "read" if flows[0].forward_bytes >= backward else "write"
    ceiling, why = rate_ceiling(seen, "storage_local", way, flows[0].bytes_per_s)
    line = _line("storage_local", flows, ceiling, why)
    return replace(
        line,
        contenders=(*_traffic_contenders(seen, "storage_local"), *(_unseen(flows) if flow else ())),
        contention="" if flow else WHOLE_HOST,
        topology=f"disks {', '.join(part.name for part in disks.parts)}" if disks else "",
    )


def _traffic_contenders(seen: Seen, edge: str) -> tuple[Contender, ...]:
    """Return who moved something over an edge at the same time as another one."""
    rows = seen.traffic.filter(pl.col("edge") == edge)
    rows = rows.filter(pl.col("selected") | pl.col("service").is_in(list(seen.neighbours)))
    activities = [
        Activity(
            str(owner),
            str(kind),
            part["start_ns"].to_numpy(),
            part["end_ns"].to_numpy(),
            int(part["forward_bytes"].sum()) + int(part["backward_bytes"].sum()),
        )
        for (owner, kind), part in rows.group_by("owner", "kind", maintain_order=True)
    ]
    return contenders(activities)


def _unseen(flows: Sequence[Flow]) -> tuple[Contender, ...]:
    """Return what counters saw beyond the transfers that are known: traffic of others."""
    if len(flows) < 2:
        return ()
    known, counted = (flow.forward_bytes + (flow.backward_bytes or 0) for flow in flows[:2])
    if counted <= known:
        return ()
    note = f"{counted - known:,} bytes more on the counters than in the spans"
    return (Contender("other traffic", "traffic", None, None, counted - known, note),)


def _line(
    edge: str, flows: Sequence[Flow], ceiling: CeilingShare | None, no_ceiling: str
) -> EdgeLine:
    nodes = EDGE[edge]
    return EdgeLine(
        edge=edge,
        source=nodes.source,
        target=nodes.target,
        forward=EDGE[edge].ways[0],
        backward=EDGE[edge].ways[1],
        provenance=flows[0].provenance if flows else NOT_OBSERVABLE,
        why="",
        flows=tuple(flows),
        ceiling=ceiling,
        no_ceiling="" if ceiling else no_ceiling,
        latency_floor_ns=None,
        contenders=(),
        contention="",
        topology="",
    )


def _not_observable(edge: str, why: str) -> EdgeLine:
    return replace(_line(edge, (), None, "nothing to hold against one"), why=why)
