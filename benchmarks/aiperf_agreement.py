"""Do AIPerf's numbers agree with the server's spans? Request by request, over one run.

    python benchmarks/aiperf_agreement.py --aiperf PATH/bin/aiperf [--requests 60] [--concurrency 4]

AIPerf (NVIDIA's load generator) wants an environment of its own, and is no dependency:
python -m venv aiperf-env; aiperf-env/bin/pip install aiperf. It drives `perfledger serve --model
reference-small` over streamed chats, offline, while `perfledger collect` keeps the spans; its
records and the store's requests are joined by the answer's id. Both sides read one monotonic
clock, so instants are compared too. Ends with 1 where counts differ, or where the client saw
something before the server did it.
"""

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import polars as pl
from collect_servers import collector, free_port, running, wait_until
from recording import write_result

from perfledger.instrumented_runtime.checkpoints.resolve import resolve
from perfledger.schema.clocks import take_anchor
from perfledger.schema.store import Store

GOAL = "client minus server >= 0 and within the transport; token counts equal"
MODEL = "reference-small"
TOKENIZER = "local/reference"  # as Hugging Face's cache names it
REVISION = "0" * 40
SETTLE_S = 60
RUN_S = 900
INPUT_TOKENS = 100


@dataclass(frozen=True)
class Seen:
    """One request as AIPerf saw it; times are ns of the monotonic clock."""

    answer_id: str
    start_ns: int
    first_ns: int  # first chunk
    last_ns: int  # last chunk with text
    chunks: int  # with text
    input_tokens: int
    output_tokens: int
    cached_tokens: int
    itl_ns: float  # by AIPerf: (latency - TTFT) / (output tokens - 1)


def main() -> int:
    """Run it once and write results/aiperf_agreement.json."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--aiperf", default=os.environ.get("AIPERF") or shutil.which("aiperf"))
    parser.add_argument("--requests", type=int, default=60)
    parser.add_argument("--concurrency", type=int, default=4)
    parser.add_argument("--output-tokens", type=int, default=32)
    args = parser.parse_args()
    if not args.aiperf:
        print("aiperf not found: name it with --aiperf or AIPERF", file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory(prefix="aiperf-") as folder:
        seen, rows, version = _run(Path(folder), args)
    result = compare(seen, rows)
    result |= {"aiperf": version, "model": MODEL, "concurrency": args.concurrency}
    write_result("aiperf_agreement", GOAL, result)
    for name, value in result.items():
        print(f"{name:28} {value}")
    return 1 if result["mismatches"] else 0


def _run(folder: Path, args: argparse.Namespace) -> tuple[list[Seen], pl.DataFrame, str]:
    with collector(folder) as receiver:
        with _runtime(folder, receiver.ports["grpc"]) as url:
            out = _profile(folder, url, args)
        assert receiver.store is not None
        seen = read_records(out)
        wait_until(lambda: len(_rows(receiver.store, seen)) == len(seen), SETTLE_S, "requests")
        rows = _rows(receiver.store, seen)
    version = json.loads((out / "profile_export_aiperf.json").read_text())["aiperf_version"]
    return seen, rows, str(version)


@contextmanager
def _runtime(folder: Path, otlp_port: int) -> Iterator[str]:
    port = free_port()
    command = [sys.executable, "-P", "-m", "perfledger", "serve", "--model", MODEL]
    command += ["--port", str(port), "--threads", "1"]
    endpoint = f"http://127.0.0.1:{otlp_port}"
    log = folder / "serve.log"
    with running("serve", command, {"http": port}, None, log, OTEL_EXPORTER_OTLP_ENDPOINT=endpoint):
        wait_until(lambda: "/v1" in log.read_text(), 120, "the model")
        yield f"http://127.0.0.1:{port}"


def _profile(folder: Path, url: str, args: argparse.Namespace) -> Path:
    """Run AIPerf and return its folder of results."""
    out = folder / "out"
    command = [args.aiperf, "profile", "--model", MODEL, "--url", url, "--endpoint-type", "chat"]
    command += ["--streaming", "--tokenizer", TOKENIZER, "--use-server-token-count"]
    command += ["--concurrency", str(args.concurrency), "--request-count", str(args.requests)]
    command += ["--warmup-request-count", "4", "--random-seed", "42", "--ui", "none"]
    command += ["--synthetic-input-tokens-mean", str(INPUT_TOKENS)]
    command += ["--output-tokens-mean", str(args.output_tokens), "--output-tokens-stddev", "0"]
    command += ["--extra-inputs", "ignore_eos:true", "--export-level", "raw"]
    command += ["--output-artifact-dir", str(out)]
    offline = {"HF_HOME": str(_tokenizer_cache(folder / "hf")), "HF_HUB_OFFLINE": "1"}
    with open(folder / "aiperf.log", "wb") as log:
        done = subprocess.run(
            command, stdout=log, stderr=log, env={**os.environ, **offline}, timeout=RUN_S
        )
    if done.returncode:
        raise SystemExit(f"aiperf ended with {done.returncode}:\n{_tail(folder / 'aiperf.log')}")
    return out


def _tokenizer_cache(home: Path) -> Path:
    """Lay our tokenizer where Hugging Face's cache would have it: AIPerf must not go online."""
    checkpoint, entry = resolve(MODEL), home / "hub" / f"models--{TOKENIZER.replace('/', '--')}"
    snapshot = entry / "snapshots" / REVISION
    snapshot.mkdir(parents=True)
    (entry / "refs").mkdir()
    (entry / "refs" / "main").write_text(REVISION)
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        shutil.copy(checkpoint / name, snapshot / name)
    return home


