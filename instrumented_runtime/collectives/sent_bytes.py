"""What one call's message is and how much of it this rank sends: from tensors to two numbers."""

from collections.abc import Sequence

from torch import Tensor

from perfledger.instrumented_runtime.collectives.group_facts import GroupFacts
from perfledger.instrumented_runtime.collectives.observed import NOT_OBSERVED
from perfledger.schema.communication import wire_bytes


def bytes_of(tensor: Tensor | None) -> int:
    """Return the bytes of a tensor's elements; a barrier has none."""
    return 0 if tensor is None else tensor.numel() * tensor.element_size()


def dtype_name(tensor: Tensor | None) -> str:
    """Return the name of a tensor's dtype, like float32; a barrier has none."""
    return "" if tensor is None else str(tensor.dtype).removeprefix("torch.")


def sent_bytes(op: str, size: int, facts: GroupFacts, device: str, root: int) -> int:
    """Return what this rank sends for a call over equal shares; `root` is a global rank if any."""
    hops = 0
    if root in facts.ranks:
        hops = (facts.position - facts.ranks.index(root)) % len(facts.ranks)
    sent = wire_bytes(op, size, len(facts.ranks), facts.backend(device), hops)
    return NOT_OBSERVED if sent is None else sent


def sent_of_splits(tensor: Tensor, splits: Sequence[int], position: int) -> int:
    """Return what an all-to-all of uneven pieces sends: all rows but those that stay here."""
    rows = tensor.shape[0]
    return (rows - splits[position]) * (bytes_of(tensor) // rows) if rows else 0
