"""From a step's plan to the tensors the model computes: numbers laid out flat, copied once."""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from perfledger.instrumented_runtime.attention import (
    BlockMoves,
    ChunkRows,
    DecodeRows,
    StepRows,
)
from perfledger.instrumented_runtime.collectives.copies import recorded_copy
from perfledger.instrumented_runtime.kv.blocks import blocks_for
from perfledger.instrumented_runtime.kv.swapping import Move, PlannedMoves
from perfledger.instrumented_runtime.scheduling.plan import Chunk, StepPlan
from perfledger.instrumented_runtime.scheduling.sequences import Sequence

Integers = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class PreparedChunk:
    """The rows of one chunk, before they have a place among the rows of the step."""

    chunk: Chunk
    rows: Integers  # [3, tokens]: token, position and slot of each row
    table: Integers  # the blocks that hold the context and the chunk


def prepare_chunk(chunk: Chunk, block_size: int) -> PreparedChunk:
    """Return the rows of a chunk; its sequence must hold the blocks for them."""
    end, sequence = chunk.start + chunk.tokens, chunk.sequence
    table = np.array(sequence.blocks[: blocks_for(end, block_size)], np.int64)
    rows = np.empty((3, chunk.tokens), np.int64)
    rows[0] = sequence.tokens[chunk.start : end]
    positions = rows[1] = np.arange(chunk.start, end)
    rows[2] = table[positions // block_size] * block_size + positions % block_size
    return PreparedChunk(chunk, rows, table)


def build_rows(
    plan: StepPlan,
    prepared: list[PreparedChunk],
    block_size: int,
    device: torch.device,
    moves: PlannedMoves | None = None,
) -> StepRows:
    """Return the tensors of a step: its decodes, then its chunks in the order of the plan."""
    pieces = [one.rows for one in prepared]
    if plan.decodes:
        pieces.insert(0, _decode_rows(plan.decodes, block_size))
    tokens, positions, slots = _tensor(np.concatenate(pieces, axis=1), device).unbind(0)
    chunks, sampled = [], list(range(len(plan.decodes)))
    start = len(plan.decodes)
    for one in prepared:
        chunks.append(_chunk_rows(one, start, block_size, device))
        start += one.chunk.tokens
        sampled += [start - 1] * len(one.chunk.samples)
    all_sampled = sampled == list(range(start))
    return StepRows(
        tokens=tokens,
        positions=positions,
        slots=slots,
        decode=_decode_tables(plan.decodes, block_size, device) if plan.decodes else None,
        chunks=tuple(chunks),
        sampled=None if all_sampled else _tensor(np.array(sampled, np.int64), device),
        moves=None if moves is None else _block_moves(moves, device),
    )


def _block_moves(moves: PlannedMoves, device: torch.device) -> BlockMoves:
    def pairs(planned: list[Move]) -> Tensor | None:
        return _tensor(np.array(planned, np.int64), device) if planned else None

    return BlockMoves(pairs(moves.swap_out), pairs(moves.copies), pairs(moves.swap_in))


def _decode_rows(decodes: list[Sequence], block_size: int) -> Integers:
    tokens = [sequence.tokens[-1] for sequence in decodes]
    positions = [sequence.computed for sequence in decodes]
    slots = [
        sequence.blocks[sequence.computed // block_size] * block_size
        + sequence.computed % block_size
        for sequence in decodes
    ]
    return np.array((tokens, positions, slots), np.int64)


def _decode_tables(decodes: list[Sequence], block_size: int, device: torch.device) -> DecodeRows:
    width = max(len(sequence.blocks) for sequence in decodes)
    table = np.zeros((len(decodes), width), np.int64)
    for row, sequence in zip(table, decodes, strict=True):
        row[: len(sequence.blocks)] = sequence.blocks
    lengths = np.array([[sequence.computed + 1] for sequence in decodes])
    mask = np.arange(width * block_size) < lengths
    return DecodeRows(
        len(decodes), _tensor(table.ravel(), device), _tensor(mask[:, None, None], device)
    )


def _chunk_rows(one: PreparedChunk, start: int, block_size: int, device: torch.device) -> ChunkRows:
    chunk = one.chunk
    if not chunk.start:
        return ChunkRows(start, chunk.tokens, 0, None, None)
    mask = np.arange(chunk.start + chunk.tokens) <= one.rows[1][:, None]
    return ChunkRows(
        start, chunk.tokens, chunk.start, _tensor(one.table, device), _tensor(mask, device)
    )


def _tensor(array: NDArray[np.generic], device: torch.device) -> Tensor:
    return recorded_copy(torch.from_numpy(array), device=device)
