"""What the KV manager does to answers: nothing. Shared, copied, swapped, dropped: same tokens."""

from dataclasses import replace
from random import Random

import pytest
from stepping_engine import ROOMY, Engine, prompt_of, small_model
from torch import Tensor

from perfledger.instrumented_runtime.attention import PagedKvCache, StepRows
from perfledger.instrumented_runtime.messages import Admitted
from perfledger.instrumented_runtime.record_spans import RecordSpans
from perfledger.instrumented_runtime.records import Admit, ChoiceEnd, Chunk, Leave, Preempt
from perfledger.instrumented_runtime.scheduling.limits import Limits
from perfledger.schema import metrics

CACHING = replace(ROOMY, prefix_cache=True)
TIGHT = Limits(16, 64, 256, 4, kv_blocks=40)
# Blocks run out, and what is preempted is computed again, found in the cache, or swapped in.
PRESSED = {
    "recompute": TIGHT,
    "cache": replace(TIGHT, prefix_cache=True),
    "swap": replace(TIGHT, swap_blocks=60),
    "swap and cache": replace(TIGHT, swap_blocks=60, prefix_cache=True),
    "little swap": replace(TIGHT, swap_blocks=16),
}
SEEDED = {"temperature": 0.5, "top_p": 0.05, "seed": 42}


@pytest.fixture(scope="module")
def alone() -> dict[object, list[int]]:
    """The answer to each prompt when nothing else is computed and nothing is shared."""
    engine = Engine(ROOMY)
    for number in range(8):
        engine.submit(number, prompt_of(number))
        engine.run()
    return dict(engine.answers)


@pytest.fixture(scope="module")
def choices() -> dict[object, list[int]]:
    """Three answers to each of four prompts, each asked for on its own with seed + choice."""
    engine = Engine(ROOMY)
    found: dict[object, list[int]] = {}
    for number in range(1, 5):
        for choice in range(3):
            engine.submit(99, prompt_of(number), **{**SEEDED, "seed": 42 + choice})
            found[number, choice] = engine.run().answers[99]
    return found


def accounts_add_up(engine: Engine) -> None:
    """Every token of a finished request was computed for the first time, or cached: once."""
    prompts = {admit.request: admit for admit in reversed(engine.of(Admit))}  # the first stays
    for leave in engine.of(Leave):
        first = prompts[leave.request]
        answers = [
            tokens
            for key, tokens in engine.answers.items()
            if leave.request == (key[0] if isinstance(key, tuple) else key)
        ]
        assert leave.output_tokens == sum(map(len, answers))
        needed = first.prompt_tokens + leave.output_tokens - len(answers)
        assert leave.computed_tokens + first.cached_tokens == needed
    recomputed = sum(chunk.recompute for chunk in engine.of(Chunk))
    assert sum(leave.recomputed_tokens for leave in engine.of(Leave)) == recomputed
    kv, host = engine.stepper.scheduler.kv, engine.stepper.scheduler.host
    assert (kv.used, host.free) == (0, host.count)


def tokens_by_records(engine: Engine) -> int:
    """How many tokens were sampled, as far as the records tell."""
    spans = RecordSpans(Random(1))
    for record in engine.records:
        spans.feed(record)
    return spans.counts[metrics.TOKENS, "output"]


@pytest.mark.parametrize("how", PRESSED)
def test_preempted_as_alone(alone: dict[object, list[int]], how: str) -> None:
    engine = Engine(PRESSED[how])
    for number in range(8):
        engine.submit(number, prompt_of(number))
    assert engine.run().answers == alone
    preempted = engine.of(Preempt)
    assert len(preempted) >= 2
    assert any(one.swapped_blocks for one in preempted) is how.startswith(("swap", "little"))
    assert all(one.swapped_blocks for one in preempted) is how.startswith("swap")
    swapped = sum(one.swapped_blocks for one in engine.of(Leave))
    assert swapped == 2 * sum(one.swapped_blocks for one in preempted)
    if how.startswith("swap"):
        assert not any(chunk.recompute for chunk in engine.of(Chunk))
    if how in ("recompute", "little swap"):
        assert any(chunk.recompute for chunk in engine.of(Chunk))
    accounts_add_up(engine)
    assert tokens_by_records(engine) == 8 * 24


def test_a_prefix_is_found_within_a_tenant_and_changes_no_token() -> None:
    system, plain = [(7 * at) % 5000 for at in range(70)], Engine(ROOMY)
    asked = [(tail, tenant) for tenant in ("a", "b") for tail in ([], [9], [9, 8, 7] * 8)]
    cached, engine = [], Engine(CACHING)
    for number, (tail, tenant) in enumerate(asked):
        plain.submit(number, system + tail, tenant=tenant)
        engine.submit(number, system + tail, tenant=tenant)
        engine.run()
        cached.append(engine.of(Admit)[-1].cached_tokens)
    assert engine.answers == plain.run().answers
    assert cached == [0, 64, 64, 0, 64, 64]
    assert engine.admitted == [Admitted(n, tokens) for n, tokens in enumerate(cached)]
    accounts_add_up(engine)


def test_all_tokens_found_means_one_is_computed_in_a_copy() -> None:
    prompt = [(3 * at) % 700 for at in range(64)]
    engine = Engine(CACHING)
    for number in (1, 2):
        engine.submit(number, prompt)
        engine.run()
    assert engine.answers[1] == engine.answers[2]
    assert [chunk.tokens for chunk in engine.of(Chunk)] == [64, 1]
    assert [leave.copied_blocks for leave in engine.of(Leave)] == [0, 1]
    # A follow-up finds the answer, too: 64 + 23 tokens were computed, five blocks are full.
    engine.submit(3, prompt + engine.answers[1] + [5])
    engine.run()
    assert engine.of(Admit)[-1].cached_tokens == 80


