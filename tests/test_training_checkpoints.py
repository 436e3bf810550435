"""Checkpoints of training runs: what is resumed goes on as if nothing had been, or is refused."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import polars as pl
import pytest
import torch
from small_disks import disk_in_memory
from spawned_ranks import run_ranks

from perfledger.instrumented_runtime.checkpoints.sharded import (
    MANIFEST,
    CheckpointError,
    newest_good,
    read_manifest,
    steps,
)
from perfledger.instrumented_runtime.parallel.layout import Layout, RankPlace
from perfledger.instrumented_runtime.training.launcher import TrainRun, launch
from perfledger.instrumented_runtime.training.options import NEWEST, TrainOptions, check
from perfledger.instrumented_runtime.training.resuming import find_start, identity_of
from perfledger.schema.errors import NoDataError, PerfledgerError, UsageError
from perfledger.schema.store import Store

pytestmark = pytest.mark.timeout(300)  # the first test starts all processes

TINY = TrainOptions(
    model_size="tiny",
    steps=4,
    batch=8,
    sequence=16,
    learning_rate=1e-2,
    checkpoint_every=2,
    telemetry=False,
    observe=0,
    threads=1,
)
CASES = {
    "dp": replace(TINY, layout=Layout(dp=2)),
    "fsdp": replace(TINY, layout=Layout(fsdp=2)),
    "tp": replace(TINY, layout=Layout(tp=2)),
    "pp": replace(TINY, layout=Layout(pp=2)),
    "cp": replace(TINY, layout=Layout(cp=2)),
    "ep": replace(TINY, layout=Layout(ep=2), model_size="tiny-moe"),
}
PAIRS = {
    "fsdp-tp": replace(TINY, layout=Layout(fsdp=2, tp=2)),
    "tp-pp": replace(TINY, layout=Layout(tp=2, pp=2)),
}


@pytest.fixture(autouse=True)
def quiet_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("OMP_WAIT_POLICY", "passive"), ("GOMP_SPINCOUNT", "0")):
        monkeypatch.setenv(name, value)


# --- a resumed run and an uninterrupted one ---


def run_all(place: RankPlace, cases: dict[str, TrainOptions]) -> dict[str, Any]:
    """Run each case whole, then again from its checkpoint of step 2; return what both found."""
    found: dict[str, Any] = {}
    for name, options in cases.items():
        try:
            found[name] = [
                train(place, replace(options, first_step=first), f"{name}{first}")
                for first in (0, 2)
            ]
        except Exception as error:
            traceback.print_exc()
            found[name] = error
    return found


def train(place: RankPlace, options: TrainOptions, meet: str) -> Any:
    """Return (loss of each step, this rank's state at the end, shards that moved)."""
    from perfledger.instrumented_runtime.parallel.groups import join
    from perfledger.instrumented_runtime.training.checkpointing import RankCheckpoints, state_of
    from perfledger.instrumented_runtime.training.steps import Trainer

    place = replace(place, layout=options.layout, rendezvous=f"{place.rendezvous}{meet}")
    device = torch.device("cpu")
    peers = None if place.alone else join(place, device, 30)
    # A resumed run has other weights until it has loaded.
    trainer = Trainer(replace(options, seed=options.first_step), place, peers, device)
    trainer._options = options
    moved: list[Any] = []
    checkpoints = RankCheckpoints(options, place, peers, trainer, moved.append)
    checkpoints.load()
    losses = []
    for number in range(options.first_step, options.steps):
        losses.append(trainer.step(number)[0])
        if number < 2:
            checkpoints.save_if_due(number + 1)
    state = {name: value.numpy().copy() for name, value in state_of(trainer).items()}
    if peers is not None:
        peers.leave()
    return losses, state, moved


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Any]]:
    """What each rank found, by case."""
    folder = tmp_path_factory.mktemp("checkpoints")
    result: dict[str, list[Any]] = {}
    for cases, world in ((CASES, Layout(dp=2)), (PAIRS, Layout(dp=4))):
        there = {name: replace(one, checkpoint=str(folder / name)) for name, one in cases.items()}
        ranks = run_ranks(run_all, world, folder / f"meet{world.world}", there, timeout_s=200)
        assert all(isinstance(one, dict) for one in ranks), ranks
        result |= {name: [rank[name] for rank in ranks] for name in cases}
    alone = replace(TINY, checkpoint=str(folder / "single"))
    result["single"] = [run_all(RankPlace(Layout()), {"single": alone})["single"]]
    return result


@pytest.mark.parametrize("name", ["single", *CASES, *PAIRS])
def test_a_resumed_run_goes_on_like_an_uninterrupted_one(
    found: dict[str, list[Any]], name: str
) -> None:
    for rank, runs in enumerate(found[name]):
        assert not isinstance(runs, Exception), runs
        (losses, state, saved), (losses_after, state_after, loaded) = runs
        assert losses_after == pytest.approx(losses[2:], abs=1e-6)
        assert state_after.keys() == state.keys()
        assert any(key.startswith("optimizer.") for key in state)
        for key, value in state.items():
            assert state_after[key] == pytest.approx(value, abs=1e-6), key
        assert [(one.step, one.loaded, one.rank) for one in saved] == [(2, 0, rank)]
        assert [(one.step, one.loaded, one.rank) for one in loaded] == [(2, 1, rank)]
        assert saved[0].bytes == loaded[0].bytes > sum(value.nbytes for value in state.values())
        assert all(one.end_ns > one.start_ns for one in (*saved, *loaded))


