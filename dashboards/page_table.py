"""A table of the page: text in cells, and a dash for what is undefined."""

from collections.abc import Sequence
from dataclasses import dataclass

UNDEFINED = "–"


@dataclass(frozen=True)
class Table:
    """Column names and cells, as text."""

    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
