"""A feed-forward half made of experts, as in the serving model, with weights that train.

With expert parallelism each rank holds some of the experts, and rows travel to the rank of their
expert and back: two all-to-alls in the forward pass, two in the backward pass. No row is dropped
and there is no balancing loss, so the result does not depend on the layout.
"""

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, silu

from perfledger.instrumented_runtime.checkpoints.config import ExpertsConfig
from perfledger.instrumented_runtime.moe import Mlp, combine, compute_experts, route
from perfledger.instrumented_runtime.parallel.expert_parallel import dispatch
from perfledger.instrumented_runtime.parallel.groups import Group
from perfledger.instrumented_runtime.training.shapes import ModelShape


class Experts(nn.Module):
    """SwiGLU experts behind a softmax router; the weights of a token's experts add up to one.

    `gate_up` is [experts, 2 * intermediate, hidden], `down` [experts, hidden, intermediate].
    """

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        inner, hidden = shape.intermediate_size, shape.hidden_size
        self._shape = ExpertsConfig(shape.experts, shape.experts_per_token, inner, normalized=True)
        self.router = nn.Linear(hidden, shape.experts, bias=False)
        self.gate_up = nn.Parameter(torch.empty(shape.experts, 2 * inner, hidden))
        self.down = nn.Parameter(torch.empty(shape.experts, hidden, inner))
        self.group: Group | None = None  # of the ranks that share the experts

    def keep_share(self, group: Group) -> None:
        """Keep this rank's share of the experts only; the others are its peers'."""
        each = self._shape.count // group.size
        mine = slice(group.position * each, (group.position + 1) * each)
        self.gate_up = nn.Parameter(self.gate_up.detach()[mine].clone())
        self.down = nn.Parameter(self.down.detach()[mine].clone())
        self.group = group

    def forward(self, hidden: Tensor) -> Tensor:
        """Return the output [batch, tokens, hidden]."""
        rows = hidden.flatten(0, 1)
        routing = route(self.router(rows), self._shape)
        experts = [self._expert(number) for number in range(len(self.gate_up))]
        if self.group is not None:
            answers = dispatch(rows, routing, experts, self._shape.count, self.group)
        else:
            order = routing.order()
            grouped = rows.index_select(0, order // self._shape.per_token)
            counts = routing.counts(self._shape.count).tolist()
            answers = combine(compute_experts(grouped, counts, experts), order, routing)
        return answers.view(hidden.shape)

    def _expert(self, number: int) -> Mlp:
        def compute(rows: Tensor) -> Tensor:
            gate, up = linear(rows, self.gate_up[number]).chunk(2, dim=-1)
            return linear(silu(gate) * up, self.down[number])

        return compute
