"""Choosing tokens: greedy, by temperature and by top-p, each row for itself."""

import math
from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from perfledger.instrumented_runtime.messages import SamplingParams, Submit
from perfledger.instrumented_runtime.sampling import sample
from perfledger.instrumented_runtime.scheduling.sequences import Sequence, request_of

PROBABILITIES = [0.5, 0.25, 0.15, 0.1]


def sequence(**options: float) -> Sequence:
    sampling = SamplingParams(max_tokens=9, **options)  # type: ignore[arg-type]
    return request_of(Submit(0, [1], sampling, 0, 0, 0)).sequences[0]


def drawn(logits: list[float], count: int, **options: float) -> Counter[int]:
    one = sequence(**options)
    row = torch.tensor([logits])
    return Counter(sample(row, [one])[0] for _ in range(count))


def test_greedy_takes_the_first_of_the_likeliest() -> None:
    logits = torch.tensor([[0.0, 3.0, 3.0], [9.0, 1.0, 2.0]])
    for dtype in (torch.float32, torch.bfloat16):
        assert sample(logits.to(dtype), [sequence(), sequence()]) == [1, 0]


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_frequencies_follow_the_temperature(temperature: float) -> None:
    count = 4000
    counts = drawn([math.log(p) for p in PROBABILITIES], count, temperature=temperature, seed=5)
    weights = [p ** (1 / temperature) for p in PROBABILITIES]
    for token, weight in enumerate(weights):
        expected = weight / sum(weights)
        deviation = math.sqrt(expected * (1 - expected) / count)
        assert abs(counts[token] / count - expected) < 4 * deviation


def test_a_seed_below_zero_is_another_than_the_one_above() -> None:
    def tokens(seed: int) -> list[int]:
        one = sequence(temperature=1.0, seed=seed)
        return [sample(torch.zeros(1, 1000), [one])[0] for _ in range(4)]

    assert len({tuple(tokens(seed)) for seed in (-2, -1, 0, 1, 2)}) == 5
    assert tokens(-1) == tokens(-1)


def test_top_p_keeps_the_smallest_set_that_reaches_it() -> None:
    logits = [math.log(p) for p in PROBABILITIES]
    kept = {
        top_p: sorted(drawn(logits, 400, temperature=1.0, top_p=top_p, seed=1))
        for top_p in (0.0, 0.4, 0.6, 0.76, 0.91)
    }
    assert kept == {0.0: [0], 0.4: [0], 0.6: [0, 1], 0.76: [0, 1, 2], 0.91: [0, 1, 2, 3]}


def test_a_nucleus_wider_than_the_guess_is_sorted_whole() -> None:
    """2000 equal tokens: half of them, and not only the first 256, can be drawn."""
    counts = drawn([1.0] * 2000, 1500, temperature=1.0, top_p=0.5, seed=2)
    assert len(counts) > 600
    assert max(counts.values()) < 12


@settings(deadline=None, max_examples=50)
@given(st.integers(0, 2**32), st.floats(0.01, 1.0), st.integers(0, 5))
def test_neighbours_change_nothing(seed: int, top_p: float, before: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(7, 900, generator=generator) * 2
    options = {"temperature": 0.8, "top_p": top_p, "seed": seed}
    alone = sample(logits[before : before + 1], [sequence(**options)])[0]
    crowd = [sequence(temperature=1.0, seed=row, top_p=0.9 if row % 2 else 1.0) for row in range(7)]
    crowd[before] = sequence(**options)
    crowd[6] = sequence()
    together = sample(logits, crowd)
    assert together[before] == alone
    assert together[6] == int(logits[6].argmax())


def test_the_smallest_temperature_is_greedy() -> None:
    assert drawn([0.0, 1.0, 0.999], 50, temperature=1e-9, seed=3) == {1: 50}
