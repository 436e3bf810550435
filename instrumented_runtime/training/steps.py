"""One training step of one rank: forward, backward, optimizer, with a pipeline or without."""

from typing import Protocol

import torch
from torch import Tensor

from perfledger.instrumented_runtime.collectives import calls
from perfledger.instrumented_runtime.parallel.groups import Peers
from perfledger.instrumented_runtime.parallel.layout import RankPlace
from perfledger.instrumented_runtime.training.context import positions_of
from perfledger.instrumented_runtime.training.memory import FullCopies, held_by
from perfledger.instrumented_runtime.training.messages import HeldBytes
from perfledger.instrumented_runtime.training.options import DATA_DIMENSIONS, TrainOptions
from perfledger.instrumented_runtime.training.parts import StepParts
from perfledger.instrumented_runtime.training.pipeline import PipelinePass
from perfledger.instrumented_runtime.training.sharding import RankModel, shard
from perfledger.instrumented_runtime.training.text import batch_of, next_token_loss


class Pass(Protocol):
    """Computes loss and gradients."""

    def run(self, tokens: Tensor, targets: Tensor) -> float | None:
        """Return the mean loss of this rank's tokens; None where another stage has it."""


class WholePass:
    """Without a pipeline: the rank's whole share at once."""

    def __init__(self, model: RankModel, parts: StepParts) -> None:
        self._model, self._parts = model, parts

    def run(self, tokens: Tensor, targets: Tensor) -> float | None:
        """See Pass."""
        with self._parts.part("forward"):
            loss = next_token_loss(self._model.module(tokens), targets)
        with self._parts.part("backward"):
            loss.backward()  # type: ignore[no-untyped-call]
            average_expert_gradients(self._model)
        return float(loss.detach())


class Trainer:
    """A rank's model, optimizer and data."""

    def __init__(
        self, options: TrainOptions, place: RankPlace, peers: Peers | None, device: torch.device
    ) -> None:
        self.parts = StepParts(device)
        shares = options.data_parallel * options.layout.cp
        self.tokens = options.batch * options.sequence // shares  # of this rank in a step
        self._options, self._place, self._device = options, place, device
        self.model = shard(options, place, peers, device)
        self._copies = FullCopies(self.model.decoder)
        self._pass: Pass
        if place.layout.pp > 1 and peers is not None:
            group = peers.groups["pp"]
            self._pass = PipelinePass(options, self.model.decoder, group, self.parts, device)
        else:
            self._pass = WholePass(self.model, self.parts)
        # One tensor at a time: the parameters may lie on different meshes.
        self.optimizer = torch.optim.AdamW(
            self.model.decoder.parameters(), lr=options.learning_rate, foreach=False
        )

    def step(self, number: int) -> tuple[float | None, HeldBytes]:
        """Train on the tokens of one step; return this rank's loss and what it holds then."""
        tokens, targets = share_of(number, self._options, self._place)
        loss = self._pass.run(tokens.to(self._device), targets.to(self._device))
        with self.parts.part("optimizer"):
            self.optimizer.step()
        held = held_by(self.model.decoder, self.optimizer, self._copies, self._device)
        self.optimizer.zero_grad()
        return loss, held


def share_of(number: int, options: TrainOptions, place: RankPlace) -> tuple[Tensor, Tensor]:
    """Return (tokens, targets) that a rank sees in a step: its sequences, its positions."""
    whole = batch_of(
        number,
        batch=options.batch,
        sequence=options.sequence,
        vocab_size=options.shape.vocab_size,
        seed=options.seed,
    )
    at, share = place.layout.coordinates(place.rank), 0
    for name in DATA_DIMENSIONS:
        share = share * getattr(options.layout, name) + at[name]
    each = options.batch // options.data_parallel
    positions = positions_of(options.sequence, options.layout.cp, at["cp"])
    tokens, targets = (
        rows[share * each : (share + 1) * each].index_select(1, positions) for rows in whole
    )
    return tokens, targets


def average_expert_gradients(model: RankModel) -> None:
    """Make the gradients of experts that are dealt out those of the mean loss over all ranks.

    The rows of all ranks of `ep` came here, so their gradients are summed already; DDP leaves
    these parameters alone. Ranks of `dp` with the same experts add theirs: one all-reduce.
    """
    if not model.experts:
        return
    parameters = [p for one in model.experts for p in (one.gate_up, one.down)]
    # No row may have come: the mean's gradient is zero then, not missing.
    gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]
    flat = torch.cat([gradient.flatten() for gradient in gradients])
    if model.expert_peers is not None:
        calls.all_reduce(flat, model.expert_peers)
    flat /= model.data_ranks
    pieces = torch.split(flat, [p.numel() for p in parameters])
    for parameter, piece in zip(parameters, pieces, strict=True):
        parameter.grad = piece.view_as(parameter)
