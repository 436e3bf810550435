"""The partition against an oracle that looks at every single instant, on hostile traces."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from random import Random

import numpy as np
from hypothesis import example, given, settings
from hypothesis import strategies as st

from perfledger.schema.partition import Partition, partition
from perfledger.schema.partition_input import (
    DECODE,
    KIND,
    PREFILL,
    RECOMPUTE,
    EngineSteps,
    Members,
    OwnSpans,
)
from perfledger.schema.stages import STAGE_NAMES, SUB_STAGE_COLUMNS

LATEST = 14  # instants 0 … LATEST


@dataclass(frozen=True)
class Span:
    request: int
    kind: str
    start: int
    end: int


@dataclass(frozen=True)
class Step:
    engine: int
    start: int
    schedule_end: int
    sample_start: int
    sample_end: int
    end: int


@dataclass(frozen=True)
class Trace:
    """Requests as (arrival, end), their spans, steps, and members as (request, step, phase)."""

    requests: tuple[tuple[int, int], ...]
    spans: tuple[Span, ...] = ()
    steps: tuple[Step, ...] = ()
    members: tuple[tuple[int, int, int], ...] = ()


def split(trace: Trace, slice_size: int = 8192, until: Sequence[int] | None = None) -> Partition:
    def column(rows: tuple[object, ...], name: str) -> np.ndarray:
        return np.array([getattr(row, name) for row in rows], np.int64)

    requests = np.array(trace.requests, np.int64).reshape(-1, 2)
    members = np.array(trace.members, np.int64).reshape(-1, 3)
    return partition(
        requests[:, 0],
        requests[:, 1],
        OwnSpans(
            column(trace.spans, "request"),
            np.array([KIND[span.kind] for span in trace.spans], np.int8),
            column(trace.spans, "start"),
            column(trace.spans, "end"),
        ),
        EngineSteps(
            *(
                column(trace.steps, name)
                for name in (
                    *("engine", "start", "schedule_end", "sample_start", "sample_end"),
                    "end",
                )
            )
        ),
        Members(members[:, 0], members[:, 1], members[:, 2].astype(np.int8)),
        until_ns=None if until is None else np.array(until, np.int64),
        slice_size=slice_size,
    )


# --- The oracle: for each request and instant, go through the rules one by one ----------------


def oracle(trace: Trace) -> tuple[list[dict[str, int]], list[dict[str, int]]]:
    stages, shares = [], []
    for request, (arrival, end) in enumerate(trace.requests):
        stage_ns, share_ns = dict.fromkeys(STAGE_NAMES, 0), dict.fromkeys(SUB_STAGE_COLUMNS, 0)
        for instant in range(arrival, end):
            stage, share = at(trace, request, instant)
            stage_ns[stage] += 1
            if share:
                share_ns[share] += 1
        stages.append(stage_ns)
        shares.append(share_ns)
    return stages, shares


def repaired(step: Step) -> Step:
    start = step.schedule_end
    end = max(start, step.end)
    sample_start = min(max(step.sample_start, start), end)
    sample_end = min(max(step.sample_end, sample_start), end)
    return Step(step.engine, min(step.start, start), start, sample_start, sample_end, end)


def at(trace: Trace, request: int, instant: int) -> tuple[str, str]:
    arrival, end = trace.requests[request]
    steps = [repaired(step) for step in trace.steps]
    mine: dict[int, set[int]] = {}
    for member, step, phase in trace.members:
        if member == request:
            mine.setdefault(step, set()).add(phase)
    own = [replace(s, end=max(s.start, s.end)) for s in trace.spans if s.request == request]

    work = [(steps[number], phases) for number, phases in mine.items()]
    if not work:
        work = [(own_work(span), {work_phase(span)}) for span in own if is_work(span)]
    now = [(step, phases) for step, phases in work if step.schedule_end <= instant < step.end]
    if any(step.sample_start <= instant < step.sample_end for step, _ in now):
        return "sample", ""
    if any(RECOMPUTE in phases for _, phases in now):
        return "prefill", "prefill_recompute_ns"
    if any(PREFILL in phases for _, phases in now):
        return "prefill", ""
    if now:
        return "decode", ""
    runs = {span.kind for span in own if span.start <= instant < span.end}
    for kind in ("encode", "adapter_load", "kv_transfer", "context", "queue"):
        if kind in runs:
            return kind, ""
    for kind in ("route", "template", "tokenize"):
        if kind in runs:
            return kind, ""
    if work:
        contexts = [span.end for span in own if span.kind == "context"]
        admitted = min(contexts or [step.schedule_end for step, _ in work])
        last_sample = max(step.sample_end for step, _ in work)
        if admitted <= instant < last_sample:
            if "held_back" in runs:
                return "stream", ""
            return "host_gap", gap_share(steps, work, arrival, end, instant)
        if instant < last_sample:
            return "unattributed", ""
    if "detokenize" in runs:
        return "detokenize", ""
    if runs & {"stream", "held_back"}:
        return "stream", ""
    return "unattributed", ""


def is_work(span: Span) -> bool:
    return span.kind in ("sample", "prefill", "decode")


def own_work(span: Span) -> Step:
    sample_start = span.start if span.kind == "sample" else span.end
    return Step(-1, span.start, span.start, sample_start, span.end, span.end)


def work_phase(span: Span) -> int:
    return PREFILL if span.kind == "prefill" else DECODE


def gap_share(
    steps: list[Step], work: list[tuple[Step, set[int]]], arrival: int, end: int, instant: int
) -> str:
    seen = [step for step, _ in work if min(step.end, end) > max(step.schedule_end, arrival)]
    first = min(seen, key=lambda step: (step.schedule_end, step.engine), default=None)
    engine = [step for step in steps if first and step.engine == first.engine]
    if any(step.schedule_end <= instant < step.end for step in engine):
        return "host_gap_other_step_ns"
    if any(step.start <= instant < step.end for step in engine):
        return "host_gap_schedule_ns"
    return "host_gap_rest_ns"


# --- Hostile traces ----------------------------------------------------------------------------

instants = st.integers(0, LATEST)


@st.composite
def traces(draw: st.DrawFn) -> Trace:
    """Anything that stamps can do: overlaps, gaps, duplicates, backwards, outside of the root."""
    requests = draw(st.lists(st.tuples(instants, instants), min_size=1, max_size=4))
    requests = [(min(pair), max(pair)) for pair in requests]
    number = st.integers(0, len(requests) - 1)
    kinds = st.sampled_from(sorted(KIND))
    spans = draw(st.lists(st.builds(Span, number, kinds, instants, instants), max_size=12))
    spans += [replace(s, kind="stream") for s in spans if s.kind == "held_back"]
    steps = draw(st.lists(steps_in_order() | hostile_steps(), max_size=3))
    flat = tuple(step for group in steps for step in group)
    members = st.lists(
        st.tuples(
            number,
            st.integers(0, max(0, len(flat) - 1)),
            st.sampled_from([RECOMPUTE, PREFILL, DECODE]),
        ),
        max_size=12,
    )
    return Trace(tuple(requests), tuple(spans), flat, tuple(draw(members)) if flat else ())


def hostile_steps() -> st.SearchStrategy[list[Step]]:
    stamps = st.tuples(*[instants] * 5)
    step = st.builds(lambda engine, stamp: Step(engine, *stamp), st.integers(0, 1), stamps)
    return st.lists(step, max_size=3)


@st.composite
def steps_in_order(draw: st.DrawFn) -> list[Step]:
    """An engine as it should be: one step after the other."""
    marks = sorted(draw(st.lists(instants, max_size=20)))
    engine = draw(st.integers(0, 1))
    return [Step(engine, *marks[at : at + 5]) for at in range(0, len(marks) - 4, 5)]


def dense_trace(seed: int) -> Trace:
    """Many requests with many collisions; seeded, as drawing them one by one would be slow."""
    random = Random(seed)

    def instant() -> int:
        return random.randint(0, LATEST)

    def in_order(engine: int) -> list[Step]:
        marks = sorted(instant() for _ in range(15))
        return [Step(engine, *marks[at : at + 5]) for at in (0, 5, 10)]

    def hostile(engine: int) -> list[Step]:
        return [Step(engine, *(instant() for _ in range(5)))]

    requests = [(random.choice([0, 0, instant()]), LATEST) for _ in range(12)]
    steps = [step for engine in (0, 1) for step in random.choice([in_order, hostile])(engine)]
    members, spans = [], []
    for request in range(len(requests)):
        for _ in range(random.randint(0, 4)):
            phase = random.choice([RECOMPUTE, PREFILL, DECODE])
            members.append((request, random.randrange(len(steps)), phase))
        kinds = random.sample(sorted(KIND), random.randint(1, 4))
        for kind in random.choices(kinds, k=random.randint(0, 5)):
            spans.append(Span(request, kind, instant(), instant()))
    spans += [replace(s, kind="stream") for s in spans if s.kind == "held_back"]
    return Trace(tuple(requests), tuple(spans), tuple(steps), tuple(members))


def as_named(split: Partition) -> tuple[list[dict[str, int]], list[dict[str, int]]]:
    return (
        [dict(zip(STAGE_NAMES, row, strict=True)) for row in split.stages.tolist()],
        [dict(zip(SUB_STAGE_COLUMNS, row, strict=True)) for row in split.sub_stages.tolist()],
    )


@settings(max_examples=200, deadline=None)
@given(traces() | st.integers(0).map(dense_trace))
def test_every_instant_belongs_to_the_stage_that_the_rules_name(trace: Trace) -> None:
    assert as_named(split(trace)) == oracle(trace)


@settings(max_examples=100, deadline=None)
@given(
    traces() | st.integers(0).map(dense_trace), st.randoms(use_true_random=False), st.integers(1, 3)
)
def test_order_of_rows_and_size_of_slices_do_not_matter(
    trace: Trace, random: object, slice_size: int
) -> None:
    whole = split(trace)
    spans, order = list(trace.spans), list(range(len(trace.steps)))
    members = list(trace.members)
    for rows in (spans, order, members):
        random.shuffle(rows)  # type: ignore[attr-defined]
    shuffled = Trace(
        trace.requests,
        tuple(spans),
        tuple(trace.steps[at] for at in order),
        tuple((request, order.index(step), phase) for request, step, phase in members),
    )
    for other in (split(trace, slice_size), split(shuffled, slice_size)):
        assert (other.stages == whole.stages).all()
        assert (other.sub_stages == whole.sub_stages).all()


@settings(max_examples=100, deadline=None)
@given(traces() | st.integers(0).map(dense_trace), st.integers(0))
def test_until_an_instant_it_is_the_partition_of_a_request_that_ended_then(
    trace: Trace, seed: int
) -> None:
    until = [Random(seed + at).randint(0, LATEST + 1) for at in range(len(trace.requests))]
    cut = [
        (arrival, min(max(arrival, instant), end))
        for (arrival, end), instant in zip(trace.requests, until, strict=True)
    ]
    ended = split(replace(trace, requests=tuple(cut)))
    assert (split(trace, until=until).until == ended.stages).all()


big = st.integers(0, 2**62)


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.tuples(big, big), min_size=1, max_size=6),
    st.lists(st.builds(Span, st.just(0), st.sampled_from(sorted(KIND)), big, big), max_size=8),
    st.lists(st.builds(Step, st.just(0), big, big, big, big, big), max_size=4),
)
@example([(0, 2**62)] * 6, [], [])
def test_stages_add_up_exactly_for_times_of_any_size(
    requests: list[tuple[int, int]], spans: list[Span], steps: list[Step]
) -> None:
    requests = [(min(pair), max(pair)) for pair in requests]
    members = tuple((0, number, PREFILL) for number in range(len(steps)))
    parts = split(Trace(tuple(requests), tuple(spans), tuple(steps), members))
    assert (parts.stages >= 0).all() and (parts.sub_stages >= 0).all()
    assert parts.stages.sum(axis=1).tolist() == [end - arrival for arrival, end in requests]
    gaps = parts.stages[:, STAGE_NAMES.index("host_gap")]
    assert (parts.sub_stages[:, 1:].sum(axis=1) == gaps).all()


# --- By hand -----------------------------------------------------------------------------------


def told(**wanted: int) -> dict[str, int]:
    return {**dict.fromkeys(STAGE_NAMES, 0), **wanted}


def shared(**wanted: int) -> dict[str, int]:
    return {**dict.fromkeys(SUB_STAGE_COLUMNS, 0), **{f"{k}_ns": v for k, v in wanted.items()}}


def test_a_request_with_chunked_prefill_preemption_and_interference() -> None:
    """One request of 0 … 200, drawn as a time line:

      0-2 template, 2-5 tokenize, 6 sent, 6-10 queue, 10-12 context
     12-13 scheduled, 13-30 prefill step without a token of it (28-30 samples for others)
     31-32 scheduled, 32-50 its last chunk, 48-50 sampled: the first token, streamed 51-53
     52-70 a step without it (52-53 scheduled); 70-71 scheduled, 71-80 decode, sample 78-79
     81 preempted: queue 81-100, context 100-103; 103-104 scheduled, 104-120 recompute, sample
     118-120; 121-122 scheduled, 122-130 decode, sample 128-130
    130-133 detokenize, 132-190 stream; the root ends at 200
    """
    spans = (
        *(Span(0, "template", 0, 2), Span(0, "tokenize", 2, 5), Span(0, "queue", 6, 10)),
        *(Span(0, "context", 10, 12), Span(0, "prefill", 13, 30), Span(0, "prefill", 32, 50)),
        *(Span(0, "sample", 48, 50), Span(0, "decode", 50, 131), Span(0, "queue", 81, 100)),
        *(Span(0, "context", 100, 103), Span(0, "prefill", 104, 120)),
        *(Span(0, "detokenize", 130, 133), Span(0, "stream", 132, 190), Span(0, "stream", 51, 53)),
    )
    steps = (
        *(Step(0, 12, 13, 28, 30, 30), Step(0, 31, 32, 48, 50, 50), Step(0, 52, 53, 66, 70, 70)),
        *(Step(0, 70, 71, 78, 79, 80), Step(0, 103, 104, 118, 120, 120)),
        Step(0, 121, 122, 128, 130, 130),
    )
    members = (
        *((0, 0, PREFILL), (0, 1, PREFILL), (0, 3, DECODE), (0, 4, RECOMPUTE), (0, 5, DECODE)),
    )
    parts = split(Trace(((0, 200),), spans, steps, members))
    assert as_named(parts) == (
        [
            told(
                sample=2 + 2 + 1 + 2 + 2,
                prefill=15 + 16 + 14,
                decode=7 + 1 + 6,
                context=2 + 3,
                queue=4 + 19,
                template=2,
                tokenize=3,
                host_gap=1 + 2 + 21 + 1 + 1 + 2,
                detokenize=3,
                stream=57,
                unattributed=1 + 10,
            )
        ],
        [
            shared(
                prefill_recompute=14,
                host_gap_schedule=1 + 1 + 1 + 1 + 1 + 1,
                host_gap_other_step=17,
                host_gap_rest=1 + 2 + 1 + 1,
            )
        ],
    )


def test_several_answers_in_one_step_are_one_step() -> None:
    members = ((0, 0, DECODE), (0, 0, PREFILL), (0, 0, DECODE))
    parts = split(Trace(((0, 10),), (), (Step(0, 1, 2, 6, 8, 9),), members))
    assert as_named(parts)[0] == [told(prefill=5, sample=2, unattributed=3)]


def test_a_request_that_was_refused_has_no_gap() -> None:
    spans = (Span(0, "tokenize", 1, 3), Span(0, "stream", 5, 8))
    parts = split(Trace(((0, 10),), spans))
    assert as_named(parts)[0] == [told(tokenize=2, stream=3, unattributed=5)]


def test_without_steps_the_own_spans_tell() -> None:
    spans = (
        *(Span(0, "queue", 0, 4), Span(0, "prefill", 4, 9), Span(0, "decode", 11, 20)),
        *(Span(0, "sample", 8, 9), Span(0, "stream", 9, 22)),
    )
    parts = split(Trace(((0, 22),), spans, (Step(0, 0, 0, 22, 22, 22),)))
    assert as_named(parts) == (
        [told(queue=4, prefill=4, sample=1, host_gap=2, decode=9, stream=2)],
        [shared(host_gap_rest=2)],
    )


def test_no_requests() -> None:
    parts = split(Trace(()))
    assert parts.stages.shape == (0, len(STAGE_NAMES))
