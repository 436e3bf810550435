"""What `perfledger collect` says of itself: one line while it runs, a table at its end."""

import asyncio
import sys
from collections import Counter
from collections.abc import Callable

from perfledger.output import print_table

_EVERY_S = 2.0
_SIGNALS = ("spans", "points", "logs")
# The first is the sum of the others.
_FATES = ("received", "written", "rejected", "waiting", "deduplicated", "sampled_away")
_MOST_GROUPED = 10**8  # longer numbers fit into 80 columns without commas only
_DERIVED_TABLES = ("steps", "requests")

Count = Callable[[], Counter[str]]


async def show_status(count: Count) -> None:
    """Rewrite one line with what happened so far, on a terminal only."""
    while sys.stderr.isatty():
        await asyncio.sleep(_EVERY_S)
        counts = count()
        line = ", ".join(
            f"{counts[name]:,} {name.replace('_', ' ')}"
            for name in ("spans_received", "spans_written", "spans_rejected", "requests_derived")
        )
        print(f"\r\x1b[2K{line}", end="", file=sys.stderr, flush=True)


def print_counts(counts: Counter[str]) -> None:
    """Print what was received and what became of it, and whatever else is not 0."""
    if sys.stderr.isatty():
        print(file=sys.stderr)
    rows: list[list[str | None]] = []
    rows += [
        [table, *(_number(counts[f"{table}_{fate}"]) for fate in _FATES)] for table in _SIGNALS
    ]
    for table in _DERIVED_TABLES:
        rows.append([table, None, _number(counts[f"{table}_written"]), *[None] * (len(_FATES) - 2)])
    print_table("", ["table", *(fate.replace("_", " ") for fate in _FATES)], rows)
    told = {f"{table}_{fate}" for table in (*_SIGNALS, *_DERIVED_TABLES) for fate in _FATES}
    for name in sorted(counts.keys() - told):
        print(f"{name.replace('_', ' ')}: {counts[name]:,}")


def _number(count: int) -> str:
    return f"{count:,}" if count < _MOST_GROUPED else str(count)
