"""Our collectives compute what torch's do, and tell op, bytes, numbers and times to a sink."""

from pathlib import Path
from typing import Any

import pytest
import torch
from collective_programs import ROWS, every_call, quiet_then_loud, sent_and_told
from spawned_ranks import run_ranks

from perfledger.instrumented_runtime.collectives.observed import NOT_OBSERVED, CollectiveCall
from perfledger.instrumented_runtime.parallel.layout import Layout

RANKS_S = 200.0  # on a busy machine
pytestmark = pytest.mark.timeout(400)


def expected_results(rank: int, ranks: int) -> dict[str, Any]:
    inputs = [[float(at) + 100 * other for at in range(ROWS)] for other in range(ranks)]
    total = [sum(values) for values in zip(*inputs, strict=True)]
    size = ROWS // ranks
    part = slice(rank * size, (rank + 1) * size)
    return {
        "reduced": total,
        "highest": torch.tensor(inputs[-1]).bfloat16().tolist(),
        "gathered": [value for one in inputs for value in one],
        "share": total[part],
        "swapped": [value for one in inputs for value in one[part]],
        "uneven": [
            [float(other)] * 2
            for other in range(ranks)
            for _ in range(3 if other == rank else other + 1)
        ],
        "told": inputs[0] if rank == 1 else inputs[-1],
        "passed": inputs[(rank - 1) % ranks],
    }


@pytest.mark.parametrize("ranks", [2, 4])
def test_every_call_computes_and_tells(tmp_path: Path, ranks: int) -> None:
    answers = run_ranks(every_call, Layout(tp=ranks), tmp_path / "meet", timeout_s=RANKS_S)
    size = ROWS * 4
    for rank, answer in enumerate(answers):
        assert answer["results"] == expected_results(rank, ranks)
        heard = [CollectiveCall(*call) for call in answer["calls"]]
        uneven_rows = 3 + (ranks - 1) * (rank + 1)
        following, before = (rank + 1) % ranks, (rank - 1) % ranks
        tree = {2: {0: 0, 1: 1}, 4: {3: 2, 0: 1, 1: 0, 2: 0}}[ranks][rank]
        # op, peer, dtype, bytes, bytes sent, number
        ring = 2 * (ranks - 1) * size // ranks
        most = (ranks - 1) * size // ranks
        expected = [
            ("all_reduce", -1, "float32", size, ring, 0),
            ("all_reduce", -1, "bfloat16", size // 2, ring // 2, 1),
            ("all_gather", -1, "float32", size * ranks, size * (ranks - 1), 2),
            ("reduce_scatter", -1, "float32", size, ring, 3),  # an all-reduce inside
            ("all_to_all", -1, "float32", size, most, 4),
            ("all_to_all", -1, "float32", uneven_rows * 8, (uneven_rows - 3) * 8, 5),
            ("broadcast", ranks - 1, "float32", size, tree * size, 6),
            ("send", following, "float32", size, size, 0),
            ("recv", before, "float32", size, 0, 0),
        ]
        if rank == 0:
            expected.append(("send", 1, "float32", size, size, 1))
        if rank == 1:
            expected.append(("recv", 0, "float32", size, 0, 1))
        expected.append(("barrier", -1, "", 0, 0, 7))
        told = [(c.op, c.peer, c.dtype, c.bytes, c.wire_bytes, c.sequence) for c in heard]
        assert told == expected
        for call in heard:
            assert (call.group, call.dimension, call.step_seq) == ("tp", "tp", 7)
            assert call.ranks == tuple(range(ranks))
            assert call.start_ns == NOT_OBSERVED
            assert 0 < call.enqueue_ns <= call.end_ns


def test_numbers_count_while_nobody_listens(tmp_path: Path) -> None:
    def numbers(answer: dict[str, Any]) -> list[int]:
        return [CollectiveCall(*call).sequence for call in answer["calls"]]

    answers = run_ranks(quiet_then_loud, Layout(tp=2), tmp_path / "meet", timeout_s=RANKS_S)
    assert answers[0]["first"] == []
    assert numbers(answers[0]) == [8, 9, 10, 11, 12, 13, 14, 2, 1, 3, 15]


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_bytes_on_the_wire_are_those_that_the_kernel_counts(tmp_path: Path, ranks: int) -> None:
    answers = run_ranks(sent_and_told, Layout(tp=ranks), tmp_path / "meet", timeout_s=RANKS_S)
    if not any(sent for found in answers for _, _, sent in found):
        pytest.skip("this kernel does not count what a socket sends")
    for found in answers:
        assert len(found) >= 5
        for op, told, sent in found:
            assert 0 <= sent - told < 2000, (op, told, sent)  # headers, acknowledgements of gloo
