"""Synthetic prompts of a declared length: seeded token ids, or words for a chat.

Equal prefix ids give equal leading blocks, so a server's prefix cache finds what the workload
says it would. Warm-up prompts have blocks of their own: they warm code, not that cache.
"""

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from perfledger.instrumented_runtime.load.plan import Calibration, LoadPlan
from perfledger.instrumented_runtime.load.workload import Arrival

Integers = npt.NDArray[np.int64]

# Streams of randomness below one seed.
_SHARED, _OWN, _WARM_UP = 1, 2, 3

PROBE_WORDS = (8, 72)

_WORDS = """
time year people way day man thing woman life child world school state family student group
country problem hand part place case week company system program question work government
number night point home water room mother area money story fact month lot right study book eye
job word business issue side kind head house service friend father power hour game line end
member law car city community name president team minute idea body information back parent face
others level office door health person art war history party result change morning reason
research girl guy moment air teacher force education
"""
WORDS = tuple(_WORDS.split())


def token_ids(plan: LoadPlan, index: int, *, warm_up: bool = False) -> Integers:
    """Return the prompt of the workload's request `index` as exactly its number of token ids."""
    low, high = plan.token_ids
    return low + _draws(plan, index, plan.workload.block_tokens, high - low, warm_up)


def chat_text(
    plan: LoadPlan, index: int, calibration: Calibration, *, warm_up: bool = False
) -> str:
    """Return the prompt of the workload's request `index` as words, of nearly its tokens."""
    per_word = calibration.tokens_per_word
    block = plan.workload.block_tokens
    arrival = plan.workload.arrivals[index]
    tokens = max(0.0, arrival.input_tokens - calibration.overhead_tokens)
    words = max(1, round(tokens / per_word))
    block_words = max(1, round(block / per_word)) if block else 0
    draws = _draws(plan, index, block_words, len(WORDS), warm_up, length=words)
    return " ".join(WORDS[draw] for draw in draws)


def probe_text(words: int) -> str:
    """Return a prompt of so many words, to learn how many tokens the server makes of them."""
    return " ".join(WORDS[at % len(WORDS)] for at in range(words))


def calibrate(counts: tuple[int | None, int | None]) -> Calibration:
    """Return the calibration from the prompt tokens that the server counted for PROBE_WORDS."""
    few, many = counts
    if few is None or many is None or many <= few:
        return Calibration()
    per_word = (many - few) / (PROBE_WORDS[1] - PROBE_WORDS[0])
    return Calibration(per_word, few - PROBE_WORDS[0] * per_word, probed=True)


def _draws(
    plan: LoadPlan,
    index: int,
    block: int,
    below: int,
    warm_up: bool,
    *,
    length: int | None = None,
) -> Integers:
    """Return integers in [0, below): the prompt's shared blocks, then what is its own."""
    arrival = plan.workload.arrivals[index]
    length = arrival.input_tokens if length is None else length
    if warm_up:
        return _stream(plan.seed, _WARM_UP, index).integers(0, below, length)
    pieces = list(_shared(plan.seed, arrival, block, below, length))
    rest = length - sum(len(piece) for piece in pieces)
    pieces.append(_stream(plan.seed, _OWN, index).integers(0, below, rest))
    return np.concatenate(pieces)


def _shared(seed: int, arrival: Arrival, block: int, below: int, length: int) -> Iterator[Integers]:
    if not block:
        return
    for at, prefix_id in enumerate(arrival.prefix_ids):
        size = min(block, length - at * block)
        if size <= 0:
            return
        yield _stream(seed, _SHARED, prefix_id).integers(0, below, block)[:size]


def _stream(seed: int, kind: int, key: int) -> np.random.Generator:
    return np.random.default_rng([seed, kind, key])
