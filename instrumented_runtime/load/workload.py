"""What is asked of a server, and when: the arrivals of a workload, and how they are scaled."""

import hashlib
import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace

import numpy as np

from perfledger.schema.errors import UsageError
from perfledger.schema.quantiles import quantiles

NS_PER_S = 1_000_000_000


@dataclass(frozen=True, slots=True)
class Arrival:
    """One request: when it comes, and how long its prompt and its answer are.

    `prefix_ids` names the blocks of its prompt: equal ids at the front are a shared prefix.
    """

    offset_ns: int
    input_tokens: int
    output_tokens: int
    prefix_ids: tuple[int, ...] = ()
    traffic_class: str = ""
    tenant: str = ""
    session: str = ""
    priority: int | None = None  # lower goes first
    deadline_ms: int | None = None  # what its caller waits for the first token, from the sending


@dataclass(frozen=True)
class Scaling:
    """The declared factors that fit a workload to a machine; all of them enter the results.

    `time_scale` multiplies offsets (0.5 is twice the load); `rate` sets the mean rate instead
    (requests a second). Lengths are multiplied, then cut at their maximum, and are never below 1.
    """

    time_scale: float = 1.0
    rate: float | None = None
    input_scale: float = 1.0
    output_scale: float = 1.0
    max_input: int | None = None
    max_output: int | None = None
    limit: int | None = None  # the first so many requests
    spread_grid: bool = False  # spread arrivals that a file rounded to a coarse grid


@dataclass(frozen=True)
class Workload:
    """Arrivals in order of time; the first comes at offset 0. `notes` says what was changed."""

    name: str
    source: str
    arrivals: tuple[Arrival, ...]
    block_tokens: int = 0  # tokens in one prefix block; 0 where prompts share nothing
    skipped: int = 0  # rows without output tokens: failed requests of the original service
    notes: tuple[str, ...] = ()
    scaling: Scaling = Scaling()

    @property
    def span_ns(self) -> int:
        """Time from the first arrival to the last, ns."""
        return self.arrivals[-1].offset_ns if self.arrivals else 0

    @property
    def rate(self) -> float | None:
        """Mean rate, requests a second: (n - 1) / span; None for one instant."""
        if not self.span_ns:
            return None
        return (len(self.arrivals) - 1) * NS_PER_S / self.span_ns

    def sha256(self) -> str:
        """Return the hash of every arrival and of the block size: equal hash, equal work."""
        digest = hashlib.sha256(f"{self.block_tokens}\n".encode())
        for arrival in self.arrivals:
            digest.update(json.dumps(_cells(arrival)).encode())
        return digest.hexdigest()


def _cells(arrival: Arrival) -> list[object]:
    cells = [getattr(arrival, name) for name in Arrival.__slots__]
    while cells[-1] is None:  # hashes of workloads without priorities and deadlines stay
        cells.pop()
    return cells


def with_defaults(
    workload: Workload, *, tenant: str = "", priority: int | None, deadline_ms: int | None
) -> Workload:
    """Return the workload with these where a request of it says nothing of its own."""

    def filled(arrival: Arrival) -> Arrival:
        return replace(
            arrival,
            tenant=arrival.tenant or tenant,
            priority=priority if arrival.priority is None else arrival.priority,
            deadline_ms=deadline_ms if arrival.deadline_ms is None else arrival.deadline_ms,
        )

    return replace(workload, arrivals=tuple(filled(arrival) for arrival in workload.arrivals))


def scale(workload: Workload, scaling: Scaling, seed: int = 0) -> Workload:
    """Return the workload fitted by the declared factors; raises UsageError for impossible ones.

    A prefix block shrinks by `input_scale` as well, so the share of a prompt that is shared stays.
    The seed serves `spread_grid` only.
    """
    _check(scaling)
    arrivals = workload.arrivals[: scaling.limit]
    notes = list(workload.notes)
    if grid_ns := coarse_grid_ns(arrivals):
        grid = f"a grid of {grid_ns / NS_PER_S:g} s"
        if scaling.spread_grid:
            arrivals = _spread(arrivals, grid_ns, seed)
            notes.append(f"arrivals of the trace lie on {grid}; spread over it")
        else:
            advice = "so they come in bursts (spread-grid spreads them)"
            notes.append(f"arrivals of the trace lie on {grid}, {advice}")
    block = workload.block_tokens
    if block:
        block = max(1, round(block * scaling.input_scale))
    factor = _time_factor(replace(workload, arrivals=arrivals), scaling)
    return replace(
        workload,
        arrivals=tuple(_scale_one(arrival, scaling, factor, block) for arrival in arrivals),
        block_tokens=block,
        notes=tuple(notes),
        scaling=scaling,
    )


