"""The ledger of a selection: every edge measured, derived or not observable, and the roofline."""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import polars as pl

from perfledger.analyzers.ceiling_choice import ChosenCeilings, choose_ceilings
from perfledger.analyzers.counter_growth import hosts_of, points_of
from perfledger.analyzers.edge_flows import POINT_KEYS, POINT_NAMES, Seen
from perfledger.analyzers.edge_lines import edge_lines
from perfledger.analyzers.edge_traffic import collective_traffic, copy_traffic
from perfledger.analyzers.edges import (
    DATASHEET,
    DERIVED,
    MEASURED,
    NOT_OBSERVABLE,
    CeilingSource,
    EdgeLedger,
    EdgeLine,
    Nearest,
)
from perfledger.analyzers.engine_facts import active_ns, devices_of, engine_facts
from perfledger.analyzers.ledger import Selection
from perfledger.analyzers.memory_edge import memory_roofline
from perfledger.analyzers.node_lines import CAPACITY_NAMES, node_lines
from perfledger.analyzers.roofline import TOO_MUCH
from perfledger.analyzers.step_sums import StepSums, find_step_sums
from perfledger.analyzers.telemetry_loss import lost_on_the_way
from perfledger.schema.ceilings import MEASURED as MEASURED_CEILINGS
from perfledger.schema.errors import NoDataError

DEFINITIONS = {
    "forward_bytes": "bytes from the edge's source to its target: read from memory, sent",
    "backward_bytes": "bytes the other way; null where the source tells of one way only",
    "active_ns": "union of the intervals in which bytes moved, added up over devices; of counters"
    " their window",
    "bytes_per_s": "bytes both ways / active_ns: the mean rate of one device while it was active",
    "bytes_per_token": "bytes both ways / tokens computed, prompt and new",
    "latency_ns": "mean time of one transfer; of the memory: of one step",
    "share": "rate / ceiling. Above 1 a cache answered, or the ceiling was measured too low",
    "measured": "a counter's or a span's own bytes",
    "derived": "exact integers from the model's shapes and the batch, or from a collective's"
    " algorithm: what was asked for",
    "certainty": "certain: bytes and ceiling measured; likely: bytes derived, ceiling measured on"
    " the same host; weak: a datasheet's ceiling, nobody said on which host, or a share that cannot"
    " be",
    "active_share": "time in which steps ran / the whole time looked at, mean over devices",
    "launch_share": "launches and the host's part of each step at their measured cost / time",
    "collective_share": "time that ranks were in collectives, waiting too / time of their steps",
    "overlap_ns": "time that a contender was active on the edge together with any other",
    "bound": "what explains at least half of the time of the steps, and half again as much as"
    " anything else; else undecided",
}
# Rows at the very end of a selection's last step, for counters that are read once a second.
_NO_WINDOW = (0, 0)


def edge_ledger(selection: Selection, ceilings: str = MEASURED_CEILINGS) -> EdgeLedger:
    """Return the ledger of a selection.

    `ceilings` is measured, datasheet or the id of one measurement. Raises NoDataError where there
    is neither a step nor a collective nor a copy, NotComparableError where ceilings are of another
    host, UsageError for ceilings that are not there.
    """
    selection = selection.resolved()
    with ThreadPoolExecutor(1) as beside:  # two cores are faster than one
        reading = beside.submit(_traffic, selection)
        steps = find_step_sums(selection)
        traffic = reading.result()
        window = _window(steps, traffic)
        if window == _NO_WINDOW:
            raise _nothing(selection)
        losses = beside.submit(_losses, selection, steps, window)
        seen = _see(selection, steps, traffic, window, ceilings)
        edges = edge_lines(seen)
        nearest, unranked = rank(edges, seen.ceilings)
        return EdgeLedger(
            selection=selection.describe(),
            from_ns=window[0],
            to_ns=window[1],
            steps=steps.steps,
            steps_without_work=steps.without_work,
            tokens=steps.tokens,
            nodes=node_lines(seen, selection),
            edges=edges,
            nearest=nearest,
            unranked=unranked,
            roofline=memory_roofline(steps, seen.devices, seen.facts, seen.ceilings, traffic),
            ceilings=_source(seen.ceilings),
            losses=tuple(losses.result()),
            active_share=_active_share(seen),
        )


