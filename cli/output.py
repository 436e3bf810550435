"""What commands print: tables within 80 columns, JSON, and numbers with units."""

import argparse
import json
import shutil
import sys
import textwrap
from collections.abc import Sequence
from typing import TextIO

WIDTH = 80


def add_json(parser: argparse.ArgumentParser) -> None:
    """Add --json."""
    parser.add_argument("--json", action="store_true", help="print one JSON object instead")


def print_json(value: object, out: TextIO | None = None) -> None:
    """Print a JSON document; bytes become hex, NaN and infinity null."""
    import orjson

    try:
        text = orjson.dumps(value, default=_plain, option=orjson.OPT_INDENT_2).decode()
    except TypeError:  # an integer of more than 64 bits, like the FLOPs of a long run
        text = json.dumps(value, default=_plain, indent=2)
    print(text, file=out or sys.stdout)


def print_table(
    title: str,
    columns: Sequence[str],
    rows: Sequence[Sequence[object]],
    out: TextIO | None = None,
) -> None:
    """Print a table; the first column is text, flush left, the others flush right."""
    cells = [[_cell(value) for value in row] for row in rows]
    widths = [max([len(name), *(len(row[at]) for row in cells)]) for at, name in enumerate(columns)]
    spare = WIDTH - sum(widths) - 2 * (len(columns) - 1)
    if spare < 0:
        widths[0] = max(8, widths[0] + spare)
    lines = [title] if title else []
    lines.append(_line(columns, widths))
    lines.append("  ".join("─" * width for width in widths))
    lines += [_line(row, widths) for row in cells]
    print("\n".join(lines), file=out or sys.stdout)


def say(text: str) -> None:
    """Print a paragraph within 80 columns; what it begins with indents the rest of it."""
    indent = " " * (len(text) - len(text.lstrip()) + 2)
    print(textwrap.fill(text, WIDTH, subsequent_indent=indent, break_long_words=False))


def ms(ns: float | None, digits: int = 1) -> str:
    """Return ns as milliseconds, or a dash where undefined."""
    return "–" if ns is None else f"{ns / 1e6:,.{digits}f} ms"


def percent(share: float | None) -> str:
    """Return a share as a percentage, or a dash where undefined."""
    return "–" if share is None else f"{100 * share:.1f} %"


def rate(value: float | None, unit: str) -> str:
    """Return a rate with its unit, or a dash where undefined."""
    return "–" if value is None else f"{value:,.1f} {unit}"


def terminal_width() -> int:
    """Return the width to draw bars in: the terminal's, at most 80."""
    return min(WIDTH, shutil.get_terminal_size((WIDTH, 24)).columns)


def _cell(value: object) -> str:
    if value is None:
        return "–"
    if isinstance(value, float):
        return f"{value:,.3f}"
    return f"{value:,}" if isinstance(value, int) else str(value)


def _line(values: Sequence[str], widths: Sequence[int]) -> str:
    first = values[0] if len(values[0]) <= widths[0] else values[0][: widths[0] - 1] + "…"
    rest = [value.rjust(width) for value, width in zip(values[1:], widths[1:], strict=True)]
    return "  ".join([first.ljust(widths[0]), *rest]).rstrip()


def _plain(value: object) -> object:
    if isinstance(value, bytes):
        return value.hex()
    if hasattr(value, "_asdict"):
        return value._asdict()
    if hasattr(value, "item"):
        return value.item()
    raise TypeError(f"not JSON: {type(value).__name__}")
