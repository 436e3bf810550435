"""Rows of a step survive their way to other ranks, and their cut into microbatches, unchanged."""

import dataclasses
from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from perfledger.instrumented_runtime.attention import (
    BlockMoves,
    ChunkRows,
    DecodeRows,
    StepRows,
)
from perfledger.instrumented_runtime.parallel.pipeline_parallel import split_rows
from perfledger.instrumented_runtime.parallel.step_messages import pack, unpack

CPU = torch.device("cpu")
BLOCK_SIZE = 4


def integers(*shape: int) -> Tensor:
    return torch.randint(0, 1 << 40, shape)


@st.composite
def steps(draw: st.DrawFn) -> StepRows:
    """Steps as `build_rows` lays them out, with any contents."""
    decoding = draw(st.lists(st.integers(0, 40), max_size=6))
    pieces = draw(st.lists(st.tuples(st.integers(0, 20), st.integers(1, 20)), max_size=4))
    if not decoding and not pieces:
        decoding = [3]
    positions = list(decoding)
    decode = None
    if decoding:
        width = max(decoding) // BLOCK_SIZE + 1 + draw(st.integers(0, 2))
        lengths = torch.tensor(decoding)[:, None] + 1
        mask = torch.arange(width * BLOCK_SIZE) < lengths
        decode = DecodeRows(len(decoding), integers(len(decoding) * width), mask[:, None, None])
    chunks = []
    for context, tokens in pieces:
        start, end = len(positions), context + tokens
        own = range(context, end)
        table = integers(-(-end // BLOCK_SIZE)) if context else None
        mask = torch.arange(end) <= torch.tensor(own)[:, None] if context else None
        chunks.append(ChunkRows(start, tokens, context, table, mask))
        positions += own
    rows = len(positions)
    sampled = draw(st.none() | st.lists(st.integers(0, rows - 1), max_size=8).map(sorted))
    kinds = [draw(st.none() | st.integers(1, 3)) for _ in range(3)]
    moves = BlockMoves(*(None if count is None else integers(count, 2) for count in kinds))
    return StepRows(
        tokens=integers(rows),
        positions=torch.tensor(positions),
        slots=integers(rows),
        decode=decode,
        chunks=tuple(chunks),
        sampled=None if sampled is None else torch.tensor(sampled, dtype=torch.int64),
        moves=draw(st.sampled_from([None, moves])),
    )


def plain(value: Any) -> Any:
    """Return anything made of dataclasses and tensors as what == compares whole."""
    if isinstance(value, Tensor):
        return (str(value.dtype), tuple(value.shape), value.tolist())
    if dataclasses.is_dataclass(value):
        return {
            field.name: plain(getattr(value, field.name)) for field in dataclasses.fields(value)
        }
    if isinstance(value, tuple):
        return tuple(plain(one) for one in value)
    return value


@given(steps())
@settings(deadline=None)
def test_rows_come_back_as_they_were(rows: StepRows) -> None:
    packed = pack(rows)
    assert (packed.dtype, packed.dim()) == (torch.int64, 1)
    assert plain(unpack(packed, CPU)) == plain(rows)


@given(steps(), st.integers(1, 5))
@settings(deadline=None)
def test_microbatches_are_the_step_in_pieces(rows: StepRows, most: int) -> None:
    parts = split_rows(rows, most)
    sequences = (rows.decode.count if rows.decode else 0) + len(rows.chunks)
    assert 1 <= len(parts) <= min(most, sequences)
    for name in ("tokens", "positions", "slots"):
        joined = torch.cat([getattr(part, name) for part in parts])
        assert torch.equal(joined, getattr(rows, name))
    starts = [0]
    for part in parts:
        assert part.moves is None
        starts.append(starts[-1] + len(part.tokens))
    if rows.sampled is None:
        assert all(part.sampled is None for part in parts)
    else:
        sampled = [
            p.sampled + s for p, s in zip(parts, starts, strict=False) if p.sampled is not None
        ]
        assert torch.cat(sampled).tolist() == rows.sampled.tolist()
    chunks = [
        dataclasses.replace(chunk, start=chunk.start + start)
        for part, start in zip(parts, starts, strict=False)
        for chunk in part.chunks
    ]
    assert plain(tuple(chunks)) == plain(rows.chunks)
    decodes = [part.decode for part in parts if part.decode is not None]
    if rows.decode is not None:
        assert sum(one.count for one in decodes) == rows.decode.count
        assert torch.equal(torch.cat([one.table for one in decodes]), rows.decode.table)
        assert torch.equal(torch.cat([one.mask for one in decodes]), rows.decode.mask)
    else:
        assert not decodes
    # A part is laid out like a step: one that packs and unpacks to itself.
    for part in parts:
        assert plain(unpack(pack(part), CPU)) == plain(part)
