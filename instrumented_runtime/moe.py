"""Mixture of experts: a router sends each token to a few of many MLPs and weighs their answers.

Tokens are grouped by expert, each expert computes its group at once, and every token's answers
are put together again. Nothing is dropped, whatever the router does. All functions can be
differentiated.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import linear

from perfledger.instrumented_runtime.checkpoints.config import ExpertsConfig

Mlp = Callable[[Tensor], Tensor]  # [rows, hidden_size] to the same


@dataclass(frozen=True, slots=True)
class Routing:
    """Which experts compute each row, and what their answers weigh."""

    experts: Tensor  # [rows, per_token] expert numbers
    weights: Tensor  # [rows, per_token] float32

    def order(self) -> Tensor:
        """Return the (row, choice) pairs, numbered row * per_token + choice, by expert."""
        return self.experts.flatten().argsort(stable=True)

    def counts(self, experts: int) -> Tensor:
        """Return how many rows go to each expert, [experts]."""
        return torch.bincount(self.experts.flatten(), minlength=experts)


class MoeMlp:
    """The MLP of one layer, with all of its experts on this rank."""

    def __init__(
        self,
        router: Tensor,
        experts: Sequence[Mlp],
        shape: ExpertsConfig,
        counts: "RoutingCounts | None" = None,
    ) -> None:
        self._router, self._experts = router, experts
        self._shape, self._counts = shape, counts

    def __call__(self, hidden: Tensor) -> Tensor:
        """Return the weighted answers of each row's experts, [rows, hidden_size]."""
        routing = route(linear(hidden, self._router), self._shape)
        order = routing.order()
        counts = routing.counts(self._shape.count).tolist()
        if self._counts is not None:
            self._counts.add(counts)
        grouped = hidden.index_select(0, order // self._shape.per_token)
        return combine(compute_experts(grouped, counts, self._experts), order, routing)


def route(logits: Tensor, shape: ExpertsConfig) -> Routing:
    """Choose experts by the router's logits [rows, experts]: softmax in float32, then the top k.

    As in Mixtral (Jiang et al. 2024) and Qwen3-MoE; with `normalized` the k weights sum to one.
    """
    weights, experts = logits.float().softmax(-1).topk(shape.per_token, dim=-1)
    if shape.normalized:
        weights = weights / weights.sum(-1, keepdim=True)
    return Routing(experts, weights)


def compute_experts(rows: Tensor, counts: Sequence[int], experts: Sequence[Mlp]) -> Tensor:
    """Let each expert compute its group; `rows` [sum of counts, hidden_size] stand by expert."""
    outputs = [
        expert(group)
        for expert, group in zip(experts, torch.split(rows, list(counts)), strict=True)
        if len(group)
    ]
    return torch.cat(outputs) if outputs else rows


def combine(outputs: Tensor, order: Tensor, routing: Routing) -> Tensor:
    """Return each row's weighted sum; `outputs` stand by expert, as `order` says."""
    back = torch.empty_like(order)
    back[order] = torch.arange(len(order), device=order.device)
    by_row = outputs.index_select(0, back).view(*routing.experts.shape, outputs.shape[1])
    return (by_row * routing.weights.unsqueeze(-1)).sum(1).to(outputs.dtype)


@dataclass(frozen=True, slots=True)
class StepRouting:
    """Where a step's rows went: an assignment is one row computed by one expert of one layer."""

    layers: int
    assignments: int
    busiest_assignments: int  # of each layer's busiest expert, summed over layers
    touched_experts: int  # with at least one row, summed over layers
    by_expert: tuple[int, ...]  # assignments of expert number 0, 1, … over all layers

    @property
    def busiest_share(self) -> float:
        """Part of the assignments that a layer's busiest expert has, on the average.

        1 / experts when the router is even, 1 / per_token when all rows go to the same experts.
        """
        return self.busiest_assignments / self.assignments


class RoutingCounts:
    """Gathers what the layers of one step routed; `take` hands it over and starts anew."""

    def __init__(self, experts: int) -> None:
        self._layers = self._busiest = self._touched = 0
        self._by_expert = [0] * experts

    def add(self, counts: Sequence[int]) -> None:
        """One layer sent counts[e] rows to its expert e."""
        self._layers += 1
        self._busiest += max(counts)
        self._touched += sum(1 for count in counts if count)
        self._by_expert = [a + b for a, b in zip(self._by_expert, counts, strict=True)]

    def take(self) -> StepRouting | None:
        """Return the counts since the last call, None if nothing was routed."""
        layers, by_expert = self._layers, tuple(self._by_expert)
        busiest, touched = self._busiest, self._touched
        self._layers = self._busiest = self._touched = 0
        self._by_expert = [0] * len(by_expert)
        if not sum(by_expert):
            return None
        return StepRouting(layers, sum(by_expert), busiest, touched, by_expert)
