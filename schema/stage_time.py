"""Where the time of some requests goes: intervals of work and waiting, matched in their order.

The rules are in partition.py; this is how they are applied to many requests at once. The times of
all requests are laid on one axis. First the time in which an engine worked on a request is summed
(rule 1), then the pieces of everything else, less what of them an engine worked.
"""

from dataclasses import dataclass, fields, replace

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
class Engine:
    """When an engine ran steps, and when it ran or scheduled them. Wall ns."""

    running: Coverage
    active: Coverage


@dataclass(frozen=True)
class Sums:
    """ns per request and class: of its whole time, and of its time before an instant (`cut`)."""

    whole: Ints
    before: Ints
    cut: Ints

    @classmethod
    def of(cls, line: Timeline, until_ns: Ints) -> "Sums":
        """Start from nothing; `until_ns` is a wall time of each request."""
        requests = np.arange(len(line.start))
        whole, before = (np.zeros((len(requests), len(CLASSES)), np.int64) for _ in range(2))
        return cls(whole, before, line.at(requests, until_ns))

    def add(self, pieces: Pieces, request: Ints, covered: Coverage | None = None) -> None:
        """Add pieces of these requests, less what is covered of them."""
        self._add(self.whole, pieces, request, covered)
        early = np.flatnonzero(pieces.start < self.cut[request])
        end = np.minimum(pieces.end[early], self.cut[request[early]])
        before = replace(pieces.take(early), end=end)
        self._add(self.before, before, request[early], covered)

    def _add(self, sums: Ints, pieces: Pieces, request: Ints, covered: Coverage | None) -> None:
        length = pieces.end - pieces.start
        if covered is not None:
            length -= covered.within(pieces.start, pieces.end)
        _add(sums, request, pieces.rank, length)

    def add_in_turn(self, work: "_Work") -> None:
        """Add work that does not overlap."""
        _add_in_turn(self.whole, work)
        early = np.flatnonzero(work.start < self.cut[work.request])
        before = work.take(early)
        cut = self.cut[before.request]
        names = ("sample_start", "sample_end", "end")
        clipped = {name: np.minimum(getattr(before, name), cut) for name in names}
        _add_in_turn(self.before, replace(before, **clipped))

    def add_rest(self, line: Timeline) -> None:
        """Give all other time to the class `unattributed`."""
        rest = CLASS["unattributed"]
        self.whole[:, rest] = line.end - line.start - self.whole.sum(axis=1)
        self.before[:, rest] = self.cut - line.offset - self.before.sum(axis=1)


@dataclass(frozen=True)
class GapShares:
    """ns of each request's host gaps: its engine ran steps without it, or scheduled."""

    other_step: Ints
    schedule: Ints


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

    def take(self, rows: NDArray[np.int64] | NDArray[np.bool_]) -> "_Work":
        return _Work(*(column[rows] for column in self.columns()))


@dataclass(frozen=True)
class _Worked:
    """When engines worked on requests; of each the first start, the last end, the first engine.

    `tangled`: whether its work overlaps or ran on several engines.
    """

    cover: Coverage
    first: Ints
    last: Ints
    engine: Ints
    tangled: NDArray[np.bool_]


def stage_time(
    line: Timeline,
    until_ns: Ints,
    spans: OwnSpans,
    steps: EngineSteps,
    members: Members,
    engines: list[Engine],
) -> tuple[Sums, GapShares]:
    """Sum the classes of time of the requests of `line`; rows are sorted by request."""
    sums = Sums.of(line, until_ns)
    work = _work(len(line.start), spans, steps, members)
    worked = _add_work(sums, line, work)
    pieces = _between(line, spans, work)
    request = line.index(pieces.start)
    # Most pieces lie before or after all work, where there is nothing to look up.
    amid = (pieces.end > worked.first[request]) & (pieces.start < worked.last[request])
    sums.add(pieces.take(~amid), request[~amid])
    sums.add(pieces.take(amid), request[amid], worked.cover)
    sums.add_rest(line)
    gap = pieces.rank == CLASS["host_gap"]
    return sums, _gap_shares(line, pieces.start[gap], pieces.end[gap], worked, engines)


def _work(requests: int, spans: OwnSpans, steps: EngineSteps, members: Members) -> _Work:
    """Return the work on each request: its steps, or its own spans where no step is known."""
    has_steps = np.zeros(requests, np.bool_)
    has_steps[members.request] = True
    own = np.flatnonzero((spans.kind < COMPUTE_KINDS) & ~has_steps[spans.request])
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


