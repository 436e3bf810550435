"""The report: one HTML file that needs nothing else, neither script nor network."""

import math
import time
from collections.abc import Mapping
from dataclasses import dataclass, fields

import jinja2
import polars as pl
from markupsafe import Markup

from perfledger.analyzers import attribution, client_view, completeness, latency
from perfledger.analyzers.attribution import Attribution
from perfledger.analyzers.edges import EdgeLedger
from perfledger.analyzers.energy import Energy
from perfledger.analyzers.experiments.verdict import Evidence, Verdict
from perfledger.analyzers.latency import Distribution
from perfledger.dashboards import svg
from perfledger.dashboards.energy_section import energy_section
from perfledger.dashboards.ledger_section import ledger_section
from perfledger.dashboards.page_table import UNDEFINED, Table
from perfledger.dashboards.picture import STYLE
from perfledger.schema.stages import STAGE_NAMES

TIMELINE_REQUESTS = 80


@dataclass(frozen=True)
class RerunFinding:
    """A rerun's verdict with the words around it."""

    title: str
    claim: str
    verdict: Verdict


def render(
    found: Attribution,
    spans: pl.DataFrame,
    rerun: RerunFinding | None,
    ledger: EdgeLedger | str,
    energy: Energy | None,
) -> str:
    """Return the page. `spans` are the requests' own spans, for the timeline.

    `ledger` and `energy` are of the same selection; `ledger` may say why there is none.
    """
    return _page(
        "report.html.jinja",
        title="Where the time of these requests went",
        selection=found.selection,
        requests=len(found.requests),
        headline=headline(found),
        warnings=found.completeness.losses(),
        legend=[{"name": name, "colour": svg.COLOURS[name]} for name in _drawn(found)],
        bands_svg=Markup(svg.stacked_bars(_band_bars(found), "ms")),
        bands_table=bands_table(found),
        ttft_svg=Markup(svg.stacked_bars(_ttft_bars(found), "ms")),
        latency_table=latency_table(found),
        itl_svg=Markup(svg.histogram(_token_gaps_ms(found.requests), "ms")),
        timeline_svg=Markup(svg.timeline(_timeline(found.requests, spans))),
        timeline_note=_timeline_note(found.requests),
        client_table=client_table(found),
        ledger=None if isinstance(ledger, str) else ledger_section(ledger),
        no_ledger=ledger,
        energy=None if energy is None else energy_section(energy),
        verdict=_verdict(rerun) if rerun else None,
        completeness_table=completeness_table(found),
        definitions=_definitions(),
    )


def render_ledger(ledger: EdgeLedger, energy: Energy | None) -> str:
    """Return a page of the ledger and the energy alone."""
    return _page(
        "ledger_page.html.jinja",
        title="What moved, and over what",
        selection=ledger.selection,
        ledger=ledger_section(ledger),
        energy=None if energy is None else energy_section(energy),
    )


def headline(found: Attribution) -> str:
    """Return the one sentence that answers the question."""
    band = found.bands["p95"]
    if band.longest is None or band.stages_ns is None or not band.e2e_ns:
        return "No request ended ok, so there is no latency to attribute."
    share = band.stages_ns[band.longest] / band.e2e_ns
    text = f"In the slowest 5 %, the longest stage is {band.longest}: {share:.0%} of the time."
    if band.too_few:
        text += f" That is {band.requests} of {len(found.requests)} requests: an anecdote."
    parts = band.contributions
    if parts:
        apart = max(parts, key=lambda name: parts[name])
        text += f" What sets them apart from the median is {apart} ({parts[apart]:.0%} of the gap)."
    return text


def bands_table(found: Attribution) -> Table:
    """Return mean ms and share of each stage per band, for the stages that occur."""
    bands = [band for band in found.bands.values() if band.stages_ns is not None]
    columns = ["stage"]
    for band in bands:
        few = ", few" if band.too_few else ""
        columns += [f"{band.name} (n={band.requests}{few})", "share"]
    rows = []
    for stage in _drawn(found):
        row = [stage]
        for band in bands:
            assert band.stages_ns is not None
            share = band.stages_ns[stage] / band.e2e_ns if band.e2e_ns else math.nan
            row += [_ms(band.stages_ns[stage]), f"{share:.1%}"]
        rows.append(row)
    return Table(columns, rows)


def latency_table(found: Attribution) -> Table:
    """Return the distributions and rates of the server's side."""
    told = found.latency
    rows = [
        _distribution("TTFT", told.ttft_ns),
        _distribution("time to first chunk", told.ttfc_ns),
        _distribution("ITL", told.itl_ns),
        _distribution("end to end", told.e2e_ns),
    ]
    for name, value in (
        ("prompt tokens/s", told.prompt_tokens_per_s),
        ("output tokens/s", told.output_tokens_per_s),
    ):
        rows.append([name, UNDEFINED if value is None else f"{value:,.1f}", "", "", ""])
    return Table(["", "mean", "p50", "p95", "p99"], rows)


def client_table(found: Attribution) -> Table | None:
    """Return the client's view beside the server's; None without client spans."""
    if found.client is None:
        return None
    rows = [
        _distribution(field.name.removesuffix("_ns").replace("_", " "), value)
        for field in fields(found.client)
        if isinstance(value := getattr(found.client, field.name), Distribution)
    ]
    return Table(["", "mean", "p50", "p95", "p99"], rows)