def test_cached_prefixes_make_room_least_recently_used_first() -> None:
    engine = Engine(replace(CACHING, kv_blocks=8))
    prompts = [[number] * 50 for number in range(3)]
    for number in (0, 1, 0, 2, 0, 1):
        engine.submit(number, prompts[number], max_tokens=2)
        engine.run()
    # Four blocks each, three of them full: 2 takes the last two of 1, which was not used since.
    assert [one.cached_tokens for one in engine.of(Admit)] == [0, 0, 48, 0, 48, 16]
    assert sum(one.evicted_blocks for one in engine.of(Leave)) == (
        engine.stepper.scheduler.kv.counts.evicted
    )


@pytest.mark.parametrize("how", ["roomy", "roomy cache", *PRESSED])
def test_choices_as_requests_of_their_own(choices: dict[object, list[int]], how: str) -> None:
    roomy = {"roomy": ROOMY, "roomy cache": CACHING}
    engine = Engine((PRESSED | roomy)[how])
    for number in range(1, 5):
        engine.submit(number, prompt_of(number), n=3, **SEEDED)
    assert engine.run().answers == choices
    assert engine.finished == dict.fromkeys(choices, "length")
    accounts_add_up(engine)
    assert tokens_by_records(engine) == 12 * 24
    assert len(engine.of(Leave)) == 4
    preempted = {one.request for one in engine.of(Preempt)}
    assert bool(preempted) is not how.startswith("roomy")
    if not preempted:
        prefilled = sum(chunk.tokens for chunk in engine.of(Chunk))
        assert prefilled == sum(len(prompt_of(number)) for number in range(1, 5))
        # Two of three copy the last block, unless the prompt fills it.
        copied = [one.copied_blocks for one in engine.of(Leave)]
        assert copied == [2 if len(prompt_of(n)) % 16 else 0 for n in range(1, 5)]


def test_one_choice_ends_and_the_others_go_on(choices: dict[object, list[int]]) -> None:
    for limits in (ROOMY, PRESSED["recompute"], PRESSED["swap and cache"]):
        engine = Engine(limits)
        engine.submit(1, prompt_of(1), n=3, **SEEDED)
        for _ in range(4):
            engine.step()
        held = engine.stepper.scheduler.kv.used
        engine.stepper.abort(1, "stop_string", choice=1)
        assert engine.stepper.scheduler.kv.used < held
        for number in range(2, 5):
            engine.submit(number, prompt_of(number), n=3, **SEEDED)
        engine.run()
        ended = engine.answers[1, 1]
        assert 0 < len(ended) < 24 and ended == choices[1, 1][: len(ended)]
        whole = {key: choices[key] for key in choices if key != (1, 1)}
        assert {key: engine.answers[key] for key in whole} == whole
        assert [one.sequences for one in engine.of(ChoiceEnd)][:1] == [2]
        assert len(engine.of(Leave)) == 4
        accounts_add_up(engine)
        assert tokens_by_records(engine) == sum(map(len, engine.answers.values()))


def test_the_last_choice_that_is_aborted_ends_the_request() -> None:
    engine = Engine(ROOMY)
    engine.submit(1, prompt_of(1), n=2, seed=1, temperature=1.0)
    engine.step()
    for choice in (0, 1, 1):
        engine.stepper.abort(1, "stop_string", choice=choice)
    assert engine.stepper.idle_ns(0) is None
    assert [one.output_tokens for one in engine.of(Leave)] == [2]
    accounts_add_up(engine)


def test_a_swapped_request_that_is_aborted_leaves_nothing() -> None:
    engine = Engine(PRESSED["swap"])
    for number in range(8):
        engine.submit(number, prompt_of(number))
    while not engine.of(Preempt):
        engine.step()
    engine.stepper.abort(engine.of(Preempt)[0].request, "client_disconnect")
    engine.run()
    kv, host = engine.stepper.scheduler.kv, engine.stepper.scheduler.host
    assert (kv.used, host.free) == (0, host.count)


class NoMemoryOnce:
    """The small model, which finds no memory for its first step (how that comes: test_stepping)."""

    def __init__(self) -> None:
        self._failed = False

    def __getattr__(self, name: str) -> object:
        return getattr(small_model(), name)

    def forward(self, rows: StepRows, cache: PagedKvCache) -> Tensor:
        if not self._failed:
            self._failed = True
            raise MemoryError
        return small_model().forward(rows, cache)


def test_choices_whose_step_found_no_memory_begin_again(
    choices: dict[object, list[int]],
) -> None:
    engine = Engine(CACHING)
    engine.stepper._model = NoMemoryOnce()
    engine.submit(1, prompt_of(1), n=3, **SEEDED)
    engine.submit(9, [5] * 40)
    engine.run()
    assert [(one.request, one.reason) for one in engine.failed] == [(9, "out_of_memory")]
    del engine.answers[9]
    assert engine.answers == {key: choices[key] for key in choices if key[0] == 1}
    (left,) = [one for one in engine.of(Leave) if one.request == 1]
    assert left.computed_tokens == len(prompt_of(1)) + 3 * 24 - 3
    assert tokens_by_records(engine) == 3 * 24
    assert engine.stepper.scheduler.kv.used == 0
