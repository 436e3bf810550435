"""The router's choice, load and memory of prefixes: pure, so said by properties and examples."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perfledger.instrumented_runtime.kv.prefix_hashes import block_hashes, prefix_salt
from perfledger.instrumented_runtime.messages import StepOutput, Token
from perfledger.instrumented_runtime.routing.load import Load
from perfledger.instrumented_runtime.routing.policy import (
    LEAST_QUEUE,
    POLICIES,
    PREFIX_AFFINITY,
    ROUND_ROBIN,
    Candidate,
    pick,
)
from perfledger.instrumented_runtime.routing.prefixes import RecentPrefixes

MS = 1_000_000
SMALL = st.integers(0, 40)
CANDIDATE = st.builds(
    Candidate,
    replica=st.just(""),
    in_flight=SMALL,
    seats=st.integers(1, 20),
    queue_tokens=SMALL,
    queue_ns=st.none() | SMALL,
    hit_tokens=SMALL,
)
CANDIDATES = st.lists(CANDIDATE, min_size=1, max_size=5).map(
    lambda some: [replace(one, replica=str(at)) for at, one in enumerate(some)]
)


def one(replica: str, **more: int) -> Candidate:
    return replace(Candidate(replica, 0, 4, 0), **more)


@given(CANDIDATES, st.sampled_from(POLICIES), st.integers(0, 99))
def test_a_choice_is_one_of_the_candidates_and_one_alone_is_no_choice(
    candidates: list[Candidate], policy: str, turn: int
) -> None:
    chosen, reason = pick(policy, candidates, turn)
    assert chosen in candidates
    assert (reason == "only_one") == (len(candidates) == 1)


@given(st.integers(1, 5), st.integers(0, 9))
def test_round_robin_serves_all_alike(replicas: int, rounds: int) -> None:
    candidates = [one(str(at), in_flight=at) for at in range(replicas)]
    chosen = [pick(ROUND_ROBIN, candidates, turn)[0] for turn in range(replicas * rounds)]
    assert all(chosen.count(candidate) == rounds for candidate in candidates)


@given(CANDIDATES, st.integers(0, 99))
def test_least_queue_leaves_no_better_one(candidates: list[Candidate], turn: int) -> None:
    chosen, _ = pick(LEAST_QUEUE, candidates, turn)
    timed = all(other.queue_ns is not None for other in candidates)

    def key(other: Candidate) -> tuple[bool, int | None, int]:
        queue = other.queue_ns if timed else other.queue_tokens
        return other.full, queue, other.in_flight

    assert key(chosen) == min(key(other) for other in candidates)


@given(CANDIDATES, st.integers(0, 99))
def test_prefix_affinity_never_waits_longer_than_the_prefix_saves(
    candidates: list[Candidate], turn: int
) -> None:
    chosen, reason = pick(PREFIX_AFFINITY, candidates, turn)
    least, _ = pick(LEAST_QUEUE, candidates, turn)
    if reason == "prefix_hit":
        assert chosen.hit_tokens == max(other.hit_tokens for other in candidates) > 0
        saved = chosen.hit_tokens - least.hit_tokens
        assert chosen.queue_tokens - least.queue_tokens <= saved
        assert least.full or not chosen.full
    else:
        assert chosen == least


@pytest.mark.parametrize(
    ("candidates", "replica", "reason"),
    [
        ([one("0", in_flight=3), one("1")], "1", "no_prefix"),
        ([one("0", in_flight=3, hit_tokens=16), one("1")], "0", "prefix_hit"),
        ([one("0", in_flight=4, hit_tokens=64), one("1")], "1", "affine_overloaded"),
        ([one("0", queue_tokens=65, hit_tokens=64), one("1")], "1", "affine_overloaded"),
        ([one("0", queue_tokens=64, hit_tokens=64), one("1")], "0", "prefix_hit"),
        ([one("0", hit_tokens=16), one("1", hit_tokens=32)], "1", "prefix_hit"),
    ],
)
def test_prefix_affinity(candidates: list[Candidate], replica: str, reason: str) -> None:
    chosen, why = pick(PREFIX_AFFINITY, candidates, 0)
    assert (chosen.replica, why) == (replica, reason)


def test_no_candidate_is_an_error() -> None:
    with pytest.raises(ValueError, match="no replica takes requests"):
        pick(LEAST_QUEUE, [], 0)


# --- load ---


def step(at_ms: int, waiting_tokens: int, sampled: int = 0) -> StepOutput:
    tokens = [Token(1, 5, None)] * sampled
    return StepOutput(1, at_ms * MS, tokens, running=1, waiting_tokens=waiting_tokens)


def test_the_queue_is_what_was_told_and_what_was_sent_since() -> None:
    load = Load()
    assert (load.queue_tokens, load.queue_ns) == (0, None)
    load.sent(300, 0)
    assert (load.queue_tokens, load.queue_ns) == (300, None)
    load.stepped(step(100, waiting_tokens=200), in_flight=1)  # 100 tokens in 100 ms
    assert (load.queue_tokens, load.queue_ns) == (200, 200 * MS)
    load.sent(50, 120 * MS)
    assert (load.queue_tokens, load.queue_ns) == (250, 250 * MS)
    load.stepped(step(110, waiting_tokens=190), in_flight=2)  # spoken before the second came
    assert load.queue_tokens == 190 + 50
    load.stepped(step(200, waiting_tokens=0, sampled=2), in_flight=0)
    assert (load.queue_tokens, load.queue_ns) == (0, 0)


def test_idle_time_is_not_counted_as_slowness() -> None:
    load = Load()
    load.sent(100, 0)
    load.stepped(step(100, 0), in_flight=0)
    load.sent(100, 500 * MS)
    assert load.queue_ns == 100 * MS
    load.stepped(step(600, 0), in_flight=0)
    load.sent(100, 9000 * MS)
    load.emptied()  # its client left
    assert load.queue_tokens == 0
    load.sent(10, 20_000 * MS)
    assert load.queue_ns == pytest.approx(10 * MS, rel=1e-6)


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 500), st.integers(0, 50)), max_size=30))
def test_load_never_counts_below_nothing(events: list[tuple[bool, int, int]]) -> None:
    load, now_ms = Load(), 0
    for is_step, tokens, later_ms in events:
        now_ms += later_ms
        if is_step:
            load.stepped(step(now_ms, tokens), in_flight=1)
            assert load.queue_tokens == tokens
        else:
            before = load.queue_tokens
            load.sent(tokens, now_ms * MS)
            assert load.queue_tokens == before + tokens
        assert load.queue_ns is None or load.queue_ns >= 0
    load.emptied()
    assert load.queue_tokens == 0


# --- prefixes ---

TOKENS = st.lists(st.integers(0, 3), max_size=24)


@given(st.lists(TOKENS, max_size=8), TOKENS)
def test_a_hit_is_the_longest_common_beginning_of_whole_blocks(
    sent: list[list[int]], asked: list[int]
) -> None:
    salt, known = prefix_salt("a"), RecentPrefixes(10_000)
    for tokens in sent:
        known.sent(block_hashes(tokens, 4, salt))

    def common(tokens: list[int]) -> int:
        blocks = min(len(tokens), len(asked)) // 4
        return next((n for n in range(blocks, 0, -1) if tokens[: n * 4] == asked[: n * 4]), 0)

    assert known.hits(block_hashes(asked, 4, salt)) == max(map(common, sent), default=0)
    assert known.hits(block_hashes(asked, 4, prefix_salt("b"))) == 0


@given(st.integers(0, 6), st.lists(TOKENS, max_size=12))
def test_memory_is_bounded_and_keeps_beginnings(most: int, sent: list[list[int]]) -> None:
    known = RecentPrefixes(most)
    for tokens in sent:
        hashes = block_hashes(tokens, 4, b"")
        known.sent(hashes)
        assert len(known) <= most
        assert known.hits(hashes) == min(most, len(hashes))
    known.forget()
    assert len(known) == 0
