"""Collectives and copies as records of a rank's ring, and back. Integers only; pure but `write`.

A record has 14 words, so names are at most 8 characters in one, and the ranks of a group are what
groups of a layout always are: a first one, a stride and a count.
"""

from collections.abc import Callable
from functools import lru_cache
from typing import NamedTuple

from perfledger.instrumented_runtime.collectives.call_attributes import members_text
from perfledger.instrumented_runtime.collectives.listening import LISTENER
from perfledger.instrumented_runtime.collectives.observed import (
    NOT_OBSERVED,
    CollectiveCall,
    CopyCall,
)
from perfledger.instrumented_runtime.records import (
    BOUNDARIES,
    COLLECTIVE,
    COLLECTIVE_OPS,
    COPY,
    DTYPES,
    Collective,
    Copy,
)

_NAME_BYTES = 8
_RANK_BITS = 21  # three fields in 63 bits
_RANK_MASK = (1 << _RANK_BITS) - 1
_OP_CODES = {name: code for code, name in enumerate(COLLECTIVE_OPS)}
_DTYPE_CODES = {name: code for code, name in enumerate(DTYPES)}
_BOUNDARY_CODES = {name: code for code, name in enumerate(BOUNDARIES)}
_OTHER_OP, _OTHER_DTYPE = len(COLLECTIVE_OPS) - 1, len(DTYPES) - 1


class RankSet(NamedTuple):
    """Ranks of a group. `stride` 0 with several: irregular, only first and how many are known."""

    first: int
    stride: int
    size: int

    def members(self) -> tuple[int, ...]:
        """Return the ranks, or nothing of irregular ones."""
        if self.size > 1 and not self.stride:
            return ()
        return tuple(
            range(self.first, self.first + self.size * (self.stride or 1), self.stride or 1)
        )

    def text(self) -> str:
        """Return the ranks as text, like 0-3; of irregular ones the first and how many."""
        members = self.members()
        return members_text(members) if members else f"{self.first} of {self.size}"


class RingSink:
    """Writes what it hears into the ring of this rank. Set `step_seq` when a step begins."""

    def __init__(self, write: Callable[[int, tuple[int, ...]], None]) -> None:
        self.step_seq = NOT_OBSERVED
        self._write = write

    def collective(self, call: CollectiveCall) -> None:
        """See CollectiveSink."""
        self._write(COLLECTIVE, collective_record(call))

    def copy(self, call: CopyCall) -> None:
        """See CollectiveSink."""
        self._write(COPY, copy_record(call))


def begin_step(seq: int) -> None:
    """Say that the engine of this process begins a step, to a sink that asks for no more."""
    sink = LISTENER.sink
    if isinstance(sink, RingSink):
        sink.step_seq = seq


def collective_record(call: CollectiveCall) -> Collective:
    """Return the record of a call."""
    return Collective(
        call.step_seq,
        _OP_CODES.get(call.op, _OTHER_OP),
        pack_name(call.group),
        pack_name(call.dimension),
        pack_ranks(call.ranks),
        call.peer,
        _DTYPE_CODES.get(call.dtype, _OTHER_DTYPE),
        call.bytes,
        call.wire_bytes,
        call.sequence,
        call.enqueue_ns,
        call.start_ns,
        call.end_ns,
    )


def copy_record(call: CopyCall) -> Copy:
    """Return the record of a copy. Raises KeyError for a boundary that is none of BOUNDARIES."""
    return Copy(
        call.step_seq,
        _BOUNDARY_CODES[call.boundary],
        pack_name(call.source),
        pack_name(call.target),
        _DTYPE_CODES.get(call.dtype, _OTHER_DTYPE),
        call.bytes,
        call.start_ns,
        call.end_ns,
    )


def call_of(record: Collective) -> CollectiveCall:
    """Return the call that a record tells of; of irregular ranks it knows none."""
    return CollectiveCall(
        COLLECTIVE_OPS[record.op],
        unpack_name(record.group),
        unpack_name(record.dimension),
        unpack_ranks(record.ranks).members(),
        record.peer,
        DTYPES[record.dtype],
        record.bytes,
        record.wire_bytes,
        record.sequence,
        record.step_seq,
        record.enqueue_ns,
        record.start_ns,
        record.end_ns,
    )


def copy_of(record: Copy) -> CopyCall:
    """Return the copy that a record tells of."""
    return CopyCall(
        BOUNDARIES[record.boundary],
        unpack_name(record.source),
        unpack_name(record.target),
        DTYPES[record.dtype],
        record.bytes,
        record.step_seq,
        record.start_ns,
        record.end_ns,
    )


@lru_cache(maxsize=1024)
def pack_name(name: str) -> int:
    """Return the first 8 bytes of a name as a signed word."""
    data = name.encode("ascii", "replace")[:_NAME_BYTES].ljust(_NAME_BYTES, b"\0")
    return int.from_bytes(data, "little", signed=True)


def unpack_name(word: int) -> str:
    """Return the name that a word holds."""
    data = word.to_bytes(_NAME_BYTES, "little", signed=True)
    return data.rstrip(b"\0").decode("ascii", "replace")


@lru_cache(maxsize=1024)
def pack_ranks(ranks: tuple[int, ...]) -> int:
    """Return ranks as one word: first, stride and count; irregular ones without a stride."""
    first, count = ranks[0], len(ranks)
    stride = ranks[1] - first if count > 1 else 0
    if stride < 1 or ranks != tuple(range(first, first + stride * count, stride)):
        stride = 0
    return first | stride << _RANK_BITS | count << 2 * _RANK_BITS


def unpack_ranks(word: int) -> RankSet:
    """Return the ranks that a word holds."""
    return RankSet(
        word & _RANK_MASK, word >> _RANK_BITS & _RANK_MASK, word >> 2 * _RANK_BITS & _RANK_MASK
    )
