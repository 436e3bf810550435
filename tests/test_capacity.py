"""The capacity ledger: sums that add up, and the edge of how many requests fit."""

from hypothesis import given
from hypothesis import strategies as st

from perfledger.instrumented_runtime.kv.blocks import blocks_for
from perfledger.instrumented_runtime.kv.capacity import (
    MIB,
    Capacity,
    StepShape,
    activations_bytes,
    capacity_lines,
    contexts,
)

LEDGER = Capacity(
    memory_bytes=1000 * MIB,
    weights_bytes=100 * MIB,
    kv_bytes=512 * MIB,
    activations_bytes=20 * MIB,
    swap_bytes=0,
    kv_blocks=400,
    block_tokens=16,
    max_num_seqs=16,
    max_model_len=2048,
)


def test_the_ledger_as_it_is_told() -> None:
    assert LEDGER.facts() == {
        "memory_bytes": 1000 * MIB,
        "weights_bytes": 100 * MIB,
        "kv_bytes": 512 * MIB,
        "activations_bytes": 20 * MIB,
        "unclaimed_bytes": 368 * MIB,
        "swap_bytes": 0,
        "kv_blocks": 400,
        "block_tokens": 16,
        "max_num_seqs": 16,
        "max_model_len": 2048,
        "concurrency_at_256_tokens": 16,
        "concurrency_at_1024_tokens": 6,
        "concurrency_at_2048_tokens": 3,
    }
    assert capacity_lines(LEDGER.facts()) == [
        "memory     1,000 MiB: weights 100 MiB, kv 512 MiB, activations 20 MiB, unclaimed 368 MiB",
        "capacity   requests at a time, by tokens each: 16 of 256, 6 of 1,024, 3 of 2,048",
    ]
    assert capacity_lines({}) == []


def test_activations_of_a_known_shape() -> None:
    shape = StepShape(
        rows=256,
        sampled_rows=16,
        hidden_size=448,
        qkv_size=9 * 64,
        intermediate_size=1216,
        vocab_size=8192,
        element_bytes=4,
    )
    layer = 256 * (3 * 448 + 4 * 1216) * 4
    assert activations_bytes(shape) == layer + 16 * 8192 * 8


@given(st.integers(1, 5000), st.integers(1, 64), st.integers(1, 40), st.integers(1, 600))
def test_so_many_fit_and_not_one_more(tokens: int, size: int, seqs: int, blocks: int) -> None:
    ledger = Capacity(0, 0, 0, 0, 0, blocks, size, seqs, 5000)
    fit, each = ledger.concurrency(tokens), max(1, blocks_for(tokens - 1, size))
    assert fit * each <= blocks and fit <= seqs
    assert (fit + 1) * each > blocks or fit == seqs


def test_contexts_end_with_the_longest() -> None:
    assert contexts(100) == [100]
    assert contexts(256) == [256]
    assert contexts(8192) == [256, 1024, 4096, 8192]
