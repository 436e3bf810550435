"""What the engines of a selection are, as their step spans say: device, dtype, model's shape."""

from collections.abc import Sequence
from dataclasses import dataclass

import polars as pl

from perfledger.analyzers.ledger import Selection
from perfledger.analyzers.step_sums import StepSums, union_ns
from perfledger.schema.errors import UsageError
from perfledger.schema.model_shape import parse_shape

_KEYS = {
    "perfledger.device": "device",
    "perfledger.dtype": "dtype",
    "perfledger.kernel_path": "kernel_path",
    "perfledger.layout": "layout",
    "perfledger.model.shape": "shape",
}


@dataclass(frozen=True)
class EngineFacts:
    """What a rank says of itself; empty where it does not."""

    device: str = ""  # cpu, cuda:0
    dtype: str = ""
    kernel_path: str = ""
    layout: str = ""
    shape: str = ""  # as schema/model_shape.py writes it

    @property
    def weights(self) -> str:
        """Return how the weights are held: a dtype, or int8 and the like; empty if not told."""
        try:
            quantization = parse_shape(self.shape).quantization if self.shape else "none"
        except UsageError:  # of another version
            return ""
        return self.dtype if quantization == "none" else quantization


@dataclass(frozen=True)
class Device:
    """One memory that selected ranks compute on, by indices into StepSums.ranks."""

    name: str
    is_cpu: bool
    ranks: tuple[int, ...]


def engine_facts(selection: Selection, steps: StepSums) -> dict[int, EngineFacts]:
    """Return the facts of each selected rank, from the span of its first step."""
    facts = {one.rank: EngineFacts() for one in steps.sums}
    if not facts:
        return {}
    owners = {(r.run, r.service, r.replica, r.rank): at for at, r in enumerate(steps.ranks)}
    first = _first_steps(selection, steps)
    ranks = {row[4:6]: owners.get((row[0] or "", row[1] or "", *row[2:4])) for row in first.rows()}
    # The ends come first: they tell which parts of which files to read.
    spans = selection.spans().filter(
        pl.col("end_ns").is_between(first["end_ns"].min(), first["end_ns"].max())
        & pl.col("trace_id").is_in(first["trace_id"].unique().implode())
        & pl.col("span_id").is_in(first["span_id"].unique().implode())
    )
    for *ids, attributes in spans.select("trace_id", "span_id", "attributes").collect().iter_rows():
        rank = ranks.get(tuple(ids))
        if rank is not None:
            texts = {pair["key"]: pair["text"] or "" for pair in attributes or ()}
            facts[rank] = EngineFacts(**{name: texts.get(k, "") for k, name in _KEYS.items()})
    return facts


def _first_steps(selection: Selection, steps: StepSums) -> pl.DataFrame:
    """Return run, service, replica, rank, both ids and the end of each rank's first step."""
    starts = {one.rank: one.first_ns for one in sorted(steps.sums, key=lambda s: -s.first_ns)}
    rows = selection.store.scan_as_received("steps", selection.since_ns)
    return (
        rows.filter(pl.col("start_ns").is_in(sorted(set(starts.values()))))
        .select("run_id", "service_name", "replica", "rank", "trace_id", "span_id", "end_ns")
        .collect()
    )


def devices_of(steps: StepSums, facts: dict[int, EngineFacts]) -> list[Device]:
    """Return the memories of the selected ranks: those on the CPU share one, others have their own.

    Ranks of several hosts on the CPU are taken for one host's: a step does not say where it ran.
    """
    on_cpu = tuple(sorted(rank for rank, fact in facts.items() if fact.device.startswith("cpu")))
    shared = [Device("DRAM of the host", True, on_cpu)] if on_cpu else []
    own = [
        Device(f"{steps.ranks[rank]} on {fact.device or 'an unknown device'}", False, (rank,))
        for rank, fact in sorted(facts.items())
        if rank not in on_cpu
    ]
    return shared + own


def active_ns(steps: StepSums, devices: Sequence[Device], kind: str | None = None) -> int:
    """Return how long steps (of one kind or all) ran on each device, added up over devices (ns)."""
    return sum(union_ns(*steps.intervals(device.ranks, kind)) for device in devices)