def _traffic(selection: Selection) -> pl.DataFrame:
    return pl.concat([collective_traffic(selection), copy_traffic(selection)])


def _see(
    selection: Selection,
    steps: StepSums,
    traffic: pl.DataFrame,
    window: tuple[int, int],
    ceilings: str,
) -> Seen:
    """Gather what all edges are made from."""
    points = points_of(selection, (*POINT_NAMES, *CAPACITY_NAMES), (*POINT_KEYS, *_MORE), window)
    hosts = _hosts(selection, points, window)
    facts = engine_facts(selection, steps)
    return Seen(
        window=window,
        hosts=tuple(hosts),
        steps=steps,
        devices=devices_of(steps, facts),
        facts=facts,
        traffic=traffic,
        points=_of_hosts(points, hosts),
        neighbours=_neighbours(selection, hosts, steps, traffic),
        ceilings=choose_ceilings(selection, hosts, ceilings, _device_names(selection, window)),
    )


_MORE = ("perfledger.replica", "system.memory.state")


def _active_share(seen: Seen) -> float | None:
    whole_ns = (seen.window[1] - seen.window[0]) * len(seen.devices)
    return active_ns(seen.steps, seen.devices) / whole_ns if whole_ns else None


def rank(
    edges: Sequence[EdgeLine], ceilings: ChosenCeilings
) -> tuple[Nearest | None, tuple[str, ...]]:
    """Return the edge nearest its ceiling, and the edges that nobody can rank, with the reason."""
    ranked, unranked = [], []
    for line in edges:
        if line.ceiling is not None and line.ceiling.share is not None:
            ranked.append((line.ceiling.share, line))
        else:
            unranked.append(f"{line.edge}: {line.why or line.no_ceiling or 'no rate'}")
    if not ranked:
        return None, tuple(unranked)
    share, line = max(ranked, key=lambda one: one[0])
    return Nearest(line.edge, share, *_certainty(line, ceilings)), tuple(unranked)


def _certainty(line: EdgeLine, ceilings: ChosenCeilings) -> tuple[str, str]:
    assert line.ceiling is not None
    limit = line.ceiling.provenance
    rests_on = f"{line.provenance} bytes, {limit} ceiling"
    if line.ceiling.share is not None and line.ceiling.share > TOO_MUCH:
        return "weak", f"{rests_on}; more than it can give: caches, or a ceiling found too low"
    if limit == DATASHEET:
        return "weak", rests_on
    if not ceilings.is_certain_host:
        return "weak", f"{rests_on} of a host that may be another one"
    if line.provenance == DERIVED:
        return "likely", rests_on
    return "certain", rests_on


def _window(steps: StepSums, traffic: pl.DataFrame) -> tuple[int, int]:
    """Return when the first selected thing began and the last one ended (wall ns)."""
    ours = traffic.filter("selected")
    starts = [] if ours.is_empty() else [int(ours["start_ns"].min())]  # type: ignore[arg-type]
    ends = [] if ours.is_empty() else [int(ours["end_ns"].max())]  # type: ignore[arg-type]
    ranks = [at for at, rank in enumerate(steps.ranks) if rank.selected]
    if ranks:
        start, end = steps.intervals(ranks)
        starts.append(int(start.min()))
        ends.append(int(end.max()))
    return (min(starts), max(ends)) if starts else _NO_WINDOW


