"""What the partition of time is computed from: spans, steps and members as columns of integers."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from perfledger.schema.intervals import Ints

Small = NDArray[np.int8]

# Spans of a request that the partition reads. `held_back` is `stream` with reason backpressure.
KINDS: tuple[str, ...] = (
    *("sample", "prefill", "decode", "encode", "adapter_load", "kv_transfer", "context", "queue"),
    *("route", "template", "tokenize", "held_back", "detokenize", "stream"),
)
KIND: dict[str, int] = {name: number for number, name in enumerate(KINDS)}
COMPUTE_KINDS = KIND["decode"] + 1  # kinds below this are work of an engine

# What a request computes in a step, in order of precedence.
RECOMPUTE, PREFILL, DECODE = 1, 2, 3


@dataclass(frozen=True)
class OwnSpans:
    """Spans of requests: the row of the request, a number of KINDS, start and end.

    A span held back for an unread client is given twice: as `held_back` and as `stream`.
    """

    request: Ints
    kind: Small
    start_ns: Ints
    end_ns: Ints


@dataclass(frozen=True)
class EngineSteps:
    """Steps of rank 0, in any order. Without a sample child both its stamps equal the end."""

    engine: Ints
    start_ns: Ints
    schedule_end_ns: Ints
    sample_start_ns: Ints
    sample_end_ns: Ints
    end_ns: Ints


@dataclass(frozen=True)
class Members:
    """Which request computes what (RECOMPUTE, PREFILL or DECODE) in which step, by row numbers."""

    request: Ints
    step: Ints
    phase: Small


def once_per_step(members: Members, steps: EngineSteps) -> Members:
    """Sort by request and step start; several sequences in one step are one member (n > 1)."""
    if _is_once(members, steps):
        return members
    by_start = np.lexsort((steps.engine, steps.schedule_end_ns))
    place = np.empty(len(by_start), np.int64)
    place[by_start] = np.arange(len(by_start))
    # One integer a member sorts faster than three columns; the phase that wins comes first.
    bits = len(place).bit_length()
    key = members.request << bits
    key |= place[members.step]
    key <<= 2
    key |= members.phase
    key.sort()
    pair = key >> 2
    kept = np.ones(len(pair), np.bool_)
    kept[1:] = pair[1:] != pair[:-1]
    if not kept.all():
        pair, key = pair[kept], key[kept]
    step = by_start[pair & ((1 << bits) - 1)]
    return Members(pair >> bits, step, (key & 3).astype(np.int8))


def _is_once(members: Members, steps: EngineSteps) -> bool:
    """Return whether members are surely sorted and unique: cheaper than to sort them again."""
    request, start = members.request, steps.schedule_end_ns[members.step]
    in_order = (request[1:] == request[:-1]) & (start[1:] > start[:-1])
    return bool((in_order | (request[1:] > request[:-1])).all())
