"""How a ledger looks on one screen: the answer in words first, then the numbers behind it."""

import time
from typing import TYPE_CHECKING

from perfledger.energy_summary import print_energy
from perfledger.output import percent, print_table, say

if TYPE_CHECKING:
    from perfledger.analyzers.contention import Contender
    from perfledger.analyzers.edges import CeilingShare, EdgeLedger, EdgeLine, Flow
    from perfledger.analyzers.energy import Energy
    from perfledger.analyzers.roofline import Point

NEAR = 0.5  # of its ceiling: below, an edge is not what limits
MOST_CONTENDERS, MOST_PARTS = 4, 12
_UNITS = ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))


def print_ledger(found: "EdgeLedger", energy: "Energy") -> None:
    """Print a ledger within 80 columns; undefined numbers are dashes."""
    for line in answer(found):
        say(line)
    print()
    _print_edges(found)
    print()
    _print_work(found)
    _print_nodes(found)
    print()
    print_energy(energy)
    _print_rest(found)


def answer(found: "EdgeLedger") -> list[str]:
    """Return the first lines: which edge is nearest its ceiling, how certain, who contends."""
    lines = [_nearest(found)]
    if found.nearest is not None:
        lines.append(_who(_line(found, found.nearest.edge)))
    lines += _bounds(found)
    steps = f"{found.steps:,} steps, {found.tokens:,} tokens computed"
    ran = f" (steps ran {percent(found.active_share)})" if found.steps else ""
    took = _seconds(found.to_ns - found.from_ns)
    return [*lines, f"{found.selection}: {steps} in {took}{ran}"]


def _nearest(found: "EdgeLedger") -> str:
    nearest = found.nearest
    if nearest is None:
        return "No edge can be held against a ceiling: " + "; ".join(found.unranked)
    line = _line(found, nearest.edge)
    assert line.ceiling is not None
    limit = f"{percent(nearest.share)} of {amount(line.ceiling.bytes_per_s, 'B/s')}"
    rests = f"{nearest.certainty}: {nearest.rests_on}"
    if nearest.share < NEAR:
        return f"No edge is near its ceiling. The nearest is {nearest.edge}: {limit} ({rests})."
    return f"The edge nearest its ceiling is {nearest.edge}: {limit} ({rests})."


def _who(line: "EdgeLine") -> str:
    """Say who contends on an edge, or that nobody was seen, and what cannot be seen."""
    who = "; ".join(_contender(one) for one in line.contenders[:MOST_CONTENDERS])
    more = len(line.contenders) - MOST_CONTENDERS
    who += f"; {more} more" if more > 0 else ""
    unknown = f" ({line.contention})" if line.contention else ""
    return f"  contending on it: {who or 'nobody seen'}{unknown}"


def _contender(one: "Contender") -> str:
    if one.share is not None:
        return f"{one.name}, {percent(one.share)} of the time"
    return f"{one.name} ({one.note})" if one.note else one.name


def _bounds(found: "EdgeLedger") -> list[str]:
    """Say for each kind of step what bounds it, where the numbers support that."""
    return [
        f"  {point.step_kind} steps: "
        + (f"bound by {point.bound}, {point.why}" if point.bound != "undecided" else "undecided, ")
        + (point.why if point.bound == "undecided" else "")
        for point in _whole(found)
    ]


def _whole(found: "EdgeLedger") -> "list[Point]":
    return [point for point in found.roofline.points if point.operator == "all"]


def _print_edges(found: "EdgeLedger") -> None:
    rows: list[tuple[object, ...]] = []
    for line in found.edges:
        if not line.flows:
            rows.append((line.edge, line.provenance, None, None, None, None, None))
        for at, flow in enumerate(line.flows):
            rows.append(_edge_row(line, flow, line.ceiling if at == 0 else None, at))
    columns = ("edge", "bytes are", "bytes", "rate", "a token", "share", "ceiling")
    print_table("", columns, rows)
    for line in found.edges:
        if line.why:
            say(f"{line.edge}: {line.why}")
        elif line.ceiling is None:
            say(f"{line.edge}: no ceiling: {line.no_ceiling}")


def _edge_row(
    line: "EdgeLine", flow: "Flow", ceiling: "CeilingShare | None", at: int
) -> tuple[object, ...]:
    size = flow.forward_bytes + (flow.backward_bytes or 0)
    return (
        line.edge if at == 0 else "  also",
        flow.provenance,
        amount(size, "B"),
        amount(flow.bytes_per_s, "B/s"),
        amount(flow.bytes_per_token, "B"),
        percent(ceiling.share) if ceiling else None,
        amount(ceiling.bytes_per_s, "B/s") if ceiling else None,
    )


