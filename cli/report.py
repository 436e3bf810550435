"""A report page and a trace file of some requests, wired from the store to the two writers."""

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import polars as pl

from perfledger.analyzers.attribution import Attribution
from perfledger.analyzers.edge_ledger import edge_ledger
from perfledger.analyzers.edges import EdgeLedger
from perfledger.analyzers.energy import energy_of
from perfledger.analyzers.ledger import Selection
from perfledger.dashboards.perfetto import write_trace
from perfledger.dashboards.report import RerunFinding, render
from perfledger.schema.errors import NoDataError, NotComparableError
from perfledger.schema.tables import SPANS

if TYPE_CHECKING:
    from perfledger.rerun import RerunResult

# A trace file of more is slow to load; the requests that arrived first are drawn.
TRACED_REQUESTS = 2_000


def write_report(
    selection: Selection,
    found: Attribution,
    rerun: "RerunResult | None",
    report: Path,
    trace: Path,
) -> int:
    """Write both files and return how many requests the trace holds (at most TRACED_REQUESTS)."""
    drawn = found.requests.sort("arrival_ns").head(TRACED_REQUESTS)
    spans = _spans(selection, drawn)
    for path in (report, trace):
        path.parent.mkdir(parents=True, exist_ok=True)
    finding = _finding(rerun) if rerun else None
    ledger, energy = ledger_or_why(selection), energy_of(selection)
    report.write_text(render(found, spans, finding, ledger, energy))
    write_trace(trace, spans, _steps(selection, drawn))
    return len(drawn)


def ledger_or_why(selection: Selection) -> EdgeLedger | str:
    """Return the ledger of the selection, or why there is none.

    Ceilings of another host are no reason to keep its bytes from anyone: they are left out.
    """
    try:
        return edge_ledger(selection)
    except NoDataError as error:
        return error.what
    except NotComparableError as error:
        found = edge_ledger(selection, "datasheet")
        return replace(found, losses=(*found.losses, f"no measured ceilings: {error.what}"))


def _spans(selection: Selection, requests: pl.DataFrame) -> pl.DataFrame:
    traces = requests["trace_id"].unique().implode()
    return (
        selection.store.scan("spans", selection.since_ns)
        .filter(pl.col("trace_id").is_in(traces))
        .select(SPANS.names())
        .collect()
    )


def _steps(selection: Selection, requests: pl.DataFrame) -> pl.DataFrame:
    return (
        selection.store.scan("steps", selection.since_ns)
        .filter(selection.of_resource())
        .filter(pl.col("end_ns") >= requests["arrival_ns"].min())
        .filter(pl.col("start_ns") <= requests["end_ns"].max())
        .collect()
    )


def _finding(rerun: "RerunResult") -> RerunFinding:
    low, high = rerun.plan.levels
    return RerunFinding(
        title=f"{rerun.plan.variable} {low} against {high}",
        claim=rerun.hypothesis.claim if rerun.hypothesis else "none was registered",
        verdict=rerun.verdict,
    )
