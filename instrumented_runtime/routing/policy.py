"""Which replica gets a request: pure functions of what the router knows of each.

Round-robin takes turns. Least-queue takes the replica with the fewest prompt tokens still to be
computed (as nanoseconds, where the speed of all is known). Prefix-affinity takes the replica that
computed the longest part of this prompt before, unless waiting there costs more than the part
saves: then least-queue decides, as it does where nobody knows the prompt.
"""

from collections.abc import Sequence
from dataclasses import dataclass

ROUND_ROBIN, LEAST_QUEUE, PREFIX_AFFINITY = "round-robin", "least-queue", "prefix-affinity"
POLICIES = (ROUND_ROBIN, LEAST_QUEUE, PREFIX_AFFINITY)

# Reasons of a choice (perfledger.reason of the route span).
ONLY_ONE, IN_TURN, SHORTEST = "only_one", "in_turn", "shortest_queue"
PREFIX_HIT, NO_PREFIX, OVERLOADED = "prefix_hit", "no_prefix", "affine_overloaded"


@dataclass(frozen=True, slots=True)
class Candidate:
    """A replica that takes requests, as the router sees it now."""

    replica: str
    in_flight: int  # requests sent there and not ended
    seats: int  # sequences that its batch holds
    queue_tokens: int  # prompt tokens sent there and not computed yet
    queue_ns: int | None = None  # how long these will take; None: its speed is not known yet
    hit_tokens: int = 0  # of this prompt, computed there before and perhaps still there

    @property
    def full(self) -> bool:
        """Whether a request would wait there for another one's end."""
        return self.in_flight >= self.seats


def pick(policy: str, candidates: Sequence[Candidate], turn: int) -> tuple[Candidate, str]:
    """Return the replica for a request, and why; `turn` counts requests.

    Among equals the turn decides. Raises ValueError without a candidate.
    """
    if not candidates:
        raise ValueError("no replica takes requests")
    first = turn % len(candidates)
    in_turn = [*candidates[first:], *candidates[:first]]
    if len(candidates) == 1:
        return candidates[0], ONLY_ONE
    if policy == ROUND_ROBIN:
        return in_turn[0], IN_TURN
    least = _least_queue(in_turn)
    if policy == LEAST_QUEUE:
        return least, SHORTEST
    affine = max(in_turn, key=lambda one: (one.hit_tokens, one is least))
    if affine.hit_tokens == 0:
        return least, NO_PREFIX
    return (least, OVERLOADED) if _overloaded(affine, least) else (affine, PREFIX_HIT)


def _least_queue(candidates: Sequence[Candidate]) -> Candidate:
    """Return the first one of those with the shortest queue: a free seat goes before all."""
    timed = all(one.queue_ns is not None for one in candidates)

    def key(one: Candidate) -> tuple[bool, int, int]:
        return one.full, (one.queue_ns or 0) if timed else one.queue_tokens, one.in_flight

    return min(candidates, key=key)


def _overloaded(affine: Candidate, least: Candidate) -> bool:
    """Whether waiting at the affine replica costs more than its cached tokens save."""
    if affine.full and not least.full:
        return True
    saved = affine.hit_tokens - least.hit_tokens
    return affine.queue_tokens - least.queue_tokens > saved
