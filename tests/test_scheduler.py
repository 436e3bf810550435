"""The scheduling policy: what each step computes, without a model."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from perfledger.instrumented_runtime.messages import SamplingParams, Submit
from perfledger.instrumented_runtime.options import RuntimeOptions
from perfledger.instrumented_runtime.scheduling.fairness import OUTPUT_WEIGHT, PROMPT_WEIGHT
from perfledger.instrumented_runtime.scheduling.limits import (
    Limits,
    limits_of,
    most_output_tokens,
    never_fits,
)
from perfledger.instrumented_runtime.scheduling.plan import StepPlan
from perfledger.instrumented_runtime.scheduling.scheduler import Scheduler
from perfledger.instrumented_runtime.scheduling.sequences import Request, request_of
from perfledger.schema.errors import UsageError

LIMITS = Limits(
    max_num_seqs=3, max_num_batched_tokens=10, max_model_len=64, block_size=4, kv_blocks=16
)


def request(
    number: int, prompt: int, output: int = 4, n: int = 1, queue_ns: int = 0, **more: object
) -> Submit:
    sampling = SamplingParams(output, n=n)
    delays_ns = {"queue": queue_ns} if queue_ns else {}
    return Submit(number, [7] * prompt, sampling, 0, 0, 0, delays_ns, **more)


def scheduler_of(limits: Limits, *submits: Submit) -> tuple[Scheduler, list[Request]]:
    scheduler = Scheduler(limits)
    requests = [request_of(one, scheduler.tenants.named(one.tenant)) for one in submits]
    for one in requests:
        scheduler.add(one)
    return scheduler, requests


def step(scheduler: Scheduler, now_ns: int = 0) -> StepPlan:
    """One step of a model that always samples token 9."""
    plan = scheduler.start_step()
    while scheduler.admit_next(plan, now_ns) is not None:
        pass
    sampled = plan.sampled()
    scheduler.tables.take_moves()
    scheduler.finish_step(plan)
    for sequence in sampled:
        if scheduler.append(sequence, 9) is not None:
            scheduler.end_sequence(sequence)
    return plan


def shown(plan: StepPlan) -> tuple[list[int], list[tuple[int, int, int]], list[int]]:
    """(who decodes, (who, start, tokens) of each chunk, who was preempted)."""
    return (
        [one.of.number for one in plan.decodes],
        [(chunk.sequence.of.number, chunk.start, chunk.tokens) for chunk in plan.chunks],
        [one.number for one in plan.preempted],
    )


def test_decodes_come_first_and_prompts_go_in_chunks() -> None:
    asked = (request(0, 4), request(1, 17), request(2, 3), request(3, 2))
    scheduler, _ = scheduler_of(LIMITS, *asked)
    assert [shown(step(scheduler)) for _ in range(6)] == [
        ([], [(0, 0, 4), (1, 0, 6)], []),
        ([0], [(1, 6, 9)], []),  # 9 left of 10: the prompt begun goes before the queue
        ([0], [(1, 15, 2), (2, 0, 3)], []),  # three are running: no seat for 3
        ([0, 1, 2], [], []),  # 0 has its four tokens
        ([1, 2], [(3, 0, 2)], []),
        ([1, 2, 3], [], []),
    ]


def test_first_in_the_queue_is_not_overtaken_when_blocks_are_short() -> None:
    limits = Limits(3, 10, 64, 4, kv_blocks=4)
    asked = (request(0, 8, 3), request(1, 9, 2), request(2, 1, 1))
    scheduler, (_, second, third) = scheduler_of(limits, *asked)
    assert shown(step(scheduler)) == ([], [(0, 0, 8)], [])
    assert (second.wait_reason, third.wait_reason) == ("kv_full", "admission")
    assert shown(step(scheduler)) == ([0], [], [])
    assert shown(step(scheduler)) == ([0], [], [])
    # One block of the four stays free for the running one, so the last waits a step longer.
    assert shown(step(scheduler)) == ([], [(1, 0, 9)], [])
    assert third.wait_reason == "kv_full"
    assert shown(step(scheduler)) == ([1], [], [])
    assert shown(step(scheduler)) == ([], [(2, 0, 1)], [])


def test_a_preempted_sequence_goes_to_the_front_and_says_so() -> None:
    limits = Limits(2, 16, 64, 4, kv_blocks=4)
    asked = (request(0, 4, 9), request(1, 4, 9), request(2, 1))
    scheduler, (first, second, _) = scheduler_of(limits, *asked)
    for _ in range(5):
        assert shown(step(scheduler))[2] == []
    plan = step(scheduler)  # both need a third block, and there is none
    assert shown(plan) == ([0], [], [1])
    again = second.sequences[0]
    assert scheduler.waiting.first(0) is second
    assert (second.wait_reason, again.blocks, again.computed) == ("preempted", [], 0)
    assert (second.output_tokens, second.account.preemptions) == (5, 1)
    while first in scheduler.running:
        assert shown(step(scheduler)) == ([0], [], [])
    plan = step(scheduler)
    assert shown(plan) == ([], [(1, 0, 9)], [])
    # Of its nine tokens the last was sampled and never computed.
    assert [chunk.recomputed for chunk in plan.chunks] == [8]


def test_a_held_request_is_admitted_later_and_blocks_nobody() -> None:
    scheduler, _ = scheduler_of(LIMITS, request(0, 4, queue_ns=1_000), request(1, 4))
    assert shown(step(scheduler, now_ns=50)) == ([], [(1, 0, 4)], [])
    assert scheduler.next_event_ns() == 1_050
    assert shown(step(scheduler, now_ns=1_049)) == ([1], [], [])
    assert shown(step(scheduler, now_ns=1_050)) == ([1], [(0, 0, 4)], [])
    assert scheduler.next_event_ns() is None


def test_never_fits_says_why() -> None:
    limits = Limits(3, 10, max_model_len=64, block_size=4, kv_blocks=10)
    assert never_fits(30, 11, limits) is None
    assert never_fits(40, 1, limits) is None
    assert never_fits(30, 12, limits) == (
        "30 prompt tokens and max_tokens 12 make 42, but the KV cache holds 40 tokens"
    )
    assert never_fits(60, 5, limits) == (
        "60 prompt tokens and max_tokens 5 make 65, but the model takes 64 tokens"
    )
    assert never_fits(20, 13, limits, n=2) == (
        "20 prompt tokens and max_tokens 13 make 33 in each of 2 answers,"
        " but the KV cache holds 40 tokens"
    )
    assert never_fits(20, 9, limits, n=2) is None  # five blocks shared, two of each
    assert never_fits(1, 1, limits, n=4) == "n is 4, but a batch holds 1 to 3 sequences"
    assert never_fits(0, 5, limits) == "the prompt has no tokens"
    assert never_fits(5, 0, limits) == "max_tokens is 0, but must be at least 1"


@given(st.integers(1, 80), st.integers(1, 80), st.integers(1, 20), st.integers(1, 3))
def test_most_output_tokens_is_the_edge_of_never_fits(
    prompt: int, output: int, kv_blocks: int, n: int
) -> None:
    limits = Limits(3, 10, 64, 4, kv_blocks)
    fits = output <= most_output_tokens(prompt, limits, n)
    assert (never_fits(prompt, output, limits, n) is None) is fits


def test_limits_that_cannot_work_are_refused() -> None:
    def refusal(options: RuntimeOptions, kv_blocks: int = 8) -> str:
        try:
            limits_of(options, max_model_len=64, kv_blocks=kv_blocks)
        except UsageError as error:
            return error.what
        return ""

    assert refusal(RuntimeOptions()) == ""
    assert refusal(RuntimeOptions(preemption="none")) == "preemption is 'none'"
    assert refusal(RuntimeOptions(watermark=1.0)) == (
        "watermark is 1.0, but must be a share from 0 to below 1"
    )
    assert refusal(RuntimeOptions(degrade=("sleep",))) == "'sleep' is no step of degrading"
    assert refusal(RuntimeOptions(degrade=("refuse-n", "refuse-n"))) == (
        "a step of degrading is named twice: refuse-n, refuse-n"
    )
    assert refusal(RuntimeOptions(block_size=0)) == "block_size is 0, but must be at least 1"
    assert refusal(RuntimeOptions(), kv_blocks=0) == "the KV memory holds no block"
    assert refusal(RuntimeOptions(max_num_seqs=8, max_num_batched_tokens=7)) == (
        "max_num_batched_tokens is 7, but each of 8 sequences may need a token in a step"
    )


def admitted(scheduler: Scheduler) -> list[int]:
    """Run everything to its end; return the order of admission."""
    order = []
    while scheduler.running or scheduler.waiting:
        before = {one.number for one in scheduler.running}
        plan = scheduler.start_step()
        while (one := scheduler.admit_next(plan, 0)) is not None:
            if one.number not in before:
                order.append(one.number)
        sampled = plan.sampled()
        scheduler.tables.take_moves()
        scheduler.finish_step(plan)
        for sequence in sampled:
            if scheduler.append(sequence, 9) is not None:
                scheduler.end_sequence(sequence)
    return order


ONE_SEAT = Limits(1, 10, 64, 4, kv_blocks=16)


def test_lower_priority_numbers_go_first_and_the_overtaken_know_why() -> None:
    asked = (request(0, 4, priority=5), request(1, 4), request(2, 4, priority=-1))
    scheduler, (low, middle, high) = scheduler_of(ONE_SEAT, *asked)
    assert admitted(scheduler) == [2, 1, 0]
    reasons = (low.wait_reason, middle.wait_reason, high.wait_reason)
    assert reasons == ("priority", "priority", "admission")


def test_within_a_tenant_the_earliest_deadline_goes_first() -> None:
    asked = (request(0, 4), request(1, 4, deadline_ns=900), request(2, 4, deadline_ns=400))
    scheduler, (never, late, soon) = scheduler_of(ONE_SEAT, *asked)
    assert admitted(scheduler) == [2, 1, 0]
    reasons = (never.wait_reason, late.wait_reason, soon.wait_reason)
    assert reasons == ("deadline", "deadline", "admission")


def test_the_tenant_served_least_goes_first() -> None:
    """b has one request among five of a: it waits for one of them, not for all."""
    asked = [request(number, 8, tenant="a") for number in range(5)]
    scheduler, requests = scheduler_of(ONE_SEAT, *asked, request(9, 8, tenant="b"))
    assert admitted(scheduler) == [0, 9, 1, 2, 3, 4]
    assert [one.wait_reason for one in requests] == ["admission", *["fairness"] * 4, "admission"]
    served = {one.tenant.name: one.tenant.served for one in requests}
    assert served == {"a": 5 * (8 + 2 * 4), "b": 8 + 2 * 4}


def test_a_tenant_that_was_away_has_saved_up_no_turns() -> None:
    scheduler, _ = scheduler_of(ONE_SEAT, *[request(n, 8, tenant="a") for n in range(3)])
    admitted(scheduler)
    for number in range(10, 16):
        one = request(number, 8, tenant="ab"[number % 2])
        scheduler.add(request_of(one, scheduler.tenants.named(one.tenant)))
    # Turn by turn: b does not get three in a row for what a had while b asked for nothing.
    assert admitted(scheduler) == [10, 11, 12, 13, 14, 15]


def test_choices_are_computed_once_and_take_a_seat_each() -> None:
    limits = Limits(3, 10, 64, 4, kv_blocks=16)
    asked = (request(0, 6, output=3, n=2), request(1, 2, n=2), request(2, 2))
    scheduler, (first, _, _) = scheduler_of(limits, *asked)
    assert shown(step(scheduler)) == ([], [(0, 0, 6)], [])  # 1 wants two seats of one left
    assert scheduler.kv.used == 2  # both hold the same two blocks
    assert shown(step(scheduler)) == ([0, 0], [], [])
    assert (scheduler.kv.used, first.account.copied_blocks) == (3, 1)
    assert shown(step(scheduler)) == ([0, 0], [], [])
    assert shown(step(scheduler)) == ([], [(1, 0, 2), (2, 0, 2)], [])
    assert scheduler.kv.counts.copied == 1


@pytest.mark.parametrize("swap_blocks", [0, 8])
def test_the_last_of_the_worst_priority_gives_up_its_blocks(swap_blocks: int) -> None:
    limits = Limits(3, 12, 64, 4, kv_blocks=6, swap_blocks=swap_blocks)
    asked = (request(0, 4, 8, priority=1), request(1, 4, 8), request(2, 4, 8))
    scheduler, (low, *_) = scheduler_of(limits, *asked)
    preempted = []
    while not preempted:
        preempted = step(scheduler).preempted
    assert preempted == [low]
    assert (scheduler.host.count - scheduler.host.free > 0) is bool(swap_blocks)
    admitted(scheduler)
    assert low.output_tokens == 8 and low.account.recomputed_tokens == (0 if swap_blocks else 8)
    assert (scheduler.kv.used, scheduler.host.free) == (0, swap_blocks)


def test_a_watermark_of_blocks_stays_free_at_an_admission() -> None:
    limits = Limits(3, 32, 64, 4, kv_blocks=8, watermark_blocks=4)
    scheduler, (_, second) = scheduler_of(limits, request(0, 8, 2), request(1, 12, 2))
    assert shown(step(scheduler)) == ([], [(0, 0, 8)], [])
    assert second.wait_reason == "kv_full"  # 8 blocks less 2 less 3 are fewer than 4
    assert shown(step(scheduler)) == ([0], [], [])
    assert shown(step(scheduler)) == ([], [(1, 0, 12)], [])  # alone it may have all


def test_deadlines_in_the_queue_expire() -> None:
    asked = (request(0, 4, deadline_ns=50), request(1, 4, deadline_ns=100), request(2, 4))
    scheduler, (_, second, _) = scheduler_of(ONE_SEAT, *asked)
    step(scheduler)
    assert scheduler.expired(99) == []
    assert scheduler.next_event_ns() == 100
    assert scheduler.expired(100) == [second]
    assert len(scheduler.waiting) == 1


def test_a_request_that_takes_all_blocks_is_admitted_though_all_of_it_is_cached() -> None:
    """There is no room for a copy of its last block, so that block is computed again."""
    limits = Limits(1, 10, 64, 4, kv_blocks=2, prefix_cache=True)
    scheduler, _ = scheduler_of(limits, request(0, 8, 1), request(1, 8, 1))
    assert [shown(step(scheduler))[1] for _ in range(2)] == [[(0, 0, 8)], [(1, 4, 4)]]


SIZES = st.lists(st.tuples(st.integers(1, 20), st.integers(1, 12)), min_size=15, max_size=30)


@settings(deadline=None)
@given(SIZES, SIZES, st.integers(1, 3))
def test_tenants_that_both_wait_are_served_alike(
    of_a: list[tuple[int, int]], of_b: list[tuple[int, int]], seats: int
) -> None:
    """The bound of Sheng et al. 2024: what tenants that both wait were served differs by 2 U at
    most, where U is the larger weight of the longest prompt and of all tokens of a batch."""
    limits = Limits(seats, 20, 64, 4, kv_blocks=40)
    asked = [request(n, *size, tenant="a") for n, size in enumerate(of_a)]
    asked += [request(100 + n, *size, tenant="b") for n, size in enumerate(of_b)]
    scheduler, _ = scheduler_of(limits, *asked)
    a, b = scheduler.tenants.named("a"), scheduler.tenants.named("b")
    bound = 2 * max(PROMPT_WEIGHT * 20, OUTPUT_WEIGHT * seats * 12)
    while a.waiting and b.waiting:
        step(scheduler)
        assert abs(a.served - b.served) <= bound


def preempted_by_recompute(swap_blocks: int) -> tuple[Scheduler, Request]:
    """Two answers that lost their blocks and whose prompt has begun to be computed again."""
    limits = Limits(4, 10, 256, 4, kv_blocks=40, swap_blocks=swap_blocks)
    scheduler, (asked,) = scheduler_of(limits, request(0, 30, output=20, n=2))
    for _ in range(5):
        step(scheduler)
    held = scheduler.host.take(swap_blocks)
    scheduler._preempt(scheduler.running.pop())
    scheduler.host.release(set(held))
    assert shown(step(scheduler)) == ([], [(0, 0, 10)], [])
    return scheduler, asked


def test_when_the_first_answer_ends_the_next_one_computes_what_they_share() -> None:
    scheduler, asked = preempted_by_recompute(0)
    first, second = asked.sequences
    scheduler.end_sequence(first)
    assert [shown(step(scheduler))[1] for _ in range(3)] == [
        [(0, 10, 10)],
        [(0, 20, 10)],
        [(0, 30, 3)],
    ]
    assert (asked.sequences, second.output_tokens) == ([second], 4)
    assert asked.account.recomputed_tokens == 32


def test_answers_that_share_a_prompt_not_whole_are_dropped_not_swapped() -> None:
    scheduler, asked = preempted_by_recompute(40)
    scheduler._preempt(scheduler.running.pop())
    assert (asked.host_tables, scheduler.host.free) == ([], 40)
    assert [shown(step(scheduler))[1] for _ in range(4)][0] == [(0, 0, 10)]


def test_a_plan_taken_back_is_made_again() -> None:
    scheduler, (asked, _) = scheduler_of(
        LIMITS, request(0, 6, output=3, n=2), request(1, 2, output=3)
    )
    plan = scheduler.start_step()
    while scheduler.admit_next(plan, 0) is not None:
        pass
    assert shown(plan) == ([], [(0, 0, 6), (1, 0, 2)], [])
    scheduler.take_back(plan)
    assert shown(step(scheduler)) == shown(plan)
    assert [one.output_tokens for one in asked.sequences] == [1, 1]
    while scheduler.running:
        step(scheduler)
    # Prompt and both answers, less the last token of each.
    assert asked.computed_tokens == 6 + 2 * 2
    assert (scheduler.kv.used, scheduler.seats) == (0, 0)
