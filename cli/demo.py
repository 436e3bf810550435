"""The demo, wired: real weights under a real workload, traced, attributed, and one rerun."""

import asyncio
import json
import secrets
import tempfile
import urllib.request
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

from perfledger.collecting import collecting
from perfledger.instrumented_runtime.load.formats import read_workload
from perfledger.instrumented_runtime.load.generator import generate
from perfledger.instrumented_runtime.load.open_loop import run_load
from perfledger.instrumented_runtime.load.plan import LoadPlan, LoadResult
from perfledger.instrumented_runtime.load.results import write_result
from perfledger.instrumented_runtime.load.workload import Scaling, Workload, scale
from perfledger.instrumented_runtime.targets.reference import (
    VARIABLES,
    ReferenceTarget,
    serving,
)
from perfledger.progress import Advance
from perfledger.schema.clocks import monotonic_ns
from perfledger.schema.errors import PerfledgerError
from perfledger.schema.store import Store

QUESTION = "What is the capital of France? Answer in one sentence."
ANSWER_TOKENS = 32
SLOTS = 8
# The workload is fitted to the machine: mean lengths at most these, and about this much work.
MEAN_INPUT, MEAN_OUTPUT = 96, 20
MAX_INPUT, MAX_OUTPUT = 384, 64
WORK_S = 35.0
FEWEST_REQUESTS = 8
# Of the work's time at one request at a time; batching makes up for the rest.
UTILISATION = 0.9
PROBE_TIMEOUT_S = 120.0

Progress = Callable[[int, str], AbstractContextManager[Advance]]


@dataclass(frozen=True)
class DemoSettings:
    """Where the demo keeps its data and what it replays; None generates azure-code."""

    store: str
    namespace: str
    model: str
    requests: int
    workload: Path | None
    seed: int = 0


@dataclass(frozen=True)
class Probe:
    """One real answer, and what a token costs this machine at one request at a time."""

    answer: str
    prompt_tokens: int
    output_tokens: int
    prefill_ns: int  # for one prompt token
    decode_ns: int  # for one output token


@dataclass(frozen=True)
class Served:
    """What the serving part of the demo did; its telemetry is in the store under `run_id`."""

    run_id: str
    probe: Probe
    load: LoadResult

    @property
    def measured_from_ns(self) -> int:
        """Wall time of the schedule's start: probes and warm-up came before."""
        return self.load.anchor.to_wall_ns(self.load.started_ns)


def serve_and_load(
    settings: DemoSettings, say: Callable[[str], None], progress: Progress
) -> Served:
    """Serve the model, ask it, load it; returns when all telemetry is written.

    Raises UsageError for a workload that cannot be read, PerfledgerError where the server fails.
    """
    workload = _read(settings)
    run_id = f"demo-{secrets.token_hex(4)}"
    with tempfile.TemporaryDirectory(prefix="perfledger-demo-") as folder:
        logs = Path(folder)
        with collecting(settings.store, settings.namespace, logs) as endpoint:
            target = ReferenceTarget(settings.model, endpoint)
            slots = VARIABLES["max_num_seqs"]
            log = logs / "serve.log"
            with serving(target, slots, SLOTS, run_id=run_id, log=log) as server:
                probe = ask(server.url)
                say(f"  {QUESTION}\n  → {probe.answer}")
                fitted = fit(workload, probe, settings.requests)
                say(f"  replaying {_described(fitted)}")
                plan = LoadPlan(
                    server.url, fitted, endpoint="chat", run_id=run_id, seed=settings.seed
                )
                with progress(len(fitted.arrivals), "load") as advance:
                    result = asyncio.run(run_load(plan, on_sample=lambda sample: advance()))
    write_result(Store.at(settings.store, settings.namespace), result)
    if not any(not sample.error for sample in result.measured):
        raise PerfledgerError("no request of the workload was answered", where=run_id)
    return Served(run_id, probe, result)


def ask(url: str) -> Probe:
    """Ask one real question and time a long and a short prompt, streamed, one after another."""
    words = " ".join(["word"] * 128)
    _timed(url, words, 1)  # the first one pays for lazy set-up
    first_ns, _, prompt_tokens, _, _ = _timed(url, words, 1)
    answer_first_ns, answer_ns, asked, output_tokens, answer = _timed(url, QUESTION, ANSWER_TOKENS)
    return Probe(
        answer=answer.strip(),
        prompt_tokens=asked,
        output_tokens=output_tokens,
        prefill_ns=first_ns // max(1, prompt_tokens),
        decode_ns=(answer_ns - answer_first_ns) // max(1, output_tokens - 1),
    )


def fit(workload: Workload, probe: Probe, requests: int) -> Workload:
    """Scale a workload to this machine by declared factors: lengths, count and rate."""
    arrivals = workload.arrivals
    mean_input = sum(a.input_tokens for a in arrivals) / len(arrivals)
    mean_output = sum(a.output_tokens for a in arrivals) / len(arrivals)
    lengths = {
        "input_scale": min(1.0, round(MEAN_INPUT / mean_input, 4)),
        "output_scale": min(1.0, round(MEAN_OUTPUT / mean_output, 4)),
        "max_input": MAX_INPUT,
        "max_output": MAX_OUTPUT,
    }
    shaped = scale(workload, Scaling(**lengths))  # type: ignore[arg-type]
    each_s = sum(
        a.input_tokens * probe.prefill_ns + a.output_tokens * probe.decode_ns
        for a in shaped.arrivals
    ) / (1e9 * len(arrivals))
    count = min(requests, len(arrivals), max(FEWEST_REQUESTS, int(WORK_S / each_s)))
    rate = round(UTILISATION / each_s, 3)
    return scale(workload, Scaling(**lengths, limit=count, rate=rate, spread_grid=True))  # type: ignore[arg-type]


def _read(settings: DemoSettings) -> Workload:
    if settings.workload is None:
        return generate("azure-code", settings.requests, settings.seed)
    return read_workload(settings.workload, settings.requests)


def _described(workload: Workload) -> str:
    scaling = workload.scaling
    factors = (
        f"lengths x{scaling.input_scale:g} in, x{scaling.output_scale:g} out,"
        f" {scaling.rate:g} requests/s"
    )
    return f"{len(workload.arrivals)} requests of {workload.source}\n  ({factors})"


def _timed(url: str, text: str, max_tokens: int) -> tuple[int, int, int, int, str]:
    """Return first-chunk and end times (ns after sending), usage counts and the answer."""
    content = {
        "messages": [{"role": "user", "content": text}],
        "max_tokens": max_tokens,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    request = urllib.request.Request(
        f"{url}/v1/chat/completions",
        json.dumps(content).encode(),
        {"Content-Type": "application/json"},
    )
    started_ns = monotonic_ns()
    first_ns, pieces, usage = 0, [], {"prompt_tokens": 0, "completion_tokens": 0}
    with urllib.request.urlopen(request, timeout=PROBE_TIMEOUT_S) as response:
        for line in response:
            if not line.startswith(b"data: {"):
                continue
            event = json.loads(line[6:])
            usage = event.get("usage") or usage
            for choice in event["choices"]:
                if piece := choice["delta"].get("content"):
                    first_ns = first_ns or monotonic_ns() - started_ns
                    pieces.append(piece)
    ended_ns = monotonic_ns() - started_ns
    counts = (usage["prompt_tokens"], usage["completion_tokens"])
    return first_ns or ended_ns, ended_ns, *counts, "".join(pieces)