# --- the command ---


def perfledger(*arguments: str, **environment: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-P", "-m", "perfledger", "train", "--model-size", "tiny"]
    command += ["--batch", "8", "--sequence", "16", "--steps", "4", *arguments]
    return subprocess.run(
        command, capture_output=True, text=True, env=os.environ | environment, timeout=120
    )


def damage(folder: Path, step: int, rank: int = 1) -> str:
    """Change a bit of a shard; return its name."""
    name = read_manifest(folder, step).shards[rank].name
    path = folder / f"step-{step:08d}" / name
    body = bytearray(path.read_bytes())
    body[-5] ^= 1
    path.write_bytes(body)
    return name


def losses_of(printed: dict[str, Any]) -> dict[int, float]:
    return {row["step"]: row["loss"] for row in printed["steps"]}


def test_a_damaged_newest_is_passed_over_aloud_and_shards_are_in_the_trace(
    tmp_path: Path, start_collector: Any
) -> None:
    folder = tmp_path / "saved"
    flags = ("--dp", "2", "--checkpoint", str(folder), "--checkpoint-every", "2", "--json")
    with start_collector(tmp_path) as collector:
        endpoint = f"http://127.0.0.1:{collector.grpc_port}"
        first = perfledger(*flags, OTEL_EXPORTER_OTLP_ENDPOINT=endpoint)
        assert first.returncode == 0, first.stderr
        assert steps(folder) == [2, 4]
        name = damage(folder, 4)
        second = perfledger(*flags, "--resume", OTEL_EXPORTER_OTLP_ENDPOINT=endpoint)
        assert second.returncode == 0, second.stderr
    whole, resumed = json.loads(first.stdout), json.loads(second.stdout)
    assert f"a newer checkpoint was passed over: {name} (rank 1) is damaged" in second.stderr
    (passed_over,) = resumed["checkpoints"]["passed_over"]
    assert passed_over.startswith(f"{name} (rank 1) is damaged: its checksum is another")
    assert resumed["checkpoints"]["resumed_after"] == 2
    assert list(losses_of(resumed)) == [2, 3]
    assert losses_of(resumed) == pytest.approx(
        {step: loss for step, loss in losses_of(whole).items() if step >= 2}, abs=1e-6
    )
    assert newest_good(folder)[0].step == 4 and newest_good(folder)[1] == []
    moved = [*whole["checkpoints"]["shards"], *resumed["checkpoints"]["shards"]]
    assert Counter((one["op"], one["step"], one["rank"]) for one in moved) == Counter(
        [("save", 2, 0), ("save", 2, 1), ("save", 4, 0), ("save", 4, 1)]
        + [("load", 2, 0), ("load", 2, 1), ("save", 4, 0), ("save", 4, 1)]
    )
    spans = Store.at(str(collector.store)).scan("spans").collect()
    told = spans.filter(pl.col("name").str.starts_with("checkpoint_")).to_dicts()
    assert sorted(spoken(span) for span in told) == sorted(
        (f"checkpoint_{one['op']}", one["rank"], one["step"], one["shard"], one["bytes"], one["ns"])
        for one in moved
    )


def spoken(span: dict[str, Any]) -> tuple[Any, ...]:
    pairs: dict[str, Any] = {}
    for pair in span["attributes"]:
        (pairs[pair["key"]],) = [v for k, v in pair.items() if k != "key" and v is not None]
    told = (pairs[f"perfledger.checkpoint.{name}"] for name in ("step", "shard", "bytes"))
    return span["name"], span["rank"], *told, span["end_ns"] - span["start_ns"]


@pytest.fixture(scope="module")
def one_saved(tmp_path_factory: pytest.TempPathFactory) -> TrainOptions:
    """Options of a run of one process that has left a checkpoint of step 2."""
    folder = tmp_path_factory.mktemp("one") / "saved"
    options = replace(TINY, steps=2, checkpoint=str(folder))
    launch(TrainRun(options), lambda: None, lambda: None)
    return replace(options, steps=4, resume=NEWEST)


def test_what_belongs_to_this_run_is_found(one_saved: TrainOptions) -> None:
    assert find_start(one_saved).step == 2
    other = replace(one_saved, seed=5, batch=4, learning_rate=1e-3, resume=2)
    assert find_start(other).step == 2
    assert read_manifest(Path(one_saved.checkpoint), 2).model_hash.startswith("tiny:")
    assert identity_of(one_saved) == identity_of(other)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"model_size": "tiny-moe"}, "the checkpoint's model is tiny:.*this job's is tiny-moe:"),
        ({"layout": Layout(dp=2)}, "the checkpoint's layout is single, but this job's is dp=2"),
        ({"resume": 3}, "there is no checkpoint of step 3"),
    ],
)
def test_another_runs_checkpoint_is_refused(
    one_saved: TrainOptions, change: dict[str, Any], said: str
) -> None:
    with pytest.raises(CheckpointError, match=said):
        find_start(replace(one_saved, **change))