def _add_work(sums: Sums, line: Timeline, work: _Work) -> _Worked:
    """Add the time in which engines worked.

    Almost always the steps of a request follow each other, and lengths just add up. Only where
    they overlap, or where they ran on several engines, is it worth while to cut them up.
    """
    start, end = line.at(work.request, work.start), line.at(work.request, work.end)
    inside = end > start
    if not inside.all():
        work, start, end = work.take(inside), start[inside], end[inside]
    sample_start = line.at(work.request, work.sample_start)
    sample_end = line.at(work.request, work.sample_end)
    placed = replace(work, start=start, sample_start=sample_start, sample_end=sample_end, end=end)
    first, last, engine = (np.full(len(line.start), _NO_ENGINE) for _ in range(3))
    first[work.request[::-1]] = start[::-1]  # the last to be set is the first in time
    engine[work.request[::-1]] = work.engine[::-1]
    np.maximum.at(last, work.request, end)
    tangled = _tangled(placed, len(line.start))

    odd = tangled[work.request]
    if not odd.any():
        sums.add_in_turn(placed)
        return _Worked(Coverage(start, end), first, last, engine, tangled)
    tidy = placed.take(~odd)
    sums.add_in_turn(tidy)
    pieces = _cut_up(placed.take(odd))
    sums.add(pieces, line.index(pieces.start))
    start = np.concatenate([tidy.start, pieces.start])
    order = np.argsort(start)
    end = np.concatenate([tidy.end, pieces.end])
    return _Worked(Coverage(start[order], end[order]), first, last, engine, tangled)


def _tangled(work: _Work, requests: int) -> NDArray[np.bool_]:
    """Return which requests have work that overlaps or that ran on several engines."""
    same = work.request[1:] == work.request[:-1]
    moved = same & (work.engine[1:] != work.engine[:-1])
    tangled = np.zeros(requests, np.bool_)
    tangled[work.request[1:][moved | (work.start[1:] < work.end[:-1])]] = True
    return tangled


def _cut_up(work: _Work) -> Pieces:
    return first_match(
        np.concatenate([work.start, work.sample_start]),
        np.concatenate([work.end, work.sample_end]),
        np.concatenate([work.phase, np.full(len(work.request), CLASS["sample"])]),
    )


def _between(line: Timeline, spans: OwnSpans, work: _Work) -> Pieces:
    """Return the pieces of classes that may hold while no engine works on the request."""
    requests = len(line.start)
    first_work, last_sample = np.full(requests, _NEVER), np.full(requests, -_NEVER)
    np.minimum.at(first_work, work.request, work.start)
    np.maximum.at(last_sample, work.request, work.sample_end)
    admission, context = np.full(requests, _NEVER), spans.kind == KIND["context"]
    np.minimum.at(admission, spans.request[context], spans.end_ns[context])
    admission = np.where(admission < _NEVER, admission, first_work)

    waits = np.flatnonzero(spans.kind >= COMPUTE_KINDS)
    request, kind = spans.request[waits], spans.kind[waits]
    start, end, sampled = spans.start_ns[waits], spans.end_ns[waits], last_sample[request]
    held = kind == KIND["held_back"]
    late = (kind == KIND["detokenize"]) | (kind == KIND["stream"])
    start = np.where(held, np.maximum(start, admission[request]), start)
    start = np.where(late, np.maximum(start, sampled), start)
    end = np.where(held, np.minimum(end, sampled), end)

    resident = np.flatnonzero(last_sample > -_NEVER)
    rank = [_CLASS_OF_KIND[kind], np.full(len(resident), CLASS["host_gap"])]
    request = np.concatenate([request, resident])
    start = np.concatenate([start, admission[resident]])
    end = np.concatenate([end, last_sample[resident]])
    return first_match(line.at(request, start), line.at(request, end), np.concatenate(rank))


def _gap_shares(
    line: Timeline, start: Ints, end: Ints, worked: _Worked, engines: list[Engine]
) -> GapShares:
    """Look into host gaps, given as pieces `[start, end)`.

    A piece may still hold the request's own steps; where these are tangled they are cut out, else
    their length is subtracted (they are steps of the same engine).
    """
    own = worked.cover.within(start, end)
    odd = worked.tangled[line.index(start)]
    if odd.any():
        holes = _holes(worked.cover, start[odd], end[odd])
        start = np.concatenate([start[~odd], holes.start])
        end = np.concatenate([end[~odd], holes.end])
        own = np.concatenate([own[~odd], np.zeros(len(holes.start), np.int64)])
    request = line.index(start)
    start_ns, end_ns = line.time_ns(request, start), line.time_ns(request, end)
    shares = GapShares(*(np.zeros(len(line.start), np.int64) for _ in range(2)))
    for number in np.unique(worked.engine[worked.engine >= 0]):
        of = np.flatnonzero(worked.engine[request] == number)
        running = engines[number].running.within(start_ns[of], end_ns[of])
        active = engines[number].active.within(start_ns[of], end_ns[of])
        np.add.at(shares.other_step, request[of], running - own[of])
        np.add.at(shares.schedule, request[of], active - running)
    return shares


def _holes(cover: Coverage, start: Ints, end: Ints) -> Pieces:
    """Return what `cover` leaves of intervals."""
    pieces = first_match(
        np.concatenate([cover.start, start]),
        np.concatenate([cover.end, end]),
        np.repeat([0, 1], [len(cover.start), len(start)]),
    )
    return pieces.take(pieces.rank == 1)


def _add(sums: Ints, request: Ints, rank: Ints, length: Ints) -> None:
    np.add.at(sums.reshape(-1), request * sums.shape[1] + rank, length)


def _add_in_turn(sums: Ints, work: _Work) -> None:
    sampling = work.sample_end - work.sample_start
    _add(sums, work.request, work.phase, work.end - work.start - sampling)
    _add(sums, work.request, np.full(len(sampling), CLASS["sample"]), sampling)