def _print_work(found: "EdgeLedger") -> None:
    """Print bytes and FLOPs by kind of step and operator class."""
    if not found.roofline.points:
        say(f"operators: {found.roofline.why}")
        return
    rows = [
        (
            f"{point.step_kind} steps" if point.operator == "all" else f"  {point.operator}",
            amount(point.read_bytes, "B"),
            amount(point.written_bytes, "B"),
            amount(point.flops, "FLOP"),
            None if point.intensity is None else f"{point.intensity:,.3g}",
            amount(point.flops_per_s, "FLOP/s"),
            point.bound if point.operator == "all" else "",
        )
        for point in found.roofline.points
    ]
    columns = ("operators", "read", "written", "FLOPs", "FLOP/B", "achieved", "bound")
    print_table("", columns, rows)


def _print_nodes(found: "EdgeLedger") -> None:
    told = [node for node in found.nodes if node.limit_bytes is not None or node.held]
    for node in told:
        held = ", ".join(f"{one.name} {amount(one.bytes, 'B')}" for one in node.held)
        say(f"{node.node}: {amount(node.limit_bytes, 'B')}" + (f"; {held}" if held else ""))


def _print_rest(found: "EdgeLedger") -> None:
    ceilings = found.ceilings
    when = ""
    if ceilings.created_ns is not None:
        when = time.strftime(", %Y-%m-%d %H:%M UTC", time.gmtime(ceilings.created_ns / 1e9))
    note = f"; {ceilings.note}" if ceilings.note else ""
    where = f" on {ceilings.host}" if ceilings.host else ""
    say(f"ceilings: {ceilings.provenance}{where}{when}{note}")
    if found.steps_without_work:
        say(f"{found.steps_without_work:,} of {found.steps:,} steps do not tell what they moved")
    say(f"missing: {'; '.join(found.losses) or 'nothing known'}")
    say(
        "rate: of one device while it was active. a token: per token computed, prompt and new. "
        "derived: what operators ask for. All definitions: --json; one edge: --edge NAME."
    )


def print_edge(found: "EdgeLedger", edge: str) -> None:
    """Print all that is known of one edge."""
    line = _line(found, edge)
    say(f"{line.edge}, {line.source} to {line.target}: {line.provenance}. {line.why}".rstrip())
    for flow in line.flows:
        print()
        _print_flow(line, flow)
    print()
    if line.ceiling is not None:
        limit = line.ceiling
        of = f"{limit.operation} {limit.variant}".strip()
        share = f"{percent(limit.share)} of {amount(limit.bytes_per_s, 'B/s')}"
        say(f"ceiling: {share} ({limit.provenance}: {of}){f'; {limit.note}' if limit.note else ''}")
    else:
        say(f"ceiling: none: {line.no_ceiling}")
    if line.latency_floor_ns is not None:
        say(f"latency of one access, measured: {line.latency_floor_ns:,.1f} ns")
    say(_who(line).strip())
    if line.topology:
        say(f"topology: {line.topology}")


def _print_flow(line: "EdgeLine", flow: "Flow") -> None:
    say(f"{flow.provenance}, told by {flow.told_by}{f': {flow.note}' if flow.note else ''}")
    rows = [
        ("bytes " + line.forward, f"{flow.forward_bytes:,}"),
        (
            "bytes " + line.backward,
            None if flow.backward_bytes is None else f"{flow.backward_bytes:,}",
        ),
        ("active", _seconds(flow.active_ns)),
        ("rate while active", amount(flow.bytes_per_s, "B/s")),
        ("transfers", flow.transfers),
        (
            "transfers/s while active",
            None if flow.transfers_per_s is None else f"{flow.transfers_per_s:,.1f}",
        ),
        (
            "mean time of a transfer",
            None if flow.latency_ns is None else f"{flow.latency_ns / 1e6:,.3f} ms",
        ),
        ("bytes a token", amount(flow.bytes_per_token, "B")),
    ]
    print_table(
        "",
        (
            "",
            "",
        ),
        rows,
    )
    parts = sorted(flow.parts, key=lambda part: -(part.forward_bytes + (part.backward_bytes or 0)))
    if parts:
        cells = [
            (
                part.name,
                amount(part.forward_bytes, "B"),
                amount(part.backward_bytes, "B"),
                part.transfers,
            )
            for part in parts[:MOST_PARTS]
        ]
        print_table("", ("by", line.forward, line.backward, "transfers"), cells)


def amount(value: float | None, unit: str) -> str:
    """Return a number with three digits and a power of 10 before its unit; a dash where null."""
    if value is None:
        return "–"
    for scale, prefix in _UNITS:
        if abs(value) >= scale:
            return f"{value / scale:.3g} {prefix}{unit}"
    return f"{value:.3g} {unit}"


def _line(found: "EdgeLedger", edge: str) -> "EdgeLine":
    return next(line for line in found.edges if line.edge == edge)


def _seconds(ns: int) -> str:
    return f"{ns / 1e9:,.2f} s"
