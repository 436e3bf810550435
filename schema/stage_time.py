"""Where the time of some requests goes: intervals of work and waiting, matched in their order.

The rules are in partition.py; this is how they are applied to many requests at once. The times of
all requests are laid on one axis. First the time in which an engine worked on a request is summed
(rule 1), then the pieces of everything else, without what of them an engine worked.
"""

from dataclasses import dataclass, fields

import numpy as np
from numpy.typing import NDArray

from perfledger.schema.intervals import Coverage, Ints, Pieces, Timeline, first_match
from perfledger.schema.partition_input import (
    COMPUTE_KINDS,
    DECODE,
    KIND,
    KINDS,
    PREFILL,
    EngineSteps,
    Members,
    OwnSpans,
)

# The order of precedence of every class of time, with shares told apart.
CLASSES: tuple[str, ...] = (
    *("sample", "recompute", "prefill", "decode", "encode", "adapter_load", "kv_transfer"),
    *("context", "queue", "route", "template", "tokenize", "held_back", "host_gap"),
    *("detokenize", "stream", "unattributed"),
)
CLASS: dict[str, int] = {name: number for number, name in enumerate(CLASSES)}
_CLASS_OF_KIND = np.array([CLASS[name] for name in KINDS], np.int64)

_NEVER = np.iinfo(np.int64).max
_NO_ENGINE = -1


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
