"""The engine's speed: against its own model without a server, and against static batching.

    python benchmarks/bench_engine.py [--pairs 5] [--threads 2] [--requests 32]

bare: output tokens/s of the engine process, driven over its pipe with 8 and with 16 requests that
decode together, divided by those of a loop that does nothing but call the same model on the same
batch and taking the likeliest tokens (no scheduler, no pipe). Target: at least 0.85.

static: makespan of one list of requests of mixed lengths, all there at the start, through the
engine with 8 seats and through transformers' generate in padded batches of 8, in the order of the
list; tokens beyond a request's own length count for neither. Target: at least 1.5 times.

Same checkpoint (reference, float32), same threads, allocator and OpenMP settings in all arms. Arms
alternate in random order; each pair gives one ratio.
"""

import argparse
import random
import statistics
import sys
import time
from dataclasses import dataclass
from functools import partial
from multiprocessing import get_context
from multiprocessing.connection import Connection
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
from perfledger.schema.clocks import monotonic_ns

sys.path.insert(0, str(Path(__file__).parent))  # python -P leaves it out
from recording import write_result  # noqa: E402

MODEL = "reference"
WIDTHS = (8, 16)
PROMPT, STEPS = 128, 96
STATIC_BATCH = 8
# The shape of the Azure code trace (2023): few output tokens with a long tail (there: mean 28,
# p95 90, p99 252), inputs scaled to this machine by 1/8 (there: median about 1500).
OUTPUT_LOG_MEAN, OUTPUT_LOG_STD, OUTPUT_CAP = 2.01, 1.51, 256
INPUT_LOG_MEAN, INPUT_LOG_STD, INPUT_CAP = 5.24, 0.8, 512


@dataclass(frozen=True)
class Request:
    prompt: list[int]
    output_tokens: int


class Arm:
    """A child process that runs one side of a comparison."""

    def __init__(self, target: Any, *arguments: Any) -> None:
        context = get_context("spawn")
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=target, args=(*arguments, theirs))
        self.process.start()
        theirs.close()

    def ask(self, question: object) -> Any:
        self.pipe.send(question)
        return self.pipe.recv()

    def end(self) -> None:
        self.pipe.close()
        self.process.join(30)


class EngineArm(Arm):
    """The engine process, as `perfledger serve` starts it, without a ring."""

    def __init__(self, folder: Path, threads: int, seats: int) -> None:
        # The same prompts are sent again and again: a prefix cache would win without computing.
        options = RuntimeOptions(
            threads=threads, max_num_seqs=seats, dtype="float32", prefix_cache=False
        )
        super().__init__(run_engine, options, folder)
        self.ready = self.pipe.recv()
        assert isinstance(self.ready, Ready), self.ready

    def submit(self, number: int, request: Request) -> None:
        sampling = SamplingParams(request.output_tokens)
        self.pipe.send(Submit(number, request.prompt, sampling, 0, 0, monotonic_ns()))

    def decode_together(self, width: int) -> float:
        """Output tokens/s from the first to the last step in which all `width` requests decode."""
        for number, prompt in enumerate(prompts(width)):
            self.submit(number, Request(prompt, STEPS + 20))
        full_ns, left = [], width
        while left:
            step = self.pipe.recv()
            assert isinstance(step, StepOutput)
            if len(step.tokens) == width:
                full_ns.append(monotonic_ns())
            left -= sum(token.finish is not None for token in step.tokens)
        full_ns = full_ns[: STEPS + 1]
        return width * (len(full_ns) - 1) / (full_ns[-1] - full_ns[0]) * 1e9

    def run_all(self, requests: list[Request]) -> float:
        """Seconds until the last of `requests` has ended."""
        started = time.perf_counter()
        for number, request in enumerate(requests):
            self.submit(number, request)
        left = len(requests)
        while left:
            step = self.pipe.recv()
            left -= sum(token.finish is not None for token in step.tokens)
        return time.perf_counter() - started

    def end(self) -> None:
        self.pipe.send(Shutdown())
        super().end()


def run_engine(options: RuntimeOptions, folder: Path, pipe: Connection) -> None:
    engine.main(options, folder, pipe, None)


