"""What experts' layers routed, from counts through records to the attributes of the step."""

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perfledger.instrumented_runtime.expert_records import RoutedSteps, routed_fields
from perfledger.instrumented_runtime.moe import RoutingCounts, StepRouting
from perfledger.instrumented_runtime.record_spans import RecordSpans
from perfledger.instrumented_runtime.records import WORDS, Routed, Step

STEP = Step(7, 0, 10, 80, 90, 100, 1, 0, 1, 0, 4, 9, 70)


@given(
    layers=st.integers(1, 4).flatmap(
        lambda layers: st.integers(1, 20).flatmap(
            lambda experts: st.lists(
                st.lists(st.integers(0, 50), min_size=experts, max_size=experts),
                min_size=layers,
                max_size=layers,
            )
        )
    )
)
def test_what_was_counted_is_what_a_step_says(layers: list[list[int]]) -> None:
    counts = RoutingCounts(len(layers[0]))
    for layer in layers:
        counts.add(layer)
    routing = counts.take()
    total = sum(map(sum, layers))
    by_expert = [sum(column) for column in zip(*layers, strict=True)]
    if not total:
        assert routing is None
        return
    assert routing is not None
    steps = RoutedSteps()
    for fields in routed_fields(routing, 7):
        assert len(fields) < WORDS  # the kind is a word too
        steps.take(Routed(*fields))
    assert steps.attributes(7) == {
        "perfledger.moe.layers": len(layers),
        "perfledger.moe.assignments": total,
        "perfledger.moe.busiest_share": pytest.approx(sum(map(max, layers)) / total),
        "perfledger.moe.touched_experts": sum(count > 0 for layer in layers for count in layer),
        "perfledger.moe.expert_tokens": ",".join(map(str, by_expert)),
    }
    assert steps.attributes(7) == {}


def test_attributes_stand_on_the_step_that_routed() -> None:
    spans = RecordSpans(Random(1))
    for fields in routed_fields(StepRouting(2, 16, 6, 8, (3, 3, 4, 6)), 7):
        assert spans.feed(Routed(*fields)) == []
    root = spans.feed(STEP)[0]
    assert root.name == "decode_step"
    moe = {name: value for name, value in root.attributes.items() if ".moe." in name}
    assert moe == {
        "perfledger.moe.layers": 2,
        "perfledger.moe.assignments": 16,
        "perfledger.moe.busiest_share": 0.375,
        "perfledger.moe.touched_experts": 8,
        "perfledger.moe.expert_tokens": "3,3,4,6",
    }
    later = spans.feed(STEP._replace(seq=8))[0]
    assert not any(".moe." in name for name in later.attributes)


def test_a_lost_record_costs_the_list_of_experts_alone() -> None:
    routing = StepRouting(1, 40, 4, 20, tuple([2] * 20))
    first, _, last = routed_fields(routing, 7)
    steps = RoutedSteps()
    steps.take(Routed(*first))
    steps.take(Routed(*last))
    assert steps.attributes(7) == {
        "perfledger.moe.layers": 1,
        "perfledger.moe.assignments": 40,
        "perfledger.moe.busiest_share": 0.1,
        "perfledger.moe.touched_experts": 20,
    }
    for fields in routed_fields(routing, 8):
        steps.take(Routed(*fields))
    assert steps.attributes(9) == {}  # the STEP of 8 was lost
