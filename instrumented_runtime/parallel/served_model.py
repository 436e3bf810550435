"""The model as one rank of a replica serves it: which part it holds, and a step with its peers."""

from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from perfledger.instrumented_runtime.attention import PagedKvCache, StepRows, block_bytes
from perfledger.instrumented_runtime.checkpoints.config import ModelConfig
from perfledger.instrumented_runtime.checkpoints.model_part import ModelPart
from perfledger.instrumented_runtime.model import load_decoder
from perfledger.instrumented_runtime.moe import RoutingCounts
from perfledger.instrumented_runtime.options import RuntimeOptions
from perfledger.instrumented_runtime.parallel.context_parallel import (
    ContextParallelDecoder,
    ShardedKvCache,
)
from perfledger.instrumented_runtime.parallel.groups import Peers
from perfledger.instrumented_runtime.parallel.layout import RankPlace
from perfledger.instrumented_runtime.parallel.pipeline_parallel import PipelineStage
from perfledger.instrumented_runtime.parallel.splits import held_experts


class StepModel(Protocol):
    """What computes steps: a decoder, or a rank's part of one together with its peers."""

    @property
    def config(self) -> ModelConfig:
        """Shape of what is held here; the vocabulary is whole."""

    @property
    def dtype(self) -> torch.dtype:
        """Of rows and logits."""

    @property
    def device(self) -> torch.device:
        """Of weights, rows and logits."""

    @property
    def parameters(self) -> int:
        """Numbers in the whole model."""

    @property
    def weights_bytes(self) -> int:
        """Bytes of the weights held here."""

    @property
    def routing(self) -> RoutingCounts | None:
        """Where rows went among experts since it was asked last; None of a model without."""

    def forward(self, rows: StepRows, cache: PagedKvCache) -> Tensor:
        """Compute one step; return the logits [sampled rows, vocab_size]: rank 0's are wanted."""


@dataclass(frozen=True, slots=True)
class Placement:
    """Where a model runs on this rank, and with whom; no peers for one process."""

    config: ModelConfig  # of the whole model
    place: RankPlace
    dtype: torch.dtype
    device: torch.device
    peers: Peers | None = None

    @property
    def part(self) -> ModelPart:
        """What of the model this rank holds."""
        layout, at = self.place.layout, self.place.layout.coordinates(self.place.rank)
        experts = held_experts(self.config, layout.ep, at["ep"]) if layout.ep > 1 else None
        return ModelPart(at["pp"], layout.pp, at["tp"], layout.tp, experts)

    def block_bytes(self, block_size: int) -> int:
        """Return the bytes of one KV block on the rank where they are most."""
        largest = self.part.largest(self.config)
        return block_bytes(largest, block_size, self.dtype) // self.place.layout.cp


def load_model(checkpoint: Path, options: RuntimeOptions, placement: Placement) -> StepModel:
    """Load this rank's part. Raises UsageError as `load_decoder` does."""
    layout, peers = placement.place.layout, placement.peers
    groups = peers.groups if peers is not None else {}
    part = placement.part
    decoder = load_decoder(
        checkpoint,
        placement.config,
        placement.dtype,
        placement.device,
        quantization=options.quantization,
        part=part,
        groups=groups,
    )
    if layout.pp > 1:
        answers = not any(
            group.position for name, group in groups.items() if name not in ("pp", "world")
        )
        return PipelineStage(decoder, groups["pp"], options.microbatches, answers=answers)
    if layout.cp > 1:
        return ContextParallelDecoder(decoder, groups["cp"])
    return decoder


def make_cache(
    placement: Placement, blocks: int, block_size: int, swap_blocks: int
) -> PagedKvCache:
    """Make this rank's part of a KV cache of that many blocks."""
    held, dtype, device = placement.part.held(placement.config), placement.dtype, placement.device
    if placement.place.layout.cp > 1:
        assert placement.peers is not None
        return ShardedKvCache(
            held, blocks, block_size, dtype, device, swap_blocks, group=placement.peers.groups["cp"]
        )
    return PagedKvCache(held, blocks, block_size, dtype, device, swap_blocks)
