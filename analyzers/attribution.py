"""Which stage the time of the requests went to: per request, per band, and what tells a tail apart.

Everything is made again from spans and steps. Bands rank the requests that ended ok by their time
from arrival to end: p50 is the 45th to 55th percentile, p95 and p99 the slowest 5 % and 1 %.
"""

import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import polars as pl

from perfledger.analyzers.client_view import ClientView, client_view
from perfledger.analyzers.completeness import Completeness, completeness, why_nothing
from perfledger.analyzers.latency import Latency, latency
from perfledger.analyzers.ledger import Selection
from perfledger.schema.derive import rows_of, split_of, times_of
from perfledger.schema.errors import NoDataError
from perfledger.schema.request_traces import RequestTraces
from perfledger.schema.stages import STAGE_COLUMNS, STAGE_NAMES, SUB_STAGE_COLUMNS

BANDS: Mapping[str, tuple[int, int]] = {"p50": (45, 55), "p95": (95, 100), "p99": (99, 100)}
ENOUGH_REQUESTS = 10

DEFINITIONS: Mapping[str, str] = {
    "stages_ns": "mean time of each stage over the requests of the band; they add up to e2e_ns",
    "sub_stages_ns": "shares of a stage, in it and not beside it",
    "longest": "the stage with the largest mean; a tie goes to the earlier stage",
    "longest_of_requests": "how many requests have each stage as their longest",
    "contributions": "difference of a stage's mean to band p50 / difference of e2e_ns; they add up"
    " to 1. An association, not a cause",
    "too_few": f"fewer than {ENOUGH_REQUESTS} requests: an anecdote, not a percentile",
}


@dataclass(frozen=True)
class Band:
    """Requests between two percentiles of e2e; means in ns, null where it holds no request."""

    name: str
    requests: int
    too_few: bool
    e2e_ns: float | None
    stages_ns: dict[str, float] | None
    sub_stages_ns: dict[str, float] | None
    longest: str | None
    longest_of_requests: dict[str, int]
    contributions: dict[str, float] | None


@dataclass(frozen=True)
class Attribution:
    """Where the time of a selection went. `requests` has one row each, as the table `requests`."""

    selection: str
    requests: pl.DataFrame
    statuses: dict[str, int]
    longest_of_requests: dict[str, int]
    longest_by_status: dict[str, dict[str, int]]
    bands: dict[str, Band]
    latency: Latency
    client: ClientView | None
    completeness: Completeness


def attribute(selection: Selection) -> Attribution:
    """Attribute the time of the selected requests. Raises NoDataError where there are none."""
    selection = selection.resolved()
    traces = _traces(selection)
    times = times_of(traces)
    split = split_of(traces, times)
    requests = rows_of(traces, times, split, received_ns=0)
    statuses = requests["status"].unique().sort().to_list()
    by_status = {s: _counts(requests.filter(pl.col("status") == s)["longest"]) for s in statuses}
    with ThreadPoolExecutor(1) as beside:  # two cores are faster than one
        now_ns = time.time_ns()
        missing = beside.submit(completeness, selection, traces, requests, now_ns=now_ns)
        return Attribution(
            selection=selection.describe(),
            requests=requests,
            statuses={status: sum(by_status[status].values()) for status in statuses},
            longest_of_requests=_counts(requests["longest"]),
            longest_by_status=by_status,
            bands=bands(requests),
            latency=latency(traces, times, split, requests),
            client=client_view(selection, traces, requests),
            completeness=missing.result(),
        )


def attribute_requests(selection: Selection) -> tuple[pl.DataFrame, Completeness]:
    """Return only the rows, as of the table `requests`, and what is missing behind them."""
    selection = selection.resolved()
    traces = _traces(selection)
    times = times_of(traces)
    requests = rows_of(traces, times, split_of(traces, times), received_ns=0)
    return requests, completeness(selection, traces, requests, now_ns=time.time_ns())


def _traces(selection: Selection) -> RequestTraces:
    """Return the requests with their spans. Raises NoDataError, which says what there is."""
    try:
        return selection.traces()
    except NoDataError as error:
        raise why_nothing(selection, error) from None


def bands(requests: pl.DataFrame) -> dict[str, Band]:
    """Return the BANDS of `requests` rows, ranked by e2e_ns among those that ended ok."""
    ok = requests.filter(pl.col("status") == "ok")
    ranked = ok.select(pl.arg_sort_by("e2e_ns", "trace_id", "span_id")).to_series()
    middle = _rows(ok, ranked, "p50")
    return {name: _band(name, _rows(ok, ranked, name), middle) for name in BANDS}


def _rows(requests: pl.DataFrame, ranked: pl.Series, name: str) -> pl.DataFrame:
    """Return the requests of a band: at least one, where there is one."""
    low, high = BANDS[name]
    first, last = len(ranked) * low // 100, -(-len(ranked) * high // 100)
    return requests[ranked[first:last]]


def _band(name: str, rows: pl.DataFrame, middle: pl.DataFrame) -> Band:
    if rows.is_empty():
        return Band(name, 0, True, None, None, None, None, {}, None)
    stages = rows.select(STAGE_COLUMNS).mean().row(0)
    shares = rows.select(SUB_STAGE_COLUMNS).mean().row(0)
    return Band(
        name,
        len(rows),
        len(rows) < ENOUGH_REQUESTS,
        float(rows["e2e_ns"].to_numpy().mean()),
        dict(zip(STAGE_NAMES, stages, strict=True)),
        {name.removesuffix("_ns"): v for name, v in zip(SUB_STAGE_COLUMNS, shares, strict=True)},
        STAGE_NAMES[int(np.argmax(stages))],
        _counts(rows["longest"]),
        None if name == "p50" else _contributions(rows, middle),
    )


def _contributions(rows: pl.DataFrame, middle: pl.DataFrame) -> dict[str, float] | None:
    """Return each stage's part in the difference of means; None where there is no difference."""
    means = (frame.select("e2e_ns", *STAGE_COLUMNS).mean() for frame in (rows, middle))
    slow, usual = (np.array(mean.row(0)) for mean in means)
    whole, *parts = slow - usual
    if whole <= 0:
        return None
    return dict(zip(STAGE_NAMES, (np.array(parts) / whole).tolist(), strict=True))


def _counts(longest: pl.Series) -> dict[str, int]:
    counts = dict(longest.value_counts().iter_rows())
    return {name: counts[name] for name in STAGE_NAMES if name in counts}
