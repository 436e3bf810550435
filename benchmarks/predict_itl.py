"""Decode inter-token latency predicted from ceilings and bytes alone, then measured.

    python benchmarks/predict_itl.py [--threads 1] [--repetitions 3] [--steps 64]

1. The host's ceilings are measured, as `perfledger ceilings` does it.
2. For batch 1, 4 and 16, float32 and int8 weights and two contexts, the time of a decode step of
   the reference model is predicted, from the model's shape, the batch and the ceilings. No step
   has been run by then. The predictions are written and hashed.
3. The engine (its steps without API and telemetry) decodes each case, in fresh requests and in a
   random order, some repetitions over; what is compared is the median time from step to step.

Target: an error of at most 15 %, or of 1.5 times the spread that repetitions of the same case have
among themselves, where that is larger.
"""

import argparse
import hashlib
import json
import random
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from perfledger.analyzers.prediction import Prediction, predict_decode
from perfledger.instrumented_runtime import engine
from perfledger.instrumented_runtime.checkpoints.resolve import resolve
from perfledger.instrumented_runtime.messages import SamplingParams, Submit
from perfledger.instrumented_runtime.options import MIB, RuntimeOptions
from perfledger.instrumented_runtime.parallel.layout import Layout, RankPlace
from perfledger.schema.ceilings import KIND, Ceilings
from perfledger.schema.host_facts import HostCounters
from perfledger.schema.model_shape import ModelShape, parse_shape
from perfledger.schema.step_work import BatchShape
from perfledger.schema.store import Store

sys.path.insert(0, str(Path(__file__).parent))  # python -P leaves it out
from recording import RESULTS, write_result  # noqa: E402

MODEL = "reference"
BATCHES, CONTEXTS, QUANTIZATIONS = (1, 4, 16), (192, 768), ("none", "int8")
TARGET, SPREADS = 0.15, 1.5
WARM_UP_STEPS = 4
GOAL = "each error at most 15 %, or 1.5 times the case's own A/A spread where that is larger"
PREDICTIONS = RESULTS / "predict_itl_predictions.json"


@dataclass(frozen=True)
class Case:
    """What decodes: `context` is the mean number of tokens that a row attends to."""

    quantization: str
    batch: int
    context: int

    @property
    def name(self) -> str:
        dtype = "float32" if self.quantization == "none" else self.quantization
        return f"{dtype}, batch {self.batch}, context {self.context}"


CASES = [Case(q, b, c) for q in QUANTIZATIONS for b in BATCHES for c in CONTEXTS]


def measure_ceilings(threads: int) -> Ceilings:
    """Run `perfledger ceilings` and read what it kept."""
    with tempfile.TemporaryDirectory(prefix="predict-itl-") as folder:
        command = [sys.executable, "-P", "-m", "perfledger", "ceilings", "--threads", str(threads)]
        subprocess.run([*command, "--store", folder], check=True)
        rows = Store.at(folder).scan("runs").collect().to_dicts()
    return Ceilings.from_row(next(row for row in rows if row["kind"] == KIND))


def shape_of_model(quantization: str, threads: int) -> ModelShape:
    """Return the shape that an engine would tell, without loading the model."""
    import torch

    from perfledger.instrumented_runtime.checkpoints.config import read_config
    from perfledger.instrumented_runtime.parallel.served_model import Placement
    from perfledger.instrumented_runtime.work_shape import rank_shapes

    config = read_config(resolve(MODEL))
    placement = Placement(config, RankPlace(Layout()), torch.float32, torch.device("cpu"))
    (text,) = rank_shapes(placement, options_for(quantization, threads))
    return parse_shape(text)


