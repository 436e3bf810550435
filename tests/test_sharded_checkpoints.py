"""Sharded checkpoints: what was saved comes back, and what is damaged is refused by its name."""

import json
import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from small_disks import disk_in_memory

from perfledger.instrumented_runtime.checkpoints.sharded import (
    MANIFEST,
    CheckpointError,
    Identity,
    commit,
    load_shard,
    newest_good,
    read_manifest,
    save_shard,
    steps,
    verify,
)
from perfledger.schema.errors import NoDataError

OURS = Identity("model-hash", "0.1.0", "fsdp=2", 2)


def tensors(rank: int, step: int = 1) -> dict[str, torch.Tensor]:
    torch.manual_seed(100 * step + rank)
    return {"layer.weight": torch.randn(7, 5), "layer.bias": torch.randn(7).bfloat16()}


def save(folder: Path, step: int = 1, identity: Identity = OURS) -> None:
    for rank in range(identity.ranks):
        save_shard(folder, step, rank, identity.ranks, tensors(rank, step))
    commit(folder, step, identity)


def shard_file(folder: Path, rank: int, step: int = 1) -> Path:
    return folder / f"step-{step:08d}" / read_manifest(folder, step).shards[rank].name


def test_every_rank_gets_its_own_tensors_back(tmp_path: Path) -> None:
    save(tmp_path)
    for rank in range(2):
        found, read = load_shard(tmp_path, 1, rank, OURS)
        assert found.keys() == tensors(rank).keys()
        assert all(torch.equal(found[name], value) for name, value in tensors(rank).items())
        assert read.shard.bytes == shard_file(tmp_path, rank).stat().st_size
        assert read.end_ns > read.start_ns
    assert verify(tmp_path, 1).bytes == sum(
        shard_file(tmp_path, rank).stat().st_size for rank in range(2)
    )


@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(place=st.floats(0, 1, exclude_max=True), bit=st.integers(0, 7), rank=st.integers(0, 1))
def test_a_shard_with_any_bit_changed_is_refused_by_name(
    tmp_path: Path, place: float, bit: int, rank: int
) -> None:
    save(tmp_path)
    path = shard_file(tmp_path, rank)
    whole = path.read_bytes()
    damaged = bytearray(whole)
    damaged[int(place * len(damaged))] ^= 1 << bit
    path.write_bytes(damaged)
    with pytest.raises(CheckpointError, match=rf"{path.name} \(rank {rank}\) is damaged"):
        load_shard(tmp_path, 1, rank, OURS)
    with pytest.raises(CheckpointError, match=path.name):
        verify(tmp_path, 1)
    path.write_bytes(whole)
    verify(tmp_path, 1)


def test_a_missing_or_short_shard_is_refused_by_name(tmp_path: Path) -> None:
    save(tmp_path)
    path = shard_file(tmp_path, 1)
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(CheckpointError, match=rf"{path.name} \(rank 1\) has \d+ bytes instead"):
        load_shard(tmp_path, 1, 1, OURS)
    path.unlink()
    with pytest.raises(CheckpointError, match=rf"{path.name} \(rank 1\) is missing"):
        load_shard(tmp_path, 1, 1, OURS)
    load_shard(tmp_path, 1, 0, OURS)


@pytest.mark.parametrize(
    ("other", "said"),
    [
        (
            replace(OURS, model_hash="b"),
            "the checkpoint's model is model-hash, but this job's is b",
        ),
        (replace(OURS, layout="tp=2"), "the checkpoint's layout is fsdp=2, but this job's is tp=2"),
        (replace(OURS, ranks=4), "the checkpoint's ranks is 2, but this job's is 4"),
        (replace(OURS, runtime_version="0.2.0"), "runtime 0.1.0 wrote the checkpoint, and 0.2.0"),
    ],
)
def test_what_does_not_belong_here_is_refused(tmp_path: Path, other: Identity, said: str) -> None:
    save(tmp_path)
    with pytest.raises(CheckpointError, match=said):
        load_shard(tmp_path, 1, 0, other)
    load_shard(tmp_path, 1, 0, replace(OURS, runtime_version="0.1.7"))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "manifest.json cannot be read"),
        ("[]", "is not a JSON object"),
        ('{"format": 2}', "has format 2, this runtime reads 1"),
        ('{"format": 1}', "the manifest is damaged"),
        ('{"format": 1, "shards": [{"name": "../x"}]}', "a shard is described wrongly"),
    ],
)
def test_a_manifest_that_is_none_is_refused(tmp_path: Path, text: str, said: str) -> None:
    save(tmp_path)
    (tmp_path / "step-00000001" / MANIFEST).write_text(text)
    with pytest.raises(CheckpointError, match=said):
        load_shard(tmp_path, 1, 0, OURS)


