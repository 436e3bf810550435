"""Workload files of others, recognised by the names of their columns.

azure     CSV    TIMESTAMP (wall clock), ContextTokens, GeneratedTokens
burstgpt  CSV    Timestamp (s), Request tokens, Response tokens; both published layouts
mooncake  JSONL  timestamp (ms), input_length, output_length, hash_ids (blocks of 512 tokens)

All may carry the columns class, tenant, session, priority and deadline_ms of our own. Rows without
output tokens are failed requests of the original service: they are skipped and counted.
"""

import csv
import json
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from pathlib import Path
from typing import TextIO

from perfledger.instrumented_runtime.load.workload import (
    NS_PER_S,
    Arrival,
    Workload,
)
from perfledger.schema.errors import UsageError

MAX_ROWS = 2_000_000
MAX_LINE_CHARS = 1_048_576
MAX_TOKENS = 10_000_000
MAX_PRIORITY = 2**31 - 1
MAX_DEADLINE_MS = 999_999_999
# Times outside these are in another unit than the format's.
MAX_MEAN_GAP_S = 86_400
MAX_RATE = 2_000
RATE_NEEDS = 100  # requests, before their rate says something about units

_STAMP = re.compile(r"(\d{4}-\d\d-\d\d)[ T](\d\d:\d\d:\d\d)(?:\.(\d{1,9}))?(Z|[+-]\d\d:\d\d)?")
_SECONDS = re.compile(r"(\d{1,11})(?:\.(\d{1,9})0*)?")
_INTEGER = re.compile(r"-?\d{1,10}")
_LABEL = re.compile(r"[ -~]{0,256}")  # they travel as HTTP headers


@dataclass(frozen=True)
class Format:
    """One format: which columns hold what. `ignored` are known and not used."""

    name: str
    time: str
    input: str
    output: str
    time_unit: str
    to_ns: Callable[[object], int | None]  # None: not a time of this format
    blocks: str = ""
    block_tokens: int = 0
    session: str = "session"
    traffic_class: str = "class"
    ignored: frozenset[str] = frozenset()

    @property
    def required(self) -> frozenset[str]:
        """The columns by which the format is recognised."""
        return frozenset({self.time, self.input, self.output})

    @property
    def known(self) -> frozenset[str]:
        """All columns that may be there."""
        optional = {self.blocks, self.session, self.traffic_class, "class", "tenant", "session"}
        return self.required | self.ignored | optional | {"priority", "deadline_ms"}


def _stamp_ns(value: object) -> int | None:
    """Wall clock as ns since 1970; a stamp without a zone is read as UTC."""
    match = _STAMP.fullmatch(value) if isinstance(value, str) else None
    if match is None:
        return None
    day, clock, fraction, zone = match.groups()
    try:
        whole = datetime.fromisoformat(f"{day}T{clock}{zone or 'Z'}")
    except ValueError:
        return None
    return int(whole.timestamp()) * NS_PER_S + int((fraction or "0").ljust(9, "0"))


def _seconds_ns(value: object) -> int | None:
    match = _SECONDS.fullmatch(value) if isinstance(value, str) else None
    if match is None:
        return None
    return int(match[1]) * NS_PER_S + int((match[2] or "0").ljust(9, "0"))


def _milliseconds_ns(value: object) -> int | None:
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 10**14:
        return None
    return value * 1_000_000


FORMATS: tuple[Format, ...] = (
    Format(
        name="azure",
        time="TIMESTAMP",
        input="ContextTokens",
        output="GeneratedTokens",
        time_unit="a wall-clock time such as 2023-11-16 18:17:03.9799600",
        to_ns=_stamp_ns,
        ignored=frozenset({"NumImages"}),
    ),
    Format(
        name="burstgpt",
        time="Timestamp",
        input="Request tokens",
        output="Response tokens",
        time_unit="seconds, such as 45.0",
        to_ns=_seconds_ns,
        session="Session ID",
        traffic_class="Log Type",
        ignored=frozenset({"Model", "Total tokens", "Elapsed time"}),
    ),
    Format(
        name="mooncake",
        time="timestamp",
        input="input_length",
        output="output_length",
        time_unit="whole milliseconds, such as 3000",
        to_ns=_milliseconds_ns,
        blocks="hash_ids",
        block_tokens=512,
        session="session_id",
    ),
)


@dataclass
class _Place:
    """Where the reader is, for its errors."""

    path: Path
    line: int = 0

    def error(self, what: str, column: str, expected: str) -> UsageError:
        where = f"{self.path}, line {self.line}" + (f", column {column}" if column else "")
        return UsageError(what, where=where, fix=f"expected {expected}")