def _check(scaling: Scaling) -> None:
    if scaling.rate is not None and scaling.time_scale != 1.0:
        raise UsageError("a rate and a time scale both set the time", fix="give only one of them")
    for name, value in asdict(scaling).items():
        if isinstance(value, bool) or value is None:
            continue
        if not (math.isfinite(value) and value > 0):
            option = name.replace("_", "-")
            raise UsageError(f"--{option} must be above 0, not {value}")


def _time_factor(workload: Workload, scaling: Scaling) -> float:
    if scaling.rate is None:
        return scaling.time_scale
    if workload.rate is None:
        raise UsageError(
            "no rate can be set: all requests arrive at one instant",
            where=workload.source,
            fix="take more requests (--limit) or leave out --rate",
        )
    return workload.rate / scaling.rate


def _scale_one(arrival: Arrival, scaling: Scaling, factor: float, block: int) -> Arrival:
    input_tokens = _length(arrival.input_tokens, scaling.input_scale, scaling.max_input)
    return replace(
        arrival,
        offset_ns=round(arrival.offset_ns * factor),
        input_tokens=input_tokens,
        output_tokens=_length(arrival.output_tokens, scaling.output_scale, scaling.max_output),
        prefix_ids=arrival.prefix_ids[: -(-input_tokens // block)] if block else (),
    )


def _length(tokens: int, factor: float, maximum: int | None) -> int:
    scaled = max(1, round(tokens * factor))
    return scaled if maximum is None else min(scaled, maximum)


def coarse_grid_ns(arrivals: Sequence[Arrival]) -> int:
    """Return the grid that arrivals were rounded to, ns; 0 where there is none of a second or more.

    A grid shows as most gaps being 0 and the others being nearly one length.
    """
    gaps = np.diff([arrival.offset_ns for arrival in arrivals])
    steps = gaps[gaps > 0]
    if len(steps) < 2 or 2 * len(steps) > len(gaps):
        return 0
    low, middle, high = np.quantile(steps, (0.05, 0.5, 0.95))
    return round(middle) if middle >= NS_PER_S and high - low <= 0.02 * middle else 0


def _spread(arrivals: tuple[Arrival, ...], grid_ns: int, seed: int) -> tuple[Arrival, ...]:
    """Move each arrival by a uniform share of the grid; the first stays at offset 0."""
    shifts = np.random.default_rng([seed, 5]).integers(0, grid_ns, len(arrivals))
    moved = sorted(int(a.offset_ns + s) for a, s in zip(arrivals, shifts, strict=True))
    return tuple(
        replace(arrival, offset_ns=at - moved[0])
        for arrival, at in zip(arrivals, moved, strict=True)
    )


@dataclass(frozen=True)
class Spread:
    """How numbers are spread; percentiles interpolate linearly (numpy's default)."""

    mean: float
    p50: float
    p95: float
    p99: float
    maximum: float


@dataclass(frozen=True)
class WorkloadFacts:
    """A workload in numbers. `gap_cv` and `empty_seconds` say how bursty it is.

    leading_reuse: share of prompt blocks that an unlimited prefix cache would hold, counted from
    the front of each prompt; None where no prompt names its blocks.
    """

    requests: int
    span_s: float
    rate: float | None
    gap_cv: float | None
    empty_seconds: float | None
    input_tokens: Spread
    output_tokens: Spread
    leading_reuse: float | None


def describe(workload: Workload) -> WorkloadFacts:
    """Return a workload's numbers; raises UsageError for one without arrivals."""
    if not workload.arrivals:
        raise UsageError("a workload without requests", where=workload.source)
    offsets = np.array([arrival.offset_ns for arrival in workload.arrivals])
    gaps = np.diff(offsets)
    mean_gap = float(gaps.mean()) if len(gaps) else 0.0
    seconds = offsets // NS_PER_S
    return WorkloadFacts(
        requests=len(offsets),
        span_s=workload.span_ns / NS_PER_S,
        rate=workload.rate,
        gap_cv=float(gaps.std()) / mean_gap if mean_gap else None,
        empty_seconds=1 - len(np.unique(seconds)) / int(seconds[-1] + 1) if mean_gap else None,
        input_tokens=spread([arrival.input_tokens for arrival in workload.arrivals]),
        output_tokens=spread([arrival.output_tokens for arrival in workload.arrivals]),
        leading_reuse=_leading_reuse(workload.arrivals),
    )


def spread(values: Sequence[int]) -> Spread:
    """Return mean, percentiles and maximum of at least one value."""
    numbers = np.asarray(values, dtype=np.float64)
    return Spread(
        float(numbers.mean()),
        *quantiles(numbers, (0.5, 0.95, 0.99, 1.0)),
    )


def _leading_reuse(arrivals: Sequence[Arrival]) -> float | None:
    seen: set[int] = set()
    reused = total = 0
    for arrival in arrivals:
        for block in arrival.prefix_ids:
            if block not in seen:
                break
            reused += 1
        total += len(arrival.prefix_ids)
        seen.update(arrival.prefix_ids)
    return reused / total if total else None
