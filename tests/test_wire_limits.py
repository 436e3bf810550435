"""The scanner's kernels in a child process: no read out of bounds, and bounded memory."""

import os
import signal
import subprocess
import sys
from pathlib import Path

from wire_verdict import BROKEN

FOLDER = Path(__file__).parent


def child(script: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(FOLDER / script), *arguments]
    beside = {**os.environ, "PYTHONPATH": str(FOLDER)}  # python -P leaves it out
    return subprocess.run(command, capture_output=True, text=True, timeout=300, env=beside)


def test_nothing_behind_the_end_is_read() -> None:
    done = child("wire_damage.py", "0", "2000")
    assert done.returncode == 0, done.stderr[-500:]
    assert int(done.stdout) > 400
    assert child("wire_damage.py", "0", "1", "overread").returncode == -signal.SIGSEGV


TOO_MANY = "the request has too many spans, attributes, events and links"
HOSTILE = {
    "empty spans": "0 rows, cut 0, rejected trace_id is not 16 bytes, or all zero",
    "many small spans": f"250000 rows, cut 0, rejected {TOO_MANY}",
    "one long text": "1 rows, cut 1, rejected none",
    "deep arrays": "1 rows, cut 0, rejected none",
    "deep groups": f"0 rows, cut 0, rejected {BROKEN}",
    "empty resources": "0 rows, cut 0, rejected none",
    "empty scopes": "malformed",
    **dict.fromkeys(("many pieces", "bad texts"), "malformed"),
    **dict.fromkeys(("keys", "maps"), "1 rows, cut 0, rejected none"),
    **dict.fromkeys(
        ("empty attributes", "tiny events", "too many events", "tiny links", "long array"),
        f"0 rows, cut 0, rejected {TOO_MANY}",
    ),
}


def test_bodies_made_to_cost_memory_cost_little() -> None:
    done = child("wire_hostile.py")
    assert done.returncode == 0, done.stderr[-500:]
    lines = [line.split("|") for line in done.stdout.splitlines()]
    assert {name: found for name, found, _, _ in lines} == HOSTILE
    # Ten times the largest body.
    assert {name: int(peak) for name, _, peak, _ in lines if int(peak) > 640} == {}
