"""Steps of the engine over a real model, in this process: tokens, records, aborts, faults."""

import json
import subprocess
import sys

import pytest
from stepping_engine import MODEL, ROOMY, Engine, prompt_of

from perfledger.instrumented_runtime.checkpoints.resolve import resolve
from perfledger.instrumented_runtime.records import (
    LEAVE_REASONS,
    WAIT_REASONS,
    Admit,
    Chunk,
    Leave,
    Preempt,
    Step,
)
from perfledger.instrumented_runtime.scheduling.limits import Limits

DELAY_NS = 30_000_000


@pytest.fixture(scope="module")
def alone() -> dict[int, list[int]]:
    """The answer to each prompt when nothing else is computed."""
    engine = Engine(ROOMY)
    for number in range(10):
        engine.submit(number, prompt_of(number))
        engine.run()
    return engine.answers


def test_together_as_alone(alone: dict[int, list[int]]) -> None:
    engine = Engine(ROOMY)
    for number in range(10):
        engine.submit(number, prompt_of(number))
        engine.step()
    assert engine.run().answers == alone
    assert engine.finished == dict.fromkeys(range(10), "length")
    assert engine.stepper.scheduler.kv.used == 0


def test_preempted_as_alone(alone: dict[int, list[int]]) -> None:
    """Blocks run out often; what is dropped is computed again, to the same tokens."""
    engine = Engine(Limits(16, 64, 256, 4, kv_blocks=40))
    for number in range(10):
        engine.submit(number, prompt_of(number))
    assert engine.run().answers == alone
    preempted = engine.of(Preempt)
    assert len(preempted) >= 3
    again = [one for one in engine.of(Admit) if WAIT_REASONS[one.wait_reason] == "preempted"]
    assert sorted(one.request for one in again) == sorted(one.request for one in preempted)
    starts = {(one.request, one.queue_start_ns) for one in again}
    assert starts == {(one.request, one.at_ns) for one in preempted}
    assert any(chunk.recompute for chunk in engine.of(Chunk))
    assert any(WAIT_REASONS[one.wait_reason] == "kv_full" for one in engine.of(Admit))


def test_records_tell_membership_and_token_times() -> None:
    engine = Engine(ROOMY)
    engine.submit(1, [5] * 100, max_tokens=3)
    engine.submit(2, [6] * 10, max_tokens=2)
    engine.run()
    steps = engine.of(Step)
    assert [
        (one.seq, one.width, one.prefill_tokens, one.decode_tokens, one.waiting, one.kv_blocks_used)
        for one in steps
    ] == [
        (1, 1, 64, 0, 1, 7),  # no token of the budget is left for the second
        (2, 2, 46, 0, 0, 8),
        (3, 2, 0, 2, 0, 8),
        (4, 1, 0, 1, 0, 7),
    ]
    assert [tuple(chunk)[:7] for chunk in engine.of(Chunk)] == [
        (1, 1, 64, 0, 0, 1, 0),
        (1, 2, 36, 0, 1, 1, 1),
        (2, 2, 10, 0, 1, 1, 1),
    ]
    leaves = [(one.request, one.seq, one.output_tokens) for one in engine.of(Leave)]
    assert leaves == [(2, 3, 2), (1, 4, 3)]
    admits = engine.of(Admit)
    assert [(one.request, one.seq, one.prompt_tokens) for one in admits] == [
        (1, 1, 100),
        (2, 2, 10),
    ]
    assert {(one.trace_high, one.trace_low, one.span) for one in admits} == {
        (-(1 << 63), number, number - (1 << 63)) for number in (1, 2)
    }
    ended_ns = 0
    for step in steps:
        inside = [one for one in admits if one.seq == step.seq]
        for one in inside:
            assert one.queue_start_ns <= one.queue_end_ns <= one.context_end_ns
            assert step.start_ns <= one.queue_end_ns and one.context_end_ns <= step.schedule_end_ns
        times = (ended_ns, step.start_ns, step.schedule_end_ns, step.sample_start_ns)
        times += (step.sample_end_ns, step.end_ns)
        assert list(times) == sorted(times)
        ended_ns = step.end_ns
    # The CPU clock is read when the batch has run empty, so the sum is whole.
    assert [step.cpu_ns > 0 for step in steps] == [False, False, False, True]
    kinds = [type(record) for record in engine.records]
    assert kinds == [
        *(Admit, Chunk, Step),
        *(Chunk, Admit, Chunk, Step),
        *(Step, Leave),
        *(Step, Leave),
    ]


def test_stop_token_ends_with_stop(alone: dict[int, list[int]]) -> None:
    engine = Engine(ROOMY)
    engine.submit(1, prompt_of(1), stop_token_ids=(alone[1][5], 2))
    engine.run()
    assert engine.answers[1] == alone[1][: alone[1].index(alone[1][5]) + 1]
    assert engine.finished == {1: "stop"}


def test_abort_frees_blocks_at_once() -> None:
    engine = Engine(ROOMY)
    for number in (1, 2, 3):
        engine.submit(number, [number] * 30, max_tokens=50)
        engine.step()
    engine.submit(4, [4] * 30)
    assert engine.stepper.scheduler.kv.used == 6
    engine.stepper.abort(2, "client_disconnect")
    engine.stepper.abort(4, "client_disconnect")  # still in the queue: nothing to record
    engine.stepper.abort(99, "client_disconnect")  # long gone
    assert engine.stepper.scheduler.kv.used == 4
    engine.stepper.abort_all("shutdown")
    assert engine.stepper.scheduler.kv.used == 0
    assert engine.stepper.idle_ns(0) is None
    left = [(one.request, LEAVE_REASONS[one.reason], one.output_tokens) for one in engine.of(Leave)]
    assert left == [(2, "client_disconnect", 2), (1, "shutdown", 3), (3, "shutdown", 1)]


