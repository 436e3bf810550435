"""What the selected steps moved and computed, as exact sums, and when which rank ran."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import polars as pl
from numpy.typing import NDArray

from perfledger.analyzers.ledger import Selection
from perfledger.schema.intervals import Coverage, Ints
from perfledger.schema.span_ids import may_be_repeated
from perfledger.schema.step_work import READ_TOTAL, WORK_COLUMNS

KINDS = ("prefill", "decode", "mixed")
_COUNTS = ("prefill_tokens", "decode_tokens", "cpu_ns")
_OWNER = ("run_id", "service_name", "replica", "rank")
_KINDS = pl.Enum([f"{kind}_step" for kind in KINDS])


@dataclass(frozen=True)
class Rank:
    """One rank of one engine. `selected` is false for those of other runs and services."""

    run: str
    service: str
    replica: str
    rank: int
    selected: bool

    def __str__(self) -> str:
        service = self.service or "unnamed service"
        return f"{service} replica {self.replica or '–'} rank {self.rank}"


@dataclass(frozen=True)
class RankSums:
    """Sums over the steps of one kind on one rank; `work` over those that tell their work."""

    rank: int  # index into StepSums.ranks
    kind: str
    steps: int
    without_work: int
    prefill_tokens: int
    decode_tokens: int
    cpu_ns: int
    first_ns: int  # start of the first of them, wall clock
    work: dict[str, int]


@dataclass(frozen=True)
class StepSums:
    """The selected steps added up, and the intervals of all steps of their time, by rank and start.

    A step is active from the end of its `schedule` child to its end: before, no byte of the model
    moves. `rank` and `kind` are indices into `ranks` and KINDS, -1 for a kind that is not known.
    Times are wall ns.
    """

    ranks: tuple[Rank, ...]
    sums: tuple[RankSums, ...]
    rank: Ints
    kind: NDArray[np.int8]
    start_ns: Ints
    end_ns: Ints

    @property
    def steps(self) -> int:
        """How many steps were added up."""
        return sum(one.steps for one in self.sums)

    @property
    def without_work(self) -> int:
        """How many of those do not tell what they moved."""
        return sum(one.without_work for one in self.sums)

    @property
    def tokens(self) -> int:
        """Tokens computed, prompt and new: each is counted once, by its replica's first rank."""
        return tokens_of(self, self.sums)

    def of(self, kind: str | None = None) -> list[RankSums]:
        """Return the sums of one kind of step, or of all kinds."""
        return [one for one in self.sums if kind is None or one.kind == kind]

    def intervals(self, ranks: Sequence[int], kind: str | None = None) -> tuple[Ints, Ints]:
        """Return starts and ends of the steps of some ranks, of one kind or all."""
        bounds = np.searchsorted(self.rank, [[rank, rank + 1] for rank in ranks])
        parts = [slice(first, last) for first, last in bounds]
        if kind is not None:
            code = KINDS.index(kind)
            parts = [p.start + np.flatnonzero(self.kind[p] == code) for p in parts]
        starts, ends = ([times[p] for p in parts] for times in (self.start_ns, self.end_ns))
        return (starts[0], ends[0]) if len(parts) == 1 else (_joined(starts), _joined(ends))


def _joined(parts: Sequence[Ints]) -> Ints:
    return np.concatenate(parts) if parts else np.empty(0, np.int64)


def of_engine(selection: Selection, start: str) -> tuple[pl.Expr, pl.Expr]:
    """Return which rows of steps (or copies, collectives) are selected by their start, and which
    are of the same engines at whatever time."""
    ours = selection.of_resource()
    chosen = selection.of_arrival(start)
    if selection.replica:
        of_replica = pl.col("replica") == selection.replica
        ours, chosen = ours & of_replica, chosen & of_replica
    return chosen.fill_null(False), ours.fill_null(False)


def find_step_sums(selection: Selection) -> StepSums:
    """Read the steps of a selection; without any, everything is empty.

    Steps of other runs and services that began in the same time are there as intervals only.
    """
    rows = _steps(selection)
    sums = _sums(rows.filter(of_engine(selection, "start_ns")[0]))
    if sums.is_empty():
        none = np.empty(0, np.int64)
        return StepSums((), (), none, none.astype(np.int8), none, none)
    first, last = int(sums["first_ns"].min()), int(sums["last_ns"].max())  # type: ignore[arg-type]
    ranks, times = _times(rows, selection, first, last)
    index = {owner: at for at, owner in enumerate(ranks.select(_OWNER).rows())}
    return StepSums(
        tuple(_rank(row) for row in ranks.iter_rows(named=True)),
        tuple(_rank_sums(row, index) for row in sums.iter_rows(named=True)),
        times["owner"].to_numpy(),
        times["kind"].to_numpy(),
        times["start_ns"].to_numpy(),
        times["end_ns"].to_numpy(),
    )