@dataclass
class _Reading:
    """What has been read so far."""

    format: Format
    place: _Place
    arrivals: list[Arrival] = field(default_factory=list)
    skipped: int = 0
    first_ns: int | None = None
    last_ns: int = 0


def read_workload(path: Path, limit: int | None = None) -> Workload:
    """Read a workload file, at most its first `limit` requests (ones with output tokens).

    Raises UsageError, naming file, line, column and what was expected, for a file that cannot be
    read, has none of the known sets of columns or unknown ones, is not in order of time, or holds
    times or lengths that cannot be in the format's units.
    """
    try:
        if not path.is_file():
            raise UsageError(f"no such workload file: {path}", fix="give a CSV or JSONL file")
        with open(path, encoding="utf-8-sig", newline="") as file:
            return _read(file, path, limit)
    except OSError as error:
        raise UsageError(f"cannot read the workload: {error.strerror}", where=str(path)) from error
    except UnicodeDecodeError as error:
        raise UsageError("not a text file in UTF-8", where=str(path)) from error


def _read(file: TextIO, path: Path, limit: int | None) -> Workload:
    place = _Place(path)
    rows = _rows(file, place)
    first = next(rows, None)
    if first is None:
        raise place.error("the workload holds no rows", "", "a header and at least one request")
    reading = _Reading(_recognise(first, place), place)
    _take(reading, first)
    for row in rows:
        if limit is not None and len(reading.arrivals) >= limit:
            break
        _take(reading, row)
        if len(reading.arrivals) > MAX_ROWS:
            raise place.error(f"over {MAX_ROWS} requests", "", "fewer, or a --limit")
    return _finish(reading)


def _finish(reading: _Reading) -> Workload:
    place, format_ = reading.place, reading.format
    if not reading.arrivals:
        what = f"no request left: all {reading.skipped} rows have 0 output tokens"
        raise place.error(what, format_.output, "at least one row above 0")
    start_ns = reading.arrivals[0].offset_ns
    arrivals = tuple(replace(a, offset_ns=a.offset_ns - start_ns) for a in reading.arrivals)
    _check_units(arrivals, reading)
    notes = []
    if reading.skipped:
        notes.append(f"{reading.skipped} rows with 0 output tokens skipped")
    return Workload(
        name=format_.name,
        source=place.path.name,
        arrivals=arrivals,
        block_tokens=format_.block_tokens if any(a.prefix_ids for a in arrivals) else 0,
        skipped=reading.skipped,
        notes=tuple(notes),
    )


def _check_units(arrivals: Sequence[Arrival], reading: _Reading) -> None:
    gaps, span_s = len(arrivals) - 1, arrivals[-1].offset_ns / NS_PER_S
    too_slow = gaps > 0 and span_s / gaps > MAX_MEAN_GAP_S
    too_fast = len(arrivals) >= RATE_NEEDS and span_s > 0 and gaps / span_s > MAX_RATE
    if too_slow or too_fast:
        what = f"{len(arrivals)} requests within {span_s:g} s: the times are in another unit"
        raise reading.place.error(what, reading.format.time, reading.format.time_unit)


def _recognise(row: dict[str, object], place: _Place) -> Format:
    """Return the format whose required columns a row has; unknown columns are refused."""
    found = [format_ for format_ in FORMATS if format_.required <= row.keys()]
    if not found:
        nearest = max(FORMATS, key=lambda format_: len(format_.required & row.keys()))
        missing = ", ".join(sorted(nearest.required - row.keys()))
        choices = "; or ".join(
            f"{format_.time}, {format_.input}, {format_.output} ({format_.name})"
            for format_ in FORMATS
        )
        columns = ", ".join(map(str, list(row)[:12]))[:300]
        raise place.error(f"unknown columns: {columns}", missing, f"{choices}")
    return found[0]


def _take(reading: _Reading, row: dict[str, object]) -> None:
    """Check one row and add its arrival, or count it as skipped."""
    format_, place = reading.format, reading.place
    if missing := format_.required - row.keys():
        raise place.error("a row without it", min(missing), "every row to have it")
    if unknown := row.keys() - format_.known:
        expected = f"only {', '.join(sorted(format_.known - {''}))} in {format_.name}"
        raise place.error("an unknown column", min(unknown), expected)
    at_ns = _time(reading, row[format_.time])
    input_tokens = _tokens(row[format_.input], format_.input, place)
    output_tokens = _tokens(row[format_.output], format_.output, place)
    if output_tokens == 0:
        reading.skipped += 1
        return
    if input_tokens == 0:
        raise place.error("a request without input", format_.input, "at least 1 token")
    reading.arrivals.append(
        Arrival(
            at_ns,
            input_tokens,
            output_tokens,
            prefix_ids=_blocks(reading, row, input_tokens),
            traffic_class=_label(row, (format_.traffic_class, "class"), place),
            tenant=_label(row, ("tenant",), place),
            session=_label(row, (format_.session, "session"), place),
            priority=_number(row, "priority", -MAX_PRIORITY, MAX_PRIORITY, place),
            deadline_ms=_number(row, "deadline_ms", 1, MAX_DEADLINE_MS, place),
        )
    )