def completeness_table(found: Attribution) -> Table:
    """Return every count of what is missing, zero included: that is the statement."""
    rows = []
    for field in fields(found.completeness):
        value = getattr(found.completeness, field.name)
        if isinstance(value, Mapping):
            value = ", ".join(f"{key}: {count}" for key, count in value.items()) or 0
        rows.append([field.name.replace("_", " "), str(value)])
    return Table(["", "count"], rows)


def _page(template: str, **content: object) -> str:
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("perfledger.dashboards", "templates"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
    )
    when = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime())
    return environment.get_template(template).render(
        when=when, picture_style=Markup(STYLE), **content
    )


def _token_gaps_ms(requests: pl.DataFrame) -> list[float]:
    ok = requests.filter(pl.col("status") == "ok")
    gaps = ok.select(pl.col("token_times_ns").list.diff().list.slice(1).explode()).to_series()
    return (gaps.drop_nulls() / 1e6).to_list()


def _drawn(found: Attribution) -> list[str]:
    """Return the stages that take any time, in their order."""
    totals = found.requests.select(f"{name}_ns" for name in STAGE_NAMES).sum().row(0)
    return [name for name, total in zip(STAGE_NAMES, totals, strict=True) if total]


def _band_bars(found: Attribution) -> list[tuple[str, dict[str, float]]]:
    return [
        (band.name, {name: ns / 1e6 for name, ns in band.stages_ns.items()})
        for band in found.bands.values()
        if band.stages_ns is not None
    ]


def _ttft_bars(found: Attribution) -> list[tuple[str, dict[str, float]]]:
    told = (
        ("mean", found.latency.ttft_stages_ns),
        ("slowest 5 %", found.latency.ttft_tail_stages_ns),
    )
    return [
        (label, {name: ns / 1e6 for name, ns in stages.items()}) for label, stages in told if stages
    ]


def _timeline(
    requests: pl.DataFrame, spans: pl.DataFrame
) -> list[tuple[str, float, list[tuple[str, float, float]]]]:
    """Return the first requests, each with its own spans in seconds after the first arrival."""
    shown = requests.sort("arrival_ns").head(TIMELINE_REQUESTS)
    if shown.is_empty():
        return []
    base_ns = shown["arrival_ns"][0]
    own = (
        spans.filter(pl.col("parent_span_id").is_not_null() & pl.col("name").is_in(STAGE_NAMES))
        .select("trace_id", pl.col("parent_span_id").alias("root"), "name", "start_ns", "end_ns")
        .sort("start_ns")
    )
    by_root: dict[tuple[bytes, bytes], list[tuple[str, float, float]]] = {}
    for trace_id, root, name, start_ns, end_ns in own.iter_rows():
        drawn = (name, (start_ns - base_ns) / 1e9, (end_ns - base_ns) / 1e9)
        by_root.setdefault((trace_id, root), []).append(drawn)
    keys = shown.select("trace_id", "span_id", "arrival_ns").iter_rows()
    return [
        (trace_id.hex()[:8], (at_ns - base_ns) / 1e9, by_root.get((trace_id, span_id), []))
        for trace_id, span_id, at_ns in keys
    ]


def _timeline_note(requests: pl.DataFrame) -> str:
    if len(requests) <= TIMELINE_REQUESTS:
        return ""
    return f"The first {TIMELINE_REQUESTS} of {len(requests)} requests."


def _verdict(rerun: RerunFinding) -> dict[str, object]:
    verdict = rerun.verdict
    drawn = [
        (
            row.metric.name,
            math.expm1(min(row.effect.interval.low, 700)),
            math.expm1(min(row.effect.estimate, 700)),
            math.expm1(min(row.effect.interval.high, 700)),
        )
        for row in verdict.evidence
    ]
    return {
        "title": rerun.title,
        "claim": rerun.claim,
        "outcome": verdict.outcome,
        "reason": verdict.reason,
        "basis": verdict.basis,
        "svg": Markup(svg.interval_bars(drawn)),
        "table": Table(
            ["metric", "role", "change", "95 % interval", "result"],
            [_evidence(row) for row in verdict.evidence],
        ),
        "would_decide": verdict.would_decide,
    }


def _evidence(row: Evidence) -> list[str]:
    estimate, low, high = (
        f"{math.expm1(min(value, 700)):+.1%}"
        for value in (row.effect.estimate, row.effect.interval.low, row.effect.interval.high)
    )
    interval = "exact" if row.exact else f"{low} to {high}"
    return [row.metric.name, row.role, estimate, interval, row.result]


def _definitions() -> list[tuple[str, str]]:
    parts = (attribution, latency, client_view, completeness)
    return [(name, text) for part in parts for name, text in part.DEFINITIONS.items()]


def _distribution(name: str, values: Distribution) -> list[str]:
    points = (values.mean, values.p50, values.p95, values.p99)
    return [f"{name} (n={values.n})", *(_ms(point) for point in points)]


def _ms(ns: float | None) -> str:
    return UNDEFINED if ns is None else f"{ns / 1e6:,.1f} ms"
