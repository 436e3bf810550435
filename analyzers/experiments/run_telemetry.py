"""From the spans of one run to its steps and requests, and whether any of it is missing."""

from collections.abc import Collection
from dataclasses import dataclass

import polars as pl

from perfledger.schema.derive import request_rows, step_rows


@dataclass(frozen=True)
class RunTelemetry:
    """What the store holds of one run. `requests` and `steps` are without the warm-up."""

    steps: pl.DataFrame
    requests: pl.DataFrame
    missing: str | None  # what did not arrive


def run_telemetry(spans: pl.DataFrame, measured: Collection[bytes]) -> RunTelemetry:
    """Return the steps and requests of a run; `measured` are the trace ids of its requests.

    Made from the spans themselves: the collector's own rows may not have settled yet.
    """
    received_ns = spans["received_ns"].max() or 0
    assert isinstance(received_ns, int)
    steps = step_rows(spans, received_ns)
    every = request_rows(spans, steps, received_ns=received_ns)
    requests = every.filter(pl.col("trace_id").is_in(list(measured)))
    first_ns = requests["arrival_ns"].min() or 0
    steps = steps.filter(pl.col("end_ns") > first_ns).sort("step_seq")
    return RunTelemetry(steps, requests, _missing(spans, steps, requests, len(measured)))


def _missing(
    spans: pl.DataFrame, steps: pl.DataFrame, requests: pl.DataFrame, expected: int
) -> str | None:
    if requests.height != expected:
        return f"telemetry of {requests.height} of {expected} requests arrived"
    if not steps.height:
        return "no telemetry of engine steps arrived"
    if lost := int(steps["step_seq"].diff().drop_nulls().sum()) - (steps.height - 1):
        return f"telemetry of {lost} engine steps is missing"
    if gaps := spans.filter(pl.col("name") == "telemetry_dropped").height:
        return f"telemetry was dropped in {gaps} places"
    return None