def tokens_of(steps: StepSums, sums: Iterable[RankSums]) -> int:
    """Return the tokens of some of the sums; ranks of one replica compute the same tokens."""
    firsts: dict[tuple[str, str, str], int] = {}
    for rank in steps.ranks:
        replica = (rank.run, rank.service, rank.replica)
        firsts[replica] = min(rank.rank, firsts.get(replica, rank.rank))
    return sum(
        one.prefill_tokens + one.decode_tokens
        for one in sums
        if (r := steps.ranks[one.rank]).rank == firsts[r.run, r.service, r.replica]
    )


def union_ns(start_ns: Ints, end_ns: Ints) -> int:
    """Return the length of a union of intervals (ns)."""
    if (end_ns >= start_ns).all() and (start_ns[1:] >= end_ns[:-1]).all():
        return int((end_ns - start_ns).sum())  # in order and apart, as one rank's steps are
    return Coverage.of(start_ns, end_ns).length


def _steps(selection: Selection) -> pl.LazyFrame:
    """Return the rows, each once. To look for a repeated id first is cheaper than to drop them."""
    store, since_ns = selection.store, selection.since_ns
    ids = (table["span_id"] for table in store.read_as_received("steps", ["span_id"], (), since_ns))
    if any(len(rows) for rows in may_be_repeated(ids)):
        return store.scan("steps", since_ns)
    return store.scan_as_received("steps", since_ns)


def _sums(rows: pl.LazyFrame) -> pl.DataFrame:
    """Return one row for each rank and kind. A sum may be larger than 64 bits hold."""
    wide = [pl.col(name).cast(pl.Int128).sum() for name in (*WORK_COLUMNS, *_COUNTS)]
    return (
        rows.group_by(*_OWNER, "kind")
        .agg(
            *wide,
            steps=pl.len(),
            without_work=pl.col(READ_TOTAL).null_count(),
            first_ns=pl.col("start_ns").min(),
            last_ns=pl.col("end_ns").max(),
        )
        .sort(*_OWNER, "kind", nulls_last=True)
        .collect(engine="streaming")
    )


def _times(
    rows: pl.LazyFrame, selection: Selection, first_ns: int, last_ns: int
) -> tuple[pl.DataFrame, pl.DataFrame]:
    """Return the ranks, and one row for each step by the number of its rank."""
    meanwhile = rows.filter((pl.col("start_ns") <= last_ns) & (pl.col("end_ns") >= first_ns))
    chosen, ours = of_engine(selection, "start_ns")
    found = meanwhile.select(
        *_OWNER,
        pl.col("kind").cast(_KINDS, strict=False),
        pl.max_horizontal("start_ns", "schedule_end_ns").alias("start_ns"),
        "end_ns",
        selected=chosen,
    ).collect(engine="streaming")
    # The time range cuts the selection itself: its own steps outside of it are no contenders.
    found = found.filter(pl.col("selected") | ~ours)
    times = found.select(
        pl.struct(_OWNER).rank("dense").cast(pl.Int64).alias("owner") - 1,
        pl.col("kind").to_physical().cast(pl.Int8).fill_null(-1),
        "start_ns",
        "end_ns",
    )
    owner, first = np.unique(times["owner"].to_numpy(), return_index=True)
    ranks = found[first].select(*_OWNER, "selected").with_columns(owner=owner)
    return ranks, times.sort("owner", "start_ns")


def _rank(row: dict[str, Any]) -> Rank:
    run, service, replica = (str(row[name] or "") for name in _OWNER[:3])
    return Rank(run, service, replica, int(row["rank"]), bool(row["selected"]))


def _rank_sums(row: dict[str, Any], index: dict[tuple[object, ...], int]) -> RankSums:
    return RankSums(
        rank=index[tuple(row[name] for name in _OWNER)],
        kind=str(row["kind"]).removesuffix("_step"),
        **{name: int(row[name]) for name in ("steps", "without_work", "first_ns", *_COUNTS)},
        work={name: int(row[name]) for name in WORK_COLUMNS},
    )
