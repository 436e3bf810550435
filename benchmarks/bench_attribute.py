"""How long `perfledger attribute` takes over 100,000 requests, and how much memory it needs.

    python benchmarks/bench_attribute.py [REQUESTS]

It makes a store (spans, steps and derived requests, about 60 MB), then runs the command as a user
would, several times, and measures each process from the outside.
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))  # python -P leaves it out
from recording import write_result  # noqa: E402

HERE = Path(__file__).parent
GOAL = "perfledger attribute over 100,000 requests: under 5 s, under 1 GiB"
RUNS = 5
COMMAND = [sys.executable, "-P", "-m", "perfledger", "attribute", "--json", "--store"]


def main() -> None:
    requests = int(sys.argv[1]) if len(sys.argv) > 1 else 100_000
    with tempfile.TemporaryDirectory() as folder:
        # In a process of its own: a child's peak memory starts at what its parent holds.
        make = [sys.executable, str(HERE / "synthetic_store.py"), folder, str(requests)]
        rows = json.loads(subprocess.run(make, check=True, capture_output=True).stdout)
        stored = sum(path.stat().st_size for path in Path(folder).rglob("*.parquet"))
        runs = [_measure(folder, requests) for _ in range(RUNS)]
    walls = [run["wall_s"] for run in runs]
    peaks = [run["peak_rss_bytes"] for run in runs]
    result = {
        "rows": rows,
        "store_bytes": stored,
        "runs": runs,
        "wall_s_median": statistics.median(walls),
        "wall_s_min": min(walls),
        "peak_rss_bytes_max": max(peaks),
        "reached": statistics.median(walls) < 5 and max(peaks) < 2**30,
    }
    print(f"wall {[round(wall, 2) for wall in walls]} s, peak {max(peaks) / 2**20:.0f} MiB")
    write_result("attribute", GOAL, result)


def _measure(store: str, requests: int) -> dict[str, float]:
    """Run the command once; wall time and, from the kernel, CPU time and peak memory."""
    before = time.monotonic()
    process = subprocess.Popen([*COMMAND, store], stdout=subprocess.PIPE)
    assert process.stdout is not None
    printed = json.loads(process.stdout.read())
    _, status, usage = os.wait4(process.pid, 0)
    wall_s = time.monotonic() - before
    process.returncode = os.waitstatus_to_exitcode(status)
    assert (process.returncode, printed["requests"]) == (0, requests)
    return {
        "wall_s": wall_s,
        "cpu_s": usage.ru_utime + usage.ru_stime,
        "peak_rss_bytes": usage.ru_maxrss * 1024,
    }


if __name__ == "__main__":
    main()
