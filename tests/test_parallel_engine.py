"""An engine of several ranks: its answers are those of one, and no death leaves it hanging."""

import dataclasses
import multiprocessing
import os
import shutil
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest
from conftest import free_port, perfledger

from perfledger.instrumented_runtime import engine
from perfledger.instrumented_runtime.checkpoints.resolve import resolve
from perfledger.instrumented_runtime.messages import (
    USAGE,
    WHOLE_ENGINE,
    Arrived,
    Failed,
    FromEngine,
    Ready,
    SamplingParams,
    StepOutput,
    Submit,
)
from perfledger.instrumented_runtime.options import RuntimeOptions
from perfledger.instrumented_runtime.parallel.layout import Layout, RankPlace
from perfledger.instrumented_runtime.records import NOT_READ, Record, Step
from perfledger.instrumented_runtime.ring import Reader, Ring
from perfledger.schema.clocks import monotonic_ns

OPTIONS = RuntimeOptions(model="reference-small", threads=1, max_model_len=512)
REQUESTS = 20


@dataclasses.dataclass
class Ranks:
    """The processes of one replica, and what the API process holds of each."""

    processes: list[BaseProcess]
    pipes: list[Connection]
    rings: list[Reader]

    def receive(self, rank: int = 0) -> FromEngine:
        assert self.pipes[rank].poll(150), f"rank {rank} says nothing"
        message: FromEngine = self.pipes[rank].recv()
        return message

    def ready(self) -> Ready:
        if len(self.pipes) > 1:
            assert self.receive() == Arrived()
        message = self.receive()
        assert isinstance(message, Ready), message
        return message

    def submit(self, number: int, max_tokens: int) -> None:
        prompt = [(number * 37 + 11 * at) % 8000 + 3 for at in range(5 + 13 * number)]
        sampling = SamplingParams(max_tokens)
        self.pipes[0].send(Submit(number, prompt, sampling, 1 << 100, number, monotonic_ns()))

    def answers(self) -> dict[int, list[int]]:
        """Submit all requests at once; return the tokens of each."""
        for number in range(REQUESTS):
            self.submit(number, 10 + number % 7)
        answers: dict[int, list[int]] = {}
        unfinished = REQUESTS
        while unfinished:
            step = self.receive()
            assert isinstance(step, StepOutput), step
            for token in step.tokens:
                answers.setdefault(token.request, []).append(token.token)
                unfinished -= token.finish is not None
        return answers

    def steps(self, rank: int) -> list[Step]:
        """The step records of a rank, once it has ended."""
        self.processes[rank].join(30)
        records = [one for one in self.rings[rank].read(10_000) if isinstance(one, Record)]
        return [one for one in records if isinstance(one, Step)]

    def stop(self) -> list[int | None]:
        """Close rank 0's pipe, as the API process does; return the exit codes of all."""
        self.pipes[0].close()
        for process in self.processes:
            process.join(20)
        return [process.exitcode for process in self.processes]


@contextmanager
def running(
    folder: Path,
    layout: Layout,
    options: RuntimeOptions = OPTIONS,
    checkpoints: tuple[Path, ...] = (),
) -> Iterator[Ranks]:
    """Start the ranks of a replica; `checkpoints` are theirs, if they differ."""
    context = multiprocessing.get_context("spawn")
    ranks, rings = Ranks([], [], []), []
    os.environ.update(OMP_NUM_THREADS="1")
    same = resolve(options.model)
    for rank in range(layout.world):
        ours, theirs = context.Pipe()
        rings.append(Ring.create(4096))
        place = RankPlace(layout, rank, f"file://{folder / 'ranks'}")
        checkpoint = checkpoints[rank] if checkpoints else same
        arguments = (options, checkpoint, theirs, rings[-1].name, place)
        ranks.processes.append(context.Process(target=engine.main, args=arguments))
        ranks.processes[-1].start()
        theirs.close()
        ranks.pipes.append(ours)
        ranks.rings.append(Reader.attach(rings[-1].name))
    try:
        yield ranks
    finally:
        for pipe in ranks.pipes:
            pipe.close()
        for process in ranks.processes:
            process.join(20)
            process.kill()
            process.join()
        for ring in rings:
            ring.close()


