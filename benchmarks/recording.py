"""Write a benchmark's result as JSON, with what is needed to judge and repeat it."""

import json
import os
import platform
import subprocess
import sys
import time
from importlib import metadata
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
LIBRARIES = ("torch", "transformers", "polars", "pyarrow", "numpy", "opentelemetry-sdk")


def write_result(name: str, goal: str, result: dict[str, Any]) -> Path:
    """Write `results/NAME.json` (goal, result, command, machine, commit, UTC date); return it."""
    report = {
        "name": name,
        "goal": goal,
        "result": result,
        "command": " ".join(["python", os.path.relpath(sys.argv[0], ROOT), *sys.argv[1:]]),
        "machine": machine(),
        "libraries": _versions(),
        "commit": commit(),
        "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }
    RESULTS.mkdir(parents=True, exist_ok=True)
    path = RESULTS / f"{name}.json"
    path.write_text(json.dumps(report, indent=2) + "\n")
    print(f"wrote {os.path.relpath(path)}")
    return path


def machine() -> dict[str, Any]:
    """Return the CPU, its cores and memory, the kernel, and the load average of the last minute."""
    return {
        "cpu": _proc_field("/proc/cpuinfo", "model name") or platform.processor(),
        "cores": os.cpu_count(),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "kernel": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "load_average_1m": os.getloadavg()[0],
    }


def commit() -> str:
    """Return the checkout's commit, `+changes` behind it if files differ; "unknown" without git."""
    try:
        head = _git("rev-parse", "HEAD")
        changed = _git("status", "--porcelain", "--", ".", ":!benchmarks/results")
        return f"{head}+changes" if changed else head
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def _git(*arguments: str) -> str:
    command = ["git", "-C", str(ROOT), *arguments]
    run = subprocess.run(command, check=True, capture_output=True, text=True)
    return run.stdout.strip()


def _versions() -> dict[str, str]:
    found = {}
    for library in LIBRARIES:
        try:
            found[library] = metadata.version(library)
        except metadata.PackageNotFoundError:
            continue
    return found


def _proc_field(path: str, field: str) -> str:
    try:
        lines = Path(path).read_text().splitlines()
    except OSError:
        return ""
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith(field)), "")