def predict(case: Case, ceilings: Ceilings, threads: int) -> Prediction:
    """Return the prediction of a case's middle step."""
    shape = shape_of_model(case.quantization, threads)
    batch = BatchShape(
        decode_rows=case.batch,
        decode_context_tokens=case.batch * case.context,
        decode_gathered_blocks=case.batch * -(-case.context // shape.block),
        sampled_rows=case.batch,
    )
    return predict_decode(shape, batch, ceilings)


def write_predictions(ceilings: Ceilings, threads: int) -> tuple[dict[str, float], str]:
    """Write the predictions of all cases; return their ns by name, and the hash of the file."""
    found = {case.name: predict(case, ceilings, threads) for case in CASES}
    content = {
        "written": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "ceilings": ceilings.run_id,
        "ceilings_samples_sha256": hashlib.sha256(
            str(ceilings.to_row()["samples"]).encode()
        ).hexdigest(),
        "predictions": {
            name: {"ms": round(one.ns / 1e6, 4), "parts": [asdict(part) for part in one.parts]}
            for name, one in found.items()
        },
    }
    text = json.dumps(content, indent=2) + "\n"
    RESULTS.mkdir(parents=True, exist_ok=True)
    PREDICTIONS.write_text(text)
    digest = hashlib.sha256(text.encode()).hexdigest()
    print(f"predictions written before the runs, sha256 {digest}")
    return {name: one.ns for name, one in found.items()}, digest


def options_for(quantization: str, threads: int) -> RuntimeOptions:
    return RuntimeOptions(
        threads=threads,
        dtype="float32",
        quantization=quantization,
        max_num_seqs=max(BATCHES),
        max_num_batched_tokens=max(BATCHES) * max(CONTEXTS),  # all prompts in one step
        prefix_cache=False,
        kv_memory_bytes=512 * MIB,
    )


def run_cases(quantization: str, threads: int, steps: int, pipe: Connection) -> None:
    """Child: for each case asked, the ns from step to step while all its requests decode."""
    engine.prepare_process()
    from perfledger.instrumented_runtime.loading import load_rank
    from perfledger.instrumented_runtime.stepping import Stepper

    rank = load_rank(options_for(quantization, threads), resolve(MODEL), RankPlace(Layout()))
    stepper = Stepper(rank.model, rank.cache, rank.limits, None)
    try:
        while True:
            pipe.send(decode(stepper, pipe.recv(), steps))
    except EOFError:
        return


def decode(stepper: Any, case: Case, steps: int) -> list[int]:
    """Return the ns of each of `steps` decode steps around the case's mean context."""
    draw = random.Random(case.batch * 1000 + case.context)
    length = case.context - steps // 2 - WARM_UP_STEPS
    for number in range(case.batch):
        prompt = [draw.randrange(3, 8192) for _ in range(length)]
        sampling = SamplingParams(steps + 2 * WARM_UP_STEPS)
        stepper.submit(Submit(number, prompt, sampling, 0, 0, 0))
    while len(_tokens(stepper)) < case.batch:
        pass
    for _ in range(WARM_UP_STEPS):
        stepper.step()
    ends = [time.perf_counter_ns()]
    for _ in range(steps):
        assert len(_tokens(stepper)) == case.batch
        ends.append(time.perf_counter_ns())
    stepper.abort_all("shutdown")
    return [after - before for before, after in zip(ends, ends[1:], strict=False)]


def _tokens(stepper: Any) -> list[Any]:
    return [token for output in stepper.step() for token in output.tokens]


def measure(threads: int, steps: int, repetitions: int) -> dict[str, list[float]]:
    """Return the median ns of each repetition of each case."""
    context, arms = get_context("spawn"), {}
    for quantization in QUANTIZATIONS:
        near, far = context.Pipe()
        process = context.Process(
            target=run_cases, args=(quantization, threads, steps, far), daemon=True
        )
        process.start()
        far.close()
        arms[quantization] = (process, near)
    medians: dict[str, list[float]] = {case.name: [] for case in CASES}
    for _ in range(repetitions):
        for case in random.sample(CASES, len(CASES)):
            pipe = arms[case.quantization][1]
            pipe.send(case)
            medians[case.name].append(statistics.median(pipe.recv()))
    for process, pipe in arms.values():
        pipe.close()
        process.join(30)
    return medians


def judge(predicted_ns: float, medians: list[float]) -> dict[str, Any]:
    """Return the error of a prediction beside the spread of repetitions of the same case."""
    measured_ns = statistics.median(medians)
    error = predicted_ns / measured_ns - 1
    spread = max(medians) / min(medians) - 1
    allowed = max(TARGET, SPREADS * spread)
    return {
        "predicted_ms": round(predicted_ns / 1e6, 3),
        "measured_ms": round(measured_ns / 1e6, 3),
        "error": round(error, 4),
        "a_a_spread": round(spread, 4),
        "reached": abs(error) <= allowed,
        "repetitions_ms": [round(ns / 1e6, 3) for ns in medians],
    }


def main() -> None:
    """Predict, run, publish."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, default=1, help="0: one for each core")
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--steps", type=int, default=64)
    asked = parser.parse_args()
    ceilings = measure_ceilings(asked.threads)
    predicted, digest = write_predictions(ceilings, asked.threads)
    before = HostCounters.read()
    medians = measure(asked.threads, asked.steps, asked.repetitions)
    disturbances = before.disturbances(HostCounters.read(), limit=0.02)
    cases = {name: judge(predicted[name], medians[name]) for name in predicted}
    for name, case in cases.items():
        print(
            f"{name:32} predicted {case['predicted_ms']:8.2f} ms, measured"
            f" {case['measured_ms']:8.2f} ms, error {case['error']:+.1%},"
            f" A/A {case['a_a_spread']:.1%}"
        )
    errors = sorted(abs(case["error"]) for case in cases.values())
    result = {
        "model": MODEL,
        "threads": ceilings.threads,
        "steps": asked.steps,
        "predictions_sha256": digest,
        "median_error": statistics.median(errors),
        "largest_error": errors[-1],
        "reached": sum(case["reached"] for case in cases.values()),
        "cases": cases,
        "disturbances": list(disturbances),
    }
    print(f"median error {result['median_error']:.1%}, largest {errors[-1]:.1%}")
    write_result("predict_itl", GOAL, result)


if __name__ == "__main__":
    main()
