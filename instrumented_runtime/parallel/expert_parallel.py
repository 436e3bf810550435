"""Expert parallelism: the experts of each layer are dealt out, and rows travel to them and back.

Rank r of a group of n holds experts [r * E/n, (r + 1) * E/n). Each rank routes its own rows, tells
the others how many go where, sends every row to the ranks of its experts (all-to-all, as many as
there are: none is dropped or padded), and gets the answers back the same way. That is the scheme
of "GShard" (Lepikhin et al. 2020), without its capacity limit.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear

from perfledger.instrumented_runtime.checkpoints.config import ExpertsConfig
from perfledger.instrumented_runtime.collectives import calls
from perfledger.instrumented_runtime.moe import (
    Mlp,
    Routing,
    RoutingCounts,
    combine,
    compute_experts,
    route,
)
from perfledger.instrumented_runtime.parallel.groups import Group


class ExpertParallelMlp:
    """The MLP of one layer with a part of its experts here; every rank calls it with equal rows.

    Attention is computed by every rank for all rows. So each rank takes its share of the rows
    through routing and dispatch, and an all-gather makes the rows whole again.
    """

    def __init__(
        self,
        router: Tensor,
        experts: Sequence[Mlp],
        shape: ExpertsConfig,
        group: Group,
        counts: RoutingCounts | None = None,
    ) -> None:
        self._router, self._experts = router, experts
        self._shape, self._group, self._counts = shape, group, counts

    def __call__(self, hidden: Tensor) -> Tensor:
        """Return the weighted answers of each row's experts, [rows, hidden_size]."""
        share = -(-len(hidden) // self._group.size)
        start = self._group.position * share
        mine = hidden[start : start + share]
        routing = route(linear(mine, self._router), self._shape)
        answers = dispatch(
            mine, routing, self._experts, self._shape.count, self._group, self._counts
        )
        padded = hidden.new_zeros(share, hidden.shape[1])
        padded[: len(answers)] = answers
        whole = hidden.new_empty(self._group.size * share, hidden.shape[1])
        calls.all_gather(whole, padded, self._group)
        return whole[: len(hidden)]


def dispatch(
    rows: Tensor,
    routing: Routing,
    experts: Sequence[Mlp],
    count: int,
    group: Group,
    counts: RoutingCounts | None = None,
) -> Tensor:
    """Return the weighted answers to this rank's own rows, [rows, hidden_size].

    `experts` are those held here, of `count` in all; `counts` gets the rows of the whole group by
    expert. Can be differentiated: gradients travel the same ways back.
    """
    order = routing.order()
    table = _exchange_counts(routing.counts(count), group)
    if counts is not None:
        counts.add([sum(column) for column in zip(*table, strict=True)])
    local = len(experts)
    first = group.position * local
    sent = [sum(table[group.position][start : start + local]) for start in range(0, count, local)]
    arriving = [row[first : first + local] for row in table]  # by rank, then by expert
    received = [sum(row) for row in arriving]
    per_token = routing.experts.shape[1]
    inbox = _send(rows.index_select(0, order // per_token), group, received, sent)
    by_expert, by_rank = _regroup(arriving, rows.device)
    per_expert = [sum(column) for column in zip(*arriving, strict=True)]
    answers = compute_experts(inbox.index_select(0, by_expert), per_expert, experts)
    returned = _send(answers.index_select(0, by_rank), group, sent, received)
    return combine(returned, order, routing)


def _exchange_counts(mine: Tensor, group: Group) -> list[list[int]]:
    """Return how many rows each rank sends to each expert, as [rank][expert]."""
    everyone = mine.new_empty(group.size * len(mine))
    calls.all_gather(everyone, mine, group)
    table: list[list[int]] = everyone.view(group.size, -1).tolist()
    return table


def _regroup(arriving: Sequence[Sequence[int]], device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the permutation of arrived rows from by-rank to by-expert order, and its inverse."""
    experts = torch.arange(len(arriving[0]), device=device).repeat(len(arriving))
    sizes = torch.tensor(arriving, device=device).flatten()
    by_expert = experts.repeat_interleave(sizes).argsort(stable=True)
    by_rank = torch.empty_like(by_expert)
    by_rank[by_expert] = torch.arange(len(by_expert), device=device)
    return by_expert, by_rank


def _send(rows: Tensor, group: Group, received: list[int], sent: list[int]) -> Tensor:
    out: Tensor = _AllToAll.apply(rows, group, received, sent)  # type: ignore[no-untyped-call]
    return out


class _AllToAll(torch.autograd.Function):
    """Send split r of the rows to rank r of the group; the gradient goes back split by split."""

    @staticmethod
    def forward(
        context: Any, rows: Tensor, group: Group, received: list[int], sent: list[int]
    ) -> Tensor:
        context.group, context.received, context.sent = group, received, sent
        out = rows.new_empty(sum(received), rows.shape[1])
        calls.all_to_all(out, rows.contiguous(), group, received, sent)
        return out

    @staticmethod
    def backward(context: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        (gradient,) = gradients
        out = gradient.new_empty(sum(context.sent), gradient.shape[1])
        calls.all_to_all(out, gradient.contiguous(), context.group, context.sent, context.received)
        return out, None, None, None
