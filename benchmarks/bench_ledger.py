"""How long `perfledger ledger` takes over a million engine steps, and how much memory it needs.

    python benchmarks/bench_ledger.py [STEPS]

It makes a store (steps with their work, four spans for each of them, points of a host sampler,
ceilings; about 400 MB), then runs the command as a user would, several times, and measures each
process from the outside. The sums that it prints are compared with those of the table.
"""

import json
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))  # python -P leaves it out
from command_cost import cost_on_store  # noqa: E402
from recording import write_result  # noqa: E402

GOAL = "perfledger ledger over a million steps: under 3 s, under 1 GiB"


def main() -> None:
    steps = int(sys.argv[1]) if len(sys.argv) > 1 else 1_000_000
    write_result(
        "ledger", GOAL, cost_on_store("ledger", "synthetic_steps.py", steps, 3, _expect_sums)
    )


def _expect_sums(folder: str) -> Callable[..., None]:
    expected = _sums(folder)

    def check(printed: Mapping[str, Any], rows: Mapping[str, int]) -> None:
        edge = next(line for line in printed["edges"] if line["edge"] == "device_memory")
        moved = [edge["flows"][0]["forward_bytes"], edge["flows"][0]["backward_bytes"]]
        assert (printed["steps"], moved) == (rows["steps"], expected)

    return check


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


if __name__ == "__main__":
    main()
