"""Experts on several ranks give what all experts on one give, forward and backward."""

from pathlib import Path
from typing import Any

import expert_ranks
import numpy as np
import pytest
import served_ranks
import torch
from known_steps import STEPS
from spawned_ranks import run_ranks

from perfledger.instrumented_runtime.checkpoints.config import (
    read_config,
)
from perfledger.instrumented_runtime.checkpoints.resolve import resolve
from perfledger.instrumented_runtime.parallel.layout import Layout
from perfledger.instrumented_runtime.parallel.splits import held_experts
from perfledger.schema.errors import UsageError


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.mark.parametrize("ranks", [2, 4])
def test_a_layer_equals_one_ranks(ranks: int, tmp_path: Path) -> None:
    everyone = run_ranks(expert_ranks.compute, Layout(ep=ranks), tmp_path / "ranks", timeout_s=120)
    for skewed in (False, True):
        expected = expert_ranks.compute_alone(skewed)
        for results, _ in everyone:
            for (ours, routed), (theirs, routed_alone) in zip(
                results[skewed], expected, strict=True
            ):
                np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-5)
                assert routed == routed_alone  # of the rows of all ranks
        if skewed:
            shares = [routed.busiest_share for _, routed in expected]
            assert shares == [1 / 3] * len(shares)
            assert {routed.touched_experts for _, routed in expected} == {3}
    _assert_same_gradients([gradients for _, gradients in everyone])


def _assert_same_gradients(parts: list[dict[str, Any]]) -> None:
    expected = expert_ranks.gradients_alone(len(parts))
    rows = np.concatenate([part["rows"] for part in parts])
    np.testing.assert_allclose(rows, expected["rows"], rtol=1e-4, atol=1e-4)
    for name in ("router", "gate_up", "down"):  # each rank has its share of the sum
        total = sum(part[name] for part in parts)
        np.testing.assert_allclose(total, expected[name], rtol=1e-4, atol=1e-3)
    each = expert_ranks.SHAPE.count // len(parts)
    for rank, part in enumerate(parts):
        others = np.delete(part["down"], slice(rank * each, (rank + 1) * each), axis=0)
        assert not others.any()


@pytest.mark.parametrize(
    "layout", [Layout(ep=2, tp=2), Layout(cp=2, ep=2), Layout(pp=2, ep=2)], ids=str
)
def test_logits_equal_one_ranks(layout: Layout, tmp_path: Path) -> None:
    folder = resolve("reference-moe-small")
    expected = served_ranks.compute_alone(folder)
    everyone = run_ranks(served_ranks.compute, layout, tmp_path / "ranks", folder, timeout_s=120)
    first = everyone[0][0]
    assert len(first) == len(STEPS)
    for ours, theirs in zip(first, expected, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-4)
        assert (ours.argmax(-1) == theirs.argmax(-1)).all()


def test_what_cannot_be_dealt_is_refused() -> None:
    config = read_config(resolve("reference-moe-small"))
    assert [held_experts(config, 4, rank) for rank in range(4)] == [
        range(0, 2),
        range(2, 4),
        range(4, 6),
        range(6, 8),
    ]
    with pytest.raises(UsageError, match=r"8 experts do not divide among 3 ranks \(ep\)"):
        held_experts(config, 3, 0)
    dense = read_config(resolve("reference-small"))
    with pytest.raises(UsageError, match=r"2 ranks \(ep\), but LlamaForCausalLM has no experts"):
        held_experts(dense, 2, 0)
