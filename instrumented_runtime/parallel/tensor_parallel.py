"""Tensor parallelism: each rank computes some heads and some MLP columns of every layer.

Queries, keys, values, gate and up are split by output, the matrices behind them by input: what
comes out of those is a part of a sum, and one all_reduce makes it whole. That is two a layer
("Megatron-LM", Shoeybi et al. 2019). The embedding is on every rank, for a step reads few of its
rows; the head, which a step reads whole, is split by the vocabulary, and its logits are gathered.
"""

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from perfledger.instrumented_runtime.collectives import calls
from perfledger.instrumented_runtime.parallel.groups import Group


@dataclass(frozen=True, slots=True)
class Reduced:
    """Rows to the sum, over the ranks of a group, of what `part` makes of them on each."""

    part: Callable[[Tensor], Tensor]
    group: Group

    def __call__(self, rows: Tensor) -> Tensor:
        """Return the sum; every rank must call with the same rows."""
        out = self.part(rows)
        calls.all_reduce(out, self.group)
        return out


@dataclass(frozen=True, slots=True)
class Gathered:
    """Rows to the outputs of all ranks' matrices, side by side."""

    part: Callable[[Tensor], Tensor]
    group: Group

    def __call__(self, rows: Tensor) -> Tensor:
        """Return [rows, outputs of all]; every rank must call with the same rows."""
        mine = self.part(rows)
        everyone = mine.new_empty(self.group.size * len(mine), mine.shape[1])
        calls.all_gather(everyone, mine, self.group)
        by_rank = everyone.view(self.group.size, *mine.shape)
        return by_rank.transpose(0, 1).reshape(len(mine), self.group.size * mine.shape[1])
