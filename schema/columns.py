"""What a column and a table are; from a declaration come the Arrow schema and the reference."""

from collections.abc import Iterable
from dataclasses import dataclass

import pyarrow as pa


@dataclass(frozen=True)
class Column:
    """One column: its name carries the unit (`_ns`, `_bytes`), `meaning` is one sentence."""

    name: str
    type: pa.DataType
    meaning: str
    required: bool = False


@dataclass(frozen=True)
class Table:
    """One table of the store. `key` identifies a row; `sort` is the order within a file."""

    name: str
    meaning: str
    columns: tuple[Column, ...]
    key: tuple[str, ...]
    sort: tuple[str, ...]

    def arrow(self) -> pa.Schema:
        """Return the Arrow schema that every file of this table has."""
        return pa.schema(
            [pa.field(c.name, c.type, nullable=not c.required) for c in self.columns],
            metadata={"perfledger.table": self.name},
        )

    def names(self) -> list[str]:
        """Return the column names in declared order."""
        return [column.name for column in self.columns]

    def from_rows(self, rows: Iterable[dict[str, object]]) -> pa.Table:
        """Build an Arrow table from dicts; a missing key is null, an unknown one an error."""
        rows = list(rows)
        present = set().union(*rows)
        if unknown := present - set(self.names()):
            raise KeyError(f"table {self.name} has no column {sorted(unknown)}")
        arrays = [
            pa.array([row.get(column.name) for row in rows], type=column.type)
            if column.name in present
            else pa.nulls(len(rows), column.type)
            for column in self.columns
        ]
        return pa.Table.from_arrays(arrays, schema=self.arrow())

    def markdown(self) -> str:
        """Return this table's section of the reference page."""
        lines = [f"## {self.name}", "", self.meaning, "", "| column | type | meaning |"]
        lines += ["|---|---|---|"]
        for column in self.columns:
            kind = str(column.type).replace("|", "\\|")
            kind = kind if len(kind) <= 60 else kind.split("<")[0] + "<…>"
            lines.append(f"| `{column.name}` | {kind} | {column.meaning} |")
        key = ", ".join(f"`{name}`" for name in self.key)
        lines += ["", f"A row is identified by {key}.", ""]
        return "\n".join(lines)
