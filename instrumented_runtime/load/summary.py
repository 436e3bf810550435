"""A load run in numbers, each with its definition. Undefined is None, never 0."""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from perfledger.instrumented_runtime.load.plan import (
    OUTPUT,
    Calibration,
    Ending,
    LoadResult,
    Sample,
)
from perfledger.instrumented_runtime.load.workload import (
    NS_PER_S,
    Scaling,
    Spread,
    WorkloadFacts,
    describe,
    spread,
)
from perfledger.schema.quantiles import quantiles

# Past this the client itself, not the server, shapes the measurement.
CLIENT_LATE_NS = 10_000_000

DEFINITIONS: dict[str, str] = {
    "ttft_ns": "real send to the first chunk with text, of any channel",
    "ttft_from_schedule_ns": "scheduled time to the first chunk with text",
    "ttfo_ns": "real send to the first chunk with answer text: no reasoning, no tool call",
    "itl_ns": "gaps between chunks with text of one answer, pooled; a chunk may hold many tokens",
    "e2e_ns": "real send to the last chunk with text; what follows it (usage, [DONE]) is left out",
    "e2e_from_schedule_ns": "scheduled time to the last chunk with text",
    "lateness_ns": "real send minus scheduled time, every measured request",
    "loop_lag_ns": "how late the client's event loop woke up, sampled every 20 ms",
    "rate_asked": "(n - 1) / (last - first scheduled time), requests a second",
    "rate_achieved": "(n - 1) / (last - first real send), requests a second",
    "output_tokens_per_s": "usage.completion_tokens of ok requests / (first send to last chunk)",
    "population": "latencies: ok requests without warm-up; failed ones are counted by kind",
    "percentile": "linear interpolation of raw samples; std is the population's",
}


@dataclass(frozen=True)
class Metric:
    """Statistics of raw ns; all None where nothing was measured."""

    mean: float | None
    std: float | None
    p50: float | None
    p95: float | None
    p99: float | None
    n: int


@dataclass(frozen=True)
class LoadSummary:
    """What `perfledger load` prints; `definition` says what each number is."""

    run_id: str
    url: str
    endpoint: str
    model: str
    seed: int
    ended: Ending
    workload: str
    workload_source: str
    workload_sha256: str
    workload_notes: tuple[str, ...]
    scaling: Scaling
    asked: WorkloadFacts
    realised_input_tokens: Spread | None  # the server's count, where it sent one
    realised_output_tokens: Spread | None
    calibration: Calibration | None
    sent: int
    ok: int
    failed: dict[str, int]
    aborted: int
    unsent: int
    warm_up: int
    usage_missing: int  # ok requests whose tokens the server did not count
    rate_asked: float | None
    rate_achieved: float | None
    window_s: float | None
    output_tokens_per_s: float | None
    client_is_bottleneck: bool
    metrics: dict[str, Metric]
    definition: dict[str, str]


def summarise(result: LoadResult) -> LoadSummary:
    """Return the summary of a run. Pure."""
    plan, measured = result.plan, result.measured
    ok = [sample for sample in measured if sample.outcome == "ok"]
    failed = Counter(s.error for s in measured if s.outcome in ("error", "refused"))
    metrics = _metrics(measured, ok, result.loop_lag_ns)
    window_ns = _window_ns(ok)
    missing = sum(sample.output_tokens is None for sample in ok)
    return LoadSummary(
        run_id=plan.run_id,
        url=plan.url,
        endpoint=plan.endpoint,
        model=result.model,
        seed=plan.seed,
        ended=result.ended,
        workload=plan.workload.name,
        workload_source=plan.workload.source,
        workload_sha256=plan.workload.sha256(),
        workload_notes=plan.workload.notes,
        scaling=plan.workload.scaling,
        asked=describe(plan.workload),
        realised_input_tokens=_realised(sample.input_tokens for sample in ok),
        realised_output_tokens=_realised(sample.output_tokens for sample in ok),
        calibration=result.calibration,
        sent=len(measured),
        ok=len(ok),
        failed=dict(failed.most_common()),
        aborted=sum(sample.outcome == "aborted" for sample in measured),
        unsent=result.unsent,
        warm_up=len(result.samples) - len(measured),
        usage_missing=missing,
        rate_asked=_rate([sample.scheduled_ns for sample in measured]),
        rate_achieved=_rate([sample.sent_ns for sample in measured]),
        window_s=window_ns / NS_PER_S if window_ns else None,
        output_tokens_per_s=None if missing else _tokens_per_s(ok, window_ns),
        client_is_bottleneck=_client_is_bottleneck(metrics),
        metrics=metrics,
        definition=DEFINITIONS,
    )


def _metrics(
    measured: Sequence[Sample], ok: Sequence[Sample], lag_ns: Sequence[int]
) -> dict[str, Metric]:
    return {
        "ttft_ns": metric(s.chunk_ns[0] - s.sent_ns for s in ok),
        "ttft_from_schedule_ns": metric(s.chunk_ns[0] - s.scheduled_ns for s in ok),
        "ttfo_ns": metric(
            s.chunk_ns[s.channels.index(OUTPUT)] - s.sent_ns for s in ok if OUTPUT in s.channels
        ),
        "itl_ns": metric(gap for s in ok for gap in _gaps(s)),
        "e2e_ns": metric(s.chunk_ns[-1] - s.sent_ns for s in ok),
        "e2e_from_schedule_ns": metric(s.chunk_ns[-1] - s.scheduled_ns for s in ok),
        "lateness_ns": metric(s.lateness_ns for s in measured),
        "loop_lag_ns": metric(lag_ns),
    }


def _gaps(sample: Sample) -> Iterator[int]:
    """Yield the gaps between the chunks of each choice."""
    if not any(sample.choices):
        yield from (later - earlier for earlier, later in pairwise(sample.chunk_ns))
        return
    newest: dict[int, int] = {}
    for choice, at_ns in zip(sample.choices, sample.chunk_ns, strict=True):
        if choice in newest:
            yield at_ns - newest[choice]
        newest[choice] = at_ns


def metric(values: Iterable[int]) -> Metric:
    """Return the statistics of raw ns values."""
    raw = np.fromiter(values, dtype=np.int64)
    if not len(raw):
        return Metric(None, None, None, None, None, 0)
    p50, p95, p99 = quantiles(raw, (0.5, 0.95, 0.99))
    return Metric(float(raw.mean()), float(raw.std()), p50, p95, p99, len(raw))


def _realised(counts: Iterable[int | None]) -> Spread | None:
    known = [count for count in counts if count is not None]
    return spread(known) if known else None


def _rate(times_ns: Sequence[int]) -> float | None:
    """Return (n - 1) / span, requests a second; None for fewer than two instants."""
    if len(times_ns) < 2 or max(times_ns) == min(times_ns):
        return None
    return (len(times_ns) - 1) * NS_PER_S / (max(times_ns) - min(times_ns))


def _window_ns(ok: Sequence[Sample]) -> int:
    if not ok:
        return 0
    return max(sample.chunk_ns[-1] for sample in ok) - min(sample.sent_ns for sample in ok)


def _tokens_per_s(ok: Sequence[Sample], window_ns: int) -> float | None:
    if not window_ns:
        return None
    return sum(sample.output_tokens or 0 for sample in ok) * NS_PER_S / window_ns


def _client_is_bottleneck(metrics: dict[str, Metric]) -> bool:
    latest = (metrics["lateness_ns"].p99, metrics["loop_lag_ns"].p99)
    return any(ns is not None and ns > CLIENT_LATE_NS for ns in latest)
