"""What a rank does in the tests of expert parallelism."""

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear, silu

from perfledger.instrumented_runtime.checkpoints.config import ExpertsConfig
from perfledger.instrumented_runtime.moe import Mlp, MoeMlp, RoutingCounts, route
from perfledger.instrumented_runtime.parallel.expert_parallel import (
    ExpertParallelMlp,
    dispatch,
)
from perfledger.instrumented_runtime.parallel.groups import Group, join
from perfledger.instrumented_runtime.parallel.layout import RankPlace

SHAPE = ExpertsConfig(count=8, per_token=3, intermediate_size=24, normalized=True)
HIDDEN = 32
ROWS = (1, 2, 3, 29)  # fewer than ranks, and none that divides


def weights(skewed: bool = False) -> dict[str, Tensor]:
    """Return the same layer everywhere; skewed, rows of positive sums go to experts 0 to 2."""
    generator = torch.Generator().manual_seed(3)
    ffn = SHAPE.intermediate_size
    shapes = {
        "router": (SHAPE.count, HIDDEN),
        "gate_up": (SHAPE.count, 2 * ffn, HIDDEN),
        "down": (SHAPE.count, HIDDEN, ffn),
    }
    made = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    if skewed:
        made["router"] = torch.zeros(SHAPE.count, HIDDEN)
        made["router"][:3] = 1.0
    return made


def rows_of(count: int) -> Tensor:
    """Return some rows of positive numbers, the same everywhere."""
    return torch.rand(count, HIDDEN, generator=torch.Generator().manual_seed(count))


def experts_of(made: dict[str, Tensor], numbers: range) -> list[Mlp]:
    """Return experts of these numbers."""

    def expert(number: int) -> Mlp:
        def mlp(rows: Tensor) -> Tensor:
            gate, up = linear(rows, made["gate_up"][number]).chunk(2, dim=-1)
            return linear(silu(gate) * up, made["down"][number])

        return mlp

    return [expert(number) for number in numbers]


def compute_alone(skewed: bool) -> list[tuple[Any, Any]]:
    """Return the answers to rows of each of ROWS and what was routed, in one process."""
    made, counts = weights(skewed), RoutingCounts(SHAPE.count)
    mlp = MoeMlp(made["router"], experts_of(made, range(SHAPE.count)), SHAPE, counts)
    return [(mlp(rows_of(count)).numpy(), counts.take()) for count in ROWS]


def compute(place: RankPlace) -> tuple[list[list[tuple[Any, Any]]], dict[str, Any]]:
    """Return the same as `compute_alone`, without and with skew, and this rank's gradients."""
    peers = join(place, torch.device("cpu"))
    group, results = peers.groups["ep"], []
    for skewed in (False, True):
        made, counts = weights(skewed), RoutingCounts(SHAPE.count)
        held = experts_of(made, numbers_of(group))
        mlp = ExpertParallelMlp(made["router"], held, SHAPE, group, counts)
        results.append([(mlp(rows_of(count)).numpy(), counts.take()) for count in ROWS])
    gradients = _gradients_here(group)
    peers.leave()
    return results, gradients


def numbers_of(group: Group) -> range:
    """Return the experts of this rank."""
    each = SHAPE.count // group.size
    return range(group.position * each, (group.position + 1) * each)


def gradients_alone(ranks: int) -> dict[str, Any]:
    """Return the gradients of one process that has the rows of all ranks."""
    made = {name: tensor.requires_grad_() for name, tensor in weights().items()}
    rows = torch.cat([rows_of(5 + rank) for rank in range(ranks)]).requires_grad_()
    mlp = MoeMlp(made["router"], experts_of(made, range(SHAPE.count)), SHAPE)
    mlp(rows).square().sum().backward()
    return _gradients({**made, "rows": rows})


def _gradients_here(group: Group) -> dict[str, Any]:
    """Return those of the router and of this rank's rows and experts."""
    made = {name: tensor.requires_grad_() for name, tensor in weights().items()}
    rows = rows_of(5 + group.position).requires_grad_()
    routing = route(linear(rows, made["router"]), SHAPE)
    held = experts_of(made, numbers_of(group))
    dispatch(rows, routing, held, SHAPE.count, group).square().sum().backward()
    return _gradients({**made, "rows": rows})


def _gradients(tensors: dict[str, Tensor]) -> dict[str, Any]:
    """An expert that computed nothing has none: zeros stand for it."""
    return {
        name: (torch.zeros_like(one) if one.grad is None else one.grad).detach().numpy()
        for name, one in tensors.items()
    }
