"""Collectives and copies as records and back, and as spans under the step they ran in."""

from itertools import count
from random import Random
from typing import Any

from hypothesis import given
from hypothesis import strategies as some

from perfledger.instrumented_runtime.collective_spans import MOST_WAITING, StepTraffic
from perfledger.instrumented_runtime.collectives.call_attributes import members_text
from perfledger.instrumented_runtime.collectives.observed import (
    NOT_OBSERVED,
    CollectiveCall,
    CopyCall,
)
from perfledger.instrumented_runtime.collectives.recording import (
    RingSink,
    call_of,
    copy_of,
    pack_name,
    pack_ranks,
    unpack_name,
    unpack_ranks,
)
from perfledger.instrumented_runtime.finished_spans import FinishedSpan
from perfledger.instrumented_runtime.record_spans import RecordSpans
from perfledger.instrumented_runtime.records import (
    BOUNDARIES,
    COLLECTIVE_OPS,
    DTYPES,
    KINDS,
    Step,
    TrainStep,
)
from perfledger.instrumented_runtime.ring import Reader, Ring, Writer

NAMES = some.text("abcdefghijklmnop_0123456789", max_size=8)
NS = some.integers(0, 2**62)
MAYBE_NS = NS | some.just(NOT_OBSERVED)
REGULAR = some.builds(
    lambda first, stride, size: tuple(range(first, first + stride * size, stride)),
    some.integers(0, 2000),
    some.integers(1, 64),
    some.integers(1, 64),
)
CALLS = some.builds(
    CollectiveCall,
    op=some.sampled_from(COLLECTIVE_OPS),
    group=NAMES,
    dimension=NAMES,
    ranks=REGULAR,
    peer=some.integers(0, 4096) | some.just(NOT_OBSERVED),
    dtype=some.sampled_from(DTYPES),
    bytes=NS,
    wire_bytes=MAYBE_NS,
    sequence=NS,
    step_seq=MAYBE_NS,
    enqueue_ns=NS,
    start_ns=MAYBE_NS,
    end_ns=MAYBE_NS,
)
COPIES = some.builds(
    CopyCall,
    boundary=some.sampled_from(BOUNDARIES),
    source=NAMES,
    target=NAMES,
    dtype=some.sampled_from(DTYPES),
    bytes=NS,
    step_seq=MAYBE_NS,
    start_ns=NS,
    end_ns=NS,
)


@given(some.lists(CALLS | COPIES, max_size=20))
def test_what_goes_through_the_ring_comes_out_as_it_was(
    told: list[CollectiveCall | CopyCall],
) -> None:
    ring = Ring.create(64)
    try:
        sink, reader = RingSink(Writer.attach(ring.name).write), Reader.attach(ring.name)
        for one in told:
            if isinstance(one, CollectiveCall):
                sink.collective(one)
            else:
                sink.copy(one)
        records: list[Any] = reader.read(100)
    finally:
        ring.close()
    read = [call_of(one) if hasattr(one, "op") else copy_of(one) for one in records]
    assert read == told


@given(some.lists(some.integers(0, 2000), min_size=1, max_size=30, unique=True))
def test_ranks_are_told_whole_or_as_first_and_size(ranks: list[int]) -> None:
    packed = unpack_ranks(pack_ranks(tuple(ranks)))
    assert packed.size == len(ranks)
    assert packed.members() in (tuple(ranks), ())
    assert packed.first == ranks[0]


def test_ranks_and_names_read_as_people_write_them() -> None:
    texts = [unpack_ranks(pack_ranks(ranks)).text() for ranks in ((5,), (0, 1, 2), (1, 3, 5))]
    assert texts == ["5", "0-2", "1-5:2"]
    assert unpack_ranks(pack_ranks((3, 1))).text() == "3 of 2"
    assert members_text((0, 3, 4)) == "0,3,4"
    assert [unpack_name(pack_name(name)) for name in ("tp", "", "a_long_name")] == [
        "tp",
        "",
        "a_long_n",
    ]


def test_an_unknown_operation_is_other() -> None:
    written: list[Any] = []
    sink = RingSink(lambda kind, fields: written.append(KINDS[kind](*fields)))
    sink.collective(call(op="all_the_things", dtype="complex32"))
    assert (call_of(written[0]).op, call_of(written[0]).dtype) == ("other", "other")


def call(**changed: Any) -> CollectiveCall:
    known = CollectiveCall(
        "all_reduce", "tp", "tp", (0, 1), NOT_OBSERVED, "float32", 4096, 4096, 3, 7,
        1_000, NOT_OBSERVED, 1_400,
    )  # fmt: skip
    return known._replace(**changed)


def written(*told: CollectiveCall | CopyCall) -> list[Any]:
    records: list[Any] = []
    sink = RingSink(lambda kind, fields: records.append(KINDS[kind](*fields)))
    for one in told:
        (sink.collective if isinstance(one, CollectiveCall) else sink.copy)(one)
    return records


