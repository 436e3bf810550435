"""What telemetry costs: the hot path alone, and the engine process's CPU per output token.

    python benchmarks/bench_telemetry.py [--restarts 3] [--rounds 8] [--model reference]

The hot path is the engine's own Recorder over a real ring, with no engine around it. The CPU per
token is that of engine processes that serve the same requests with and without telemetry, in
adjacent pairs of random order, against a collector that takes everything. A second pair of
engines, both without telemetry, shows what the method finds where there is nothing to find.
"""

import argparse
import gc
import os
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from concurrent import futures
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import grpc

from perfledger.analyzers.experiments.statistics import paired_effect
from perfledger.instrumented_runtime import engine, exporter
from perfledger.instrumented_runtime.checkpoints.resolve import resolve
from perfledger.instrumented_runtime.messages import (
    Failed,
    Ready,
    SamplingParams,
    Shutdown,
    StepOutput,
    Submit,
)
from perfledger.instrumented_runtime.options import RuntimeOptions
from perfledger.instrumented_runtime.recorder import Recorder
from perfledger.instrumented_runtime.ring import Reader, Ring, Writer
from perfledger.instrumented_runtime.scheduling.plan import Chunk, StepPlan
from perfledger.instrumented_runtime.scheduling.sequences import Request, request_of
from perfledger.instrumented_runtime.telemetry import (
    RankRing,
    RequestRecord,
    TelemetrySender,
    open_channel,
)
from perfledger.schema.clocks import monotonic_ns, take_anchor

sys.path.insert(0, str(Path(__file__).parent))  # python -P leaves it out
from recording import write_result  # noqa: E402

PROMPT_TOKENS, OUTPUT_TOKENS, BLOCK_SIZE = 64, 128, 16
SPAWN = get_context("spawn")


# --- the hot path alone ---


def hot_path(batch: int, repeats: int = 200) -> dict[str, float]:
    """Return us of thread CPU time a step, for requests that live for OUTPUT_TOKENS steps."""
    ring = Ring.create(65_536)
    reader, recorder = Reader.attach(ring.name), Recorder(Writer.attach(ring.name).write)
    requests = [request_of(submit(number)) for number in range(batch)]
    gc.disable()
    per_step = []
    for _ in range(repeats):
        start_ns = time.thread_time_ns()
        write_life(recorder, requests)
        per_step.append((time.thread_time_ns() - start_ns) / OUTPUT_TOKENS / 1000)
        reader.read(65_536)
    gc.enable()
    assert ring.counts().dropped == 0
    ring.close()
    return {"median_us": statistics.median(per_step), "min_us": min(per_step)}


def write_life(recorder: Recorder, requests: list[Request]) -> None:
    """Write all records of a batch that is admitted at once and leaves at once."""
    sequences = [one.sequences[0] for one in requests]
    chunks = [Chunk(one, 0, PROMPT_TOKENS, (one,), last=True) for one in sequences]
    for chunk in chunks:
        recorder.admit(chunk.sequence.of, 1, 1, 1, 0)
        recorder.chunks([chunk], 1, BLOCK_SIZE)
    recorder.step(StepPlan(0, [], chunks), 1, (1, 2, 3, 4, 5), (0, 100, 1000))
    decode = StepPlan(0, sequences, [])
    for seq in range(2, OUTPUT_TOKENS + 1):
        recorder.step(decode, seq, (1, 2, 3, 4, 5), (0, 100, 1000), gathered_blocks=8)
    for one in requests:
        recorder.leave(one, OUTPUT_TOKENS, 1, "length")


def submit(number: int) -> Submit:
    """Return a request with the ids and times of a real one."""
    prompt = [1 + (number + at) % 500 for at in range(PROMPT_TOKENS)]
    sampling = SamplingParams(max_tokens=OUTPUT_TOKENS)
    ids = random.getrandbits(128), random.getrandbits(64)
    return Submit(number, prompt, sampling, *ids, sent_ns=monotonic_ns())


# --- CPU per token of an engine process ---


@dataclass
class Engine:
    """An engine process and, with telemetry, the exporter beside it."""

    connection: Connection
    pid: int
    exporter_pid: int | None
    sender: TelemetrySender | None
    requests: int = 0

    def serve(self, batch: int) -> float:
        """Serve a batch of requests to their ends; return ns of engine CPU an output token."""
        before_ns, tokens, ended = process_cpu_ns(self.pid), 0, 0
        first = self.requests
        self.requests += batch
        submits = [submit(number) for number in range(first, self.requests)]
        for one in submits:
            self.connection.send(one)
        while ended < batch:
            message = self.connection.recv()
            if isinstance(message, Failed):
                raise SystemExit(message.detail)
            assert isinstance(message, StepOutput)
            tokens += len(message.tokens)
            ended += sum(token.finish is not None for token in message.tokens)
        for one in submits:
            self._tell(one)
        return (process_cpu_ns(self.pid) - before_ns) / tokens

    def _tell(self, one: Submit) -> None:
        """Send what the API would send at the end of a request."""
        if self.sender:
            ids = one.request, one.trace_id, one.span_id, None
            end_ns = monotonic_ns()
            self.sender.send(RequestRecord(*ids, "chat", one.sent_ns, end_ns, "ok", {}, []))


