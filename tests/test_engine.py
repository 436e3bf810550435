"""The engine as a process of its own, over a real pipe, its records read from a real ring."""

import dataclasses
import multiprocessing
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest

from perfledger.instrumented_runtime import engine
from perfledger.instrumented_runtime.checkpoints.resolve import resolve
from perfledger.instrumented_runtime.checkpoints.weights import weights_hash
from perfledger.instrumented_runtime.loading import load_rank
from perfledger.instrumented_runtime.messages import (
    USAGE,
    WHOLE_ENGINE,
    Abort,
    Failed,
    FromEngine,
    Ready,
    SamplingParams,
    Shutdown,
    StepOutput,
    Submit,
)
from perfledger.instrumented_runtime.options import RuntimeOptions
from perfledger.instrumented_runtime.parallel.layout import Layout, RankPlace
from perfledger.instrumented_runtime.records import (
    LEAVE_REASONS,
    Admit,
    Leave,
    Preempt,
    Record,
    Step,
)
from perfledger.instrumented_runtime.ring import Reader, Ring
from perfledger.instrumented_runtime.runtime_version import runtime_version
from perfledger.schema.clocks import monotonic_ns
from perfledger.schema.model_shape import parse_shape

OPTIONS = RuntimeOptions(model="reference-small", threads=1)
BLOCK_BYTES = 2 * 3 * 16 * 4 * 64 * 4  # K and V, layers, tokens, heads, head_dim, float32


@dataclasses.dataclass
class Running:
    process: BaseProcess
    pipe: Connection
    ring: Reader

    def receive(self) -> FromEngine:
        assert self.pipe.poll(60), "the engine says nothing"
        message: FromEngine = self.pipe.recv()
        return message

    def submit(self, number: int, prompt: list[int], max_tokens: int) -> None:
        sampling = SamplingParams(max_tokens)
        self.pipe.send(Submit(number, prompt, sampling, 1 << 100, number, monotonic_ns()))

    def answers(self, count: int) -> dict[int, list[int]]:
        """The tokens of the next `count` requests that finish, and of those beside them."""
        answers: dict[int, list[int]] = {}
        while count:
            step = self.receive()
            assert isinstance(step, StepOutput) and step.tokens
            assert step.sent_ns <= monotonic_ns()
            for token in step.tokens:
                answers.setdefault(token.request, []).append(token.token)
                count -= token.finish is not None
        return answers

    def records(self) -> list[Record]:
        """All records, once the process has ended."""
        self.process.join(30)
        return [one for one in self.ring.read(10_000) if isinstance(one, Record)]


@contextmanager
def running(options: RuntimeOptions = OPTIONS, folder: Path | None = None) -> Iterator[Running]:
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    ring = Ring.create(4096)
    checkpoint = folder or resolve(options.model)
    arguments = (options, checkpoint, theirs, ring.name, RankPlace(Layout()))
    process = context.Process(target=engine.main, args=arguments)
    process.start()
    theirs.close()
    try:
        yield Running(process, ours, Reader.attach(ring.name))
    finally:
        ours.close()
        process.join(30)
        if process.exitcode is None:
            process.kill()
        ring.close()


def prompt_of(number: int) -> list[int]:
    return [(number * 37 + 11 * at) % 8000 + 3 for at in range(20 + 15 * number)]


@pytest.fixture(scope="module")
def one_by_one() -> dict[int, list[int]]:
    answers: dict[int, list[int]] = {}
    with running() as it:
        it.receive()
        for number in range(6):
            it.submit(number, prompt_of(number), 30)
            answers |= it.answers(1)
    return answers


def test_facts_answers_and_an_end_on_request(one_by_one: dict[int, list[int]]) -> None:
    with running() as it:
        ready = it.receive()
        assert isinstance(ready, Ready)
        capacity = ready.capacity
        assert ready == Ready(
            device="cpu",
            dtype="float32",
            kernel_path="prefill: sdpa flash; decode: block gather, sdpa flash, group as query",
            threads=1,
            kv_blocks=16 * 4096 // 16,
            max_model_len=4096,
            parameters=4_863_744,
            weights_hash=weights_hash(resolve(OPTIONS.model)),
            runtime_version=runtime_version(),
            layout="single",
            capacity=capacity,
            shapes=ready.shapes,
        )
        (shape,) = (parse_shape(text) for text in ready.shapes)
        assert (shape.layers, shape.hidden, shape.block) == (3, 256, 16)
        assert capacity["weights_bytes"] == 4 * ready.parameters
        assert capacity["kv_bytes"] == ready.kv_blocks * BLOCK_BYTES
        for number in range(6):
            it.submit(number, prompt_of(number), 30)
        assert it.answers(6) == one_by_one
        it.pipe.send(Shutdown())
        records = it.records()
        assert it.process.exitcode == 0
    steps = [one for one in records if isinstance(one, Step)]
    assert [one.seq for one in steps] == list(range(1, len(steps) + 1))
    assert max(one.width for one in steps) > 1
    assert sum(one.prefill_tokens for one in steps) == sum(len(prompt_of(n)) for n in range(6))
    assert sum(one.decode_tokens for one in steps) == 6 * 29
    leaves = [one for one in records if isinstance(one, Leave)]
    assert {(LEAVE_REASONS[one.reason], one.output_tokens) for one in leaves} == {("length", 30)}


