"""What a rank does in the tests of ring attention."""

from typing import Any

import torch

from perfledger.instrumented_runtime.parallel.groups import Group, join
from perfledger.instrumented_runtime.parallel.layout import RankPlace
from perfledger.instrumented_runtime.parallel.ring_attention import (
    ring_attention,
    zigzag_positions,
)


def attend_and_go_back(
    place: RankPlace, cases: list[dict[str, Any]]
) -> list[tuple[Any, dict[str, Any]]]:
    """Return of each case the positions held, and the rank's part of output and gradients."""
    peers = join(place, torch.device("cpu"))
    results = [_attend(peers.groups["cp"], tensors) for tensors in cases]
    peers.leave()
    return results


def _attend(group: Group, tensors: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    whole = {name: torch.from_numpy(array) for name, array in tensors.items()}
    tokens = whole["query"].shape[2]
    held = zigzag_positions(tokens, group.size, group.position)
    query, key, value = (
        whole[name][:, :, held].clone().requires_grad_() for name in ("query", "key", "value")
    )
    output = ring_attention(query, key, value, group)
    (output * whole["upstream"][:, :, held]).sum().backward()
    results = {"output": output.detach(), "query": query.grad, "key": key.grad}
    results["value"] = value.grad
    return held.numpy(), {name: one.numpy() for name, one in results.items() if one is not None}
