"""Copies over a boundary are told with bytes and time; what crosses none is not."""

from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest
import torch

from perfledger.instrumented_runtime.attention import BlockMoves, PagedKvCache
from perfledger.instrumented_runtime.checkpoints.config import read_config
from perfledger.instrumented_runtime.checkpoints.reference import make_reference
from perfledger.instrumented_runtime.collectives.copies import Crossing, recorded_copy
from perfledger.instrumented_runtime.collectives.listening import observe
from perfledger.instrumented_runtime.collectives.observed import CollectiveCall, CopyCall
from perfledger.schema.clocks import monotonic_ns

CPU = torch.device("cpu")


@dataclass
class Listener:
    """A sink that keeps copies."""

    step_seq: int = 4
    copies: list[CopyCall] = field(default_factory=list)

    def collective(self, call: CollectiveCall) -> None:
        raise AssertionError(call)

    def copy(self, call: CopyCall) -> None:
        self.copies.append(call)


@pytest.fixture
def listener() -> Iterator[Listener]:
    sink = Listener()
    observe(sink)
    yield sink
    observe(None)


def test_another_dtype_is_a_copy(listener: Listener) -> None:
    before_ns = monotonic_ns()
    rows = torch.arange(6.0).reshape(2, 3)
    half = recorded_copy(rows, dtype=torch.bfloat16)
    assert (half.dtype, half.tolist()) == (torch.bfloat16, rows.tolist())
    (copy,) = listener.copies
    assert copy[:6] == ("dtype", "cpu", "cpu", "bfloat16", 12, 4)
    assert before_ns <= copy.start_ns <= copy.end_ns <= monotonic_ns()


def test_what_is_where_and_what_it_should_be_is_itself(listener: Listener) -> None:
    rows = torch.zeros(3)
    assert recorded_copy(rows, device=CPU, dtype=torch.float32) is rows
    assert listener.copies == []


def test_nobody_listens_and_it_is_copied_all_the_same() -> None:
    assert recorded_copy(torch.ones(2), dtype=torch.float64).dtype == torch.float64


def test_a_copy_that_fails_is_not_told(listener: Listener) -> None:
    with pytest.raises(ZeroDivisionError), Crossing("stage", "pp=0", "pp=1", torch.float32, 8):
        raise ZeroDivisionError
    assert listener.copies == []


def test_a_host_that_meets_a_device(listener: Listener) -> None:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    from perfledger.instrumented_runtime.collectives import calls

    rows = torch.ones(1024)
    back = recorded_copy(recorded_copy(rows, device=torch.device("cuda:0")), device=CPU)
    calls.flush(wait=True)
    assert torch.equal(back, rows)
    there, here = listener.copies
    assert there[:6] == ("host_to_device", "cpu", "cuda:0", "float32", 4096, 4)
    assert here[:6] == ("device_to_host", "cuda:0", "cpu", "float32", 4096, 4)
    assert there.start_ns <= there.end_ns <= here.end_ns


def test_swapped_blocks_are_told_in_both_ways(listener: Listener) -> None:
    config = read_config(make_reference("reference-small"))
    cache = PagedKvCache(config, 4, 16, torch.float32, CPU, swap_blocks=4)
    pairs = torch.tensor([[0, 1], [2, 3]])
    cache.apply(BlockMoves(swap_out=pairs))
    cache.apply(BlockMoves(swap_in=pairs[:1]))
    cache.apply(BlockMoves(copies=pairs))  # within the device: no boundary
    block_bytes = 2 * 16 * config.kv_heads * config.head_dim * 4 * config.layers
    assert [copy[:5] for copy in listener.copies] == [
        ("offload_out", "cpu", "cpu", "float32", 2 * block_bytes),
        ("offload_in", "cpu", "cpu", "float32", block_bytes),
    ]
    assert all(copy.start_ns < copy.end_ns for copy in listener.copies)
