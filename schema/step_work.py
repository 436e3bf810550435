"""What one step moves and computes: the nouns, and the columns of `steps` that tell it.

Each torch operator reads each of its inputs once and writes its output once: these are the bytes
that operators ask for, not those that a cache let through to DRAM. A multiply-add is two FLOPs, and
only matrix products count, as in torch's FlopCounterMode. All of it is integers. The formulas are
in operator_work.py.
"""

from dataclasses import dataclass
from typing import Any

OPERATORS = ("embedding", "norm", "linear", "attention", "moe", "elementwise", "sampling")
KINDS = ("weights", "kv", "gather", "activations", "logits")
DIRECTIONS = ("read", "written")

# What occurs: operator, kind of bytes, direction; and what the bytes are.
CELL_MEANINGS: dict[tuple[str, str, str], str] = {
    ("embedding", "weights", "read"): "rows of the embedding and of the rotary tables",
    ("embedding", "activations", "written"): "the same, as activations",
    ("norm", "weights", "read"): "gains of RMSNorm",
    ("norm", "activations", "read"): "rows into RMSNorm, between its operators too",
    ("norm", "activations", "written"): "rows out of RMSNorm, between its operators too",
    ("linear", "weights", "read"): "matrices outside of experts, with scales and biases",
    ("linear", "activations", "read"): "rows into matrices",
    ("linear", "activations", "written"): "rows out of matrices, but logits",
    ("linear", "logits", "written"): "logits",
    ("attention", "kv", "read"): "K and V that attention reads, padding included",
    ("attention", "kv", "written"): "K and V stored in the cache",
    ("attention", "gather", "read"): "KV blocks read to be gathered, copied or swapped",
    ("attention", "gather", "written"): "KV blocks written by gathering, copying or swapping",
    ("attention", "activations", "read"): "queries, masks, new K and V, outputs: read",
    ("attention", "activations", "written"): "masks and outputs: written",
    ("moe", "weights", "read"): "routers, and the matrices of experts with a row",
    ("moe", "activations", "read"): "rows into routing, dispatch, experts and combination",
    ("moe", "activations", "written"): "rows out of the same",
    ("elementwise", "activations", "read"): "rotary, SwiGLU, residuals, choice of rows: read",
    ("elementwise", "activations", "written"): "the same: written",
    ("sampling", "logits", "read"): "logits read by greedy sampling",
    ("sampling", "logits", "written"): "logits converted for it",
}
CELLS = tuple(CELL_MEANINGS)
FLOP_OPERATORS = ("linear", "attention", "moe")

CELL_COLUMNS = {cell: "_".join((*cell, "bytes")) for cell in CELLS}
FLOP_COLUMNS = {name: f"{name}_flops" for name in FLOP_OPERATORS}
READ_TOTAL, WRITTEN_TOTAL, FLOPS_TOTAL = "memory_read_bytes", "memory_written_bytes", "flops"
LAUNCHES = "launches"
WORK_COLUMNS: tuple[str, ...] = (
    *CELL_COLUMNS.values(),
    *FLOP_COLUMNS.values(),
    READ_TOTAL,
    WRITTEN_TOTAL,
    FLOPS_TOTAL,
    LAUNCHES,
)
COLUMN_MEANINGS: dict[str, str] = {
    **{CELL_COLUMNS[cell]: meaning for cell, meaning in CELL_MEANINGS.items()},
    **{column: f"FLOPs of {name}" for name, column in FLOP_COLUMNS.items()},
    READ_TOTAL: "sum of the columns `…_read_bytes` before it",
    WRITTEN_TOTAL: "sum of the columns `…_written_bytes` before it",
    FLOPS_TOTAL: "sum of the columns `…_flops` before it",
    LAUNCHES: "torch operators called, but for those that only make a view",
}

# An int, or an array of int64 with one for each of many steps.
Whole = Any


@dataclass(frozen=True)
class BatchShape:
    """The rows of one step (or of many: each field an array).

    A chunk is a piece of one sequence's prompt; one that is continued has tokens of its sequence
    in the cache already. A pair is a row and a token that its query is multiplied with, also where
    a mask takes it out again.
    """

    decode_rows: Whole = 0
    decode_context_tokens: Whole = 0  # that those rows may look at, own included
    decode_gathered_blocks: Whole = 0  # rows times blocks of the longest of them
    prefill_rows: Whole = 0
    chunks: Whole = 0
    continued_chunks: Whole = 0
    chunk_key_tokens: Whole = 0  # tokens of each chunk and before it, summed
    chunk_pairs: Whole = 0
    continued_pairs: Whole = 0  # of the continued chunks
    chunk_gathered_blocks: Whole = 0  # of the continued chunks
    sampled_rows: Whole = 0  # whose logits are computed, one as often as it is sampled
    moved_blocks: Whole = 0  # KV blocks copied before a write, swapped out and in
    moved_kinds: Whole = 0  # how many of these three there were
    assignments: Whole = 0  # rows computed by an expert, summed over layers
    touched_experts: Whole = 0  # with at least one row, summed over layers
    microbatches: Whole = 1  # into which the step was cut
    decode_microbatches: Whole = 1  # of those, with a row that decodes; if the step has any
    sampled_microbatches: Whole = 1  # of those, with a sampled row

    @property
    def rows(self) -> Whole:
        """All rows of the step."""
        return self.decode_rows + self.prefill_rows

    @property
    def decoding(self) -> Whole:
        """Calls of attention in each layer for the rows that decode."""
        return (self.decode_rows > 0) * self.decode_microbatches

    @property
    def chosen(self) -> Whole:
        """Whether some rows are sampled, and not every one of them once."""
        sequences = self.decode_rows + self.chunks
        return (self.sampled_rows != self.rows) | (sequences != self.rows)


class Tally:
    """Adds up what operators read, write and compute."""

    def __init__(self) -> None:
        self._cells: dict[tuple[str, str, str], Whole] = dict.fromkeys(CELLS, 0)
        self._flops: dict[str, Whole] = dict.fromkeys(FLOP_OPERATORS, 0)
        self._launches: Whole = 0

    # Sums are made anew each time: added in place, an array of integers would stay one of these.

    def read(self, operator: str, kind: str, size: Whole) -> None:
        """Add bytes read. Raises KeyError for a cell that is not declared."""
        self._add(self._cells, (operator, kind, "read"), size)

    def write(self, operator: str, kind: str, size: Whole) -> None:
        """Add bytes written. Raises KeyError for a cell that is not declared."""
        self._add(self._cells, (operator, kind, "written"), size)

    def compute(self, operator: str, flops: Whole) -> None:
        """Add FLOPs."""
        self._add(self._flops, operator, flops)

    def launch(self, operators: Whole) -> None:
        """Add calls of operators."""
        self._launches = self._launches + operators

    def _add(self, sums: dict[Any, Whole], key: object, more: Whole) -> None:
        sums[key] = sums[key] + more

    def columns(self) -> dict[str, Whole]:
        """Return a value for each of WORK_COLUMNS."""
        totals = {
            direction: sum(size for cell, size in self._cells.items() if cell[2] == direction)
            for direction in DIRECTIONS
        }
        return {
            **{CELL_COLUMNS[cell]: size for cell, size in self._cells.items()},
            **{FLOP_COLUMNS[name]: flops for name, flops in self._flops.items()},
            READ_TOTAL: totals["read"],
            WRITTEN_TOTAL: totals["written"],
            FLOPS_TOTAL: sum(self._flops.values()),
            LAUNCHES: self._launches,
        }
