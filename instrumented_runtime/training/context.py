"""Context parallelism: which tokens of a sequence a rank holds, and how it attends to the rest."""

import torch
from torch import Tensor

from perfledger.instrumented_runtime.parallel.groups import Group
from perfledger.instrumented_runtime.parallel.ring_attention import (
    ring_attention,
    zigzag_positions,
)
from perfledger.instrumented_runtime.training.model import Attend


def positions_of(sequence: int, ranks: int, rank: int) -> Tensor:
    """Return the positions of the tokens that a rank holds, in its order.

    Raises UsageError if a sequence does not divide into two pieces a rank.
    """
    return zigzag_positions(sequence, ranks, rank) if ranks > 1 else torch.arange(sequence)


def ring_attend(group: Group) -> Attend:
    """Return causal attention over the tokens of all ranks of a group."""

    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        query, key, value = (rows.transpose(1, 2).contiguous() for rows in (query, key, value))
        return ring_attention(query, key, value, group).transpose(1, 2)

    return attend
