"""What each rank of an engine tells of its shape, so that bytes and FLOPs of a step can be derived.

Arithmetic over a checkpoint's config: rank 0 tells it of every rank. `Matrix.bytes` of the
matrices that a rank really holds add up to the same.
"""

import torch

from perfledger.instrumented_runtime.checkpoints.config import ModelConfig
from perfledger.instrumented_runtime.linears import matrix_bytes
from perfledger.instrumented_runtime.options import RuntimeOptions
from perfledger.instrumented_runtime.parallel.layout import Layout, RankPlace
from perfledger.instrumented_runtime.parallel.served_model import Placement
from perfledger.schema.model_shape import ModelShape


def rank_shapes(placement: Placement, options: RuntimeOptions) -> tuple[str, ...]:
    """Return the text of each rank's shape, of rank 0 first; empty where it cannot be said.

    With experts or contexts over several ranks, what a rank computes of a step depends on where
    its rows went or stand, which the step's records do not tell.
    """
    layout = placement.place.layout
    if layout.ep > 1 or layout.cp > 1:
        return ()
    shapes = []
    for rank in range(layout.world):
        at = Placement(placement.config, RankPlace(layout, rank), placement.dtype, placement.device)
        shapes.append(str(shape_of(at, options, samples=not rank)))
    return tuple(shapes)


def shape_of(at: Placement, options: RuntimeOptions, *, samples: bool = True) -> ModelShape:
    """Return the shape of what the rank at a place holds."""
    part, dtype = at.part, at.dtype
    held, experts = part.held(at.config), at.config.experts
    ffn = experts.intermediate_size // part.shards if experts else held.intermediate_size
    gated = _gated_bytes(held.hidden_size, ffn, options.quantization, dtype)
    attention = _attention_bytes(held, options.quantization, dtype, with_bias=part.shard == 0)
    return ModelShape(
        layers=held.layers,
        hidden=held.hidden_size,
        heads=held.heads,
        kv_heads=held.kv_heads,
        head_dim=held.head_dim,
        ffn=ffn,
        element=dtype.itemsize,
        block=options.block_size,
        matrices=attention + (0 if experts else gated),
        vocabulary=held.vocab_size // part.shards if part.last else 0,
        shards=part.shards,
        microbatches=_microbatches(at.place.layout, options),
        experts=experts.count if experts else 0,
        per_token=experts.per_token if experts else 0,
        expert_bytes=gated if experts else 0,
        normalized=int(experts is not None and experts.normalized),
        qk_norm=int(held.qk_norm),
        qkv_bias=int(held.qkv_bias),
        output_bias=int(held.output_bias and not part.shard),
        first=int(part.first),
        logits=held.vocab_size if samples else 0,
        quantization=options.quantization,
        device=at.device.type,
    )


def _attention_bytes(
    held: ModelConfig, quantization: str, dtype: torch.dtype, *, with_bias: bool
) -> int:
    """Return the bytes of a layer's projections; one rank holds the bias behind a reduction."""
    outputs, inputs = (held.heads + 2 * held.kv_heads) * held.head_dim, held.hidden_size
    biased = held.output_bias and with_bias
    return matrix_bytes(outputs, inputs, held.qkv_bias, quantization, dtype) + matrix_bytes(
        held.hidden_size, held.heads * held.head_dim, biased, quantization, dtype
    )


def _gated_bytes(hidden: int, ffn: int, quantization: str, dtype: torch.dtype) -> int:
    up = matrix_bytes(2 * ffn, hidden, False, quantization, dtype)
    return up + matrix_bytes(hidden, ffn, False, quantization, dtype)


def _microbatches(layout: Layout, options: RuntimeOptions) -> int:
    return 1 if layout.pp == 1 else options.microbatches or layout.pp