STEP = Step(7, 900, 950, 1_800, 1_900, 2_000, 2, 0, 2, 0, 4, 8, 50)


def spans_of(*records: Any) -> list[FinishedSpan]:
    spans = RecordSpans(Random(1), replica="1", rank=1)
    return [span for record in records for span in spans.feed(record)] + spans.end()


def test_golden_spans_of_a_step() -> None:
    copy = CopyCall("offload_out", "cpu", "cpu", "float32", 512, 7, 1_500, 1_600)
    received = call(op="recv", group="pp", dimension="pp", peer=0, wire_bytes=0, start_ns=1_100)
    spans = spans_of(*written(call(), received, copy), STEP)
    (step,) = (span for span in spans if span.name == "decode_step")
    children = [span for span in spans if span.name in ("collective", "copy")]
    assert {span.parent_span_id for span in children} == {step.span_id}
    assert {span.trace_id for span in children} == {step.trace_id}
    place = {"perfledger.replica": "1", "perfledger.rank": 1}
    assert [(s.name, s.start_ns, s.end_ns, s.attributes) for s in children] == [
        (
            "collective",
            1_000,
            1_400,
            place
            | {
                "perfledger.collective.op": "all_reduce",
                "perfledger.collective.group": "tp",
                "perfledger.collective.dimension": "tp",
                "perfledger.collective.ranks": 2,
                "perfledger.collective.members": "0-1",
                "perfledger.collective.bytes": 4096,
                "perfledger.collective.wire_bytes": 4096,
                "perfledger.collective.sequence": 3,
                "perfledger.collective.start_observed": False,
                "perfledger.collective.end_observed": True,
                "perfledger.dtype": "float32",
                "perfledger.step.seq": 7,
            },
        ),
        (
            "collective",
            1_000,
            1_400,
            place
            | {
                "perfledger.collective.op": "recv",
                "perfledger.collective.group": "pp",
                "perfledger.collective.dimension": "pp",
                "perfledger.collective.ranks": 2,
                "perfledger.collective.members": "0-1",
                "perfledger.collective.peer": 0,
                "perfledger.collective.bytes": 4096,
                "perfledger.collective.wire_bytes": 0,
                "perfledger.collective.sequence": 3,
                "perfledger.collective.start_observed": True,
                "perfledger.collective.end_observed": True,
                "perfledger.collective.queued_ns": 100,
                "perfledger.dtype": "float32",
                "perfledger.step.seq": 7,
            },
        ),
        (
            "copy",
            1_500,
            1_600,
            place
            | {
                "perfledger.copy.boundary": "offload_out",
                "perfledger.copy.source": "cpu",
                "perfledger.copy.target": "cpu",
                "perfledger.copy.bytes": 512,
                "perfledger.dtype": "float32",
                "perfledger.step.seq": 7,
            },
        ),
    ]


def test_a_call_is_under_its_own_step_or_under_none() -> None:
    late = call(step_seq=7, sequence=9)
    lost = call(step_seq=6, sequence=1)
    outside = call(step_seq=NOT_OBSERVED, sequence=2, end_ns=NOT_OBSERVED)
    never = call(step_seq=8, sequence=5)
    records = written(lost, call(), outside, late, never)
    spans = spans_of(*records[:3], STEP, *records[3:])
    steps = {span.span_id: span.name for span in spans}
    parents = {
        span.attributes["perfledger.collective.sequence"]: steps.get(span.parent_span_id or 0)
        for span in spans
        if span.name == "collective"
    }
    assert parents == {1: None, 3: "decode_step", 2: None, 9: "decode_step", 5: None}
    (open_end,) = (s for s in spans if s.attributes.get("perfledger.collective.sequence") == 2)
    assert (open_end.start_ns, open_end.end_ns) == (1_000, 1_000)
    assert open_end.attributes["perfledger.collective.end_observed"] is False
    assert "perfledger.step.seq" not in open_end.attributes


def test_a_training_step_has_its_collectives_too() -> None:
    step = TrainStep(7, 900, 2_000, NOT_OBSERVED, 64, 1, 1, 1, 0, 0, 1, 1)
    spans = spans_of(*written(call(group="fsdp", dimension="fsdp")), step)
    (root,) = (span for span in spans if span.name == "train_step")
    (child,) = (span for span in spans if span.name == "collective")
    assert child.parent_span_id == root.span_id


def test_what_waits_is_bounded_and_nothing_is_lost() -> None:
    numbers = count(1)
    traffic = StepTraffic(
        lambda name, start, end, attributes, parent: FinishedSpan(
            name, 1, next(numbers), parent, start, end, attributes
        ),
        {},
    )
    (record,) = written(call())
    made = 0
    for _ in range(3 * MOST_WAITING):
        made += len(traffic.take(record))
    assert made >= 2 * MOST_WAITING
    made += len(traffic.leave())
    assert made == 3 * MOST_WAITING
