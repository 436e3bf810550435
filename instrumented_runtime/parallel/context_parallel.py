"""Context parallelism for serving: a sequence's keys and values over several ranks.

Of each KV block, rank r of n holds the tokens whose position modulo n is r: block numbers, tables
and moves are the same everywhere, and each rank's memory is an n-th. The rows of a prompt chunk
are dealt the same way ("Striped Attention", Brandon et al. 2023), so that every rank computes its
share of them, stores their keys and values where it stands, and attends while the keys and values
of the others pass by in a ring. A row that decodes is computed by every rank, attends to the keys
held there, and the parts are merged by log-sum-exp.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from perfledger.instrumented_runtime.attention import PagedKvCache, StepRows
from perfledger.instrumented_runtime.checkpoints.config import ModelConfig
from perfledger.instrumented_runtime.collectives import calls
from perfledger.instrumented_runtime.model import Decoder
from perfledger.instrumented_runtime.parallel.groups import Group
from perfledger.instrumented_runtime.parallel.partial_attention import (
    add_part,
    attend_part,
    merge_parts,
)
from perfledger.instrumented_runtime.parallel.ring_attention import Passing
from perfledger.instrumented_runtime.parallel.splits import tokens_a_rank

KERNEL_PATH = "prefill: ring of partial softmax; decode: partial softmax, merged by log-sum-exp"


@dataclass(frozen=True, slots=True)
class LocalChunk:
    """This rank's rows of a chunk, and which keys of each rank they see."""

    rows: slice  # among the local rows
    table: Tensor  # blocks of context and chunk
    masks: tuple[Tensor, ...]  # by the rank that holds the keys: [rows, blocks * tokens a block]


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalRows(StepRows):
    """The rows of a step that one rank computes: all that decode, and its part of each chunk.

    `decode`, `chunks` and `sampled` of the whole step do not apply to them and are empty.
    """

    stored: Tensor  # local rows whose keys and values belong here; `slots` says where
    decoding: int  # the first rows
    decode_table: Tensor  # [decoding * blocks]
    decode_mask: Tensor  # [decoding, 1, 1, blocks * tokens a block]: keys held here
    pieces: tuple[LocalChunk, ...]
    places: Tensor  # [rows of the step]: the local row, or -1 if it is computed elsewhere


