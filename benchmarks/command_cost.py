"""What a command costs that is run on a store as a user would: its wall time, CPU and memory."""

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
RUNS = 5
GIB = 2**30


def cost_on_store(
    command: str, maker: str, size: int, wall_s: float, expect: Callable[[str], Callable[..., None]]
) -> dict[str, Any]:
    """Run `perfledger COMMAND --json` several times on a store that the script `maker` makes.

    `expect` is given the store's folder once, and returns what checks each answer against the
    maker's counts. Reached is a median below `wall_s` and a peak below 1 GiB.
    """
    with tempfile.TemporaryDirectory() as folder:
        # In a process of its own: a child's peak memory starts at what its parent holds.
        make = [sys.executable, str(HERE / maker), folder, str(size)]
        rows = json.loads(subprocess.run(make, check=True, capture_output=True).stdout)
        stored = sum(path.stat().st_size for path in Path(folder).rglob("*.parquet"))
        check = expect(folder)
        runs = []
        for _ in range(RUNS):
            printed, cost = _run(command, folder)
            check(printed, rows)
            runs.append(cost)
    walls = [run["wall_s"] for run in runs]
    peaks = [run["peak_rss_bytes"] for run in runs]
    print(f"wall {[round(wall, 2) for wall in walls]} s, peak {max(peaks) / 2**20:.0f} MiB")
    return {
        "rows": rows,
        "store_bytes": stored,
        "runs": runs,
        "wall_s_median": statistics.median(walls),
        "wall_s_min": min(walls),
        "peak_rss_bytes_max": max(peaks),
        "reached": statistics.median(walls) < wall_s and max(peaks) < GIB,
    }


def _run(command: str, store: str) -> tuple[Mapping[str, Any], dict[str, float]]:
    """Run it once; what it printed, and from the kernel its CPU time and peak memory."""
    line = [sys.executable, "-P", "-m", "perfledger", command, "--json", "--store", store]
    before = time.monotonic()
    process = subprocess.Popen(line, stdout=subprocess.PIPE)
    assert process.stdout is not None
    printed = process.stdout.read()
    _, status, usage = os.wait4(process.pid, 0)
    wall_s = time.monotonic() - before
    process.returncode = os.waitstatus_to_exitcode(status)
    assert process.returncode == 0, f"perfledger {command} ended with {process.returncode}"
    return json.loads(printed), {
        "wall_s": wall_s,
        "cpu_s": usage.ru_utime + usage.ru_stime,
        "peak_rss_bytes": usage.ru_maxrss * 1024,
    }
