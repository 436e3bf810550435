"""Rank 0 tells the others what to compute: the rows of each step, packed into one tensor.

A short header goes first, on which the others sleep between steps; so it is no collective of a
step, and not recorded as one. The rows follow as a broadcast like any other.
"""

from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from perfledger.instrumented_runtime.attention import (
    BlockMoves,
    ChunkRows,
    DecodeRows,
    StepRows,
)
from perfledger.instrumented_runtime.collectives import calls
from perfledger.instrumented_runtime.parallel.groups import STALL_S, Peers
from perfledger.schema.clocks import monotonic_ns

LEADER = 0
IDLE_S = 7 * 24 * 3600.0  # so long the others wait for a step
ABSENT = -1  # as a length: there is no such tensor

WARM_UP, STEP, END = range(3)


class Header(NamedTuple):
    """What comes next. `sent_ns` is monotonic, of rank 0's host."""

    kind: int  # WARM_UP, STEP or END
    seq: int  # of the step in rank 0's engine
    words: int  # in the packed rows
    sent_ns: int


class StepMessages:
    """The way from rank 0 to all other ranks of a replica."""

    def __init__(self, peers: Peers, device: torch.device) -> None:
        leads = peers.place.rank == LEADER
        self.group = peers.new_group("steps", STALL_S if leads else IDLE_S)
        self._device = device

    def send(self, kind: int, seq: int, rows: StepRows) -> None:
        """Tell all ranks to compute `rows`: rank 0's part."""
        packed = pack(rows)
        self._knock(Header(kind, seq, len(packed), monotonic_ns()))
        calls.broadcast(packed, LEADER, self.group)

    def send_end(self) -> None:
        """Tell all ranks to end."""
        self._knock(Header(END, 0, 0, monotonic_ns()))

    def wait(self) -> Header:
        """Wait for what rank 0 says next."""
        header = torch.empty(len(Header._fields), dtype=torch.int64)
        dist.broadcast(header, LEADER, self.group.handle)
        return Header(*header.tolist())

    def receive(self, header: Header) -> StepRows:
        """Return the rows that a header announced."""
        packed = torch.empty(header.words, dtype=torch.int64)
        calls.broadcast(packed, LEADER, self.group)
        return unpack(packed, self._device)

    def _knock(self, header: Header) -> None:
        dist.broadcast(torch.tensor(header), LEADER, self.group.handle)


def pack(rows: StepRows) -> Tensor:
    """Return rows as one int64 tensor on the host; masks are left out, they follow from the rest.

    It starts with the numbers of everything behind them, ABSENT where there is none: rows,
    sequences that decode, blocks of each, tokens a block, rows sampled, the three kinds of moves,
    chunks; then (start, tokens, context, blocks) of each chunk.
    """
    decode, moves = rows.decode, rows.moves or BlockMoves()
    optional = (rows.sampled, moves.swap_out, moves.copies, moves.swap_in)
    numbers = [
        len(rows.tokens),
        *_decode_numbers(decode),
        *(ABSENT if tensor is None else len(tensor) for tensor in optional),
        int(rows.moves is not None),
        len(rows.chunks),
    ]
    for one in rows.chunks:
        blocks = ABSENT if one.table is None else len(one.table)
        numbers += (one.start, one.tokens, one.context, blocks)
    pieces = [torch.tensor(numbers), rows.tokens, rows.positions, rows.slots]
    if decode is not None:
        pieces.append(decode.table)
    pieces += [one.table for one in rows.chunks if one.table is not None]
    pieces += [tensor.flatten() for tensor in optional if tensor is not None]
    return torch.cat([piece.cpu() for piece in pieces])


def unpack(packed: Tensor, device: torch.device) -> StepRows:
    """Return the rows that `pack` packed, with their tensors on `device`."""
    count, decoding, blocks, block_size, *optional, has_moves, chunks = packed[:10].tolist()
    shapes = packed[10 : 10 + 4 * chunks].view(chunks, 4).tolist()
    rest = packed[10 + 4 * chunks :].to(device)

    def take(words: int) -> Tensor:
        nonlocal rest
        taken, rest = rest[:words], rest[words:]
        return taken

    tokens, positions, slots = (take(count) for _ in range(3))
    decode = None
    if decoding:
        table = take(decoding * blocks)
        mask = torch.arange(blocks * block_size, device=device) <= positions[:decoding, None]
        decode = DecodeRows(decoding, table, mask[:, None, None])
    pieces = []
    for start, length, context, held in shapes:
        if held == ABSENT:
            pieces.append(ChunkRows(start, length, context, None, None))
            continue
        table = take(held)
        own = positions[start : start + length, None]
        mask = torch.arange(context + length, device=device) <= own
        pieces.append(ChunkRows(start, length, context, table, mask))
    sampled = None if optional[0] == ABSENT else take(optional[0])
    moves = [None if n == ABSENT else take(2 * n).view(n, 2) for n in optional[1:]]
    return StepRows(
        tokens=tokens,
        positions=positions,
        slots=slots,
        decode=decode,
        chunks=tuple(pieces),
        sampled=sampled,
        moves=BlockMoves(*moves) if has_moves else None,
    )


def _decode_numbers(decode: DecodeRows | None) -> tuple[int, int, int]:
    if decode is None:
        return 0, 0, 0
    blocks = len(decode.table) // decode.count
    return decode.count, blocks, decode.mask.shape[-1] // blocks
