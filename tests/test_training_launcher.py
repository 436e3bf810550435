"""Training runs whose processes die, stop or cannot work; every child is gone afterwards."""

import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace

import psutil
import pytest

from perfledger.instrumented_runtime.parallel.layout import Layout
from perfledger.instrumented_runtime.training.launcher import TrainRun, launch
from perfledger.instrumented_runtime.training.options import TrainOptions, check
from perfledger.schema.errors import PerfledgerError, UsageError

TINY = TrainOptions(
    layout=Layout(dp=2), model_size="tiny", batch=4, sequence=16, telemetry=False, threads=1
)


@pytest.fixture(autouse=True)
def quiet_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("OMP_WAIT_POLICY", "passive"), ("GOMP_SPINCOUNT", "0")):
        monkeypatch.setenv(name, value)


def nothing() -> None:
    """Of a run that calls back."""


def test_a_rank_that_is_killed_in_a_step_is_named() -> None:
    run = TrainRun(replace(TINY, steps=100_000, observe=0))

    def kill() -> None:
        if len(run.steps) == 3:
            os.kill(run.joined[1].process, signal.SIGKILL)

    started_s = time.monotonic()
    with pytest.raises(PerfledgerError, match=r"rank 1 \(dp=1\) ended with exit code -9"):
        launch(run, nothing, kill)
    assert time.monotonic() - started_s < 90
    assert len(run.complete_steps()) >= 3
    assert multiprocessing.active_children() == []


def test_a_rank_that_never_joins_is_named() -> None:
    run = TrainRun(replace(TINY, join_timeout_s=3.0))

    def stop() -> None:
        while True:
            for child in multiprocessing.active_children():
                if child.name == "train 1" and child.pid:
                    os.kill(child.pid, signal.SIGSTOP)
                    return
            time.sleep(0.01)

    stopping = threading.Thread(target=stop, daemon=True)
    stopping.start()
    with pytest.raises(PerfledgerError, match=r"rank 1 \(dp=1\) has not joined in 3 s"):
        launch(run, nothing, nothing)
    assert multiprocessing.active_children() == []


def test_a_rank_that_stops_in_a_step_is_named() -> None:
    run = TrainRun(replace(TINY, steps=100_000, observe=0, step_timeout_s=6.0))

    def stop() -> None:
        if len(run.steps) == 2:
            os.kill(run.joined[1].process, signal.SIGSTOP)

    with pytest.raises(PerfledgerError, match=r"rank 1 \(dp=1\).* has not ended step \d+ in 6 s"):
        launch(run, nothing, stop)
    assert multiprocessing.active_children() == []


def test_what_a_rank_could_never_do_is_a_usage_error() -> None:
    run = TrainRun(replace(TINY, layout=Layout(), device="cuda", steps=1))
    with pytest.raises(UsageError, match="cuda is not there"):
        launch(run, nothing, nothing)


def test_ctrl_c_ends_it_and_shows_the_steps() -> None:
    command = [sys.executable, "-P", "-m", "perfledger", "train", "--dp", "2", "--model-size"]
    command += ["tiny", "--steps", "100000", "--observe", "0", "--no-telemetry"]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline().startswith("model    tiny: 2 layers")
        time.sleep(2)
        os.killpg(process.pid, signal.SIGINT)  # as a terminal does
        out, errors = process.communicate(timeout=30)
    finally:
        process.kill()
    assert process.returncode == 130
    assert errors == "perfledger: interrupted: the steps so far\n"
    assert "tokens/s" in out and max(len(line) for line in out.splitlines()) <= 80
    assert ended_within(10, process.pid)


def ended_within(seconds: float, session: int) -> bool:
    """Whether no process of a session is left (but for dead ones that nobody waits for)."""
    give_up_s = time.monotonic() + seconds
    while time.monotonic() < give_up_s:
        if not any(_in_session(one, session) for one in psutil.process_iter()):
            return True
        time.sleep(0.1)
    return False


def _in_session(process: psutil.Process, session: int) -> bool:
    try:
        return process.status() != psutil.STATUS_ZOMBIE and os.getsid(process.pid) == session
    except (psutil.NoSuchProcess, ProcessLookupError, PermissionError):
        return False


@pytest.mark.parametrize(
    ("change", "what"),
    [
        ({"layout": Layout(tp=3)}, "4 query heads do not divide among 3 tensor-parallel ranks"),
        ({"layout": Layout(tp=4)}, "2 KV heads do not divide among 4 tensor-parallel ranks"),
        ({"layout": Layout(dp=3)}, "4 sequences of a step do not divide among 3 data shares"),
        ({"layout": Layout(pp=3)}, "2 layers do not fill 3 pipeline stages|4 sequences of a step"),
        ({"layout": Layout(cp=2), "sequence": 18}, "18 tokens of a sequence do not divide into"),
        ({"layout": Layout(ep=2)}, "tiny has no experts to spread"),
        ({"layout": Layout(ep=3), "model_size": "tiny-moe", "batch": 3}, "4 experts do not divide"),
        ({"layout": Layout(tp=2), "model_size": "tiny-moe"}, "trains over dp and ep only"),
        ({"layout": Layout(dp=2, tp=2)}, "the combination dp=2,tp=2 is not one"),
        ({"layout": Layout(dp=2, pp=2, tp=2)}, "the combination pp=2,dp=2,tp=2 is not one"),
        ({"microbatches": 2}, "microbatches are pieces of a pipeline's batch"),
        ({"layout": Layout(pp=2), "microbatches": 1}, "1f1b needs a microbatch for each of 2"),
        ({"layout": Layout(dp=128)}, "128 ranks are more than 64"),
        ({"steps": 0}, "steps is 0, but must be at least 1"),
        ({"model_size": "huge"}, "'huge' is not a model size"),
        ({"schedule": "zigzag"}, "'zigzag' is not a schedule"),
        ({"learning_rate": float("nan")}, "learning_rate is nan"),
        ({"save": "/nowhere/at/all"}, "cannot write"),
        ({"save": "/"}, "cannot write"),  # a folder
    ],
    ids=str,
)
def test_what_cannot_be_is_refused_before_anything_starts(
    change: dict[str, object], what: str
) -> None:
    with pytest.raises(UsageError, match=what):
        check(replace(TINY, **change))  # type: ignore[arg-type]
    assert multiprocessing.active_children() == []