@pytest.mark.parametrize(
    ("prompt", "options", "detail"),
    [
        ([], {}, "the prompt has no tokens"),
        ([5] * 250, {}, "250 prompt tokens and max_tokens 24 make 274, but the model takes 256"),
        ([5, 8192], {}, "the prompt holds a token outside the vocabulary of 8192"),
        ([-1], {}, "the prompt holds a token outside the vocabulary of 8192"),
        ([5], {"max_tokens": 0}, "max_tokens is 0, but must be at least 1"),
    ],
)
def test_what_can_never_be_served_is_refused(
    prompt: list[int], options: dict[str, int], detail: str
) -> None:
    refused = Engine(ROOMY).submit(1, prompt, **options)
    assert refused is not None and refused.reason == "error"
    assert refused.detail.startswith(detail)


def test_a_seed_gives_the_same_answer_in_any_company() -> None:
    seeded = {"temperature": 0.9, "top_p": 0.95, "seed": 42}
    single, crowd = Engine(ROOMY), Engine(ROOMY)
    single.submit(1, prompt_of(3), **seeded)
    crowd.submit(7, prompt_of(7), temperature=1.0, seed=1)
    crowd.submit(8, prompt_of(8))
    crowd.step()
    crowd.submit(1, prompt_of(3), **seeded)
    crowd.submit(2, prompt_of(3), **{**seeded, "seed": 43})
    assert single.run().answers[1] == crowd.run().answers[1] != crowd.answers[2]


def test_planted_delays_lie_in_their_interval_once() -> None:
    """Each delay is in its own interval of the records; the request beside it is not held up."""
    stages = ("queue", "context", "prefill", "decode", "sample", "host_gap")
    for stage in stages:
        engine = Engine(ROOMY)
        engine.submit(1, [5] * 100, max_tokens=5, delays_ns={stage: DELAY_NS})
        engine.run()
        first, *_ = engine.of(Admit)
        steps = engine.of(Step)
        pairs = zip(steps, steps[1:], strict=False)
        lengths_ns = {
            "queue": [first.queue_end_ns - first.queue_start_ns],
            "context": [first.context_end_ns - first.queue_end_ns],
            "prefill": [one.sample_start_ns - one.schedule_end_ns for one in steps[:2]],
            "decode": [one.sample_start_ns - one.schedule_end_ns for one in steps[2:]],
            "sample": [one.sample_end_ns - one.sample_start_ns for one in steps],
            "host_gap": [after.start_ns - before.end_ns for before, after in pairs],
        }
        long = {name: [one >= DELAY_NS for one in lengths_ns[name]] for name in stages}
        assert sum(long[stage]) >= 1, stage
        place = long[stage].index(True)
        assert place == {"sample": 1, "host_gap": 2}.get(stage, 0), stage


def test_a_request_held_in_the_queue_holds_up_nobody() -> None:
    engine = Engine(ROOMY)
    engine.submit(1, [5] * 10, max_tokens=2, delays_ns={"queue": 10 * DELAY_NS})
    engine.submit(2, [6] * 10, max_tokens=2)
    engine.run()
    assert [one.request for one in engine.of(Leave)] == [2, 1]
    assert [one.request for one in engine.of(Admit)] == [2, 1]


# In a process of its own: one request decodes and a short one begins when a long one finds no
# memory.
NO_MEMORY = """
import json, os, resource, sys
from pathlib import Path
from perfledger.instrumented_runtime.loading import load_rank
from perfledger.instrumented_runtime.messages import Failed, SamplingParams, StepOutput, Submit
from perfledger.instrumented_runtime.options import RuntimeOptions
from perfledger.instrumented_runtime.parallel.layout import Layout, RankPlace
from perfledger.instrumented_runtime.recorder import Recorder
from perfledger.instrumented_runtime.records import NO_MEMORY
from perfledger.instrumented_runtime.stepping import Stepper

options = RuntimeOptions(threads=1, max_num_batched_tokens=4096, max_num_seqs=4)
rank = load_rank(options, Path(sys.argv[1]), RankPlace(Layout()))
told = []
recorder = Recorder(lambda kind, fields: told.append(fields) if kind == NO_MEMORY else None)

def answers(numbers, limited):
    stepper = Stepper(rank.model, rank.cache, rank.limits, recorder)
    stepper.submit(Submit(1, [5] * 20, SamplingParams(6), 0, 0, 0))
    outputs = stepper.step()
    if limited:
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        limit = pages * os.sysconf("SC_PAGE_SIZE") + (24 << 20)
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    for number in numbers:
        length = 3900 if number == 2 else 30
        stepper.submit(Submit(number, [5 + number] * length, SamplingParams(4), 0, 0, 0))
    while stepper.idle_ns(0) is not None:
        outputs += stepper.step()
    tokens = {}
    for output in outputs:
        for token in output.tokens if isinstance(output, StepOutput) else ():
            tokens.setdefault(token.request, []).append(token.token)
    failed = [(one.request, one.reason) for one in outputs if isinstance(one, Failed)]
    return tokens, failed, stepper.scheduler.kv.used

alone, _, _ = answers([3], False)
beside, failed, used = answers([2, 3], True)
print(json.dumps([beside == alone, failed, used, [one[0] for one in told],
                  [min(one[3], one[5], one[7]) > 0 for one in told]]))
"""


def test_no_memory_ends_the_request_that_wanted_it_and_no_other() -> None:
    command = [sys.executable, "-P", "-c", NO_MEMORY, str(resolve(MODEL))]
    run = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert run.returncode == 0, run.stderr
    assert json.loads(run.stdout) == [True, [[2, "out_of_memory"]], 0, [2], [True]]