def test_a_checkpoint_of_another_runtime_version_is_refused(one_saved: TrainOptions) -> None:
    manifest = Path(one_saved.checkpoint) / "step-00000002" / MANIFEST
    text = manifest.read_text()
    fields = json.loads(text) | {"runtime_version": "99.0.0+abc"}
    manifest.write_text(json.dumps(fields))
    try:
        with pytest.raises(CheckpointError, match=r"runtime 99.0.0\+abc wrote the checkpoint"):
            find_start(one_saved)
    finally:
        manifest.write_text(text)


def test_a_folder_of_another_run_nothing_left_to_do_and_nothing_there(
    one_saved: TrainOptions, tmp_path: Path
) -> None:
    with pytest.raises(UsageError, match="a run has left checkpoints there, up to step 2"):
        find_start(replace(one_saved, resume=None))
    with pytest.raises(UsageError, match="2 of 2 steps are done already"):
        find_start(replace(one_saved, steps=2))
    with pytest.raises(NoDataError, match="there is no checkpoint"):
        find_start(replace(one_saved, checkpoint=str(tmp_path)))
    with pytest.raises(UsageError, match="the folder of the checkpoints is missing"):
        check(replace(one_saved, checkpoint=""))
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match="cannot write checkpoints there"):
        check(replace(one_saved, checkpoint=str(tmp_path / "file" / "below")))


@pytest.mark.parametrize("named", [(), ("2",)])
def test_a_damaged_only_or_named_checkpoint_ends_the_command_with_its_name(
    one_saved: TrainOptions, named: tuple[str, ...]
) -> None:
    folder = Path(one_saved.checkpoint)
    name = damage(folder, 2, rank=0)
    try:
        done = perfledger("--no-telemetry", "--checkpoint", str(folder), "--resume", *named)
    finally:
        damage(folder, 2, rank=0)
    assert (done.returncode, done.stdout) == (1, "")
    assert f"{name} (rank 0) is damaged: its checksum is another" in done.stderr


SHARD = "shard-00001-of-00002"


@pytest.mark.parametrize(
    ("rank", "stuck", "before"),
    [(1, f"{SHARD}.json", f"{SHARD}.safetensors"), (0, MANIFEST, f"{SHARD}.json")],
)
def test_a_rank_killed_while_it_saves_leaves_the_checkpoint_before(
    tmp_path: Path, rank: int, stuck: str, before: str
) -> None:
    """It comes to a file that is a named pipe without a reader, and is killed there."""
    options = replace(CASES["dp"], steps=6, checkpoint=str(tmp_path))
    run = TrainRun(options)
    pipe = tmp_path / "step-00000004" / f"{stuck}.part"
    pipe.parent.mkdir()
    os.mkfifo(pipe)

    def kill() -> None:
        while not (pipe.parent / before).exists():
            time.sleep(0.01)
        os.kill(run.joined[rank].process, signal.SIGKILL)

    threading.Thread(target=kill, daemon=True).start()
    with pytest.raises(
        PerfledgerError, match=rf"rank {rank} \(dp={rank}\) ended with exit code -9"
    ):
        launch(run, lambda: None, lambda: None)
    manifest, passed_over = newest_good(tmp_path)
    assert (manifest.step, passed_over) == (2, [])
    pipe.unlink()
    resumed = replace(options, resume=NEWEST)
    start = find_start(resumed)
    again = TrainRun(replace(resumed, first_step=start.step))
    launch(again, lambda: None, lambda: None)
    assert steps(tmp_path) == [4, 6]
    whole, after = (
        {ranks[0].number: ranks[0].loss for ranks in one.complete_steps()} for one in (run, again)
    )
    assert list(whole) == [0, 1, 2, 3] and list(after) == [2, 3, 4, 5]
    assert {step: after[step] for step in (2, 3)} == pytest.approx(
        {step: whole[step] for step in (2, 3)}, abs=1e-6
    )


def test_a_full_disk_is_said_with_the_path(tmp_path: Path) -> None:
    with disk_in_memory(tmp_path / "disk", 1_000_000) as disk:  # one checkpoint has 860 kB
        flags = ("--checkpoint", str(disk / "saved"), "--checkpoint-every", "2", "--no-telemetry")
        done = perfledger("--dp", "2", *flags)
        assert done.returncode == 1
        failed = str(disk / "saved" / "step-00000004" / "shard-0000")
        assert "cannot save the checkpoint: " in done.stderr
        assert "No space left on device" in done.stderr and failed in done.stderr
        assert "tokens/s" in done.stdout
        manifest, passed_over = newest_good(disk / "saved")
        assert (manifest.step, passed_over) == (2, [])