def _tail(log: Path) -> str:
    return "\n".join(log.read_text(errors="replace").splitlines()[-15:])


# --- what AIPerf saw, from its raw export ---


def read_records(out: Path) -> list[Seen]:
    """Return the measured requests (no warm-up) of AIPerf's raw export."""
    metrics = {
        record["metadata"]["x_request_id"]: record["metrics"]
        for record in _lines(out / "profile_export.jsonl")
    }
    return [
        _seen(record, metrics[record["metadata"]["x_request_id"]])
        for record in _lines(out / "profile_export_raw.jsonl")
        if record["metadata"]["phase_kind"] != "warmup"
    ]


def _seen(record: dict[str, Any], metrics: dict[str, Any]) -> Seen:
    events = [
        (response["perf_ns"], json.loads(packet["value"]))
        for response in record["responses"]
        for packet in response["packets"]
        if packet["value"] != "[DONE]"
    ]
    texts = [
        at_ns
        for at_ns, event in events
        if any(choice["delta"].get("content") for choice in event["choices"])
    ]
    return Seen(
        answer_id=events[0][1]["id"],
        start_ns=record["start_perf_ns"],
        first_ns=record["start_perf_ns"] + round(metrics["time_to_first_token"]["value"] * 1e6),
        last_ns=texts[-1],
        chunks=len(texts),
        input_tokens=metrics["usage_prompt_tokens"]["value"],
        output_tokens=metrics["output_sequence_length"]["value"],
        cached_tokens=metrics["usage_prompt_cache_read_tokens"]["value"],
        itl_ns=metrics["inter_token_latency"]["value"] * 1e6,
    )


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    with open(path, encoding="utf-8") as file:
        yield from (json.loads(line) for line in file)


# --- what the server's spans say ---


def _rows(store: Store, seen: Sequence[Seen]) -> pl.DataFrame:
    """Return the store's requests that AIPerf measured, each with its answer's id."""
    ids = (
        store.scan("spans")
        .filter(pl.col("kind") == "server")
        .select("trace_id", "span_id", "attributes")
        .explode("attributes")
        .unnest("attributes")
        .filter(pl.col("key") == "gen_ai.response.id")
        .select("trace_id", "span_id", answer_id="text")
    )
    wanted = pl.col("answer_id").is_in([one.answer_id for one in seen])
    requests = store.scan("requests")
    return requests.join(ids, on=["trace_id", "span_id"]).filter(wanted).collect()


def compare(seen: Sequence[Seen], rows: pl.DataFrame) -> dict[str, Any]:
    """Return how the two sides differ; `mismatches` names what cannot be explained."""
    served = {row["answer_id"]: row for row in rows.to_dicts()}
    pairs = [(one, served[one.answer_id]) for one in seen]
    to_wall_ns = take_anchor().to_wall_ns
    differences = {
        "ttft_minus_ttfc": [one.first_ns - one.start_ns - row["ttfc_ns"] for one, row in pairs],
        "ttft_minus_server_ttft": [
            one.first_ns - one.start_ns - row["ttft_ns"] for one, row in pairs
        ],
        "start_to_arrival": [row["arrival_ns"] - to_wall_ns(one.start_ns) for one, row in pairs],
        "last_sample_to_last_chunk": [
            to_wall_ns(one.last_ns) - row["token_times_ns"][-1] for one, row in pairs
        ],
        "itl_minus_server_itl": [one.itl_ns - _server_itl_ns(row) for one, row in pairs],
    }
    never_negative = list(differences)[:-1]
    mismatches = [name for name in never_negative if min(differences[name]) < 0]
    for name in ("input_tokens", "output_tokens", "cached_tokens"):
        if any(getattr(one, name) != row[name] for one, row in pairs):
            mismatches.append(name)
    return {
        "requests": len(pairs),
        "output_tokens": sum(one.output_tokens for one in seen),
        "chunks_with_text": sum(one.chunks for one in seen),
        "ttft_ms": round(statistics.fmean(one.first_ns - one.start_ns for one in seen) / 1e6, 3),
        "itl_ms": round(statistics.fmean(one.itl_ns for one in seen) / 1e6, 3),
        **{f"{name}_ms": _spread_ms(values) for name, values in differences.items()},
        "mismatches": mismatches,
    }


def _server_itl_ns(row: dict[str, Any]) -> float:
    times = row["token_times_ns"]
    return float(times[-1] - times[0]) / (len(times) - 1)


def _spread_ms(values: Sequence[float]) -> dict[str, float]:
    found = {"min": min(values), "median": statistics.median(values), "max": max(values)}
    return {name: round(value / 1e6, 3) for name, value in found.items()}


if __name__ == "__main__":
    sys.exit(main())