@contextmanager
def running_engine(options: RuntimeOptions, checkpoint: Path, telemetry: bool) -> Iterator[Engine]:
    with ExitStack() as stack:
        ring_name, exporter_pid, sender = None, None, None
        if telemetry:
            ring_name, exporter_pid, sender = stack.enter_context(running_exporter())
        near, far = SPAWN.Pipe()
        process = SPAWN.Process(target=engine.main, args=(options, checkpoint, far, ring_name))
        process.start()
        far.close()
        ready = near.recv()
        assert isinstance(ready, Ready), ready
        assert process.pid is not None
        yield Engine(near, process.pid, exporter_pid, sender)
        near.send(Shutdown())
        process.join()


@contextmanager
def running_exporter() -> Iterator[tuple[str, int, TelemetrySender]]:
    ring, (near, far) = Ring.create(65_536), open_channel()
    arguments = ([RankRing(ring.name)], far, take_anchor(), {"service.name": "bench"})
    process = SPAWN.Process(target=exporter.main, args=arguments)
    process.start()
    far.close()
    assert process.pid is not None
    sender = TelemetrySender(near)
    yield ring.name, process.pid, sender
    sender.close()
    process.join()
    print(f"  telemetry: {ring.counts()}")
    ring.close()


@contextmanager
def discarding_collector() -> Iterator[None]:
    """Serve OTLP over gRPC, take every request without looking at it, point OTEL_* here."""

    class Everything(grpc.GenericRpcHandler):
        def service(self, _: Any) -> Any:
            return grpc.unary_unary_rpc_method_handler(lambda request, context: b"")

    server = grpc.server(futures.ThreadPoolExecutor(2), handlers=[Everything()])
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    os.environ["OTEL_EXPORTER_OTLP_ENDPOINT"] = f"http://127.0.0.1:{port}"
    yield
    server.stop(0).wait()


def process_cpu_ns(pid: int) -> int:
    """Return the CPU time of all threads of a process: its CPU clock, numbered as Linux does."""
    return time.clock_gettime_ns((~pid << 3) | 2)


def compare(
    start: Callable[[bool], Any], batch: int, restarts: int, rounds: int, telemetry: bool
) -> dict[str, Any]:
    """Run pairs of (without, with `telemetry`) and return the ratios' statistics."""
    without, given, exporter_ns = [], [], []
    for _ in range(restarts):
        with start(False) as off, start(telemetry) as on:
            off.serve(batch), on.serve(batch)  # warm-up
            exported_ns = process_cpu_ns(on.exporter_pid) if telemetry else 0
            for _ in range(rounds):
                sides = [(off, without), (on, given)]
                random.shuffle(sides)
                for side, costs in sides:
                    costs.append(side.serve(batch))
            if telemetry:
                time.sleep(2)  # it sends once a second
                spent_ns = process_cpu_ns(on.exporter_pid) - exported_ns
                exporter_ns.append(spent_ns / (rounds * batch * OUTPUT_TOKENS))
    effect = paired_effect(without, given)
    ratios = [b / a for a, b in zip(without, given, strict=True)]
    return {
        "pairs": len(ratios),
        "median_ratio_less_1": statistics.median(ratios) - 1,
        "interval_95_log_ratio": [effect.interval.low, effect.interval.high],
        "engine_us_per_token_without": statistics.median(without) / 1000,
        "engine_us_per_token_with": statistics.median(given) / 1000,
        "exporter_us_per_token": statistics.median(exporter_ns) / 1000 if telemetry else None,
        "raw_ns_per_token": {"without": without, "with": given},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--restarts", type=int, default=3, help="fresh pairs of engines")
    parser.add_argument("--rounds", type=int, default=8, help="pairs of runs of each")
    parser.add_argument("--batch", type=int, default=8, help="requests at once")
    parser.add_argument("--model", default="reference")
    parser.add_argument("--threads", type=int, default=1)
    asked = parser.parse_args()

    hot = {f"batch_{batch}": hot_path(batch) for batch in (1, 32)}
    print("hot path, us a step:", hot)
    write_result(
        "telemetry_hot_path",
        "at most 2 us a step at batch 1 and 4 us at batch 32",
        {**hot, "steps_per_request": OUTPUT_TOKENS},
    )

    options = RuntimeOptions(model=asked.model, threads=asked.threads)
    checkpoint = resolve(asked.model)

    def start(telemetry: bool) -> Any:
        return running_engine(options, checkpoint, telemetry)

    with discarding_collector():
        found = {
            name: compare(start, asked.batch, asked.restarts, asked.rounds, telemetry)
            for name, telemetry in (("on_against_off", True), ("off_against_off", False))
        }
    for name, result in found.items():
        print(name, {key: value for key, value in result.items() if key != "raw_ns_per_token"})
    write_result(
        "telemetry_engine_cpu",
        "engine CPU per output token with telemetry at most 2 % above that without",
        {**vars(asked), **found},
    )


if __name__ == "__main__":
    main()
