"""The capacity ledger: what the memory of one rank is for, and how many requests fit in it. Pure.

Weights and KV cache are what they are; activations are a bound computed from the shape of the
largest step. `unclaimed` is what is left, for the process itself and for whoever else is there.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass

from perfledger.instrumented_runtime.kv.blocks import blocks_for

MIB = 1024 * 1024


@dataclass(frozen=True, slots=True)
class StepShape:
    """The largest step of a rank. Widths are elements; a row is one token."""

    rows: int  # max_num_batched_tokens
    sampled_rows: int  # max_num_seqs
    hidden_size: int
    qkv_size: int  # (heads + 2 kv_heads) * head_dim, of this rank
    intermediate_size: int  # of this rank
    vocab_size: int
    element_bytes: int


def activations_bytes(shape: StepShape) -> int:
    """Return the most that the tensors of one step hold at a time, without gathered KV (bytes).

    The residual, its norm and the result of the half-layer; q, k and v before and after rotation;
    gate, up and their product: of a layer, the wider half. Then the logits, and their float32 copy
    for sampling.
    """
    attention = 3 * shape.hidden_size + 3 * shape.qkv_size
    feed_forward = 3 * shape.hidden_size + 4 * shape.intermediate_size
    layer = shape.rows * max(attention, feed_forward) * shape.element_bytes
    logits = shape.sampled_rows * shape.vocab_size * (shape.element_bytes + 4)
    return layer + logits


@dataclass(frozen=True, slots=True)
class Capacity:
    """The ledger of one rank. `memory_bytes` is the device's, of which swapping uses none."""

    memory_bytes: int
    weights_bytes: int
    kv_bytes: int
    activations_bytes: int
    swap_bytes: int  # host memory
    kv_blocks: int
    block_tokens: int
    max_num_seqs: int
    max_model_len: int

    @property
    def unclaimed_bytes(self) -> int:
        """What nothing here is for; negative where more is promised than there is."""
        claimed = self.weights_bytes + self.kv_bytes + self.activations_bytes
        return self.memory_bytes - claimed

    def concurrency(self, context_tokens: int) -> int:
        """Return how many requests of so many tokens can decode at a time, sharing no prefix."""
        # The token sampled last has no place in the cache.
        each = max(1, blocks_for(context_tokens - 1, self.block_tokens))
        return min(self.max_num_seqs, self.kv_blocks // each)

    def facts(self) -> dict[str, int]:
        """Return the ledger for the Ready message: integers by name, units in the names."""
        facts = {**asdict(self), "unclaimed_bytes": self.unclaimed_bytes}
        for tokens in contexts(self.max_model_len):
            facts[f"concurrency_at_{tokens}_tokens"] = self.concurrency(tokens)
        return facts


def contexts(max_model_len: int) -> list[int]:
    """Return the context lengths that the ledger is told for: powers of 4, and the longest."""
    powers = [tokens for tokens in (256, 1024, 4096, 16384, 65536) if tokens < max_model_len]
    return [*powers, max_model_len]


def capacity_lines(facts: Mapping[str, int]) -> list[str]:
    """Return the ledger of `Capacity.facts` as two lines for the start; none without facts."""
    if not facts:
        return []
    names = ("weights", "kv", "activations", "unclaimed")
    shares = [f"{name} {_mib(facts[f'{name}_bytes'])}" for name in names]
    swap = f"; swap {_mib(facts['swap_bytes'])} on the host" if facts["swap_bytes"] else ""
    fits = [
        f"{facts[f'concurrency_at_{tokens}_tokens']} of {tokens:,}"
        for tokens in contexts(facts["max_model_len"])
    ]
    return [
        f"memory     {_mib(facts['memory_bytes'])}: {', '.join(shares)}{swap}",
        f"capacity   requests at a time, by tokens each: {', '.join(fits)}",
    ]


def _mib(size_bytes: int) -> str:
    return f"{size_bytes / MIB:,.0f} MiB"
