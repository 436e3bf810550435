"""Who is in the engine's batch, as far as its records tell; also when records were lost.

What cannot be known is left out. A request whose LEAVE was lost is let go of when its own record
came from the API, or when the batch is narrower than what is believed to be in it.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

from perfledger.instrumented_runtime.records import Admit, ChoiceEnd, Chunk, Step
from perfledger.instrumented_runtime.ring import to_unsigned

# The engine may hear of an abort a step after the API ended the request.
LEAVE_LAG_NS = 1_000_000_000
# After a gap, this long for the LEAVEs that were not lost to explain a batch too narrow.
STALE_NS = 10_000_000_000
# Requests remembered at most, so that lost records cannot fill the memory.
MAX_REQUESTS = 65_536

T = TypeVar("T")


@dataclass(slots=True)
class BatchRequest:
    """A request that the engine admitted and that has not left."""

    trace_id: int
    span_id: int  # its root
    cached_tokens: int
    waiting_since_ns: int | None = None  # preempted then, and not admitted again
    chunk: Chunk | None = None  # planned for the coming step
    decoding: bool = False  # its last chunk is behind it
    sequences: int = 1  # that get a token in each step from then on
    sampled: bool = False
    first_sample_end_ns: int | None = None  # None also if the record of that step was lost
    first_tokens: int = 1  # sampled then: one for each of its answers
    last_step_end_ns: int = 0
    ended_ns: int | None = None  # as the API said
    unsure: bool = False  # records were lost since it was last named

    def wait(self, since_ns: int | None) -> None:
        """Leave the batch by preemption, or (None) come back to it."""
        self.waiting_since_ns, self.decoding, self.chunk = since_ns, False, None

    def resume(self, sequences: int) -> None:
        """Decode from the coming step on, without a chunk: it was swapped in."""
        if sequences:
            self.decoding, self.sequences = True, sequences

    def end_choice(self, end: ChoiceEnd) -> None:
        """Go on with fewer sequences."""
        self.sequences = end.sequences
        if self.waiting_since_ns is None:
            self.decoding = bool(end.decoding)


class Member(NamedTuple):
    """The part that a request has in one step."""

    request: BatchRequest
    phase: str  # one of stages.PHASES
    tokens: int
    samples: int  # tokens that it gets at the end of the step


class BatchMembers:
    """All requests that were admitted and have not left, by number, in the order of admission."""

    def __init__(self) -> None:
        self._requests: dict[int, BatchRequest] = {}

    def __iter__(self) -> Iterator[BatchRequest]:
        return iter(self._requests.values())

    def peek(self, number: int) -> BatchRequest | None:
        """Return a request without taking it for a sign that it is still there."""
        return self._requests.get(number)

    def named(self, number: int) -> BatchRequest | None:
        """Return a request that the engine has just named, or None if its ADMIT was lost."""
        if request := self._requests.get(number):
            request.unsure = False
        return request

    def admit(self, admit: Admit) -> BatchRequest:
        """Add a request to the batch."""
        trace_id = to_unsigned(admit.trace_high) << 64 | to_unsigned(admit.trace_low)
        request = BatchRequest(trace_id, to_unsigned(admit.span), admit.cached_tokens)
        remember(self._requests, admit.request, request)
        return request

    def leave(self, number: int) -> BatchRequest | None:
        """Take a request out, or return None if its ADMIT was lost or never written."""
        return self._requests.pop(number, None)

    def step_failed(self, seq: int) -> None:
        """Step `seq` was not computed: what was planned for it has not happened."""
        for request in self._requests.values():
            if request.chunk is not None and request.chunk.seq == seq:
                request.chunk = None

    def lose_sight(self) -> None:
        """Records are missing; any LEAVE may be among them."""
        for request in self._requests.values():
            request.unsure = True

    def let_go_ended(self, now_ns: int) -> list[BatchRequest]:
        """Take out the requests that ended long before `now_ns`: their LEAVE was lost."""
        gone = [
            number
            for number, request in self._requests.items()
            if request.ended_ns is not None and request.ended_ns + LEAVE_LAG_NS < now_ns
        ]
        return [self._requests.pop(number) for number in gone]

    def members(self, step: Step, gap_end_ns: int) -> list[Member]:
        """Return who has a part in a step, by the rules at the top of records.py.

        `gap_end_ns` is when the last missing records were written, at the latest.
        """
        found = [m for request in self._requests.values() if (m := _part(request, step))]
        if len(found) > step.width and step.start_ns > gap_end_ns + STALE_NS:
            self._requests = {n: one for n, one in self._requests.items() if not one.unsure}
            found = [member for member in found if not member.request.unsure]
        return found


def _part(request: BatchRequest, step: Step) -> Member | None:
    chunk, request.chunk = request.chunk, None
    if chunk is not None:
        request.decoding = request.decoding or bool(chunk.last)
        request.sequences = chunk.sequences
        if chunk.seq == step.seq:
            phase = "recompute" if chunk.recompute else "prefill"
            return Member(request, phase, chunk.tokens, chunk.samples)
        request.sampled = request.sampled or bool(chunk.samples)  # in a step whose record was lost
    if request.waiting_since_ns is not None or not request.decoding:
        return None
    return Member(request, "decode", request.sequences, request.sequences)


def remember(table: dict[int, T], number: int, value: T) -> None:
    """Add an entry to a table of at most MAX_REQUESTS; the oldest makes room."""
    if len(table) >= MAX_REQUESTS:
        del table[next(iter(table))]
    table[number] = value
