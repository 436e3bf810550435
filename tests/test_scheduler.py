"""The scheduling policy: what each step computes, without a model."""

from hypothesis import given, settings
from hypothesis import strategies as st

from perfledger.instrumented_runtime.messages import SamplingParams, Submit
from perfledger.instrumented_runtime.options import RuntimeOptions
from perfledger.instrumented_runtime.scheduler import (
    Limits,
    Scheduler,
    StepPlan,
    limits_of,
    most_output_tokens,
    never_fits,
)
from perfledger.instrumented_runtime.sequences import Sequence, sequence_of
from perfledger.schema.errors import UsageError

LIMITS = Limits(
    max_num_seqs=3, max_num_batched_tokens=10, max_model_len=64, block_size=4, kv_blocks=16
)


def request(number: int, prompt: int, output: int = 4, **delays_ns: int) -> Sequence:
    submit = Submit(number, [7] * prompt, SamplingParams(output), 0, 0, 0, delays_ns)
    return sequence_of(submit)


def scheduler_of(limits: Limits, *sequences: Sequence) -> Scheduler:
    scheduler = Scheduler(limits)
    for sequence in sequences:
        scheduler.add(sequence)
    return scheduler


def step(scheduler: Scheduler, now_ns: int = 0) -> StepPlan:
    """One step of a model that always samples token 9."""
    plan = scheduler.start_step()
    while scheduler.admit_next(plan, now_ns) is not None:
        pass
    sampled = plan.sampled()
    scheduler.finish_step(plan)
    for sequence in sampled:
        sequence.tokens.append(9)
        if sequence.finish_reason() is not None:
            scheduler.remove(sequence)
    return plan


def shown(plan: StepPlan) -> tuple[list[int], list[tuple[int, int, int]], list[int]]:
    """(who decodes, (who, start, tokens) of each chunk, who was preempted)."""
    return (
        [one.request for one in plan.decodes],
        [(chunk.sequence.request, chunk.start, chunk.tokens) for chunk in plan.chunks],
        [one.request for one in plan.preempted],
    )


def test_decodes_come_first_and_prompts_go_in_chunks() -> None:
    scheduler = scheduler_of(LIMITS, request(0, 4), request(1, 17), request(2, 3), request(3, 2))
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
    first, second, third = request(0, 8, 3), request(1, 9, 2), request(2, 1, 1)
    scheduler = scheduler_of(limits, first, second, third)
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
    first, second, third = request(0, 4, 9), request(1, 4, 9), request(2, 1)
    scheduler = scheduler_of(limits, first, second, third)
    for _ in range(5):
        assert shown(step(scheduler))[2] == []
    plan = step(scheduler)  # both need a third block, and there is none
    assert shown(plan) == ([0], [], [1])
    assert [one.request for one in scheduler.waiting] == [1, 2]
    assert (second.wait_reason, second.blocks, second.computed) == ("preempted", [], 0)
    assert second.output_tokens == 5
    while first in scheduler.running:
        assert shown(step(scheduler)) == ([0], [], [])
    plan = step(scheduler)
    assert shown(plan) == ([], [(1, 0, 9)], [])
    assert [chunk.recompute for chunk in plan.chunks] == [True]


def test_a_held_request_is_admitted_later_and_blocks_nobody() -> None:
    held, other = request(0, 4, queue=1_000), request(1, 4)
    scheduler = scheduler_of(LIMITS, held, other)
    assert shown(step(scheduler, now_ns=50)) == ([], [(1, 0, 4)], [])
    assert scheduler.next_release_ns() == 1_050
    assert shown(step(scheduler, now_ns=1_049)) == ([1], [], [])
    assert shown(step(scheduler, now_ns=1_050)) == ([1], [(0, 0, 4)], [])
    assert scheduler.next_release_ns() is None


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
    assert never_fits(0, 5, limits) == "the prompt has no tokens"
    assert never_fits(5, 0, limits) == "max_tokens is 0, but must be at least 1"


@given(st.integers(1, 80), st.integers(1, 80), st.integers(1, 20))
def test_most_output_tokens_is_the_edge_of_never_fits(
    prompt: int, output: int, kv_blocks: int
) -> None:
    limits = Limits(3, 10, 64, 4, kv_blocks)
    fits = output <= most_output_tokens(prompt, limits)
    assert (never_fits(prompt, output, limits) is None) is fits


def test_limits_that_cannot_work_are_refused() -> None:
    def refusal(options: RuntimeOptions, kv_blocks: int = 8) -> str:
        try:
            limits_of(options, max_model_len=64, kv_blocks=kv_blocks)
        except UsageError as error:
            return error.what
        return ""

    assert refusal(RuntimeOptions()) == ""
    assert refusal(RuntimeOptions(block_size=0)) == "block_size is 0, but must be at least 1"
    assert refusal(RuntimeOptions(), kv_blocks=0) == "the KV memory holds no block"
    assert refusal(RuntimeOptions(max_num_seqs=8, max_num_batched_tokens=7)) == (
        "max_num_batched_tokens is 7, but each of 8 sequences may need a token in a step"
    )


REQUESTS = st.lists(st.tuples(st.integers(1, 30), st.integers(1, 12)), min_size=1, max_size=12)


@settings(deadline=None, max_examples=150)
@given(REQUESTS, st.integers(1, 4), st.integers(4, 16), st.integers(11, 30), st.data())
def test_every_request_ends_whatever_the_limits(
    sizes: list[tuple[int, int]], seats: int, budget: int, kv_blocks: int, data: st.DataObject
) -> None:
    """All are served in full, first come first served; budget, seats and blocks are kept."""
    limits = Limits(seats, budget, 64, 4, kv_blocks)
    sequences = [request(number, *size) for number, size in enumerate(sizes)]
    arrivals = list(sequences)
    scheduler, done, admitted = Scheduler(limits), 0, []
    while done < len(sequences):
        while arrivals and (data.draw(st.booleans()) or not scheduler.running):
            scheduler.add(arrivals.pop(0))
        decoding = [one for one in scheduler.running if one.decoding]
        plan = step(scheduler)
        computed = len(plan.decodes) + sum(chunk.tokens for chunk in plan.chunks)
        assert 0 < computed == budget - plan.budget
        assert plan.decodes == [one for one in decoding if one not in plan.preempted]
        assert len(scheduler.running) <= seats
        for chunk in plan.chunks:
            if not chunk.start and not chunk.recompute:
                admitted.append(chunk.sequence.request)
        tables = [block for one in scheduler.running for block in one.blocks]
        assert len(tables) == len(set(tables)) == scheduler.kv.used
        done = sum(one.finish_reason() is not None for one in sequences if one.output_tokens)
    assert [one.output_tokens for one in sequences] == [size[1] for size in sizes]
    assert admitted == sorted(admitted)
    assert scheduler.kv.used == 0 and not scheduler.running and not scheduler.waiting
