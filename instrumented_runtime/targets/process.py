"""A program of ours or of others as a child: started, watched until it is ready, surely ended."""

import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from perfledger.schema.errors import PerfledgerError, UsageError

STOP_S = 30.0  # after SIGTERM; then it is killed
POLL_S = 0.02
LOG_TAIL_BYTES = 2_000
LARGEST_LOG_BYTES = 1_000_000  # searched for the line that says ready


@dataclass(frozen=True)
class Child:
    """A running program; what it prints goes to `log`."""

    name: str
    process: subprocess.Popen[bytes]
    log: Path

    def wait_for(self, pattern: str, timeout_s: float) -> re.Match[str]:
        """Wait until it prints a line that matches, and return the match.

        Raises UsageError where it ended with exit code 2, PerfledgerError where it ended otherwise
        or was not ready in time; both carry its last lines.
        """
        line = re.compile(pattern, re.MULTILINE)
        deadline_s = time.monotonic() + timeout_s
        while True:
            code = self.process.poll()
            if found := line.search(self._printed()):
                return found
            if code is not None:
                error = UsageError if code == UsageError.exit_code else PerfledgerError
                raise error(f"{self.name} ended with exit code {code}:\n{self.last_lines()}")
            if time.monotonic() > deadline_s:
                what = f"{self.name} was not ready within {timeout_s:g} s"
                raise PerfledgerError(f"{what}:\n{self.last_lines()}")
            time.sleep(POLL_S)

    def last_lines(self) -> str:
        """Return the end of what it printed."""
        text = self.log.read_bytes()[-LOG_TAIL_BYTES:].decode(errors="replace").strip()
        return text or "(it printed nothing)"

    def _printed(self) -> str:
        with open(self.log, "rb") as file:
            return file.read(LARGEST_LOG_BYTES).decode(errors="replace")


def perfledger_command(*arguments: str) -> list[str]:
    """Return the command line of one of our own commands, in this Python."""
    return [sys.executable, "-P", "-m", "perfledger", *arguments]


@contextmanager
def running(
    name: str, command: Sequence[str], environment: Mapping[str, str], log: Path
) -> Iterator[Child]:
    """Run a program for the time of the block, then end it with SIGTERM (in the end SIGKILL).

    Raises PerfledgerError where it cannot be started.
    """
    with open(log, "ab") as sink:
        try:
            process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=sink, stderr=sink, env=dict(environment)
            )
        except OSError as error:
            raise PerfledgerError(f"cannot start {name}: {error}") from error
    try:
        yield Child(name, process, log)
    finally:
        stop(process)


def stop(process: subprocess.Popen[bytes], timeout_s: float = STOP_S) -> None:
    """End a child: SIGTERM, and SIGKILL where that did not end it in time or we are in a hurry."""
    try:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
        process.wait(timeout_s)
    except subprocess.TimeoutExpired:
        pass
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()
