"""Where each nanosecond of a request goes: the partition of its time from arrival to end.

At each instant the first of these that holds wins (`stages.STAGES` says what each stage means):

1. in a step of the request: `sample` while its sample child runs, else `prefill` where any of its
   tokens there are prompt or recomputed ones (share `recompute`), else `decode`;
2. its spans `encode`, `adapter_load`, `kv_transfer`; 3. `context`; 4. `queue`;
5. `route`, `template`, `tokenize`;
6. from the first admission to the last sample: `stream` while held back for an unread client, else
   `host_gap` (shares: `other_step` while a step of its engine runs without it, else `schedule`
   while its engine schedules, else `rest`);
7. after that last sample: `detokenize`, then `stream`; 8. else `unattributed`.

A step counts from the end of its schedule child to its end. The first admission is the earliest
end of a `context` span, or the start of the first step where there is no such span. The last
sample is the latest end of a step's sample child (of the step, where it has none). A request
without steps is described by its own `prefill`, `decode` and `sample` spans instead. A request
that no engine worked on has no last sample: its `detokenize` and `stream` spans always count.

Pure: integers of ns in, integers of ns out. The stages of a request add up to its end minus its
arrival exactly, whatever the spans look like; the order of the input rows does not matter.
"""

from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from itertools import pairwise
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from perfledger.schema.intervals import Coverage, Ints, Pieces, Timeline, first_match
from perfledger.schema.stages import STAGE_NAMES, SUB_STAGE_COLUMNS

Small = NDArray[np.int8]

# Spans of a request that the partition reads. `held_back` is `stream` with reason backpressure.
KINDS: tuple[str, ...] = (
    *("sample", "prefill", "decode", "encode", "adapter_load", "kv_transfer", "context", "queue"),
    *("route", "template", "tokenize", "held_back", "detokenize", "stream"),
)
KIND: dict[str, int] = {name: number for number, name in enumerate(KINDS)}
_COMPUTE_KINDS = KIND["decode"] + 1  # kinds below this are work of an engine

# What a request computes in a step, in order of precedence.
RECOMPUTE, PREFILL, DECODE = 1, 2, 3

# The order of precedence of every class of time, with shares told apart.
_CLASSES: tuple[str, ...] = (
    *("sample", "recompute", "prefill", "decode", "encode", "adapter_load", "kv_transfer"),
    *("context", "queue", "route", "template", "tokenize", "held_back", "host_gap"),
    *("detokenize", "stream", "unattributed"),
)
_CLASS: dict[str, int] = {name: number for number, name in enumerate(_CLASSES)}
_CLASS_OF_KIND = np.array([_CLASS[name] for name in KINDS], np.int64)

_NEVER = np.iinfo(np.int64).max
_MOST_NS = 1 << 62  # of request time in one slice
_NO_ENGINE = -1


@dataclass(frozen=True)
class OwnSpans:
    """Spans of requests: the row of the request, a number of KINDS, start and end.

    A span held back for an unread client is given twice: as `held_back` and as `stream`.
    """

    request: Ints
    kind: Small
    start_ns: Ints
    end_ns: Ints


@dataclass(frozen=True)
class EngineSteps:
    """Steps of rank 0, in any order. Without a sample child both its stamps equal the end."""

    engine: Ints
    start_ns: Ints
    schedule_end_ns: Ints
    sample_start_ns: Ints
    sample_end_ns: Ints
    end_ns: Ints


@dataclass(frozen=True)
class Members:
    """Which request computes what (RECOMPUTE, PREFILL or DECODE) in which step, by row numbers."""

    request: Ints
    step: Ints
    phase: Small


Rows = TypeVar("Rows", OwnSpans, Members)


@dataclass(frozen=True)
class Partition:
    """ns per request: columns in the order of STAGE_NAMES and of SUB_STAGE_COLUMNS."""

    stages: Ints
    sub_stages: Ints


@dataclass(frozen=True)
class _Work:
    """Intervals in which an engine worked on a request, sorted by request, then start."""

    request: Ints
    start: Ints
    sample_start: Ints
    sample_end: Ints
    end: Ints
    phase: Ints
    engine: Ints

    def columns(self) -> list[Ints]:
        return [getattr(self, field.name) for field in fields(self)]

    def take(self, rows: Ints | NDArray[np.bool_]) -> "_Work":
        return _Work(*(column[rows] for column in self.columns()))


