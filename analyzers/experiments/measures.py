"""What is measured of one run: each metric declared once, computed from its steps and requests."""

from dataclasses import dataclass
from typing import Literal

import polars as pl

Kind = Literal["wall", "cpu", "count"]


@dataclass(frozen=True)
class Metric:
    """One number of a run. `wall` needs a measured noise level of the machine to be decided on.

    `cpu` and `count` do not: they hardly feel the neighbours.
    """

    name: str
    unit: str
    kind: Kind
    meaning: str


METRICS: tuple[Metric, ...] = (
    Metric("queue_ns_per_request", "ns", "wall", "time in the stage queue, mean of requests"),
    Metric("queue_steps_per_request", "steps", "count", "engine steps that a request waited for"),
    Metric("steps_per_output_token", "steps", "count", "engine steps for each token sampled"),
    Metric("cpu_ns_per_output_token", "ns", "cpu", "engine CPU time for each token sampled"),
    Metric("batch_width", "sequences", "count", "sequences in a step, mean of steps"),
    Metric("prefill_tokens_per_request", "tokens", "count", "prompt tokens really computed"),
    Metric("ttft_ns_p50", "ns", "wall", "arrival to the end of the first sample, median"),
    Metric("e2e_ns_p50", "ns", "wall", "arrival to end, median"),
    Metric("wall_ns_per_output_token", "ns", "wall", "first arrival to last end, for each token"),
)
METRIC: dict[str, Metric] = {metric.name: metric for metric in METRICS}

STEP_COLUMNS = (
    "start_ns",
    "width",
    "prefill_tokens",
    "waiting",
    "kv_blocks_used",
    "kv_blocks_total",
    "cpu_ns",
)
REQUEST_COLUMNS = ("arrival_ns", "end_ns", "e2e_ns", "ttft_ns", "queue_ns", "output_tokens")


def measure(steps: pl.DataFrame, requests: pl.DataFrame) -> dict[str, float]:
    """Return the metrics of a run; one that the frames cannot tell is left out, never 0."""
    if not requests.height:
        return {}
    tokens = _sum(requests, "output_tokens")
    found: dict[str, float | None] = {
        "queue_ns_per_request": _sum_over(requests, "queue_ns", requests.height),
        "ttft_ns_p50": _median(requests, "ttft_ns"),
        "e2e_ns_p50": _median(requests, "e2e_ns"),
        "wall_ns_per_output_token": _ratio(_span_ns(requests), tokens),
        "queue_steps_per_request": _sum_over(steps, "waiting", requests.height),
        "prefill_tokens_per_request": _sum_over(steps, "prefill_tokens", requests.height),
        "steps_per_output_token": _ratio(steps.height or None, tokens),
        "cpu_ns_per_output_token": _ratio(_sum(steps.drop_nulls("cpu_ns"), "cpu_ns"), tokens),
        "batch_width": _sum_over(steps, "width", steps.height),
    }
    return {name: value for name, value in found.items() if value is not None}


def observe(
    steps: pl.DataFrame, requests: pl.DataFrame, *, slots: int | None
) -> dict[str, float | None]:
    """Return the quantities that a symptom may name; None where the frames cannot tell."""
    known = requests.drop_nulls(["ttft_ns", "queue_ns"])
    return {
        "queue_share_of_ttft": _ratio(_sum(known, "queue_ns"), _sum(known, "ttft_ns")),
        "waiting_mean": _sum_over(steps, "waiting", steps.height),
        "slots_full_share": _first(steps, (pl.col("width") >= slots).mean()) if slots else None,
        "kv_used_peak": _first(steps, (pl.col("kv_blocks_used") / pl.col("kv_blocks_total")).max()),
    }


def _sum(rows: pl.DataFrame, column: str) -> float | None:
    """Return the sum of a column; None if there are no rows or one of them does not tell."""
    if not rows.height or rows[column].null_count():
        return None
    return float(rows[column].sum())


def _sum_over(rows: pl.DataFrame, column: str, count: int) -> float | None:
    return _ratio(_sum(rows, column), count)


def _ratio(total: float | None, count: float | None) -> float | None:
    return total / count if total is not None and count else None


def _median(rows: pl.DataFrame, column: str) -> float | None:
    median = rows[column].median()
    return float(median) if isinstance(median, int | float) else None


def _span_ns(requests: pl.DataFrame) -> float:
    first, last = requests["arrival_ns"].min(), requests["end_ns"].max()
    assert isinstance(first, int) and isinstance(last, int)
    return float(last - first)


def _first(rows: pl.DataFrame, aggregate: pl.Expr) -> float | None:
    """Return one aggregate of the rows; None if there are none or they do not tell."""
    value = rows.select(aggregate).item() if rows.height else None
    return float(value) if value is not None else None
