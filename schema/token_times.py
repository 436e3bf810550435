"""When each token of a request was sampled.

A step gives a request one token (one a choice, at the same instant) if it computes a new token of
it, or the last piece of its prompt. The phase of a link does not tell which piece is the last; the
request's own `sample` span marks the first token, and a piece that is followed by a decode was the
last one. A recomputed piece that ended the request counts only where the root's token count says
that a token is missing.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from perfledger.schema.intervals import Ints
from perfledger.schema.partition_input import (
    DECODE,
    EngineSteps,
    Members,
)

NEVER = np.iinfo(np.int64).max


@dataclass(frozen=True)
class TokenTimes:
    """Wall ns: the first sample of each request (NEVER where none), and all, sorted by request."""

    first_ns: Ints
    request: Ints
    time_ns: Ints


def token_times(
    own_sample_ns: Ints,
    output_tokens: Ints,
    steps: EngineSteps,
    sampling: NDArray[np.bool_],
    members: Members,
) -> TokenTimes:
    """Find the token times of requests from the steps that they were in.

    `own_sample_ns` is the end of each request's own first `sample` span (NEVER where it has none),
    `output_tokens` what its root says (-1 where it does not), `sampling` which steps have a sample
    child; `members` is sorted (`partition.once_per_step`).
    """
    request, time_ns = members.request, steps.sample_end_ns[members.step]
    samples = sampling[members.step]
    certain, last = _certain(members, samples)
    first_ns = own_sample_ns.copy()
    unmarked = own_sample_ns == NEVER
    _lower(first_ns, request, time_ns, certain & unmarked[request])
    silent = (first_ns == NEVER) & (output_tokens > 0)
    _lower(first_ns, request, time_ns, last & samples & silent[request])

    token = (certain & (time_ns >= first_ns[request])) | (samples & (time_ns == first_ns[request]))
    counts = np.bincount(request[token], minlength=len(first_ns))
    missing = counts < output_tokens
    token |= last & samples & missing[request] & (time_ns > first_ns[request])
    return _sorted(first_ns, request[token], time_ns[token])


def _certain(
    members: Members, samples: NDArray[np.bool_]
) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
    """Return which members surely got a token, and which are the last of their request."""
    decodes = members.phase == DECODE
    follows = members.request[1:] == members.request[:-1]
    decode_follows = np.zeros(len(decodes), np.bool_)
    decode_follows[:-1] = follows & decodes[1:]
    last = np.ones(len(decodes), np.bool_)
    last[:-1] = ~follows
    return samples & (decodes | decode_follows), last


def _lower(first_ns: Ints, request: Ints, time_ns: Ints, rows: NDArray[np.bool_]) -> None:
    np.minimum.at(first_ns, request[rows], time_ns[rows])


def _sorted(first_ns: Ints, request: Ints, time_ns: Ints) -> TokenTimes:
    """Sort by request and time; a first sample whose step was lost is a token time too."""
    earliest = np.full(len(first_ns), NEVER)
    np.minimum.at(earliest, request, time_ns)
    lost = np.flatnonzero((first_ns < NEVER) & (earliest != first_ns))
    request = np.concatenate([request, lost])
    time_ns = np.concatenate([time_ns, first_ns[lost]])
    if len(lost) or ((request[1:] == request[:-1]) & (time_ns[1:] < time_ns[:-1])).any():
        order = np.lexsort((time_ns, request))
        request, time_ns = request[order], time_ns[order]
    return TokenTimes(first_ns, request, time_ns)
