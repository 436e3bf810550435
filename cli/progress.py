"""A progress bar with the time left, on a terminal only and after 2 seconds only."""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

SHOW_AFTER_S = 2.0
Advance = Callable[..., None]


@contextmanager
def progress(total: int, label: str) -> Iterator[Advance]:
    """Yield `advance(n=1)`; draws on stderr, and nothing where stderr is not a terminal."""
    if not sys.stderr.isatty():
        yield lambda n=1: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
    from rich.progress import TimeRemainingColumn as TimeLeft

    columns = (TextColumn(label), BarColumn(), MofNCompleteColumn(), TimeLeft())
    bar = Progress(*columns, console=Console(stderr=True), transient=True)
    task = bar.add_task(label, total=total)
    started_s, shown = time.monotonic(), False

    def advance(n: int = 1) -> None:
        nonlocal shown
        bar.advance(task, n)
        if not shown and time.monotonic() - started_s > SHOW_AFTER_S:
            shown = True
            bar.start()

    try:
        yield advance
    finally:
        bar.stop()
