"""Decode attention over the paged cache, as the runtime does it: gather the blocks, then attend.

The blocks are taken in turn from a pool much larger than the caches, for in a step the weights of
a layer pass through the caches before the layer's blocks are read again.
"""

from collections.abc import Callable

import torch

from perfledger.instrumented_runtime.attention import (
    BlockMoves,
    DecodeRows,
    PagedKvCache,
    StepRows,
)
from perfledger.instrumented_runtime.ceilings.cells import Cell, Work, timed_apart
from perfledger.instrumented_runtime.checkpoints.config import ModelConfig, parse_config
from perfledger.schema.ceilings import AttentionShape

MIB = 1 << 20
BLOCK = 16
ROWS, CONTEXTS = (1, 4, 16), (64, 256, 1024, 2048)
KV_HEADS, GROUP, HEAD_DIM = 4, 2, 64
POOL_BYTES, QUICK_POOL_BYTES = 192 * MIB, 64 * MIB


def attention_cells(device: torch.device, *, quick: bool) -> list[Cell]:
    """Return the cells of decode attention, in bytes/s.

    The bytes are those that the operators ask for: blocks read and written by the gather, and
    read again by the attention.
    """
    pool_bytes = QUICK_POOL_BYTES if quick else POOL_BYTES
    dtypes = ("float32",) if quick else ("float32", "bfloat16")
    shapes = [
        AttentionShape(dtype, rows, context, KV_HEADS, GROUP, HEAD_DIM)
        for dtype in dtypes
        for rows in (ROWS if not quick else ROWS[::2])
        for context in (CONTEXTS if not quick else CONTEXTS[1:3])
    ]
    return [
        Cell(
            "device_memory",
            "attention",
            str(shape),
            "bytes/s",
            timed_apart(_attending(shape, pool_bytes, device), moved_bytes(shape), device),
        )
        for shape in shapes
    ]


def moved_bytes(shape: AttentionShape) -> int:
    """Return the bytes that one call moves: K and V gathered (read, written), and read."""
    tokens = shape.rows * -(-shape.context // BLOCK) * BLOCK
    element = getattr(torch, shape.dtype).itemsize
    return 3 * 2 * tokens * shape.kv_heads * shape.head_dim * int(element)


def _attending(shape: AttentionShape, pool_bytes: int, device: torch.device) -> Callable[[], Work]:
    def prepare() -> Work:
        dtype = getattr(torch, shape.dtype)
        blocks = shape.rows * -(-shape.context // BLOCK)
        block_bytes = 2 * BLOCK * shape.kv_heads * shape.head_dim * dtype.itemsize
        tables = max(2, pool_bytes // (blocks * block_bytes))
        cache = PagedKvCache(_config(shape), blocks * tables, BLOCK, dtype, device)
        steps = [_step(shape, blocks, at, device) for at in range(tables)]
        heads = shape.kv_heads * shape.group
        query = torch.randn(shape.rows, heads, shape.head_dim, device=device).to(dtype)
        key = torch.randn(shape.rows, shape.kv_heads, shape.head_dim, device=device).to(dtype)
        # Pages that nothing was written to are all the same page of zeros: write every block.
        every = torch.arange(1, blocks * tables, device=device)
        cache.apply(BlockMoves(copies=torch.stack((torch.zeros_like(every), every), dim=1)))
        at = 0

        def attend() -> None:
            nonlocal at
            at = (at + 1) % tables
            cache.attend(0, query, key, key, steps[at])

        return attend

    return prepare


def _step(shape: AttentionShape, blocks: int, at: int, device: torch.device) -> StepRows:
    """Return the rows of a decode step over the blocks from `at * blocks` on."""
    table = torch.arange(at * blocks, (at + 1) * blocks, device=device)
    width = blocks // shape.rows
    mask = torch.arange(width * BLOCK, device=device) < shape.context
    last = (shape.context - 1) // BLOCK
    slots = table.view(shape.rows, width)[:, last] * BLOCK + (shape.context - 1) % BLOCK
    nothing = torch.zeros(shape.rows, dtype=torch.int64, device=device)
    decode = DecodeRows(shape.rows, table, mask.expand(shape.rows, 1, 1, -1).contiguous())
    return StepRows(nothing, nothing, slots, decode, (), None)


def _config(shape: AttentionShape) -> ModelConfig:
    """Return a model of one layer with such heads; nothing else of it is used."""
    heads = shape.kv_heads * shape.group
    return parse_config(
        {
            "architectures": ["LlamaForCausalLM"],
            "vocab_size": 16,
            "hidden_size": heads * shape.head_dim,
            "intermediate_size": 16,
            "num_hidden_layers": 1,
            "num_attention_heads": heads,
            "num_key_value_heads": shape.kv_heads,
            "head_dim": shape.head_dim,
            "max_position_embeddings": shape.context + 1,
        }
    )
