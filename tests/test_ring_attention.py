"""Ring attention gives what attention over the whole sequence gives, forward and backward."""

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from ring_ranks import attend_and_go_back
from spawned_ranks import run_ranks
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from perfledger.instrumented_runtime.parallel.layout import Layout
from perfledger.instrumented_runtime.parallel.partial_attention import (
    add_part,
    attend_part,
    merge_parts,
)
from perfledger.instrumented_runtime.parallel.ring_attention import zigzag_positions
from perfledger.schema.errors import UsageError


@pytest.mark.parametrize("ranks", [2, 4])
def test_equals_attention_over_the_whole_sequence(ranks: int, tmp_path: Path) -> None:
    torch.manual_seed(5)
    cases = [_case(4, 4), _case(6, 2)]  # with a KV head for each query head, and for each three
    answers = [_expected(case) for case in cases]
    arrays = [{name: tensor.numpy() for name, tensor in case.items()} for case in cases]
    results = run_ranks(
        attend_and_go_back, Layout(cp=ranks), tmp_path / "ranks", arrays, timeout_s=120
    )
    for number, expected in enumerate(answers):
        parts = [result[number] for result in results]
        assert sorted(np.concatenate([held for held, _ in parts])) == list(range(48))
        for held, tensors in parts:
            assert tensors.keys() == expected.keys()
            for name, part in tensors.items():
                wanted = expected[name][:, :, torch.from_numpy(held)].detach().numpy()
                np.testing.assert_allclose(part, wanted, rtol=1e-5, atol=1e-5, err_msg=name)


def _case(heads: int, kv_heads: int) -> dict[str, Tensor]:
    shapes = {"query": heads, "key": kv_heads, "value": kv_heads, "upstream": heads}
    return {name: torch.randn(2, count, 48, 16) for name, count in shapes.items()}


def _expected(case: dict[str, Tensor]) -> dict[str, Tensor]:
    inputs = {name: case[name].clone().requires_grad_() for name in ("query", "key", "value")}
    output = scaled_dot_product_attention(*inputs.values(), is_causal=True, enable_gqa=True)
    (output * case["upstream"]).sum().backward()
    gradients = {name: tensor.grad for name, tensor in inputs.items() if tensor.grad is not None}
    return {"output": output, **gradients}


@given(ranks=st.integers(1, 8), piece=st.integers(1, 5))
def test_zigzag_deals_every_token_once_and_evenly(ranks: int, piece: int) -> None:
    tokens = 2 * ranks * piece
    held = [zigzag_positions(tokens, ranks, rank) for rank in range(ranks)]
    assert torch.cat(held).sort().values.tolist() == list(range(tokens))
    # Keys that a rank's rows see, in all: the same for every rank, up to the diagonal pieces.
    work = [int((positions + 1).sum()) for positions in held]
    assert len(set(work)) == 1


def test_a_sequence_that_does_not_divide_is_refused() -> None:
    with pytest.raises(UsageError, match=r"30 tokens do not divide into 8 pieces for 4 ranks"):
        zigzag_positions(30, 4, 0)


@settings(deadline=None)
@given(data=st.data(), keys=st.integers(1, 12), seed=st.integers(0, 1000))
def test_parts_merge_to_the_whole(data: st.DataObject, keys: int, seed: int) -> None:
    """However the keys are cut, with parts of which a row sees nothing, in any order."""
    torch.manual_seed(seed)
    query, key, value = torch.randn(3, 5, 8), torch.randn(3, keys, 8), torch.randn(3, keys, 8)
    mask = torch.tensor([[data.draw(st.booleans()) for _ in range(keys)] for _ in range(5)])
    mask[:, 0] = True  # every row sees something in all
    query *= data.draw(st.sampled_from([1.0, 100.0]))  # very unlike weights too
    expected = scaled_dot_product_attention(query, key, value, attn_mask=mask)
    cuts = sorted(data.draw(st.lists(st.integers(1, keys), max_size=3, unique=True)) + [0, keys])
    parts = [
        attend_part(query, key[:, a:b], value[:, a:b], mask[:, a:b])
        for a, b in zip(cuts, cuts[1:], strict=False)
        if b > a
    ]
    outputs = torch.stack([output for output, _ in parts])
    log_sums = torch.stack([log_sum for _, log_sum in parts])
    torch.testing.assert_close(merge_parts(outputs, log_sums), expected, rtol=1e-4, atol=1e-5)
    output, log_sum = torch.zeros_like(query), torch.full((3, 5, 1), -torch.inf)
    for part in parts:
        add_part(output, log_sum, *part)
    torch.testing.assert_close(output, expected, rtol=1e-4, atol=1e-5)
