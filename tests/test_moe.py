"""Experts: what the grouped computation gives is what each token alone would get."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.functional import linear, silu
from transformers import MixtralConfig, Qwen3MoeConfig
from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock

from perfledger.instrumented_runtime.checkpoints.config import ExpertsConfig
from perfledger.instrumented_runtime.moe import (
    Mlp,
    MoeMlp,
    RoutingCounts,
    StepRouting,
    combine,
    compute_experts,
    route,
)

HIDDEN, FFN = 32, 24


def swiglu(gate_up: Tensor, down: Tensor) -> Mlp:
    def mlp(rows: Tensor) -> Tensor:
        gate, up = linear(rows, gate_up).chunk(2, dim=-1)
        return linear(silu(gate) * up, down)

    return mlp


@pytest.mark.parametrize("name", ["mixtral", "qwen3", "qwen3 normalized"])
def test_equals_transformers(name: str) -> None:
    torch.manual_seed(3)
    sizes = {"hidden_size": HIDDEN, "num_experts_per_tok": 3}
    block: MixtralSparseMoeBlock | Qwen3MoeSparseMoeBlock
    if name == "mixtral":
        block = MixtralSparseMoeBlock(
            MixtralConfig(**sizes, intermediate_size=FFN, num_local_experts=8)
        )
    else:
        normalized = {"norm_topk_prob": "normalized" in name}
        block = Qwen3MoeSparseMoeBlock(
            Qwen3MoeConfig(**sizes, moe_intermediate_size=FFN, num_experts=8, **normalized)
        )
    for parameter in block.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    experts = [
        swiglu(gate_up, down)
        for gate_up, down in zip(block.experts.gate_up_proj, block.experts.down_proj, strict=True)
    ]
    shape = ExpertsConfig(8, 3, FFN, normalized=name != "qwen3")
    ours = MoeMlp(block.gate.weight, experts, shape)
    for rows in (1, 2, 37):
        hidden = torch.randn(rows, HIDDEN)
        expected = block(hidden[None])[0]
        torch.testing.assert_close(ours(hidden), expected, rtol=1e-5, atol=1e-5)


@settings(deadline=None, max_examples=60)
@given(data=st.data(), count=st.integers(1, 9), rows=st.integers(0, 12), normalized=st.booleans())
def test_every_row_gets_its_experts(
    data: st.DataObject, count: int, rows: int, normalized: bool
) -> None:
    shape = ExpertsConfig(count, data.draw(st.integers(1, count)), 1, normalized)
    # Few values, so that ties and experts without a row are common.
    logits = torch.tensor(
        [[data.draw(st.integers(-2, 2)) for _ in range(count)] for _ in range(rows)]
    ).view(rows, count)
    routing = route(logits, shape)
    hidden = torch.arange(1.0, rows + 1)[:, None]
    order, counts = routing.order(), routing.counts(count).tolist()
    assert sum(counts) == rows * shape.per_token
    # Expert e multiplies by 10 ** -e.
    experts = [(lambda group, e=e: group * 10.0**-e) for e in range(count)]
    grouped = compute_experts(hidden[order // shape.per_token], counts, experts)
    got = combine(grouped, order, routing)
    assert got.shape == (rows, 1)
    for row in range(rows):
        chosen = routing.experts[row].tolist()
        assert len(set(chosen)) == shape.per_token
        weights = logits[row].float().softmax(0)[chosen]
        weights = weights / weights.sum() if normalized else weights
        factor = sum(w * 10.0**-e for w, e in zip(weights.tolist(), chosen, strict=True))
        assert got[row].item() == pytest.approx((row + 1) * factor, rel=1e-5)


def test_routing_counts_show_a_skewed_router() -> None:
    counts = RoutingCounts(4)
    assert counts.take() is None
    counts.add([2, 2, 2, 2])
    counts.add([1, 1, 2, 4])
    even = counts.take()
    assert even == StepRouting(2, 16, 6, 8, (3, 3, 4, 6))
    assert even is not None and even.busiest_share == 6 / 16
    counts.add([4, 4, 0, 0])
    skewed = counts.take()
    assert skewed == StepRouting(1, 8, 4, 2, (4, 4, 0, 0))
    assert skewed is not None and skewed.busiest_share == 0.5
    assert counts.take() is None


def test_a_layer_tells_what_it_routed() -> None:
    shape, counts = ExpertsConfig(3, 1, FFN, normalized=True), RoutingCounts(3)
    router = torch.zeros(3, HIDDEN)
    router[1] = 1.0
    layer = MoeMlp(router, [lambda rows: rows] * 3, shape, counts)
    hidden = torch.ones(5, HIDDEN)
    assert torch.equal(layer(hidden), hidden)
    assert counts.take() == StepRouting(1, 5, 5, 1, (0, 5, 0))
