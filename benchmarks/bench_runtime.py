"""What the scheduler and its bookkeeping cost a step, and what a prefix-cache hit saves.

    python benchmarks/bench_runtime.py [--repeats 7] [--threads 2]

overhead: 32 requests decode together; from the records of the steps, the share of the time from
one step's start to the next one's that is neither the model's forward pass nor sampling:
scheduling, rows, bookkeeping, records, the pipe. Target: under 5 %.

prefix: time to first token of a prompt of 1,024 tokens, sent for the first time and with its first
768 in the cache. Saved time over what the steps that computed those 768 tokens took the first time
(three chunks, from their records); target: within 15 % of one.
"""

import argparse
import random
import statistics
import sys
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from perfledger.instrumented_runtime import engine
from perfledger.instrumented_runtime.checkpoints.resolve import resolve
from perfledger.instrumented_runtime.messages import (
    Ready,
    SamplingParams,
    Shutdown,
    StepOutput,
    Submit,
)
from perfledger.instrumented_runtime.options import RuntimeOptions
from perfledger.instrumented_runtime.records import Step
from perfledger.instrumented_runtime.ring import Reader, Ring
from perfledger.schema.clocks import monotonic_ns

sys.path.insert(0, str(Path(__file__).parent))  # python -P leaves it out
from recording import write_result  # noqa: E402

MODEL, WIDTH, STEPS, VOCABULARY = "reference", 32, 96, 8192
LONG, SHARED = 1024, 768
GOAL = (
    "scheduler and bookkeeping under 5 % of a step at batch 32;"
    " a prefix-cache hit cuts TTFT by the prefill that it saves, within 15 %"
)


class Engine:
    """The engine process as `perfledger serve` starts it, driven over its pipe."""

    def __init__(self, folder: Path, threads: int) -> None:
        options = RuntimeOptions(threads=threads, max_num_seqs=WIDTH, dtype="float32")
        self.ring = Ring.create(options.ring_slots)
        self.records = Reader.attach(self.ring.name)
        context = get_context("spawn")
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(
            target=run_engine, args=(options, folder, theirs, self.ring.name)
        )
        self.process.start()
        theirs.close()
        ready = self.pipe.recv()
        assert isinstance(ready, Ready), ready
        self.number = 0

    def submit(self, prompt: list[int], output_tokens: int) -> int:
        """Send a request; return when, monotonic ns."""
        self.number += 1
        sent_ns = monotonic_ns()
        self.pipe.send(Submit(self.number, prompt, SamplingParams(output_tokens), 0, 0, sent_ns))
        return sent_ns

    def ttft_ns(self, prompt: list[int]) -> int:
        """Send a prompt alone and wait for its only token."""
        sent_ns = self.submit(prompt, 1)
        step = self.pipe.recv()
        assert isinstance(step, StepOutput), step
        return monotonic_ns() - sent_ns

    def steps(self) -> list[Step]:
        """Return the records of all steps that have not been read yet."""
        return [record for record in self.records.read(65_536) if isinstance(record, Step)]

    def decode_steps(self) -> list[Step]:
        """Let 32 requests decode together; return the records of steps that hold all of them."""
        self.steps()
        draw = random.Random(self.number)
        for _ in range(WIDTH):
            self.submit([draw.randrange(300, VOCABULARY) for _ in range(128)], STEPS)
        left = WIDTH
        while left:
            step = self.pipe.recv()
            left -= sum(token.finish is not None for token in step.tokens)
        return [
            one for one in self.steps() if one.decode_tokens == WIDTH and not one.prefill_tokens
        ]

    def end(self) -> None:
        """End the process."""
        self.pipe.send(Shutdown())
        self.process.join(30)
        self.ring.close()


def run_engine(options: RuntimeOptions, folder: Path, pipe: Any, ring_name: str) -> None:
    """Child."""
    engine.main(options, folder, pipe, ring_name)


def overhead(one: Engine, repeats: int) -> dict[str, Any]:
    """Return the share of a step's period that is neither forward nor sampling."""
    shares, periods_ms = [], []
    for repeat in range(repeats + 1):
        steps = one.decode_steps()
        if not repeat:
            continue
        whole = statistics.median(b.start_ns - a.start_ns for a, b in adjacent(steps))
        rest = statistics.median(
            (b.start_ns - a.start_ns)
            - (a.sample_start_ns - a.schedule_end_ns)
            - (a.sample_end_ns - a.sample_start_ns)
            for a, b in adjacent(steps)
        )
        shares.append(round(rest / whole, 4))
        periods_ms.append(round(whole / 1e6, 3))
    return {"share": statistics.median(shares), "raw_shares": shares, "period_ms": periods_ms}


def adjacent(steps: list[Step]) -> list[tuple[Step, Step]]:
    """Return pairs of steps that follow each other."""
    return [(a, b) for a, b in zip(steps, steps[1:], strict=False) if b.seq == a.seq + 1]


def prefix(one: Engine, repeats: int) -> dict[str, Any]:
    """Return saved time over the cost of what was saved, and the raw times."""
    draw = random.Random(20261130)

    def fresh(tokens: int) -> list[int]:
        return [draw.randrange(300, VOCABULARY) for _ in range(tokens)]

    raw: dict[str, list[float]] = {"cold": [], "hit": [], "saved_prefill": []}
    for repeat in range(repeats + 1):
        prompt, tail = fresh(LONG), fresh(LONG - SHARED)
        one.steps()
        times = {"cold": one.ttft_ns(prompt)}
        times["saved_prefill"] = prefill_ns(one.steps(), SHARED)
        times["hit"] = one.ttft_ns(prompt[:SHARED] + tail)
        if repeat:
            for name, value_ns in times.items():
                raw[name].append(round(value_ns / 1e6, 3))
    ratios = [(cold - hit) / saved for cold, hit, saved in zip(*raw.values(), strict=True)]
    return {
        "saved_over_cost": round(statistics.median(ratios), 3),
        "ratios": [round(ratio, 3) for ratio in ratios],
        "ms": {name: statistics.median(values) for name, values in raw.items()},
        "raw_ms": raw,
    }


def prefill_ns(steps: list[Step], tokens: int) -> int:
    """Return the time of the steps that computed the first `tokens` of a prompt alone."""
    computed = total_ns = 0
    for step in steps:
        if computed < tokens:
            computed, total_ns = (
                computed + step.prefill_tokens,
                total_ns + step.end_ns - step.start_ns,
            )
    assert computed == tokens, "a chunk goes over the end of what is shared"
    return total_ns


def main() -> None:
    """Measure and write the result."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--threads", type=int, default=2)
    asked = parser.parse_args()
    one = Engine(resolve(MODEL), asked.threads)
    result = {"model": MODEL, "threads": asked.threads}
    result["overhead"] = overhead(one, asked.repeats)
    result["prefix"] = prefix(one, asked.repeats)
    one.end()
    print(f"overhead {result['overhead']['share']}, prefix {result['prefix']['saved_over_cost']}")
    write_result("runtime", GOAL, result)


if __name__ == "__main__":
    main()
