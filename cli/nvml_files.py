"""The flags --record and --replay: NVML's answers to a file, or a file's in place of NVML."""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from perfledger.schema.errors import UsageError

if TYPE_CHECKING:
    from perfledger.collectors.device.nvml_recording import Recorder


def add_recording(parser: argparse.ArgumentParser) -> None:
    """Add --record and --replay, of which one at most may be given."""
    files = parser.add_mutually_exclusive_group()
    files.add_argument("--record", type=Path, metavar="FILE", help="write down NVML's answers")
    files.add_argument("--replay", type=Path, metavar="FILE", help="a recording in place of NVML")


def recorder(path: Path) -> "Recorder":
    """Return NVML, recorded in a new file. Raises UsageError where it cannot be made."""
    from perfledger.collectors.device.nvml_calls import NvmlLibrary
    from perfledger.collectors.device.nvml_recording import Recorder

    try:
        file = path.open("x", encoding="utf-8")
    except OSError as error:
        raise UsageError(f"cannot write {path}: {error.strerror}") from error
    return Recorder(NvmlLibrary(), file)
