"""The ledger's part of the report: what moved, between which places, and under which roof."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from markupsafe import Markup

from perfledger.analyzers.edge_ledger import DEFINITIONS
from perfledger.analyzers.edges import CeilingShare, EdgeLedger, EdgeLine
from perfledger.analyzers.roofline import ALL, UNDECIDED, Point, Roofline
from perfledger.dashboards.hierarchy_svg import hierarchy, percent, spoken
from perfledger.dashboards.page_table import UNDEFINED, Table
from perfledger.dashboards.picture import scaled
from perfledger.dashboards.roofline_marks import marks, point_name, unplaced
from perfledger.dashboards.roofline_svg import roofline

NEAR = 0.5  # of its ceiling: below, an edge is not what limits
MOST_PARTS = 5
Value = TypeVar("Value")


@dataclass(frozen=True)
class LedgerSection:
    """What the template draws; notes are (subject, what is to be known of it)."""

    headline: str
    warnings: tuple[str, ...]
    ceilings: str
    hierarchy_svg: Markup
    edges_table: Table
    edge_notes: list[tuple[str, str]]
    roofline_svg: Markup | None
    roofline_note: str  # why there is no plot, or no roof in it
    points_table: Table
    point_notes: list[tuple[str, str]]
    definitions: list[tuple[str, str]]


def ledger_section(ledger: EdgeLedger) -> LedgerSection:
    """Return the section of this ledger."""
    drawn = marks(ledger.roofline)
    return LedgerSection(
        headline=headline(ledger),
        warnings=warnings(ledger),
        ceilings=_ceilings(ledger),
        hierarchy_svg=Markup(hierarchy(ledger)),
        edges_table=edges_table(ledger),
        edge_notes=_edge_notes(ledger),
        roofline_svg=Markup(roofline(ledger.roofline)) if drawn else None,
        roofline_note=_roofline_note(ledger, bool(drawn)),
        points_table=points_table(ledger.roofline),
        point_notes=_point_notes(ledger.roofline),
        definitions=[(name.replace("_", " "), text) for name, text in DEFINITIONS.items()],
    )


def headline(ledger: EdgeLedger) -> str:
    """Return the one sentence that a tired person needs."""
    nearest = ledger.nearest
    if nearest is None:
        text = "No edge has both a speed and a ceiling, so none can be called the nearest to it"
        return f"{text}: {ledger.ceilings.note}." if ledger.ceilings.note else f"{text}."
    reached = f"{spoken(nearest.edge)}: {percent(nearest.share)}"
    rests_on = f"{nearest.certainty}: {nearest.rests_on}"
    if nearest.share < NEAR:
        return f"No edge is near its ceiling. The nearest is {reached} ({rests_on})."
    return f"The edge nearest its ceiling is {reached} ({rests_on})."


def warnings(ledger: EdgeLedger) -> tuple[str, ...]:
    """Return what was lost on the way, and steps whose work nobody could derive."""
    if not ledger.steps_without_work:
        return ledger.losses
    text = f"{ledger.steps_without_work:,} of {ledger.steps:,} steps have no bytes or FLOPs here"
    return (*ledger.losses, text)


def edges_table(ledger: EdgeLedger) -> Table:
    """Return a row an edge, with its first flow; what is not observable has dashes and says so."""
    columns = ["edge", "while active", "of its ceiling", "per token", "forward", "backward"]
    return Table([*columns, "transfers", "latency"], [_edge_row(edge) for edge in ledger.edges])


def _edge_row(edge: EdgeLine) -> list[str]:
    if not edge.flows:
        return [spoken(edge.edge), edge.provenance, *[UNDEFINED] * 6]
    flow = edge.flows[0]
    return [
        f"{spoken(edge.edge)}, {flow.provenance}",
        _or_dash(flow.bytes_per_s, lambda value: scaled(value, "B/s")),
        _or_dash(edge.ceiling, _of_ceiling),
        _or_dash(flow.bytes_per_token, lambda value: scaled(value, "B")),
        f"{scaled(flow.forward_bytes, 'B')} {edge.forward}",
        _or_dash(flow.backward_bytes, lambda value: f"{scaled(value, 'B')} {edge.backward}"),
        _or_dash(flow.transfers_per_s, lambda value: scaled(value, "/s")),
        _or_dash(flow.latency_ns, lambda value: scaled(value / 1e6, "ms")),
    ]


def _of_ceiling(ceiling: CeilingShare) -> str:
    share = _or_dash(ceiling.share, percent)
    return f"{share} of {scaled(ceiling.bytes_per_s, 'B/s')}"


def _roofline_note(ledger: EdgeLedger, drawn: bool) -> str:
    found = ledger.roofline
    if not drawn:
        return f"No plot: {found.why or 'no steps with bytes, FLOPs and a time or a roof'}."
    return "" if found.roofs else f"No roof to draw: {ledger.ceilings.note}."


def points_table(found: Roofline) -> Table:
    """Return a row a point, whole steps first; `#` is its number in the narrow picture."""
    numbers = {mark.name: mark.number for mark in marks(found)}
    columns = ["kind", "operator", "#", "bound", "FLOP/B", "reached", "at best", "bytes", "FLOPs"]
    points = sorted(found.points, key=lambda point: point.operator != ALL)
    return Table([*columns, "steps"], [_point_row(point, numbers) for point in points])


def _point_row(point: Point, numbers: dict[str, int]) -> list[str]:
    return [
        point.step_kind,
        point.operator,
        _or_dash(numbers.get(point_name(point)), str),
        point.bound,
        _or_dash(point.intensity, lambda value: f"{value:.3g}"),
        _or_dash(point.flops_per_s, lambda value: scaled(value, "FLOP/s")),
        _or_dash(point.attainable_flops_per_s or None, lambda value: scaled(value, "FLOP/s")),
        scaled(point.read_bytes + point.written_bytes, "B"),
        scaled(point.flops, "FLOP"),
        f"{point.steps:,}",
    ]


def _ceilings(ledger: EdgeLedger) -> str:
    source = ledger.ceilings
    of = f" on {source.host}" if source.host else ""
    return f"Ceilings: {source.provenance}{of}. {source.note}".strip()


def _edge_notes(ledger: EdgeLedger) -> list[tuple[str, str]]:
    """Return for each edge what the table has no column for."""
    notes = []
    for edge in ledger.edges:
        texts = [edge.why, *(flow.note for flow in edge.flows)]
        texts.append(edge.no_ceiling if edge.flows and edge.ceiling is None else "")
        texts += [edge.ceiling.note if edge.ceiling else "", _parts(edge), _floor(edge)]
        texts += [edge.contention, edge.topology]
        for other in edge.contenders:
            share = f", {percent(other.share)} of the time" if other.share is not None else ""
            texts.append(f"with it: {other.kind} {other.name}{share} {other.note}".strip())
        said = [text for text in dict.fromkeys(texts) if text]
        if said:
            notes.append((spoken(edge.edge), "; ".join(said)))
    return notes


def _parts(edge: EdgeLine) -> str:
    """Return the largest parts of an edge's bytes: operator classes, collectives, devices."""
    parts = edge.flows[0].parts if edge.flows else ()
    sized = {part.name: part.forward_bytes + (part.backward_bytes or 0) for part in parts}
    largest = sorted(sized, key=lambda name: -sized[name])
    told = [f"{name} {scaled(sized[name], 'B')}" for name in largest[:MOST_PARTS]]
    rest = len(largest) - len(told)
    return f"of it {', '.join(told)}{f' and {rest} more' if rest else ''}" if told else ""


def _floor(edge: EdgeLine) -> str:
    if edge.latency_floor_ns is None:
        return ""
    return f"one access takes {edge.latency_floor_ns:,.0f} ns here, measured"


def _point_notes(found: Roofline) -> list[tuple[str, str]]:
    """Return why bounds are as they are, and which points have no place in the plot."""
    whys: dict[tuple[str, str], list[str]] = {}
    for point in found.points:
        if point.why:
            whys.setdefault((point.bound, point.why), []).append(
                f"{point.step_kind} {point.operator}"
            )
    notes = [
        (f"{bound}: {', '.join(names)}" if bound == UNDECIDED else ", ".join(names), why)
        for (bound, why), names in whys.items()
    ]
    return notes + [("not drawn", text) for text in unplaced(found)]


def _or_dash(value: Value | None, text: Callable[[Value], str]) -> str:
    return UNDEFINED if value is None else text(value)