def local_rows(rows: StepRows, block_size: int, ranks: int, rank: int) -> LocalRows:
    """Return the part of a step that `rank` of a cp group of `ranks` computes.

    `block_size` is that of the whole group, in tokens.
    """
    decoding = 0 if rows.decode is None else rows.decode.count
    mine = (rows.positions % ranks == rank).index_fill(
        0, torch.arange(decoding, device=rows.positions.device), True
    )
    chosen = mine.nonzero().squeeze(1)
    positions, slots = rows.positions[chosen], rows.slots[chosen]
    stored = (positions % ranks == rank).nonzero().squeeze(1)
    kept = slots[stored]
    places = torch.full_like(rows.tokens, -1)
    places[chosen] = torch.arange(len(chosen), device=chosen.device)
    if rows.decode is None:
        table, mask = slots[:0], mine[:0]
    else:
        table = rows.decode.table
        held = _key_positions(len(table) // decoding, block_size, ranks, rank, table.device)
        mask = (held <= positions[:decoding, None])[:, None, None]
    return LocalRows(
        tokens=rows.tokens[chosen],
        positions=positions,
        slots=kept // block_size * (block_size // ranks) + kept % block_size // ranks,
        decode=None,
        chunks=(),
        sampled=None,
        stored=stored,
        decoding=decoding,
        decode_table=table,
        decode_mask=mask,
        pieces=tuple(_local_chunks(rows, mine, positions, block_size, ranks)),
        places=places,
    )


def _local_chunks(
    rows: StepRows, mine: Tensor, positions: Tensor, block_size: int, ranks: int
) -> list[LocalChunk]:
    before = mine.cumsum(0).tolist()  # local rows up to and with each row of the step
    pieces = []
    for chunk in rows.chunks:
        end = chunk.start + chunk.tokens
        local = slice(before[chunk.start - 1] if chunk.start else 0, before[end - 1])
        table = chunk.table
        if table is None:  # no context: every block of the chunk starts at one of its rows
            table = rows.slots[chunk.start : end : block_size] // block_size
        masks = [
            _key_positions(len(table), block_size, ranks, owner, table.device)
            <= positions[local, None]
            for owner in range(ranks)
        ]
        pieces.append(LocalChunk(local, table, tuple(masks)))
    return pieces


def _key_positions(
    blocks: int, block_size: int, ranks: int, rank: int, device: torch.device
) -> Tensor:
    """Return the positions of the tokens that a rank holds of a table's blocks, in its order."""
    return torch.arange(rank, blocks * block_size, ranks, device=device)


class ShardedKvCache(PagedKvCache):
    """A rank's part of the paged cache: `blocks` blocks, of each `block_size / n` tokens.

    Raises UsageError if the blocks do not divide.
    """

    def __init__(
        self,
        config: ModelConfig,
        blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
        swap_blocks: int = 0,
        *,
        group: Group,
    ) -> None:
        part = tokens_a_rank(block_size, group.size)
        super().__init__(config, blocks, part, dtype, device, swap_blocks)
        self.ring = group
        self.whole_block_size = block_size

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, rows: StepRows
    ) -> Tensor:
        """Store what belongs here; return the attention of the local rows over all ranks' keys."""
        assert isinstance(rows, LocalRows)
        keys, values = self._layers[layer].unbind(0)
        keys.flatten(0, 1).index_copy_(0, rows.slots, key.index_select(0, rows.stored))
        values.flatten(0, 1).index_copy_(0, rows.slots, value.index_select(0, rows.stored))
        grouped = query.view(len(query), self._kv_heads, self._group, self._head_dim)
        output = torch.empty_like(grouped)
        if rows.decoding:
            output[: rows.decoding] = self._decode_part(grouped, keys, values, rows)
        if rows.pieces:
            self._ring(grouped, output, keys, values, rows)
        return output.flatten(1)

    def _decode_part(self, query: Tensor, keys: Tensor, values: Tensor, rows: LocalRows) -> Tensor:
        shape = (rows.decoding, -1, self._kv_heads, self._head_dim)
        key, value = self._gather(keys, values, rows.decode_table)
        output, log_sum = attend_part(
            query[: rows.decoding],
            key.view(shape).transpose(1, 2),
            value.view(shape).transpose(1, 2),
            rows.decode_mask,
        )
        mine = torch.cat((output, log_sum), dim=-1)
        parts = mine.new_empty(self.ring.size, *mine.shape)
        calls.all_gather(parts, mine, self.ring)
        return merge_parts(parts[..., :-1], parts[..., -1:])

    def _ring(
        self, query: Tensor, output: Tensor, keys: Tensor, values: Tensor, rows: LocalRows
    ) -> None:
        """Attend with the rows of all chunks while every rank's keys and values pass by."""
        table = torch.cat([piece.table for piece in rows.pieces])
        held = torch.stack(self._gather(keys, values, table)).view(
            2, -1, self._kv_heads, self._head_dim
        )
        states = []
        for piece in rows.pieces:
            total = torch.zeros_like(query[piece.rows].transpose(0, 1), dtype=torch.float32)
            total = total.transpose(1, 2)  # [kv_heads, group, rows, head_dim]
            states.append((total, total.new_full((*total.shape[:-1], 1), -torch.inf)))
        for hop in range(self.ring.size):
            passing = Passing(held, self.ring) if hop + 1 < self.ring.size else None
            owner, start = (self.ring.position - hop) % self.ring.size, 0
            for piece, state in zip(rows.pieces, states, strict=True):
                end = start + len(piece.table) * self.block_size
                key, value = held[:, start:end].transpose(1, 2).unsqueeze(2).unbind(0)
                part = attend_part(
                    query[piece.rows].permute(1, 2, 0, 3), key, value, piece.masks[owner]
                )
                add_part(*state, *part)
                start = end
            held = held if passing is None else passing.wait()
        for piece, (total, _) in zip(rows.pieces, states, strict=True):
            output[piece.rows] = total.permute(2, 0, 1, 3).to(output.dtype)


class ContextParallelDecoder:
    """A decoder over the ranks of a cp group; each holds all weights and a part of the cache."""

    def __init__(self, decoder: Decoder, group: Group) -> None:
        self._decoder, self._group = decoder, group
        self.config, self.dtype, self.device = decoder.config, decoder.dtype, decoder.device
        self.parameters, self.routing = decoder.parameters, decoder.routing
        self.weights_bytes = decoder.weights_bytes

    @torch.inference_mode()
    def forward(self, rows: StepRows, cache: PagedKvCache) -> Tensor:
        """Compute one step with the other ranks; return the logits of the sampled rows.

        Only the first rank of the group gets them; the others return none, [0, vocab_size].
        """
        assert isinstance(cache, ShardedKvCache)
        if rows.moves is not None:
            cache.apply(rows.moves)
        ranks, rank = self._group.size, self._group.position
        local = local_rows(rows, cache.whole_block_size, ranks, rank)
        hidden = self._decoder.hidden(local, cache)
        wanted = local.places if rows.sampled is None else local.places[rows.sampled]
        sampled = self._collect(hidden, wanted, local.decoding)
        return self._decoder.logits(sampled if rank == 0 else sampled[:0])

    def _collect(self, hidden: Tensor, wanted: Tensor, decoding: int) -> Tensor:
        """Return the hidden states of the wanted local rows of all ranks (-1: not here).

        Rows that decode are everywhere: the first rank's count.
        """
        here = wanted >= (0 if self._group.position == 0 else decoding)
        mine = hidden.new_zeros(len(wanted), hidden.shape[1])
        mine[here] = hidden[wanted[here]]
        calls.all_reduce(mine, self._group)
        return mine
