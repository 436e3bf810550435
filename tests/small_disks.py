"""File systems of a test's own, small enough to fill; only root may mount one."""

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest


@contextmanager
def mounted(folder: Path, *arguments: str) -> Iterator[Path]:
    """Mount something on a folder, or skip the test; where CI=true that is a failure."""
    folder.mkdir(exist_ok=True)
    result = subprocess.run(["mount", *arguments, str(folder)], capture_output=True, text=True)
    if result.returncode:
        reason = f"cannot mount a disk for the test: {result.stderr.strip()}"
        if os.environ.get("CI") == "true":
            pytest.fail(reason)
        pytest.skip(reason)
    try:
        yield folder
    finally:
        subprocess.run(["umount", str(folder)], check=True)


@contextmanager
def disk_in_memory(folder: Path, size_bytes: int) -> Iterator[Path]:
    """Mount a tmpfs of this size."""
    with mounted(folder, "-t", "tmpfs", "-o", f"size={size_bytes}", "tmpfs") as disk:
        yield disk