def run_bare(folder: Path, threads: int, pipe: Connection) -> None:
    """Child: for each width asked, output tokens/s of the model alone."""
    engine.prepare_process()
    loop = BareLoop(folder, threads)
    try:
        while True:
            pipe.send(loop.tokens_per_s(pipe.recv()))
    except EOFError:
        return


class BareLoop:
    """The model's step in a loop: the least that decoding can cost here."""

    def __init__(self, folder: Path, threads: int) -> None:
        import torch

        from perfledger.instrumented_runtime.attention import PagedKvCache
        from perfledger.instrumented_runtime.checkpoints.config import read_config
        from perfledger.instrumented_runtime.model import load_decoder

        torch.set_num_threads(threads)
        cpu, config = torch.device("cpu"), read_config(folder)
        self.model = load_decoder(folder, config, torch.float32, cpu)
        self.blocks = -(-(PROMPT + STEPS + 1) // 16)
        self.cache = PagedKvCache(config, max(WIDTHS) * self.blocks, 16, torch.float32, cpu)

    def tokens_per_s(self, width: int) -> float:
        import torch

        from perfledger.instrumented_runtime.attention import ChunkRows, StepRows

        table = torch.arange(width * self.blocks).view(width, self.blocks)
        tokens = torch.empty(width, dtype=torch.int64)
        positions = torch.arange(PROMPT)
        for row, prompt in enumerate(prompts(width)):
            slots = table[row, positions // 16] * 16 + positions % 16
            chunk = (ChunkRows(0, PROMPT, 0, None, None),)
            rows = StepRows(torch.tensor(prompt), positions, slots, None, chunk, None)
            tokens[row] = self.model.forward(rows, self.cache)[-1].argmax()
        tokens = self._decode(tokens, PROMPT, table)
        started = time.perf_counter()
        for position in range(PROMPT + 1, PROMPT + 1 + STEPS):
            tokens = self._decode(tokens, position, table)
        return width * STEPS / (time.perf_counter() - started)

    def _decode(self, tokens: Any, position: int, table: Any) -> Any:
        import torch

        from perfledger.instrumented_runtime.attention import DecodeRows, StepRows
        from perfledger.instrumented_runtime.sampling import greedy

        width, blocks = len(tokens), position // 16 + 1
        mask = (torch.arange(blocks * 16) <= position).expand(width, 1, 1, -1)
        rows = StepRows(
            tokens,
            torch.full((width,), position),
            table[:, position // 16] * 16 + position % 16,
            DecodeRows(width, table[:, :blocks].reshape(-1), mask),
            (),
            None,
        )
        return torch.tensor(greedy(self.model.forward(rows, self.cache)))


def run_static(folder: Path, threads: int, pipe: Connection) -> None:
    """Child: seconds that padded static batches take for each list of requests asked."""
    engine.prepare_process()
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(threads)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    model.generation_config.eos_token_id = None
    try:
        while True:
            requests = pipe.recv()
            started = time.perf_counter()
            for at in range(0, len(requests), STATIC_BATCH):
                _generate(model, requests[at : at + STATIC_BATCH])
            pipe.send(time.perf_counter() - started)
    except EOFError:
        return


def _generate(model: Any, batch: list[Request]) -> None:
    import torch

    longest = max(len(one.prompt) for one in batch)
    padded = [[0] * (longest - len(one.prompt)) + one.prompt for one in batch]
    mask = [[0] * (longest - len(one.prompt)) + [1] * len(one.prompt) for one in batch]
    wanted = max(one.output_tokens for one in batch)
    with torch.inference_mode():
        out = model.generate(
            torch.tensor(padded),
            attention_mask=torch.tensor(mask),
            max_new_tokens=wanted,
            do_sample=False,
            pad_token_id=0,
        )
    assert out.shape[1] == longest + wanted


def prompts(width: int) -> list[list[int]]:
    draw = random.Random(width)
    return [[draw.randrange(3, 8192) for _ in range(PROMPT)] for _ in range(width)]


def mixed_requests(count: int, seed: int = 20261130) -> list[Request]:
    draw = random.Random(seed)
    requests = []
    for _ in range(count):
        inputs = min(INPUT_CAP, max(4, round(draw.lognormvariate(INPUT_LOG_MEAN, INPUT_LOG_STD))))
        outputs = round(draw.lognormvariate(OUTPUT_LOG_MEAN, OUTPUT_LOG_STD))
        prompt = [draw.randrange(3, 8192) for _ in range(inputs)]
        requests.append(Request(prompt, min(OUTPUT_CAP, max(1, outputs))))
    return requests


def compare_with_bare(folder: Path, pairs: int, threads: int) -> dict[str, Any]:
    bare, ours = Arm(run_bare, folder, threads), EngineArm(folder, threads, max(WIDTHS))
    result: dict[str, Any] = {"prompt_tokens": PROMPT, "steps": STEPS}
    for width in WIDTHS:
        bare.ask(width), ours.decode_together(width)  # warm
        raw: dict[str, list[float]] = {"engine_tokens_per_s": [], "bare_tokens_per_s": []}
        for _ in range(pairs):
            arms = [
                ("engine_tokens_per_s", partial(ours.decode_together, width)),
                ("bare_tokens_per_s", partial(bare.ask, width)),
            ]
            random.shuffle(arms)
            for name, measure in arms:
                raw[name].append(measure())
        ratios = [a / b for a, b in zip(*raw.values(), strict=True)]
        result[f"{width}_requests"] = {**summary(ratios), **rounded(raw)}
        print(f"bare, {width} requests: {summary(ratios)}")
    bare.end(), ours.end()
    return result


def compare_with_static(folder: Path, pairs: int, threads: int, count: int) -> dict[str, Any]:
    requests = mixed_requests(count)
    tokens = sum(one.output_tokens for one in requests)
    static, ours = Arm(run_static, folder, threads), EngineArm(folder, threads, STATIC_BATCH)
    static.ask(requests[:STATIC_BATCH]), ours.run_all(requests[:STATIC_BATCH])  # warm
    raw: dict[str, list[float]] = {"engine_tokens_per_s": [], "static_tokens_per_s": []}
    for _ in range(pairs):
        arms = [
            ("engine_tokens_per_s", partial(ours.run_all, requests)),
            ("static_tokens_per_s", partial(static.ask, requests)),
        ]
        random.shuffle(arms)
        for name, measure in arms:
            raw[name].append(tokens / measure())
    static.end(), ours.end()
    ratios = [a / b for a, b in zip(*raw.values(), strict=True)]
    print(f"static: {summary(ratios)}")
    workload = {
        "requests": count,
        "input_tokens": lengths([len(one.prompt) for one in requests]),
        "output_tokens": lengths([one.output_tokens for one in requests]),
        "seats_and_batch": STATIC_BATCH,
    }
    return {**workload, **summary(ratios), **rounded(raw)}


def lengths(values: list[int]) -> dict[str, float]:
    ranked = sorted(values)
    quantiles = {
        f"p{q}": ranked[min(len(ranked) - 1, len(ranked) * q // 100)] for q in (50, 95, 99)
    }
    return {"mean": round(statistics.mean(values), 1), **quantiles, "max": ranked[-1]}


def summary(ratios: list[float]) -> dict[str, Any]:
    return {
        "ratio_median": round(statistics.median(ratios), 3),
        "ratios": [round(ratio, 3) for ratio in ratios],
    }


def rounded(raw: dict[str, list[float]]) -> dict[str, list[float]]:
    return {name: [round(value, 1) for value in values] for name, values in raw.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--requests", type=int, default=32, help="of the comparison with static")
    options = parser.parse_args()
    folder = resolve(MODEL)
    result = {
        "model": MODEL,
        "dtype": "float32",
        "threads": options.threads,
        "pairs": options.pairs,
        "bare": compare_with_bare(folder, options.pairs, options.threads),
        "static": compare_with_static(folder, options.pairs, options.threads, options.requests),
    }
    goal = (
        "engine/bare output tokens/s >= 0.85 at 8 and 16 requests;"
        " engine/static batching (transformers generate, batch 8) >= 1.5"
    )
    write_result("engine", goal, result)


if __name__ == "__main__":
    main()