@pytest.fixture(scope="module")
def answers_of_one(tmp_path_factory: pytest.TempPathFactory) -> dict[int, list[int]]:
    with running(tmp_path_factory.mktemp("one"), Layout()) as one:
        one.ready()
        return one.answers()


@pytest.mark.parametrize("layout", [Layout(tp=2), Layout(pp=2), Layout(pp=2, tp=2)], ids=str)
def test_answers_are_those_of_one_rank(
    layout: Layout, answers_of_one: dict[int, list[int]], tmp_path: Path
) -> None:
    with running(tmp_path, layout) as ranks:
        assert ranks.ready().layout == str(layout)
        assert ranks.answers() == answers_of_one
        assert ranks.stop() == [0] * layout.world
        led, *followed = (ranks.steps(rank) for rank in range(layout.world))
    assert [one.seq for one in led] == list(range(1, len(led) + 1))
    for steps in followed:
        for mine, its in zip(led, steps, strict=True):
            assert (its.seq, its.width) == (mine.seq, mine.width)
            assert (its.prefill_tokens, its.decode_tokens) == (
                mine.prefill_tokens,
                mine.decode_tokens,
            )
            assert (its.waiting, its.kv_blocks_used) == (NOT_READ, NOT_READ)  # rank 0 knows them
            assert mine.schedule_end_ns <= its.start_ns <= its.schedule_end_ns < its.end_ns


def test_a_killed_rank_is_named_and_all_end(tmp_path: Path) -> None:
    layout = Layout(pp=2, tp=2)
    with running(tmp_path, layout) as ranks:
        ranks.ready()
        ranks.submit(1, 400)
        assert isinstance(ranks.receive(), StepOutput)
        victim = ranks.processes[3]
        assert victim.pid is not None
        os.kill(victim.pid, signal.SIGKILL)
        killed = time.monotonic()
        while isinstance(message := ranks.receive(), StepOutput):
            pass
        assert isinstance(message, Failed)
        assert (message.request, message.reason) == (WHOLE_ENGINE, "error")
        assert message.detail.startswith("rank 3 (pp=1, tp=1) ended"), message
        for process in ranks.processes:
            process.join(20)
        assert time.monotonic() - killed < 30
        assert [one.exitcode for one in ranks.processes] == [0, 1, 1, -signal.SIGKILL]


def test_the_end_of_rank_0_ends_the_others(tmp_path: Path) -> None:
    with running(tmp_path, Layout(tp=2)) as ranks:
        ranks.ready()
        ranks.processes[0].kill()
        ranks.processes[1].join(20)
        assert ranks.processes[1].exitcode == 1


def test_the_end_of_a_lifeline_ends_its_rank(tmp_path: Path) -> None:
    with running(tmp_path, Layout(tp=2)) as ranks:
        ranks.ready()
        assert ranks.receive(1) == Arrived()
        ranks.pipes[1].close()
        ranks.processes[1].join(20)
        assert ranks.processes[1].exitcode == 0


def test_ranks_with_other_weights_are_refused(tmp_path: Path) -> None:
    same = resolve(OPTIONS.model)
    other = tmp_path / "other"
    shutil.copytree(same, other)
    with open(other / "model.safetensors", "r+b") as file:
        file.seek(-1, os.SEEK_END)
        byte = file.read(1)
        file.seek(-1, os.SEEK_END)
        file.write(bytes([byte[0] ^ 1]))
    with running(tmp_path, Layout(tp=2), checkpoints=(same, other)) as ranks:
        for rank in range(2):
            assert ranks.receive(rank) == Arrived()
            failed = ranks.receive(rank)
            assert isinstance(failed, Failed) and failed.reason == USAGE
            assert failed.detail.startswith("the ranks differ in the checkpoint: rank 0 (tp=0) ")


def test_a_split_that_cannot_be_ends_before_anything_starts(tmp_path: Path) -> None:
    log = tmp_path / "serve.log"
    flags = ["--model", OPTIONS.model, "--port", str(free_port()), "--tp", "3"]
    with perfledger("serve", *flags, log=log) as process:
        assert process.wait(120) == 2
    assert "8 query heads do not divide among 3 ranks (tp)" in log.read_text()