@dataclass(frozen=True)
class _AtWork:
    """Sums of classes so far, when engines worked, whose work overlaps, its first step's engine."""

    totals: Ints
    cover: Coverage
    tangled: NDArray[np.bool_]
    engine: Ints


@dataclass(frozen=True)
class _Engine:
    """When an engine ran steps, and when it ran or scheduled them."""

    running: Coverage
    active: Coverage


def partition(
    arrival_ns: Ints,
    end_ns: Ints,
    spans: OwnSpans,
    steps: EngineSteps,
    members: Members,
    *,
    slice_size: int = 8192,
) -> Partition:
    """Return where the time of each request went, in ns (the rules are in the module's docstring).

    Requests are worked on in slices of at most `slice_size`, to bound memory.
    """
    end_ns = np.maximum(arrival_ns, end_ns)
    steps = _repaired(steps)
    spans = _by_request(spans)
    members = once_per_step(members, steps)
    engines = _engines(steps)
    stages = np.zeros((len(arrival_ns), len(STAGE_NAMES)), np.int64)
    sub_stages = np.zeros((len(arrival_ns), len(SUB_STAGE_COLUMNS)), np.int64)
    for first, last in _slices(end_ns - arrival_ns, slice_size):
        line = Timeline.of(arrival_ns[first:last], end_ns[first:last])
        of_slice = _of_requests(spans, first, last), steps, _of_requests(members, first, last)
        stages[first:last], sub_stages[first:last] = _partition_slice(line, *of_slice, engines)
    return Partition(stages, sub_stages)


def _of_requests(rows: Rows, first: int, last: int) -> Rows:
    """Return the rows (sorted by request) of some requests, which are numbered from 0 again."""
    part = slice(*np.searchsorted(rows.request, [first, last]))
    columns = {field.name: getattr(rows, field.name)[part] for field in fields(rows)}
    return replace(rows, **{**columns, "request": columns["request"] - first})


def _repaired(steps: EngineSteps) -> EngineSteps:
    """Make each step run forwards, its sample child inside it."""
    start = steps.schedule_end_ns
    end = np.maximum(start, steps.end_ns)
    sample_start = np.clip(steps.sample_start_ns, start, end)
    sample_end = np.clip(steps.sample_end_ns, sample_start, end)
    return EngineSteps(
        steps.engine, np.minimum(steps.start_ns, start), start, sample_start, sample_end, end
    )


def _by_request(spans: OwnSpans) -> OwnSpans:
    order = np.argsort(spans.request, kind="stable")
    start = spans.start_ns[order]
    end = np.maximum(start, spans.end_ns[order])
    return OwnSpans(spans.request[order], spans.kind[order], start, end)


def once_per_step(members: Members, steps: EngineSteps) -> Members:
    """Sort by request and step start; several sequences in one step are one member (n > 1)."""
    if _is_once(members, steps):
        return members
    by_start = np.lexsort((steps.engine, steps.schedule_end_ns))
    place = np.empty(len(by_start), np.int64)
    place[by_start] = np.arange(len(by_start))
    # One integer a member sorts faster than three columns; the phase that wins comes first.
    key = (members.request * len(place) + place[members.step]) * 4 + members.phase
    key.sort()
    pair, phase = key >> 2, (key & 3).astype(np.int8)
    kept = np.ones(len(pair), np.bool_)
    kept[1:] = pair[1:] != pair[:-1]
    request, step = np.divmod(pair[kept], max(1, len(place)))
    return Members(request, by_start[step], phase[kept])


def _is_once(members: Members, steps: EngineSteps) -> bool:
    """Return whether members are surely sorted and unique: cheaper than to sort them again."""
    request, start = members.request, steps.schedule_end_ns[members.step]
    in_order = (request[1:] == request[:-1]) & (start[1:] > start[:-1])
    return bool((in_order | (request[1:] > request[:-1])).all())


def _engines(steps: EngineSteps) -> list[_Engine]:
    """Return when each engine ran and scheduled, by its number."""
    order = np.argsort(steps.engine, kind="stable")
    numbers = np.arange(steps.engine.max(initial=_NO_ENGINE) + 2)
    first = np.searchsorted(steps.engine[order], numbers)
    return [_engine(steps, order[begin:end]) for begin, end in pairwise(first)]


def _engine(steps: EngineSteps, rows: Ints) -> _Engine:
    end = steps.end_ns[rows]
    return _Engine(
        Coverage.of(steps.schedule_end_ns[rows], end), Coverage.of(steps.start_ns[rows], end)
    )


