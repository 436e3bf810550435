"""What one rank of an engine loads before it can compute: its part of the model, its cache."""

from dataclasses import dataclass
from pathlib import Path

import torch

from perfledger.instrumented_runtime import attention, devices
from perfledger.instrumented_runtime.attention import PagedKvCache
from perfledger.instrumented_runtime.checkpoints.config import ModelConfig, read_config
from perfledger.instrumented_runtime.checkpoints.weights import weights_hash
from perfledger.instrumented_runtime.kv.blocks import blocks_for
from perfledger.instrumented_runtime.kv.capacity import Capacity, StepShape, activations_bytes
from perfledger.instrumented_runtime.linears import check_quantization
from perfledger.instrumented_runtime.messages import Ready
from perfledger.instrumented_runtime.options import RuntimeOptions
from perfledger.instrumented_runtime.parallel import context_parallel
from perfledger.instrumented_runtime.parallel.groups import join
from perfledger.instrumented_runtime.parallel.layout import RankPlace
from perfledger.instrumented_runtime.parallel.served_model import (
    Placement,
    StepModel,
    load_model,
    make_cache,
)
from perfledger.instrumented_runtime.parallel.splits import check_layout
from perfledger.instrumented_runtime.runtime_version import runtime_version
from perfledger.instrumented_runtime.scheduling.limits import Limits, check_options, limits_of
from perfledger.instrumented_runtime.work_shape import rank_shapes
from perfledger.schema.errors import UsageError


@dataclass(frozen=True, slots=True)
class LoadedRank:
    """One rank, ready to compute; `facts` are what rank 0 tells the API process."""

    placement: Placement
    model: StepModel
    cache: PagedKvCache
    limits: Limits
    facts: Ready


def load_rank(options: RuntimeOptions, checkpoint: Path, place: RankPlace) -> LoadedRank:
    """Meet the other ranks, load this one's part of the model and make its cache.

    Raises UsageError for a checkpoint or options that can never work, and where ranks hold
    different ones; PerfledgerError for a rank that does not come.
    """
    check_options(options)
    config = read_config(checkpoint)
    check_layout(config, place.layout, options.block_size)
    max_model_len = _model_len(options, config.max_position_embeddings)
    threads = devices.set_threads(options.threads)
    device = _device_of(place, devices.choose_device(options.device))
    dtype = devices.choose_dtype(options.dtype, config.dtype, device)
    check_quantization(options.quantization, dtype, device)
    digest = weights_hash(checkpoint)
    placement = _meet(config, place, dtype, device, digest)
    limits = _limits(options, placement, max_model_len)
    model = load_model(checkpoint, options, placement)
    cache = make_cache(placement, limits.kv_blocks, limits.block_size, limits.swap_blocks)
    facts = Ready(
        device=str(device),
        dtype=str(dtype).removeprefix("torch."),
        kernel_path=context_parallel.KERNEL_PATH
        if place.layout.cp > 1
        else attention.kernel_path(model.config, dtype, device),
        threads=threads,
        kv_blocks=limits.kv_blocks,
        max_model_len=max_model_len,
        parameters=model.parameters,
        weights_hash=digest,
        runtime_version=runtime_version(),
        layout=str(place.layout),
        capacity=_capacity(options, placement, limits, model.weights_bytes).facts(),
        shapes=rank_shapes(placement, options),
    )
    return LoadedRank(placement, model, cache, limits, facts)


def _meet(
    config: ModelConfig, place: RankPlace, dtype: torch.dtype, device: torch.device, digest: str
) -> Placement:
    if place.alone:
        return Placement(config, place, dtype, device)
    peers = join(place, device)
    peers.agree(
        {
            "the runtime version": runtime_version(),
            "the checkpoint": digest,
            "the model's shape": str(config),
            "the dtype": str(dtype),
        }
    )
    return Placement(config, place, dtype, device, peers)


def _limits(options: RuntimeOptions, placement: Placement, max_model_len: int) -> Limits:
    """Return the limits, equal on all ranks: each has the memory that the options give."""
    # More blocks than all sequences need at their full length would never be used.
    most = options.max_num_seqs * blocks_for(max_model_len, options.block_size)
    each = placement.block_bytes(options.block_size)
    swapping = options.preemption == "swap"
    return limits_of(
        options,
        max_model_len=max_model_len,
        kv_blocks=min(options.kv_memory_bytes // each, most),
        swap_blocks=min(options.swap_memory_bytes // each, most) if swapping else 0,
    )


def _capacity(
    options: RuntimeOptions, placement: Placement, limits: Limits, weights_bytes: int
) -> Capacity:
    """Return what this rank's memory is for."""
    held, block = placement.part.held(placement.config), placement.block_bytes(limits.block_size)
    step = StepShape(
        rows=limits.max_num_batched_tokens,
        sampled_rows=limits.max_num_seqs,
        hidden_size=held.hidden_size,
        qkv_size=(held.heads + 2 * held.kv_heads) * held.head_dim,
        intermediate_size=held.intermediate_size,
        vocab_size=held.vocab_size,
        element_bytes=placement.dtype.itemsize,
    )
    return Capacity(
        memory_bytes=devices.memory_bytes(placement.device),
        weights_bytes=weights_bytes,
        kv_bytes=limits.kv_blocks * block,
        activations_bytes=activations_bytes(step),
        swap_bytes=limits.swap_blocks * block,
        kv_blocks=limits.kv_blocks,
        block_tokens=limits.block_size,
        max_num_seqs=limits.max_num_seqs,
        max_model_len=limits.max_model_len,
    )


def _device_of(place: RankPlace, chosen: torch.device) -> torch.device:
    """Return the device of a rank: the CPU for all, or a CUDA device for each."""
    if place.alone or chosen.type == "cpu":
        return chosen
    devices_here, needed = torch.cuda.device_count(), place.layout.world
    if devices_here < needed:
        raise UsageError(
            f"{place.layout} needs {needed} CUDA devices, but there are {devices_here}",
            fix="--device cpu, or fewer ranks",
        )
    device = torch.device("cuda", place.rank)
    torch.cuda.set_device(device)
    return device


def _model_len(options: RuntimeOptions, checkpoint_limit: int) -> int:
    if not 0 <= options.max_model_len <= checkpoint_limit:
        raise UsageError(
            f"max_model_len is {options.max_model_len}, but the checkpoint takes"
            f" {checkpoint_limit} tokens"
        )
    return options.max_model_len or checkpoint_limit
