"""Deadlines: estimates from measured rates, refusals with their numbers, expiry in the queue."""

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st
from stepping_engine import ROOMY, Engine

from perfledger.instrumented_runtime.messages import Failed
from perfledger.instrumented_runtime.scheduling.admission import (
    Ahead,
    Rates,
    first_token_ns,
    why_too_late,
)
from perfledger.schema.clocks import monotonic_ns

MS = 1_000_000


def measured() -> Rates:
    """20 steps of 50 ms with 100 prompt tokens each; a seat is freed in every fourth."""
    rates = Rates()
    for number in range(200):
        rates.observe(50 * MS, 100, ended=int(not number % 4), waiting=True)
    return rates


def test_rates_are_those_of_the_last_steps() -> None:
    rates = measured()
    assert (rates.tokens_per_s, rates.step_ns) == (2000, 50 * MS)
    assert 180 * MS < rates.seat_ns < 220 * MS
    for _ in range(400):
        rates.observe(10 * MS, 0, ended=0, waiting=False)
    assert rates.tokens_per_s == 2000  # steps without a prompt say nothing of it
    assert 10 * MS <= rates.step_ns < 11 * MS
    assert Rates().seat_ns == Rates().step_ns == Rates().tokens_per_s == 0


def test_the_estimate_is_the_longer_wait_and_the_own_prompt() -> None:
    rates = measured()
    assert first_token_ns(Ahead(0, 0), 10, rates) == 50 * MS  # never less than a step
    assert first_token_ns(Ahead(400, 0), 200, rates) == 300 * MS
    assert first_token_ns(Ahead(400, 5), 200, rates) == 5 * rates.seat_ns + 100 * MS
    assert first_token_ns(Ahead(400, 5), 200, Rates()) is None


def test_the_refusal_says_the_numbers() -> None:
    late = why_too_late(1000 * MS, 900 * MS, Ahead(400, 0), 200, measured())
    assert late == (
        "the first token would come in about 300 ms, the deadline is in 100 ms: 400 tokens and 0"
        " seats are wanted before its 200 tokens, 2000 prompt tokens a second are computed",
        200 * MS,
    )
    assert why_too_late(900 * MS, 1000 * MS, Ahead(0, 0), 1, Rates()) == (
        "the deadline was 100 ms ago",
        0,
    )
    assert why_too_late(901 * MS, 900 * MS, Ahead(10**9, 0), 1, Rates()) is None


@given(st.integers(0, 10**5), st.integers(0, 50), st.integers(1, 5000), st.integers(1, 10**10))
def test_more_before_it_never_comes_sooner(tokens: int, seats: int, own: int, left: int) -> None:
    rates, here = measured(), Ahead(tokens, seats)
    expected = first_token_ns(here, own, rates)
    assert expected is not None
    more = first_token_ns(Ahead(tokens + 100, seats + 1), own, rates)
    assert more is not None and more >= expected
    assert (why_too_late(left, 0, here, own, rates) is None) is (expected <= left)


def test_an_engine_refuses_what_it_cannot_do_in_time() -> None:
    engine = Engine(replace(ROOMY, max_num_seqs=1))
    past = engine.submit(1, [5] * 9, deadline_ns=monotonic_ns() - 5 * MS)
    assert past is not None and past.reason == "deadline"
    assert past.detail.endswith("ago")
    # Nothing was measured yet: the benefit of the doubt, then rates.
    assert engine.submit(2, [5] * 60, max_tokens=8) is None
    engine.run()
    for number in range(3, 9):
        engine.submit(number, [number] * 200, max_tokens=8)
    hasty = engine.submit(9, [5] * 200, deadline_ns=monotonic_ns() + MS)
    assert hasty is not None and hasty.reason == "deadline"
    assert "prompt tokens a second are computed" in hasty.detail
    assert hasty.retry_after_s is not None and hasty.retry_after_s >= 1
    patient = engine.submit(10, [5] * 200, deadline_ns=monotonic_ns() + 10**12)
    assert patient is None
    engine.run()
    assert engine.finished[10] == "length"


def test_a_deadline_that_comes_in_the_queue_ends_the_wait() -> None:
    engine = Engine(replace(ROOMY, max_num_seqs=1))
    engine.submit(1, [5] * 30, max_tokens=200)
    engine.step()
    deadline_ns = monotonic_ns() + 60_000 * MS
    assert engine.submit(2, [6] * 30, deadline_ns=deadline_ns, max_tokens=5) is None
    assert engine.stepper._turn_away(deadline_ns - 1) == []
    gone = engine.stepper._turn_away(deadline_ns)
    assert [(one.request, one.reason) for one in gone] == [(2, "deadline")]
    assert isinstance(gone[0], Failed)
    assert gone[0].detail.startswith("the deadline came after ")
    assert gone[0].detail.endswith(" ms in the queue (admission)")
    engine.run()
    assert engine.answers[2] == [] and len(engine.answers[1]) == 200
