"""Sessions of NVML in a file: what was asked and what it answered, a JSON object a line.

    {"recording": "perfledger nvml 1", "synthetic": false, "note": "…"}     the first line
    {"sample": {"monotonic_ns": 1, "wall_ns": 2}}                           a sample starts
    {"call": "nvmlDeviceGetPowerUsage", "args": [0], "value": 71200}
    {"call": "nvmlDeviceGetName", "args": [1], "error": 15}                 nvmlReturn_t

An answer that is as before is not written again, and a replay repeats the one before. A file
written by hand must say `"synthetic": true`; what is made from it says so too.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

from perfledger.collectors.device.nvml_calls import (
    FUNCTION_NOT_FOUND,
    Calls,
    Instant,
    NvmlFailure,
)
from perfledger.schema.errors import PerfledgerError, UsageError

FORMAT = "perfledger nvml 1"
LARGEST_RECORDING_BYTES = 256_000_000
_LONGEST_LINE = 1_000_000

Question = tuple[str, str]


class EndOfRecording(PerfledgerError):
    """There are no more samples."""


@dataclass(frozen=True)
class Answer:
    """A value, or NVML's error."""

    value: Any = None
    error: int | None = None

    def given(self) -> Any:
        """Return the value. Raises NvmlFailure where it is an error."""
        if self.error is not None:
            raise NvmlFailure(self.error)
        return self.value


class Recorder:
    """Passes calls on, and writes down what was answered; the file is closed with it."""

    def __init__(self, calls: Calls, file: TextIO, note: str = "") -> None:
        self._calls, self._file = calls, file
        self._said: dict[Question, Answer] = {}
        self._write({"recording": FORMAT, "synthetic": False, "note": note})

    def start_sample(self, at: Instant) -> Instant:
        """Write that a sample starts; what came before it is on disk then."""
        at = self._calls.start_sample(at)
        self._write({"sample": at._asdict()})
        self._file.flush()
        return at

    def call(self, function: str, *arguments: Any) -> Any:
        """Pass a call on. Raises NvmlFailure."""
        try:
            answer = Answer(self._calls.call(function, *arguments))
        except NvmlFailure as failure:
            answer = Answer(error=failure.code)
        question = function, json.dumps(arguments)
        if self._said.get(question) != answer:
            self._said[question] = answer
            said = {"value": answer.value} if answer.error is None else {"error": answer.error}
            self._write({"call": function, "args": arguments, **said})
        return answer.given()

    def close(self) -> None:
        """Let go of the library, and close the file."""
        self._calls.close()
        self._file.close()

    def _write(self, line: dict[str, Any]) -> None:
        self._file.write(json.dumps(line) + "\n")


@dataclass
class Sample:
    """What was answered from one sample's start to the next one's."""

    at: Instant
    answers: dict[Question, Answer] = field(default_factory=dict)


@dataclass
class Recording:
    """A session as read. `before` are the answers before the first sample."""

    synthetic: bool
    note: str
    before: dict[Question, Answer]
    samples: list[Sample]
    cut: bool = False  # the last line is not whole: its writer was stopped


def read_recording(path: Path) -> Recording:
    """Read a file. Raises UsageError where it is none of ours, with the line."""
    try:
        if path.stat().st_size > LARGEST_RECORDING_BYTES:
            raise UsageError("the recording is too large", where=str(path))
        lines = path.read_text("utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"not a readable recording: {error}", where=str(path)) from error
    cut = lines.pop() != ""
    if not lines:
        raise UsageError("not a recording: no whole line", where=str(path))
    parsed = _parsed(lines, path)
    recording = _header(next(parsed, {}), path)
    recording.cut = cut
    answers = recording.before
    for number, line in enumerate(parsed, 2):
        try:
            if "sample" in line:
                recording.samples.append(Sample(_instant(line["sample"])))
                answers = recording.samples[-1].answers
            else:
                question, answer = _answer(line)
                answers[question] = answer
        except (KeyError, TypeError, ValueError) as error:
            raise UsageError(
                "neither a sample nor a call", where=f"{path}, line {number}"
            ) from error
    return recording


def _parsed(lines: list[str], path: Path) -> Iterator[dict[str, Any]]:
    for number, line in enumerate(lines, 1):
        where = f"{path}, line {number}"
        try:
            value = json.loads(line) if len(line) <= _LONGEST_LINE else None
        except (ValueError, RecursionError) as error:
            raise UsageError("not JSON", where=where) from error
        if not isinstance(value, dict):
            raise UsageError("not a JSON object, or too long", where=where)
        yield value


def _header(line: dict[str, Any], path: Path) -> Recording:
    synthetic, note = line.get("synthetic"), line.get("note", "")
    known = line.get("recording") == FORMAT
    if not known or type(synthetic) is not bool or type(note) is not str:
        raise UsageError(f"not a recording of the format {FORMAT!r}", where=f"{path}, line 1")
    return Recording(synthetic, note, {}, [])


def _instant(value: Any) -> Instant:
    at = Instant(value["monotonic_ns"], value["wall_ns"])
    if not all(type(part) is int and 0 <= part < 2**63 for part in at):
        raise ValueError("not a time")
    return at


def _answer(line: dict[str, Any]) -> tuple[Question, Answer]:
    function, arguments = line["call"], line["args"]
    if type(function) is not str or type(arguments) is not list:
        raise TypeError("not a call")
    if "error" in line:
        if type(line["error"]) is not int:
            raise TypeError("not an error's number")
        return (function, json.dumps(arguments)), Answer(error=line["error"])
    return (function, json.dumps(arguments)), Answer(line["value"])


class Replay:
    """Answers as in a recording, sample after sample."""

    def __init__(self, recording: Recording) -> None:
        self._answers = dict(recording.before)
        self._samples = iter(recording.samples)

    def start_sample(self, at: Instant) -> Instant:
        """Go to the next sample; return its time. Raises EndOfRecording."""
        sample = next(self._samples, None)
        if sample is None:
            raise EndOfRecording("the recording is over")
        self._answers |= sample.answers
        return sample.at

    def call(self, function: str, *arguments: Any) -> Any:
        """Return the recorded answer; what was never asked is a function that is not there."""
        question = function, json.dumps(arguments)
        return self._answers.get(question, Answer(error=FUNCTION_NOT_FOUND)).given()

    def close(self) -> None:
        """Do nothing: the file was read whole."""
