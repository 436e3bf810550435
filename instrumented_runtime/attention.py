"""Paged attention: K and V in blocks, one layer after another, over the rows of one step.

The rows of a step are flat: first one row for each sequence that decodes, then the rows of each
prompt chunk. Decoding gathers the blocks of all sequences into one buffer and attends once, the
query heads that share a KV head standing as a query of that length; each chunk attends on its own.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend
from torch.nn.functional import scaled_dot_product_attention

from perfledger.instrumented_runtime.checkpoints.config import ModelConfig
from perfledger.instrumented_runtime.collectives.copies import Crossing


@dataclass(frozen=True, slots=True)
class ChunkRows:
    """Rows `[start, start + tokens)` of a step: a piece of one prompt, after `context` tokens."""

    start: int
    tokens: int
    context: int
    table: Tensor | None  # block numbers of context and chunk; None where there is no context
    mask: Tensor | None  # [tokens, context + tokens], True where a row may look


@dataclass(frozen=True, slots=True)
class DecodeRows:
    """The first `count` rows of a step, one of each sequence that decodes."""

    count: int
    table: Tensor  # [count * blocks]: block numbers, shorter tables filled with block 0
    mask: Tensor  # [count, 1, 1, blocks * block_size], True where there is a token


@dataclass(frozen=True, slots=True)
class BlockMoves:
    """Blocks copied before a step computes, over all layers: pairs [moves, 2] of (from, to).

    The three kinds follow one another, and each reads all its blocks before it writes one.
    """

    swap_out: Tensor | None = None  # device block to host block
    copies: Tensor | None = None  # device block to device block (copy-on-write)
    swap_in: Tensor | None = None  # host block to device block


@dataclass(frozen=True, slots=True)
class StepRows:
    """All rows of one step, as the model computes them."""

    tokens: Tensor  # [rows]
    positions: Tensor  # [rows]
    slots: Tensor  # [rows]: block * block_size + offset, where K and V of the row go
    decode: DecodeRows | None
    chunks: tuple[ChunkRows, ...]
    sampled: Tensor | None  # rows whose logits are wanted, one as often as named; None for all
    moves: BlockMoves | None = None


class PagedKvCache:
    """K and V of all layers, each [blocks, block_size, kv_heads, head_dim], and the attention."""

    def __init__(
        self,
        config: ModelConfig,
        blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
        swap_blocks: int = 0,
    ) -> None:
        self.blocks, self.block_size, self.swap_blocks = blocks, block_size, swap_blocks
        self._kv_heads, self._head_dim = config.kv_heads, config.head_dim
        self._group = config.heads // config.kv_heads
        shape = (2, blocks, block_size, config.kv_heads, config.head_dim)
        self._layers = [_zeros(shape, dtype, device) for _ in range(config.layers)]
        shape, host = (2, swap_blocks, *shape[2:]), torch.device("cpu")
        layers = config.layers if swap_blocks else 0
        self._swapped = [_zeros(shape, dtype, host) for _ in range(layers)]
        self._gathered = torch.empty(
            2, 0, block_size * config.kv_heads * config.head_dim, dtype=dtype, device=device
        )

    @torch.inference_mode()
    def apply(self, moves: BlockMoves) -> None:
        """Copy blocks as told: models do it with the moves of a step before they compute it."""
        if moves.swap_out is not None:
            with self._crossing("offload_out", moves.swap_out):
                for layer, swapped in zip(self._layers, self._swapped, strict=True):
                    _copy_blocks(layer, swapped, moves.swap_out)
        if moves.copies is not None:
            for layer in self._layers:
                _copy_blocks(layer, layer, moves.copies)
        if moves.swap_in is not None:
            with self._crossing("offload_in", moves.swap_in):
                for layer, swapped in zip(self._layers, self._swapped, strict=True):
                    _copy_blocks(swapped, layer, moves.swap_in)

    def _crossing(self, boundary: str, pairs: Tensor) -> Crossing:
        """Return what tells of so many blocks on their way to or from the host."""
        layer = self._layers[0]
        size = len(pairs) * layer[:, 0].numel() * layer.element_size() * len(self._layers)
        places = [str(layer.device), str(self._swapped[0].device)]
        source, target = places if boundary == "offload_out" else places[::-1]
        return Crossing(boundary, source, target, layer.dtype, size, layer.device.type)

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, rows: StepRows
    ) -> Tensor:
        """Store K and V of the rows, and return their attention output [rows, heads * head_dim].

        `query` is [rows, heads, head_dim], `key` and `value` are [rows, kv_heads, head_dim];
        queries and keys are already rotated.
        """
        keys, values = self._layers[layer].unbind(0)
        keys.flatten(0, 1).index_copy_(0, rows.slots, key)
        values.flatten(0, 1).index_copy_(0, rows.slots, value)
        if rows.decode is not None and not rows.chunks:
            return self._decode(query, keys, values, rows.decode)
        outputs = []
        if rows.decode is not None:
            outputs.append(self._decode(query[: rows.decode.count], keys, values, rows.decode))
        for chunk in rows.chunks:
            piece = slice(chunk.start, chunk.start + chunk.tokens)
            if chunk.table is None:
                outputs.append(self._prefill(query[piece], key[piece], value[piece], None))
            else:
                outputs.append(self._extend(query[piece], keys, values, chunk))
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs)

    def _decode(self, query: Tensor, keys: Tensor, values: Tensor, rows: DecodeRows) -> Tensor:
        shape = (rows.count, -1, self._kv_heads, self._head_dim)
        key, value = self._gather(keys, values, rows.table)
        out = scaled_dot_product_attention(
            query.reshape(rows.count, self._kv_heads, self._group, self._head_dim),
            key.view(shape).transpose(1, 2),
            value.view(shape).transpose(1, 2),
            attn_mask=rows.mask,
        )
        return out.reshape(rows.count, -1)

    def _extend(self, query: Tensor, keys: Tensor, values: Tensor, chunk: ChunkRows) -> Tensor:
        assert chunk.table is not None
        key, value = self._gather(keys, values, chunk.table)
        length = chunk.context + chunk.tokens
        shape = (-1, self._kv_heads, self._head_dim)
        return self._prefill(
            query, key.view(shape)[:length], value.view(shape)[:length], chunk.mask
        )

    def _prefill(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        # The heads of a group stand in the batch dimension, so K and V are shared, not copied.
        tokens, group = len(query), self._group
        out = scaled_dot_product_attention(
            query.view(tokens, self._kv_heads, group, self._head_dim).permute(2, 1, 0, 3),
            key.transpose(0, 1).expand(group, -1, -1, -1),
            value.transpose(0, 1).expand(group, -1, -1, -1),
            attn_mask=mask,
            is_causal=mask is None,
        )
        return out.permute(2, 1, 0, 3).reshape(tokens, -1)

    def _gather(self, keys: Tensor, values: Tensor, table: Tensor) -> tuple[Tensor, Tensor]:
        """Copy blocks into the buffer that all layers and steps share.

        A fresh buffer of some MB for each layer would be mapped and faulted in anew every time.
        """
        count = len(table)
        if self._gathered.shape[1] < count:
            self._gathered = self._gathered.new_empty(2, count, self._gathered.shape[2])
        key, value = self._gathered[0, :count], self._gathered[1, :count]
        torch.index_select(keys.flatten(1), 0, table, out=key)
        torch.index_select(values.flatten(1), 0, table, out=value)
        return key, value


def _copy_blocks(source: Tensor, target: Tensor, pairs: Tensor) -> None:
    read = source.index_select(1, pairs[:, 0].to(source.device))
    target.index_copy_(1, pairs[:, 1].to(target.device), read.to(target.device))


def block_bytes(config: ModelConfig, block_size: int, dtype: torch.dtype) -> int:
    """Return the bytes of K and V in one block, over all layers."""
    return 2 * config.layers * block_size * config.kv_heads * config.head_dim * dtype.itemsize


def kernel_path(config: ModelConfig, dtype: torch.dtype, device: torch.device) -> str:
    """Name the attention kernels that torch really chooses for this model's two shapes."""
    group = config.heads // config.kv_heads

    def chosen(batch: int, rows: int, mask: Tensor | None) -> str:
        query = torch.zeros(
            batch, config.kv_heads, rows, config.head_dim, dtype=dtype, device=device
        )
        key = torch.zeros(batch, config.kv_heads, 16, config.head_dim, dtype=dtype, device=device)
        backend = torch._fused_sdp_choice(query, key, key, mask, 0.0, mask is None)
        return str(SDPBackend(backend).name).removesuffix("_ATTENTION").lower()

    mask = torch.ones(2, 1, 1, 16, dtype=torch.bool, device=device)
    prefill, decode = chosen(group, 16, None), chosen(2, group, mask)
    return f"prefill: sdpa {prefill}; decode: block gather, sdpa {decode}, group as query"


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return zeros whose pages the kernel maps only when a block is first used (on the CPU).

    Zeros, because a masked place still takes part in the arithmetic and must be finite.
    """
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    size = int(np.prod(shape)) * dtype.itemsize
    return torch.from_numpy(np.zeros(size, np.uint8)).view(dtype).view(shape)