def _time(reading: _Reading, value: object) -> int:
    format_, place = reading.format, reading.place
    at_ns = format_.to_ns(value)
    if at_ns is None:
        raise place.error(f"not a time: {_shown(value)}", format_.time, format_.time_unit)
    if reading.first_ns is None:
        reading.first_ns = at_ns
    elif at_ns < reading.last_ns:
        what = f"{_shown(value)} is before the time of the row above it"
        raise place.error(what, format_.time, "rows in order of time")
    reading.last_ns = at_ns
    return at_ns


def _tokens(value: object, column: str, place: _Place) -> int:
    if isinstance(value, str) and value.isascii() and value.isdigit() and len(value) < 20:
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= MAX_TOKENS:
        expected = f"a whole number of tokens from 0 to {MAX_TOKENS}"
        raise place.error(f"not a length: {_shown(value)}", column, expected)
    return value


def _number(row: dict[str, object], column: str, low: int, high: int, place: _Place) -> int | None:
    value = row.get(column)
    if value is None or value == "":
        return None
    if isinstance(value, str) and _INTEGER.fullmatch(value):
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        expected = f"a whole number from {low} to {high}, or nothing"
        raise place.error(f"not a number: {_shown(value)}", column, expected)
    return value


def _label(row: dict[str, object], columns: tuple[str, ...], place: _Place) -> str:
    for column in columns:
        value = row.get(column)
        if value is None or value == "":
            continue
        if not isinstance(value, str) or not _LABEL.fullmatch(value):
            raise place.error(f"not a label: {_shown(value)}", column, "at most 256 ASCII letters")
        return value
    return ""


def _blocks(reading: _Reading, row: dict[str, object], input_tokens: int) -> tuple[int, ...]:
    format_, place = reading.format, reading.place
    value = row.get(format_.blocks) if format_.blocks else None
    if value is None:
        return ()
    size = format_.block_tokens
    expected = -(-input_tokens // size)
    if not isinstance(value, list) or not all(type(x) is int and 0 <= x < 2**63 for x in value):
        raise place.error(f"not block ids: {_shown(value)}", format_.blocks, "a list of integers")
    if len(value) != expected:
        what = f"{len(value)} ids for {input_tokens} tokens"
        raise place.error(what, format_.blocks, f"{expected}, one a block of {size} tokens")
    return tuple(value)


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _rows(file: TextIO, place: _Place) -> Iterator[dict[str, object]]:
    """Yield rows as dicts, JSON where the first line is an object, else CSV with a header."""
    lines = _lines(file, place)
    for line in lines:
        if line.strip():
            break
    else:
        return
    if line.lstrip().startswith("{"):
        yield _object(line, place)
        yield from (_object(line, place) for line in lines if line.strip())
    else:
        yield from _csv_rows(line, lines, place)


def _lines(file: TextIO, place: _Place) -> Iterator[str]:
    while line := file.readline(MAX_LINE_CHARS + 1):
        place.line += 1
        if len(line) > MAX_LINE_CHARS:
            raise place.error("a line too long", "", f"at most {MAX_LINE_CHARS} characters")
        yield line


def _object(line: str, place: _Place) -> dict[str, object]:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise place.error(f"not JSON: {error}", "", "one JSON object a line") from error
    if not isinstance(row, dict):
        raise place.error(f"not an object: {_shown(row)}", "", "one JSON object a line")
    return row


def _csv_rows(first: str, lines: Iterator[str], place: _Place) -> Iterator[dict[str, object]]:
    try:
        header = [name.strip() for name in next(csv.reader([first]))]
        if repeated := {name for name in header if header.count(name) > 1}:
            raise place.error("a column named twice", min(repeated), "each name once")
        for cells in csv.reader(lines, strict=True):
            if not cells:
                continue
            if len(cells) != len(header):
                what = f"{len(cells)} cells under {len(header)} columns"
                raise place.error(what, "", f"{len(header)} cells: {', '.join(header)}"[:300])
            yield dict(zip(header, cells, strict=True))
    except csv.Error as error:
        raise place.error(f"not CSV: {error}", "", "comma-separated cells") from error