def _hosts(selection: Selection, points: pl.DataFrame, window: tuple[int, int]) -> list[str]:
    """Return the boot ids of the selection's hosts, which its gauges say, or else its spans."""
    gauges = points.filter(pl.col("name").is_in(CAPACITY_NAMES) & selection.of_resource())
    told = gauges.filter(pl.col("name").str.starts_with("perfledger."))["boot_id"].drop_nulls()
    return sorted(set(told)) or hosts_of(selection, *window)


def _of_hosts(points: pl.DataFrame, hosts: list[str]) -> pl.DataFrame:
    """Return the points of the selection's hosts, or those that do not say of which they are."""
    if not hosts:
        return points
    mine = points.filter(pl.col("boot_id").is_in(hosts))
    return points.filter(pl.col("boot_id").is_null()) if mine.is_empty() else mine


def _device_names(selection: Selection, window: tuple[int, int]) -> list[str]:
    """Return what the GPUs are called whose energy was sampled meanwhile."""
    energy = points_of(selection, ("hw.energy",), ("hw.type", "hw.name"), window)
    return sorted(set(energy.filter(pl.col("hw.type") == "gpu")["hw.name"].drop_nulls()))


def _neighbours(
    selection: Selection, hosts: list[str], steps: StepSums, traffic: pl.DataFrame
) -> frozenset[str]:
    """Return the other services that ran on the selection's hosts."""
    others = {rank.service for rank in steps.ranks if not rank.selected}
    others |= set(traffic.filter(~pl.col("selected"))["service"])
    if not others or not hosts:
        return frozenset()
    spans = selection.spans().filter(
        pl.col("service_name").is_in(list(others)) & pl.col("boot_id").is_in(hosts)
    )
    return frozenset(spans.select("service_name").unique().collect()["service_name"])


def _source(chosen: ChosenCeilings) -> CeilingSource:
    measured = chosen.measured
    if measured is None:
        provenance = DATASHEET if chosen.peak else NOT_OBSERVABLE
        return CeilingSource(provenance, chosen.peak.name if chosen.peak else "", None, chosen.note)
    names = measured.host.values.get("device.names")
    device = names[0] if isinstance(names, list) and names else None
    host = str(device or measured.host.values.get("host.cpu_model") or "unknown")
    if measured.threads is not None:
        host += f", {measured.threads} thread{'' if measured.threads == 1 else 's'}"
    return CeilingSource(MEASURED, host, measured.created_ns, chosen.note)


def _losses(selection: Selection, steps: StepSums, window: tuple[int, int]) -> list[str]:
    """Return what was certainly lost, in words."""
    found = []
    columns = ("trace_id", "span_id", "run_id", "service_name", "start_ns", "end_ns")
    # Collected by name alone: that reads one column of all spans, and these of a few.
    gaps = selection.spans().filter(pl.col("name") == "telemetry_dropped").select(columns).collect()
    ours = gaps.filter(
        selection.of_resource()
        & (pl.col("start_ns") <= window[1])
        & (pl.col("end_ns") >= window[0])
    )
    if count := ours.select("trace_id", "span_id").n_unique():
        found.append(f"telemetry records were dropped in {count} gaps: their steps are missing")
    if lost := lost_on_the_way(selection, *window):
        found.append(f"{lost} spans or records lost on the way to a collector")
    silent = sum(one.without_work for one in steps.sums if one.steps > one.without_work)
    if silent:
        found.append(f"steps whose bytes are lost, of engines that tell them: {silent:,}")
    return found


def _nothing(selection: Selection) -> NoDataError:
    where = f"store {selection.store.url}, namespace {selection.store.namespace}"
    if not selection.store.visible("spans"):
        fix = "start `perfledger collect` on this store and send it telemetry"
        return NoDataError("no spans in this store", where=where, fix=fix)
    return NoDataError(
        "no engine step, collective or copy matches",
        where=f"{where}: {selection.describe()}",
        fix="widen the selection; steps are stored some seconds after they ended",
    )
