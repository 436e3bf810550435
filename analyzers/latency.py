"""How long and how fast: TTFT and its stages, inter-token latency, end to end, token rates.

Times of the server, in ns. Latencies are of the requests that ended ok: a refusal in a millisecond
is not a fast answer. DEFINITIONS says what each number is.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import polars as pl
from numpy.typing import NDArray

from perfledger.schema.intervals import Coverage, Ints
from perfledger.schema.partition import Partition
from perfledger.schema.partition_input import (
    DECODE,
)
from perfledger.schema.quantiles import quantiles
from perfledger.schema.request_traces import RequestTraces
from perfledger.schema.stages import STAGE_NAMES
from perfledger.schema.token_times import NEVER, TokenTimes

TAIL = 0.95

DEFINITIONS: Mapping[str, str] = {
    "ttft_ns": "arrival at the server to the end of the first sample, of ok requests",
    "ttfc_ns": "arrival at the server to the first chunk written, of ok requests that told it",
    "e2e_ns": "arrival at the server to the last byte accepted by its socket, of ok requests",
    "itl_ns": "gaps between consecutive token times of one request, pooled over ok requests",
    "ttft_stages_ns": "mean share of each stage in TTFT: the partition of arrival to first sample",
    "ttft_tail_stages_ns": "the same over the slowest 5 % of TTFT",
    "prompt_tokens_per_s": "prompt and recomputed tokens of the steps that held a prompt of these"
    " requests / union of the time that those steps ran",
    "output_tokens_per_s": "tokens sampled for all these requests / first arrival to last end",
    "quantiles": "linear interpolation of raw values (Hyndman and Fan type 7)",
}


@dataclass(frozen=True)
class Distribution:
    """A sample of values; all but `n` are null where there is none."""

    n: int
    mean: float | None
    p50: float | None
    p95: float | None
    p99: float | None


@dataclass(frozen=True)
class Latency:
    """Latencies in ns, rates in tokens/s; null where nothing tells."""

    ttft_ns: Distribution
    ttfc_ns: Distribution
    e2e_ns: Distribution
    itl_ns: Distribution
    ttft_stages_ns: dict[str, float] | None
    ttft_tail_stages_ns: dict[str, float] | None
    prompt_tokens_per_s: float | None
    output_tokens_per_s: float | None


def latency(
    traces: RequestTraces, times: TokenTimes, split: Partition, requests: pl.DataFrame
) -> Latency:
    """Return the latencies and rates of gathered requests and their `requests` rows."""
    ok = (requests["status"] == "ok").to_numpy()
    ttft, tail = _ttft_stages(split.until[ok & (times.first_ns < NEVER)])
    return Latency(
        ttft_ns=distribution(_told(requests, "ttft_ns", ok)),
        ttfc_ns=distribution(_told(requests, "ttfc_ns", ok)),
        e2e_ns=distribution(_told(requests, "e2e_ns", ok)),
        itl_ns=distribution(token_gaps(times, ok)),
        ttft_stages_ns=ttft,
        ttft_tail_stages_ns=tail,
        prompt_tokens_per_s=_prompt_rate(traces),
        output_tokens_per_s=_output_rate(requests),
    )


def distribution(values: NDArray[np.number]) -> Distribution:
    """Return mean and quantiles of values."""
    if not len(values):
        return Distribution(0, None, None, None, None)
    return Distribution(len(values), float(values.mean()), *quantiles(values, (0.5, 0.95, 0.99)))


def token_gaps(times: TokenTimes, wanted: NDArray[np.bool_]) -> Ints:
    """Return the ns between consecutive tokens of the wanted requests."""
    within = (times.request[1:] == times.request[:-1]) & wanted[times.request[1:]]
    gaps: Ints = np.diff(times.time_ns)[within]
    return gaps


def _ttft_stages(stages: Ints) -> tuple[dict[str, float] | None, dict[str, float] | None]:
    """Return the mean stages up to the first sample, of all and of the slowest."""
    if not len(stages):
        return None, None
    slow = np.argsort(stages.sum(axis=1), kind="stable")[int(len(stages) * TAIL) :]
    return _means(stages), _means(stages[slow])


def _means(stages: Ints) -> dict[str, float]:
    return dict(zip(STAGE_NAMES, stages.mean(axis=0).tolist(), strict=True))


def _told(requests: pl.DataFrame, name: str, ok: NDArray[np.bool_]) -> Ints:
    return requests[name].filter(pl.Series(ok)).drop_nulls().to_numpy()


def _prompt_rate(traces: RequestTraces) -> float | None:
    prompt = traces.members.phase != DECODE
    steps = np.unique(traces.members.step[prompt])
    tokens = traces.step_rows["prefill_tokens"].gather(pl.Series(steps))
    if not len(steps) or tokens.null_count():
        return None
    busy = Coverage.of(traces.steps.schedule_end_ns[steps], traces.steps.end_ns[steps])
    return float(tokens.sum()) / (busy.length / 1e9) if busy.length else None


def _output_rate(requests: pl.DataFrame) -> float | None:
    """Tokens are what the root says, else the token times; null where neither is there."""
    tokens = requests.select(pl.coalesce("output_tokens", pl.col("token_times_ns").list.len()))
    told = tokens.to_series().drop_nulls().to_numpy()
    span_ns = int(requests["end_ns"].to_numpy().max() - requests["arrival_ns"].to_numpy().min())
    return float(told.sum()) / (span_ns / 1e9) if len(told) and span_ns else None
