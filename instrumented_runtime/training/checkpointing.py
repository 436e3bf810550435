"""A rank's shard of a checkpoint: its parts of the parameters and of the optimizer's state."""

from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from perfledger.instrumented_runtime.checkpoints.sharded import (
    CheckpointError,
    ShardIo,
    commit,
    load_shard,
    save_shard,
    shard_name,
)
from perfledger.instrumented_runtime.collectives import calls
from perfledger.instrumented_runtime.parallel.groups import WORLD, Peers
from perfledger.instrumented_runtime.parallel.layout import RankPlace
from perfledger.instrumented_runtime.records import ShardMoved
from perfledger.instrumented_runtime.training.memory import local_part
from perfledger.instrumented_runtime.training.messages import PeerDidNotSaveError
from perfledger.instrumented_runtime.training.options import TrainOptions
from perfledger.instrumented_runtime.training.resuming import identity_of
from perfledger.instrumented_runtime.training.steps import Trainer
from perfledger.schema.errors import PerfledgerError

ADAMW_STATE = ("step", "exp_avg", "exp_avg_sq")


class RankCheckpoints:
    """Saves and loads the shard of one rank, and tells of each that moved."""

    def __init__(
        self,
        options: TrainOptions,
        place: RankPlace,
        peers: Peers | None,
        trainer: Trainer,
        tell: Callable[[ShardMoved], None],
    ) -> None:
        self._options, self._place, self._peers = options, place, peers
        self._trainer, self._tell = trainer, tell
        self._folder, self._identity = Path(options.checkpoint), identity_of(options)

    def load(self) -> None:
        """Go on where the run left off, if it does. Raises CheckpointError with the shard's name
        unless every tensor is that of this rank."""
        step, rank = self._options.first_step, self._place.rank
        if not step:
            return
        tensors, moved = load_shard(self._folder, step, rank, self._identity)
        name = shard_name(rank, self._identity.ranks)
        try:
            restore(self._trainer, tensors)
        except ValueError as error:
            raise CheckpointError(f"{name} {error}", where=str(self._folder)) from None
        self._moved(moved, step, loaded=True)

    def save_if_due(self, step: int) -> None:
        """Save after `step` steps where the options say so; it counts once all ranks have.

        Raises CheckpointError with the path that could not be written.
        """
        if not self._is_due(step):
            return
        failed: PerfledgerError | None = None
        try:
            tensors, ranks = state_of(self._trainer), self._identity.ranks
            moved = save_shard(self._folder, step, self._place.rank, ranks, tensors)
        except CheckpointError as error:
            failed = error
        if not self._all(failed is None):
            raise failed or PeerDidNotSaveError("another rank did not save its shard")
        self._moved(moved, step, loaded=False)
        if self._place.rank == 0:
            commit(self._folder, step, self._identity)

    def _is_due(self, step: int) -> bool:
        every = self._options.checkpoint_every
        last = step == self._options.steps
        return bool(self._options.checkpoint) and (last or (every > 0 and step % every == 0))

    def _all(self, good: bool) -> bool:
        """Wait for all ranks; return whether it is good on all."""
        if self._peers is None:
            return good
        flag = torch.tensor([int(good)])
        calls.all_reduce(flag, self._peers.groups[WORLD], op="min")
        return bool(flag.item())

    def _moved(self, moved: ShardIo, step: int, *, loaded: bool) -> None:
        shard, ranks = moved.shard, self._identity.ranks
        times = (moved.start_ns, moved.end_ns)
        self._tell(ShardMoved(step, int(loaded), shard.rank, ranks, shard.bytes, *times))


def state_of(trainer: Trainer) -> dict[str, Tensor]:
    """Return this rank's parts of the parameters and of AdamW's state, by name; not copied."""
    tensors = {}
    for name, parameter in trainer.model.decoder.named_parameters():
        tensors[_parameter_key(name)] = local_part(parameter.detach())
        state = trainer.optimizer.state.get(parameter)
        if state:  # none before its first gradient
            tensors |= {_state_key(name, key): local_part(state[key]) for key in ADAMW_STATE}
    return tensors


@torch.no_grad()
def restore(trainer: Trainer, tensors: dict[str, Tensor]) -> None:
    """Make the rank's parameters and AdamW's state those of `state_of`, which is used up.

    Raises ValueError for a tensor that is missing, of another shape, or of nothing here.
    """
    for name, parameter in trainer.model.decoder.named_parameters():
        _copy(_parameter_key(name), parameter, tensors)
        if _state_key(name, "step") not in tensors:
            continue
        state = trainer.optimizer.state[parameter]
        state["step"] = tensors.pop(_state_key(name, "step"))
        for key in ADAMW_STATE[1:]:
            state[key] = torch.zeros_like(parameter)
            _copy(_state_key(name, key), state[key], tensors)
    if tensors:
        raise ValueError(f"has {min(tensors)}, which this model has not")


def _copy(key: str, target: Tensor, tensors: dict[str, Tensor]) -> None:
    value, part = tensors.pop(key, None), local_part(target.detach())
    if value is None:
        raise ValueError(f"has no {key}")
    if (value.shape, value.dtype) != (part.shape, part.dtype):
        raise ValueError(f"has {key} of the shape {tuple(value.shape)}, not {tuple(part.shape)}")
    part.copy_(value)


def _parameter_key(name: str) -> str:
    return f"model.{name}"


def _state_key(name: str, key: str) -> str:
    return f"optimizer.{name}.{key}"
