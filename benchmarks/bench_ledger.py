"""How long `perfledger ledger` takes over a million engine steps, and how much memory it needs.

    python benchmarks/bench_ledger.py [STEPS]

It makes a store (steps with their work, four spans for each of them, points of a host sampler,
ceilings; about 400 MB), then runs the command as a user would, several times, and measures each
process from the outside. The sums that it prints are compared with those of the table.
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
GOAL = "perfledger ledger over a million steps: under 3 s, under 1 GiB"
RUNS = 5
COMMAND = [sys.executable, "-P", "-m", "perfledger", "ledger", "--json", "--store"]


def main() -> None:
    steps = int(sys.argv[1]) if len(sys.argv) > 1 else 1_000_000
    with tempfile.TemporaryDirectory() as folder:
        # In a process of its own: a child's peak memory starts at what its parent holds.
        make = [sys.executable, str(HERE / "synthetic_steps.py"), folder, str(steps)]
        rows = json.loads(subprocess.run(make, check=True, capture_output=True).stdout)
        stored = sum(path.stat().st_size for path in Path(folder).rglob("*.parquet"))
        expected = _sums(folder)
        runs = [_measure(folder, rows["steps"], expected) for _ in range(RUNS)]
    walls = [run["wall_s"] for run in runs]
    peaks = [run["peak_rss_bytes"] for run in runs]
    result = {
        "rows": rows,
        "store_bytes": stored,
        "runs": runs,
        "wall_s_median": statistics.median(walls),
        "wall_s_min": min(walls),
        "peak_rss_bytes_max": max(peaks),
        "reached": statistics.median(walls) < 3 and max(peaks) < 2**30,
    }
    print(f"wall {[round(wall, 2) for wall in walls]} s, peak {max(peaks) / 2**20:.0f} MiB")
    write_result("ledger", GOAL, result)


def _sums(folder: str) -> list[int]:
    """Return the bytes read and written of all steps, by another way than the ledger's."""
    script = (
        "import sys; from pathlib import Path; import pyarrow.parquet as pq, pyarrow.compute as pc;"
        "files = list(Path(sys.argv[1]).rglob('steps/**/*.parquet'));"
        "names = ['memory_read_bytes', 'memory_written_bytes'];"
        "print([sum(pc.sum(pq.read_table(f, columns=[n])[n]).as_py() for f in files)"
        " for n in names])"
    )
    out = subprocess.run([sys.executable, "-c", script, folder], check=True, capture_output=True)
    return [int(size) for size in json.loads(out.stdout)]


def _measure(store: str, steps: int, expected: list[int]) -> dict[str, float]:
    """Run the command once; wall time and, from the kernel, CPU time and peak memory."""
    before = time.monotonic()
    process = subprocess.Popen([*COMMAND, store], stdout=subprocess.PIPE)
    assert process.stdout is not None
    printed = json.loads(process.stdout.read())
    _, status, usage = os.wait4(process.pid, 0)
    wall_s = time.monotonic() - before
    process.returncode = os.waitstatus_to_exitcode(status)
    edge = next(line for line in printed["edges"] if line["edge"] == "device_memory")
    moved = [edge["flows"][0]["forward_bytes"], edge["flows"][0]["backward_bytes"]]
    assert (process.returncode, printed["steps"], moved) == (0, steps, expected)
    return {
        "wall_s": wall_s,
        "cpu_s": usage.ru_utime + usage.ru_stime,
        "peak_rss_bytes": usage.ru_maxrss * 1024,
    }


if __name__ == "__main__":
    main()
