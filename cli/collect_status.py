"""What `perfledger collect` says of itself: one line while it runs, a table at its end."""

import asyncio
import sys
from collections import Counter
from collections.abc import Callable

from perfledger.output import print_table

_EVERY_S = 2.0
_SIGNAL_TABLES = ("spans", "points", "logs")
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
    fates = ("received", "written", "rejected", "waiting")
    rows = [[table, *(counts[f"{table}_{fate}"] for fate in fates)] for table in _SIGNAL_TABLES]
    rows += [[table, None, counts[f"{table}_written"], None, None] for table in _DERIVED_TABLES]
    print_table("", ["table", *fates], rows)
    told = {f"{table}_{fate}" for table in (*_SIGNAL_TABLES, *_DERIVED_TABLES) for fate in fates}
    for name in sorted(counts.keys() - told):
        print(f"{name.replace('_', ' ')}: {counts[name]:,}")