def test_preemption_under_tiny_kv_changes_no_token(one_by_one: dict[int, list[int]]) -> None:
    options = dataclasses.replace(OPTIONS, kv_memory_bytes=12 * BLOCK_BYTES)
    with running(options) as it:
        ready = it.receive()
        assert isinstance(ready, Ready) and ready.kv_blocks == 12
        for number in range(6):
            it.submit(number, prompt_of(number), 30)
        assert it.answers(6) == one_by_one
        it.submit(7, [5] * 100, 94)  # 193 tokens in the cache at most, which holds 192
        refused = it.receive()
        it.pipe.send(Shutdown())
        records = it.records()
    assert isinstance(refused, Failed)
    assert (refused.request, refused.reason) == (7, "error")
    assert refused.detail.endswith("make 194, but the KV cache holds 192 tokens")
    assert sum(isinstance(one, Preempt) for one in records) > 0
    assert max(one.kv_blocks_used for one in records if isinstance(one, Step)) <= 12


def test_abort_ends_one_request_and_leaves_the_others(one_by_one: dict[int, list[int]]) -> None:
    with running() as it:
        it.receive()
        it.submit(50, prompt_of(9), 3000)
        it.submit(1, prompt_of(1), 30)
        first = it.receive()
        assert isinstance(first, StepOutput)
        answers = it.answers(1)
        it.pipe.send(Abort(50, "client_disconnect"))
        it.submit(2, prompt_of(2), 30)
        later = it.answers(1)
        it.pipe.send(Shutdown())
        records = it.records()
    assert answers[1] == one_by_one[1][len(one_by_one[1]) - len(answers[1]) :]
    assert later[2] == one_by_one[2]
    left = {one.request: one for one in records if isinstance(one, Leave)}
    assert LEAVE_REASONS[left[50].reason] == "client_disconnect"
    last = [one for one in records if isinstance(one, Step)][-1]
    assert last.kv_blocks_used == -(-(50 + 29) // 16)


def test_the_end_of_the_pipe_ends_the_process() -> None:
    with running() as it:
        it.receive()
        it.submit(1, prompt_of(1), 3000)
        it.receive()
        os.kill(it.process.pid or 0, signal.SIGINT)  # Ctrl-C: the API process decides
        it.receive()
        it.pipe.close()
        records = it.records()
        assert it.process.exitcode == 0
    leaves = [one for one in records if isinstance(one, Leave)]
    assert [LEAVE_REASONS[one.reason] for one in leaves] == ["shutdown"]
    assert [one.request for one in records if isinstance(one, Admit)] == [1]


@pytest.mark.parametrize(
    ("changes", "detail"),
    [
        ({"device": "tpu"}, "'tpu' is not a device\n  try: auto, cpu, cuda or cuda:1"),
        ({"device": "cuda:7"}, "the device cuda:7 is not there"),
        ({"dtype": "int8"}, "'int8' is not a dtype"),
        ({"threads": -1}, "threads is -1, but must be at least 0"),
        ({"max_model_len": 5000}, "max_model_len is 5000, but the checkpoint takes 4096 tokens"),
        ({"kv_memory_bytes": 1000}, "the KV memory holds no block"),
        ({"block_size": 0}, "block_size is 0, but must be at least 1"),
    ],
)
def test_options_that_can_never_work(changes: dict[str, object], detail: str) -> None:
    """Refused in the loading itself, in this process: the next test has the process."""
    with pytest.raises(engine.UsageError) as error:
        options = dataclasses.replace(OPTIONS, **changes)
        load_rank(options, resolve(OPTIONS.model), RankPlace(Layout()))
    assert str(error.value).startswith(detail)


def test_a_checkpoint_that_cannot_be_loaded_is_said_once(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{")
    with running(folder=tmp_path) as it:
        failed = it.receive()
        with pytest.raises(EOFError):
            it.pipe.recv()
        it.process.join(30)
        assert it.process.exitcode == 0
    assert isinstance(failed, Failed)
    assert (failed.request, failed.reason) == (WHOLE_ENGINE, USAGE)
    assert failed.detail.startswith("config.json is not valid JSON")