def _slices(length_ns: Ints, size: int) -> Iterator[tuple[int, int]]:
    """Yield ranges of requests whose times, laid one after another, fit an integer."""
    ranges = [(first, first + size) for first in range(0, len(length_ns), size)]
    while ranges:
        first, last = ranges.pop()
        if last - first > 1 and length_ns[first:last].sum(dtype=np.float64) > _MOST_NS:
            middle = (first + last) // 2
            ranges += [(first, middle), (middle, last)]
        else:
            yield first, min(last, len(length_ns))


def _partition_slice(
    line: Timeline, spans: OwnSpans, steps: EngineSteps, members: Members, engines: list[_Engine]
) -> tuple[Ints, Ints]:
    """Partition the time of the requests of one slice, numbered from 0."""
    work = _work(len(line.start), spans, steps, members)
    at_work = _at_work(line, work)
    totals, cover = at_work.totals, at_work.cover
    pieces = _between(line, spans, work)
    own = cover.within(pieces.start, pieces.end)
    _add(totals, line.index(pieces.start), pieces.rank, pieces.end - pieces.start - own)
    totals[:, _CLASS["unattributed"]] = line.end - line.start - totals.sum(axis=1)
    gap = pieces.rank == _CLASS["host_gap"]
    shares = _gap_shares(line, pieces.start[gap], pieces.end[gap], at_work, engines)
    return _stages(totals), _sub_stages(totals, *shares)


def _work(requests: int, spans: OwnSpans, steps: EngineSteps, members: Members) -> _Work:
    """Return the work on each request: its steps, or its own spans where no step is known."""
    has_steps = np.zeros(requests, np.bool_)
    has_steps[members.request] = True
    own = np.flatnonzero((spans.kind < _COMPUTE_KINDS) & ~has_steps[spans.request])
    start, end, kind = spans.start_ns[own], spans.end_ns[own], spans.kind[own]
    step = members.step
    in_steps = _Work(
        members.request,
        steps.schedule_end_ns[step],
        steps.sample_start_ns[step],
        steps.sample_end_ns[step],
        steps.end_ns[step],
        members.phase.astype(np.int64),
        steps.engine[step],
    )
    if not len(own):
        return in_steps
    told = _Work(
        spans.request[own],
        start,
        np.where(kind == KIND["sample"], start, end),
        end,
        end,
        np.where(kind == KIND["prefill"], PREFILL, DECODE),
        np.full(len(own), _NO_ENGINE),
    )
    work = _Work(*map(np.concatenate, zip(in_steps.columns(), told.columns(), strict=True)))
    return work.take(np.lexsort((work.start, work.request)))


def _at_work(line: Timeline, work: _Work) -> _AtWork:
    """Sum the classes of work.

    Almost always the steps of a request follow each other, and lengths just add up. Only where
    they overlap, or where they ran on several engines, is it worth while to cut them up.
    """
    totals = np.zeros((len(line.start), len(_CLASSES)), np.int64)
    start, end = line.at(work.request, work.start), line.at(work.request, work.end)
    inside = end > start
    if not inside.all():
        work, start, end = work.take(inside), start[inside], end[inside]
    sample_start = line.at(work.request, work.sample_start)
    sample_end = line.at(work.request, work.sample_end)
    overlap = (start[1:] < end[:-1]) | (
        (work.request[1:] == work.request[:-1]) & (work.engine[1:] != work.engine[:-1])
    )
    tangled = np.zeros(len(line.start), np.bool_)
    tangled[work.request[1:][overlap]] = True
    engine = np.full(len(line.start), _NO_ENGINE)
    engine[work.request[::-1]] = work.engine[::-1]  # the last to be set is its first step's

    tidy = ~tangled[work.request]
    sampling = sample_end - sample_start
    rest = end - start - sampling
    _add(totals, work.request[tidy], work.phase[tidy], rest[tidy])
    _add(totals, work.request[tidy], np.full(tidy.sum(), _CLASS["sample"]), sampling[tidy])
    if tidy.all():
        return _AtWork(totals, Coverage(start, end), tangled, engine)
    pieces = first_match(
        np.concatenate([start[~tidy], sample_start[~tidy]]),
        np.concatenate([end[~tidy], sample_end[~tidy]]),
        np.concatenate([work.phase[~tidy], np.full((~tidy).sum(), _CLASS["sample"])]),
    )
    _add(totals, line.index(pieces.start), pieces.rank, pieces.end - pieces.start)
    start = np.concatenate([start[tidy], pieces.start])
    order = np.argsort(start)
    cover = Coverage(start[order], np.concatenate([end[tidy], pieces.end])[order])
    return _AtWork(totals, cover, tangled, engine)


