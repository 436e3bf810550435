"""The degrading policy: order, hysteresis, and what it does to requests."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from stepping_engine import ROOMY, Engine

from perfledger.instrumented_runtime.messages import Admitted, Failed
from perfledger.instrumented_runtime.records import LEAVE_REASONS, Degrade, Leave
from perfledger.instrumented_runtime.scheduling.degrading import (
    BY_NAME,
    CAPPED_TOKENS,
    CODES,
    STEPS,
    Change,
    Degrading,
    bit,
    step_names,
)

ORDER = ("shrink-chunk", "cap-max-tokens", "shed-low-priority")


def test_steps_go_on_in_order_and_off_in_reverse() -> None:
    policy = Degrading(ORDER)
    assert policy.update(1249) == []
    assert policy.update(1250) == [Change("shrink-chunk", True, 1250)]
    assert policy.update(1100) == []  # above its `leave`: it stays on
    assert policy.update(5000) == [
        Change("cap-max-tokens", True, 5000),
        Change("shed-low-priority", True, 5000),
    ]
    assert policy.on == set(ORDER)
    assert policy.update(1300) == [Change("shed-low-priority", False, 1300)]
    assert policy.update(0) == [
        Change("cap-max-tokens", False, 0),
        Change("shrink-chunk", False, 0),
    ]
    assert policy.on == set()


@given(st.permutations(list(BY_NAME)), st.lists(st.integers(0, 4000), max_size=40))
def test_no_step_without_the_ones_before_it(order: list[str], pressures: list[int]) -> None:
    policy, on = Degrading(tuple(order)), set()
    for pressure in pressures:
        before = set(on)
        for change in policy.update(pressure):
            (on.add if change.on else on.remove)(change.step)
            edge = BY_NAME[change.step]
            assert pressure >= edge.enter if change.on else pressure <= edge.leave
        assert on == policy.on == set(order[: len(on)])
        assert before <= on or on <= before  # not on and off at once


def test_thresholds_leave_room_between_on_and_off() -> None:
    assert all(0 < step.leave < step.enter for step in STEPS)
    assert step_names(bit("refuse-n") | bit("shed-low-priority")) == [
        "refuse-n",
        "shed-low-priority",
    ]


def pressed(*degrade: str, seats: int = 2) -> Engine:
    """An engine with so much waiting that all its steps of degrading are on."""
    engine = Engine(replace(ROOMY, max_num_seqs=seats, degrade=degrade))
    for number in range(100, 100 + 4 * seats):
        engine.submit(number, [5] * 10, max_tokens=4)
    return engine


def test_cap_max_tokens_shortens_answers_and_says_so() -> None:
    engine = pressed("cap-max-tokens")
    engine.submit(1, [7] * 10, max_tokens=100)
    engine.run()
    assert (len(engine.answers[1]), engine.finished[1]) == (CAPPED_TOKENS, "length")
    assert Admitted(1, 0, "cap_max_tokens=64") in engine.admitted
    bits = {one.request: one.degraded for one in engine.of(Leave)}
    assert bits.pop(1) == bit("cap-max-tokens") and set(bits.values()) == {0}
    told = [(one.step, one.on) for one in engine.of(Degrade)]
    code = CODES["cap-max-tokens"]
    assert told == [(code, 1), (code, 0)]
    assert engine.of(Degrade)[0].pressure >= 2000 > 1250 >= engine.of(Degrade)[1].pressure


def test_refuse_n_refuses_several_choices_only() -> None:
    engine = pressed("refuse-n")
    refused = engine.submit(1, [7] * 10, n=2)
    assert refused == Failed(
        1, "degraded", "n is 2: under load only one answer is given (refuse-n)", 1
    )
    assert engine.submit(2, [7] * 10) is None
    engine.run()
    engine.submit(3, [7] * 10, n=2)  # the load is gone
    assert len(engine.run().answers[3, 1]) == 24


def test_shed_low_priority_ends_who_waits_and_refuses_who_comes() -> None:
    engine = Engine(replace(ROOMY, max_num_seqs=2, degrade=("shed-low-priority",)))
    for number in range(3):
        engine.submit(number, [5] * 10, max_tokens=4)
    assert engine.submit(10, [5] * 10, priority=1) is None  # at twice the seats: not yet
    for number in range(3, 6):
        engine.submit(number, [5] * 10, max_tokens=4)
    refused = engine.submit(11, [5] * 10, priority=2)
    assert refused is not None and (refused.reason, refused.retry_after_s) == ("shed", 1)
    assert refused.detail == (
        "priority 2 is shed under load (shed-low-priority): seats or KV blocks wanted are 3.50"
        " times those there are"
    )
    engine.run()
    assert [(one.request, one.reason) for one in engine.failed] == [(10, "shed")]
    assert sorted(engine.finished) == [0, 1, 2, 3, 4, 5]


def test_shrink_chunk_cuts_prompts_smaller() -> None:
    engine = pressed("shrink-chunk", seats=4)
    engine.submit(1, [7] * 60, max_tokens=4)
    engine.run()
    assert bit("shrink-chunk") in {one.degraded for one in engine.of(Leave)}
    assert len(engine.answers[1]) == 4


@pytest.mark.parametrize("reason", ["deadline", "shed", "degraded"])
def test_refusals_are_leave_reasons(reason: str) -> None:
    assert reason in LEAVE_REASONS
