"""The fuzzer of benchmarks/ runs, and finds nothing in a few seconds."""

import subprocess
import sys
from pathlib import Path

FUZZER = Path(__file__).parent.parent / "benchmarks" / "fuzz_scanner.py"


def test_the_fuzzer_runs(tmp_path: Path) -> None:
    command = [sys.executable, str(FUZZER), "4", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    assert list(tmp_path.glob("crash-*")) == []
