"""Ranks meet, group by dimension and part; who is missing, differs or has died is named."""

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from spawned_ranks import run_ranks

from perfledger.instrumented_runtime.parallel.groups import Peers, join
from perfledger.instrumented_runtime.parallel.layout import Layout, RankPlace
from perfledger.schema.errors import PerfledgerError, UsageError

CPU = torch.device("cpu")


def joined(place: RankPlace) -> Peers:
    return join(place, CPU, timeout_s=30)


def sums_by_group(place: RankPlace) -> dict[str, Any]:
    peers = joined(place)
    sums = {}
    for name, group in peers.groups.items():
        value = torch.tensor([place.rank])
        dist.all_reduce(value, group=group.handle)
        sums[name] = (group.ranks, group.position, int(value))
    peers.leave()
    return sums


def test_every_dimension_has_its_group(tmp_path: Path) -> None:
    results = run_ranks(sums_by_group, Layout(pp=2, tp=2), tmp_path / "ranks")
    world = (0, 1, 2, 3)
    assert results == [
        {"pp": ((0, 2), 0, 2), "tp": ((0, 1), 0, 1), "world": (world, 0, 6)},
        {"pp": ((1, 3), 0, 4), "tp": ((0, 1), 1, 1), "world": (world, 1, 6)},
        {"pp": ((0, 2), 1, 2), "tp": ((2, 3), 0, 5), "world": (world, 2, 6)},
        {"pp": ((1, 3), 1, 4), "tp": ((2, 3), 1, 5), "world": (world, 3, 6)},
    ]


def join_in_two_seconds(place: RankPlace) -> None:
    join(place, CPU, timeout_s=2)


def test_ranks_that_never_join_are_named(tmp_path: Path) -> None:
    results = run_ranks(join_in_two_seconds, Layout(pp=2, tp=2), tmp_path / "ranks", ranks=(0, 2))
    assert [type(one) for one in results] == [PerfledgerError, PerfledgerError]
    missing = "rank 1 (pp=0, tp=1), rank 3 (pp=1, tp=1) have not joined in 2 s"
    assert [one.args[0] for one in results] == [missing, missing]


def agree_on(place: RankPlace, *held: str) -> None:
    peers = joined(place)
    try:
        peers.agree({"runtime version": "1", "checkpoint": held[place.rank]}, timeout_s=10)
    finally:
        peers.leave()


def test_ranks_that_differ_are_named(tmp_path: Path) -> None:
    results = run_ranks(agree_on, Layout(tp=2), tmp_path / "ranks", "abc", "abd")
    assert [type(one) for one in results] == [UsageError, UsageError]
    assert str(results[0]).splitlines()[0] == (
        "the ranks differ in checkpoint: rank 0 (tp=0) abc, rank 1 (tp=1) abd"
    )


def test_ranks_that_agree_go_on(tmp_path: Path) -> None:
    assert run_ranks(agree_on, Layout(tp=2), tmp_path / "ranks", "abc", "abc") == [None, None]


def lose_rank_two(place: RankPlace) -> str:
    peers = joined(place)
    if place.rank == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        with peers.named():
            while True:
                dist.all_reduce(torch.zeros(1), group=peers.groups["world"].handle)
    except PerfledgerError as error:
        return error.what
    finally:
        peers.leave()


def test_a_rank_that_dies_is_named_by_all(tmp_path: Path) -> None:
    results = run_ranks(lose_rank_two, Layout(tp=3), tmp_path / "ranks")
    assert results == ["rank 2 (tp=2) ended", "rank 2 (tp=2) ended", "killed"]


@pytest.mark.parametrize(
    ("rendezvous", "said"),
    [
        ("tcp://somewhere", "the rendezvous 'tcp://somewhere' is none"),
        ("file:///nowhere/at/all", "cannot make the rendezvous file: No such file or directory"),
    ],
)
def test_a_rendezvous_that_cannot_be_made(rendezvous: str, said: str) -> None:
    with pytest.raises(UsageError) as refused:
        join(RankPlace(Layout(tp=2), 0, rendezvous), CPU, timeout_s=1)
    assert refused.value.what == said
