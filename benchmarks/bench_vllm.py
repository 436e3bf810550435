"""Inter-token latency beside vLLM's, on the same checkpoint, threads and client, in one run.

    python benchmarks/bench_vllm.py --vllm DIR/bin/vllm [--pairs 5] [--threads 2]

Both servers are started once and stay; batches of 1, 8 and 32 requests (128 prompt tokens, 96
sampled, greedy) go to one and then to the other, in random order. ITL is the median gap between a
request's chunks while all requests of the batch decode, so that prefills do not count. Target: at
most 1.15 times vLLM's. Without --vllm (or VLLM) it says so and ends with 0.
"""

import argparse
import asyncio
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import aiohttp

from perfledger.instrumented_runtime.checkpoints.resolve import resolve

sys.path.insert(0, str(Path(__file__).parent))  # python -P leaves it out
from collect_servers import free_port  # noqa: E402
from recording import write_result  # noqa: E402

WIDTHS = (1, 8, 32)
PROMPT, OUTPUT = 128, 96
GOAL = "ITL at batch 1, 8 and 32 at most 1.15x that of vLLM on the same CPU, checkpoint and threads"
STARTS_WITHIN_S = 180.0
QUIET = {"OMP_WAIT_POLICY": "passive", "GOMP_SPINCOUNT": "0"}
VLLM_ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
}


def vllm_command(binary: str, folder: Path, port: int) -> list[str]:
    """Return the command that serves `folder` with the same limits as ours."""
    return [
        *(binary, "serve", str(folder), "--served-model-name", "m", "--dtype", "float32"),
        *("--max-model-len", "1024", "--max-num-seqs", "32", "--block-size", "32"),
        *("--enforce-eager", "--host", "127.0.0.1", "--port", str(port)),
    ]


def our_command(folder: Path, port: int, threads: int) -> list[str]:
    """Return the command that serves `folder` with us, telemetry on."""
    return [
        *(sys.executable, "-P", "-m", "perfledger", "serve", "--model", str(folder)),
        *("--dtype", "float32", "--max-model-len", "1024", "--max-num-seqs", "32"),
        *("--max-num-batched-tokens", "512", "--threads", str(threads), "--port", str(port)),
    ]


@contextmanager
def server(name: str, command: list[str], port: int, environment: dict[str, str]) -> Iterator[str]:
    """Run a server; give its URL once it answers."""
    url = f"http://127.0.0.1:{port}"
    with tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen(
            command, stdout=log, stderr=subprocess.STDOUT, env={**os.environ, **environment}
        )
        try:
            deadline = time.monotonic() + STARTS_WITHIN_S
            while not answers(url):
                if process.poll() is not None or time.monotonic() > deadline:
                    log.seek(0)
                    raise SystemExit(f"{name} does not answer:\n{log.read()[-3000:]}")
                time.sleep(0.5)
            yield url
        finally:
            process.terminate()
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def answers(url: str) -> bool:
    """Whether /health says 200."""
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=2) as response:
            return bool(response.status == 200)
    except OSError:
        return False


async def one_request(
    client: aiohttp.ClientSession, url: str, model: str, seed: int
) -> list[float]:
    """Send one request; return when each chunk with a token came, s."""
    body = {
        "model": model,
        "prompt": random.Random(seed).choices(range(300, 4000), k=PROMPT),
        "max_tokens": OUTPUT,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
    }
    times = []
    async with client.post(f"{url}/v1/completions", json=body) as response:
        response.raise_for_status()
        async for line in response.content:
            if line.startswith(b"data: {") and json.loads(line[6:])["choices"]:
                times.append(time.perf_counter())
    return times


async def batch(url: str, model: str, width: int, seed: int) -> float:
    """Send `width` requests at once; return the median ITL while all of them decode, ms."""
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=width)) as client:
        sends = (one_request(client, url, model, seed * 1000 + n) for n in range(width))
        requests = await asyncio.gather(*sends)
    begin, end = max(times[0] for times in requests), min(times[-1] for times in requests)
    gaps = [
        late - early
        for times in requests
        for early, late in zip(times, times[1:], strict=False)
        if early >= begin and late <= end
    ]
    if len(gaps) < width * OUTPUT / 4:
        raise SystemExit(f"only {len(gaps)} gaps in which all {width} requests decode")
    return statistics.median(gaps) * 1000


def measure(urls: dict[str, tuple[str, str]], pairs: int) -> dict[str, Any]:
    """Return for each width the raw ITLs of both, and the median ratio."""
    result: dict[str, Any] = {}
    for width in WIDTHS:
        raw: dict[str, list[float]] = {name: [] for name in urls}
        for pair in range(pairs + 1):
            for name in random.sample(list(urls), len(urls)):
                itl_ms = asyncio.run(batch(*urls[name], width, pair))
                if pair:  # the first is the warm-up
                    raw[name].append(round(itl_ms, 3))
        ratios = [ours / theirs for ours, theirs in zip(raw["ours"], raw["vllm"], strict=True)]
        result[f"batch_{width}"] = {
            "itl_ms": {name: round(statistics.median(values), 2) for name, values in raw.items()},
            "ratio": round(statistics.median(ratios), 3),
            "ratios": [round(ratio, 3) for ratio in ratios],
            "raw_itl_ms": raw,
        }
        print(f"batch {width:>2}: {result[f'batch_{width}']['itl_ms']}, ratio", end=" ")
        print(result[f"batch_{width}"]["ratio"], flush=True)
    return result


def main() -> None:
    """Measure and write the result."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--vllm", default=os.environ.get("VLLM", ""), help="the vllm program")
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--model", default="reference")
    asked = parser.parse_args()
    if not asked.vllm:
        print("no vLLM: give --vllm DIR/bin/vllm (or VLLM); nothing was measured")
        return
    folder, ports = resolve(asked.model), (free_port(), free_port())
    threads = {**QUIET, "OMP_NUM_THREADS": str(asked.threads)}
    theirs = vllm_command(asked.vllm, folder, ports[0])
    ours = our_command(folder, ports[1], asked.threads)
    with (
        server("vLLM", theirs, ports[0], threads | VLLM_ENVIRONMENT) as vllm_url,
        server("perfledger", ours, ports[1], threads) as our_url,
    ):
        urls = {"vllm": (vllm_url, "m"), "ours": (our_url, folder.name)}
        result = measure(urls, asked.pairs)
    write_result("vllm", GOAL, {"threads": asked.threads, "model": asked.model, **result})


if __name__ == "__main__":
    main()
