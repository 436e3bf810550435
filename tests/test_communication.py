"""Formulas of bytes: each against a count made another way, and against published values."""

import pytest
from hypothesis import given
from hypothesis import strategies as some

from perfledger.schema.communication import (
    bus_factor,
    data_parallel_bytes,
    even_remote_assignments,
    expert_parallel_bytes,
    fsdp_bytes,
    pipeline_bytes,
    ring_attention_bytes,
    tensor_parallel_bytes,
    tree_children,
    wire_bytes,
)

RANKS = some.integers(2, 64)
ROOTED = ("broadcast", "reduce", "gather", "scatter")


def test_bus_factors_are_those_of_nccl_tests() -> None:
    assert bus_factor("all_reduce", 8) == 1.75
    assert bus_factor("all_gather", 8) == bus_factor("reduce_scatter", 8) == 0.875
    assert bus_factor("all_to_all", 8) == 0.875
    assert bus_factor("broadcast", 8) == bus_factor("send", 8) == 1
    with pytest.raises(KeyError):
        bus_factor("barrier", 8)


def test_bus_bandwidth_of_a_public_trace() -> None:
    # Llama 70B on 8 GPUs, as TraceLens reports it: an all-gather of 106,956,800 bfloat16 a rank
    # took 6041.88 us on the fastest rank: 264.01 GiB/s, or 231.01 GiB/s of bus bandwidth.
    algorithm = 106_956_800 * 2 * 8 / 6041.88e-6 / 2**30
    assert algorithm == pytest.approx(264.01, abs=0.3)
    assert algorithm * bus_factor("all_gather", 8) == pytest.approx(231.01, abs=0.3)


@given(RANKS, some.integers(0, 10**6))
def test_all_ranks_together_send_what_must_reach_the_others(ranks: int, share: int) -> None:
    size = share * ranks

    def total(op: str, backend: str = "gloo") -> int:
        hops = range(ranks) if op in ROOTED else [0] * ranks
        sent = [wire_bytes(op, size, ranks, backend, one) for one in hops]
        return sum(one for one in sent if one is not None)

    assert total("broadcast") == (ranks - 1) * size  # each of the others gets it once
    assert total("gather") == total("scatter") == (ranks - 1) * share
    assert total("all_gather") == ranks * (ranks - 1) * share
    assert total("all_to_all") == ranks * (ranks - 1) * share
    assert total("all_reduce") == 2 * ranks * (ranks - 1) * share
    assert total("reduce_scatter") == total("all_reduce")
    assert total("reduce_scatter", "nccl") == total("all_reduce") / 2
    assert total("reduce") == total("all_reduce") / 2 + (ranks - 1) * share
    assert total("broadcast", "nccl") == total("reduce", "nccl") == (ranks - 1) * size


@given(RANKS)
def test_a_tree_reaches_every_rank_once(ranks: int) -> None:
    children = [tree_children(hops, ranks) for hops in range(ranks)]
    assert sum(children) == ranks - 1
    assert children[0] == (ranks - 1).bit_length()


def test_what_is_not_known_is_said() -> None:
    assert wire_bytes("gather", 1024, 4, "nccl", 0) == 0
    assert wire_bytes("reduce", 1024, 4, "mpi", 1) is None
    assert wire_bytes("all_reduce", 1024, 1, "gloo") == 0
    assert (wire_bytes("send", 9, 2, "gloo"), wire_bytes("recv", 9, 2, "gloo")) == (9, 0)


@given(some.integers(1, 10**9), RANKS)
def test_fsdp_moves_half_as_much_again_as_data_parallel(parameters: int, ranks: int) -> None:
    one, other = data_parallel_bytes(4 * parameters, ranks), fsdp_bytes(4 * parameters, ranks)
    assert other == pytest.approx(1.5 * one)
    kept = fsdp_bytes(4 * parameters, ranks, reshard_after_forward=False)
    assert kept == pytest.approx(one)


def test_formulas_of_the_other_dimensions_count_tensors() -> None:
    # 2 all-reduces in each of 3 layers, forward; of [16, 256] in float32; 2 ranks.
    reduced = 16 * 256 * 4
    assert tensor_parallel_bytes(16, 256, 4, 3, 2) == 6 * reduced
    assert tensor_parallel_bytes(16, 256, 4, 3, 4, training=True) == 12 * 1.5 * reduced
    assert pipeline_bytes(16, 256, 4) == reduced
    assert pipeline_bytes(16, 256, 4, training=True) == 2 * reduced
    # K and V of 8 tokens, 2 heads of 64, to 3 other ranks, in 3 layers.
    assert ring_attention_bytes(8, 2, 64, 4, 3, 4) == 3 * 3 * (2 * 8 * 2 * 64 * 4)
    assert even_remote_assignments(16, 2, 8, 4) == 16 * 2 * 8 * 3 / 4
    assert expert_parallel_bytes(192, 256, 2) == 2 * 192 * 256 * 2
    assert expert_parallel_bytes(192, 256, 2, training=True) == 4 * 192 * 256 * 2


@given(some.integers(1, 10**4), some.integers(1, 16), RANKS)
def test_a_ring_of_shards_moves_the_share_of_the_sequence(
    rank_tokens: int, heads: int, ranks: int
) -> None:
    sequence = rank_tokens * ranks
    whole = 2 * sequence * heads * 64 * 2
    passed = ring_attention_bytes(rank_tokens, heads, 64, 2, 1, ranks)
    assert passed == pytest.approx((ranks - 1) / ranks * whole)