def _between(line: Timeline, spans: OwnSpans, work: _Work) -> Pieces:
    """Return the pieces of classes that may hold while no engine works on the request."""
    requests = len(line.start)
    first_work, last_sample = np.full(requests, _NEVER), np.full(requests, -_NEVER)
    np.minimum.at(first_work, work.request, work.start)
    np.maximum.at(last_sample, work.request, work.sample_end)
    admission, context = np.full(requests, _NEVER), spans.kind == KIND["context"]
    np.minimum.at(admission, spans.request[context], spans.end_ns[context])
    admission = np.where(admission < _NEVER, admission, first_work)

    waits = np.flatnonzero(spans.kind >= _COMPUTE_KINDS)
    request, kind = spans.request[waits], spans.kind[waits]
    start, end, sampled = spans.start_ns[waits], spans.end_ns[waits], last_sample[request]
    held = kind == KIND["held_back"]
    late = (kind == KIND["detokenize"]) | (kind == KIND["stream"])
    start = np.where(held, np.maximum(start, admission[request]), start)
    start = np.where(late, np.maximum(start, sampled), start)
    end = np.where(held, np.minimum(end, sampled), end)

    resident = np.flatnonzero(last_sample > -_NEVER)
    rank = [_CLASS_OF_KIND[kind], np.full(len(resident), _CLASS["host_gap"])]
    request = np.concatenate([request, resident])
    start = np.concatenate([start, admission[resident]])
    end = np.concatenate([end, last_sample[resident]])
    return first_match(line.at(request, start), line.at(request, end), np.concatenate(rank))


def _gap_shares(
    line: Timeline, start: Ints, end: Ints, at_work: _AtWork, engines: list[_Engine]
) -> tuple[Ints, Ints]:
    """Return for each request how long, in its host gaps, its engine ran other steps or scheduled.

    A gap piece `[start, end)` may still hold the request's own steps; where these are tangled
    they are cut out, else their length is subtracted (they are steps of the same engine).
    """
    cover, engine = at_work.cover, at_work.engine
    own = cover.within(start, end)
    odd = at_work.tangled[line.index(start)]
    if odd.any():
        holes = first_match(
            np.concatenate([cover.start, start[odd]]),
            np.concatenate([cover.end, end[odd]]),
            np.repeat([0, 1], [len(cover.start), odd.sum()]),
        )
        hole = holes.rank == 1
        start = np.concatenate([start[~odd], holes.start[hole]])
        end = np.concatenate([end[~odd], holes.end[hole]])
        own = np.concatenate([own[~odd], np.zeros(hole.sum(), np.int64)])
    request = line.index(start)
    start_ns, end_ns = line.time_ns(request, start), line.time_ns(request, end)
    other, schedule = np.zeros(len(engine), np.int64), np.zeros(len(engine), np.int64)
    for number in np.unique(engine[engine >= 0]):
        of = np.flatnonzero(engine[request] == number)
        running = engines[number].running.within(start_ns[of], end_ns[of])
        active = engines[number].active.within(start_ns[of], end_ns[of])
        np.add.at(other, request[of], running - own[of])
        np.add.at(schedule, request[of], active - running)
    return other, schedule


def _add(totals: Ints, request: Ints, rank: Ints, length: Ints) -> None:
    np.add.at(totals.reshape(-1), request * totals.shape[1] + rank, length)


def _stages(totals: Ints) -> Ints:
    """Return the stages in their order; a share is added to its stage."""
    stage_of = {"recompute": "prefill", "held_back": "stream"}
    stages = np.zeros((len(totals), len(STAGE_NAMES)), np.int64)
    for column, name in enumerate(_CLASSES):
        stages[:, STAGE_NAMES.index(stage_of.get(name, name))] += totals[:, column]
    return stages


def _sub_stages(totals: Ints, other: Ints, schedule: Ints) -> Ints:
    shares = {
        "prefill_recompute_ns": totals[:, _CLASS["recompute"]],
        "host_gap_schedule_ns": schedule,
        "host_gap_other_step_ns": other,
        "host_gap_rest_ns": totals[:, _CLASS["host_gap"]] - other - schedule,
    }
    return np.column_stack([shares[name] for name in SUB_STAGE_COLUMNS])