def test_a_shard_never_leads_out_of_its_folder(tmp_path: Path) -> None:
    save(tmp_path)
    path = tmp_path / "step-00000001" / MANIFEST
    fields = json.loads(path.read_text())
    fields["shards"][0]["name"] = "../../secret"
    path.write_text(json.dumps(fields))
    with pytest.raises(CheckpointError, match="a shard is described wrongly"):
        load_shard(tmp_path, 1, 0, OURS)


def test_a_rank_that_saved_nothing_is_named_and_nothing_counts(tmp_path: Path) -> None:
    save_shard(tmp_path, 1, 0, 2, tensors(0))
    with pytest.raises(CheckpointError, match="rank 1 did not save its shard"):
        commit(tmp_path, 1, OURS)
    assert steps(tmp_path) == []
    with pytest.raises(NoDataError):
        newest_good(tmp_path)


def test_two_checkpoints_stay_and_a_damaged_one_is_passed_over_aloud(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        save(tmp_path, step)
    assert steps(tmp_path) == [2, 3]
    assert newest_good(tmp_path) == (read_manifest(tmp_path, 3), [])
    shard_file(tmp_path, 0, 3).write_bytes(b"")
    manifest, passed_over = newest_good(tmp_path)
    assert manifest == read_manifest(tmp_path, 2)
    assert ["has 0 bytes instead of" in str(error) for error in passed_over] == [True]
    shard_file(tmp_path, 1, 2).unlink()
    with pytest.raises(CheckpointError, match="has 0 bytes instead of"):
        newest_good(tmp_path)


def test_a_job_that_went_back_sets_later_checkpoints_aside(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        save(tmp_path, step)
    save(tmp_path, 2)
    assert steps(tmp_path) == [2]
    aside = tmp_path / "aside-step-00000003"
    assert (aside / MANIFEST).is_file()
    save(tmp_path, 3)
    save(tmp_path, 2)
    assert sorted(place.name for place in tmp_path.iterdir()) == [aside.name, "step-00000002"]


def test_what_was_never_committed_goes_with_the_next_commit_and_nothing_else(
    tmp_path: Path,
) -> None:
    save(tmp_path, 1)
    save_shard(tmp_path, 2, 0, 2, tensors(0))
    (tmp_path / "step-by-step").mkdir()
    save(tmp_path, 3)
    assert sorted(place.name for place in tmp_path.iterdir()) == [
        "step-00000001",
        "step-00000003",
        "step-by-step",
    ]


def test_a_full_disk_is_said_with_the_path_and_leaves_nothing_that_fills_it(
    tmp_path: Path,
) -> None:
    with disk_in_memory(tmp_path / "disk", 200_000) as disk:
        save(disk)
        large = {"w": torch.zeros(100_000)}
        with pytest.raises(CheckpointError, match="No space left on device") as caught:
            save_shard(disk, 2, 1, 2, large)
        assert caught.value.where == str(disk / "step-00000002/shard-00001-of-00002.safetensors")
        assert list((disk / "step-00000002").iterdir()) == []
        assert newest_good(disk) == (read_manifest(disk, 1), [])


SAVER = """
import sys
from pathlib import Path
import torch
from perfledger.instrumented_runtime.checkpoints.sharded import Identity, commit, save_shard
folder, step = Path(sys.argv[1]), 0
while True:
    step += 1
    for rank in range(2):
        save_shard(folder, step, rank, 2, {"w": torch.full((1000,), float(step))})
    commit(folder, step, Identity("model-hash", "0.1.0", "fsdp=2", 2))
    print(step, flush=True)
"""


@pytest.mark.parametrize("after", [1, 2, 5])
def test_killed_at_any_time_the_newest_committed_checkpoint_is_whole(
    tmp_path: Path, after: int
) -> None:
    command = [sys.executable, "-P", "-c", SAVER, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as saver:
        assert saver.stdout is not None
        while int(saver.stdout.readline()) < after:
            pass
        os.kill(saver.pid, signal.SIGKILL)
    manifest, passed_over = newest_good(tmp_path)
    assert passed_over == [] and manifest.step >= after
    for rank in range(2):
        found, _ = load_shard(tmp_path, manifest.step, rank, OURS)
        assert torch.equal(found["w"], torch.full((1000,), float(manifest.step)))
