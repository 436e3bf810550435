"""What `perfledger train` prints: steps, what moved between the ranks, what each rank holds."""

from dataclasses import asdict
from typing import TYPE_CHECKING

from perfledger.instrumented_runtime.checkpoints.sharded import shard_name
from perfledger.instrumented_runtime.records import ShardMoved
from perfledger.instrumented_runtime.training.messages import StepDone
from perfledger.instrumented_runtime.training.traffic import Traffic, conversion_of, summed
from perfledger.output import ms, print_table

if TYPE_CHECKING:
    from perfledger.instrumented_runtime.training.launcher import TrainRun

STEP_COLUMNS = ("step", "loss", "time", "tokens/s", "sent")


def print_start(run: "TrainRun") -> None:
    """Print what trains, once all ranks have joined."""
    options, shape, first = run.options, run.options.shape, run.joined[0]
    layout = f"{options.layout}, {options.layout.world} x {first.device} ({first.backend})"
    if options.layout.pp > 1:
        layout += f", {options.schedule}, {options.pieces} microbatches"
    print(
        f"model    {options.size_name}: {shape.layers} layers, hidden size {shape.hidden_size},"
        f" {first.parameters:,} parameters on rank 0\nlayout   {layout}",
        flush=True,
    )
    if options.first_step:
        print(f"resumed  after {options.first_step} steps, from {options.checkpoint}", flush=True)


def print_summary(run: "TrainRun") -> None:
    """Print the tables of what was done, each within 80 columns."""
    rows = [
        (
            str(row["step"]),
            f"{row['loss']:.4f}",
            ms(row["wall_ns"]),
            f"{row['tokens_per_s']:,.0f}",
            size(row["wire_bytes"]),
        )
        for row in step_rows(run)
    ]
    print_table("", STEP_COLUMNS, rows)
    number, traffic = last_observed(run)
    if traffic:
        _print_traffic(f"\nwhat moved in step {number}, all ranks together", traffic)
    if saved := summed(run.saved()):
        _print_traffic("\nwhat moved to save the whole model", saved)
    _print_memory(run)
    if run.shards:
        _print_shards(run)
    if run.telemetry and (run.telemetry.dropped or run.telemetry.lost):
        lost = run.telemetry
        print(f"\ntelemetry lost: {lost.dropped} records and {lost.lost} spans")


def step_rows(run: "TrainRun") -> list[dict[str, float | int | None]]:
    """Return the steps that all ranks have ended: loss over all tokens, time from the first
    rank's start to the last one's end, bytes that the ranks sent (None: not observed)."""
    rows: list[dict[str, float | int | None]] = []
    tokens = run.options.batch * run.options.sequence
    for ranks in run.complete_steps():
        losses = [done.loss for done in ranks.values() if done.loss is not None]
        wall_ns = max(d.end_ns for d in ranks.values()) - min(d.start_ns for d in ranks.values())
        rows.append(
            {
                "step": ranks[0].number,
                "loss": sum(losses) / len(losses),
                "wall_ns": wall_ns,
                "tokens": tokens,
                "tokens_per_s": tokens * 1e9 / wall_ns,
                "wire_bytes": sent_bytes(ranks),
            }
        )
    return rows


def sent_bytes(ranks: dict[int, StepDone]) -> int | None:
    """Return what all ranks sent in a step; None where it was not observed or not known."""
    total = 0
    for done in ranks.values():
        if done.traffic is None:
            return None
        for row in done.traffic:
            if row.wire_bytes is None:
                return None
            total += row.wire_bytes
    return total


def last_observed(run: "TrainRun") -> tuple[int, list[Traffic]]:
    """Return the last step whose collectives were observed, and their totals over all ranks."""
    for ranks in reversed(run.complete_steps()):
        if all(done.traffic is not None for done in ranks.values()):
            return ranks[0].number, summed(
                row for done in ranks.values() for row in done.traffic or ()
            )
    return 0, []


def as_json(run: "TrainRun") -> dict[str, object]:
    """Return everything as one JSON object."""
    number, traffic = last_observed(run)
    options = run.options
    return {
        "model": {"name": options.size_name, **asdict(options.shape)},
        "layout": options.layout.used(),
        "world": options.layout.world,
        "schedule": options.schedule if options.layout.pp > 1 else None,
        "microbatches": options.pieces if options.layout.pp > 1 else None,
        "ranks": [run.joined[rank]._asdict() for rank in sorted(run.joined)],
        "steps": step_rows(run),
        "observed_step": number if traffic else None,
        "traffic": [_traffic_json(row) for row in traffic],
        "saved": [_traffic_json(row) for row in summed(run.saved())],
        "memory": [
            {"rank": rank, **asdict(done.held)} for rank, done in sorted(_last(run).items())
        ],
        "checkpoints": {
            "folder": options.checkpoint or None,
            "resumed_after": options.first_step or None,
            "passed_over": run.passed_over,
            "shards": [_shard_json(moved) for moved in run.shards],
        },
        "telemetry": run.telemetry._asdict() if run.telemetry else None,
    }


def size(count: int | float | None) -> str:
    """Return bytes with a unit (powers of 1000), or a dash where undefined."""
    if count is None:
        return "–"
    if count < 1000:
        return f"{count} B"
    for unit in ("kB", "MB"):
        count /= 1000
        if count < 999.95:
            return f"{count:.1f} {unit}"
    return f"{count / 1000:.1f} GB"


def _traffic_json(row: Traffic) -> dict[str, object]:
    return {**row._asdict(), "conversion": conversion_of(row)._asdict()}


def _shard_json(moved: ShardMoved) -> dict[str, object]:
    return {
        "op": "load" if moved.loaded else "save",
        "step": moved.step,
        "rank": moved.rank,
        "shard": shard_name(moved.rank, moved.ranks),
        "bytes": moved.bytes,
        "ns": moved.end_ns - moved.start_ns,
    }


def _print_shards(run: "TrainRun") -> None:
    """The shards that were loaded, and those of the last checkpoint that was saved."""
    last = max(moved.step for moved in run.shards)
    rows = [
        (
            f"{'loaded' if moved.loaded else 'saved'} after {moved.step}",
            shard_name(moved.rank, moved.ranks),
            size(moved.bytes),
            ms(moved.end_ns - moved.start_ns),
        )
        for moved in sorted(run.shards, key=lambda moved: (moved.step, moved.rank))
        if moved.loaded or moved.step == last
    ]
    columns = ("steps", "shard", "bytes", "time")
    print_table("\ncheckpoints: loaded, and the last saved", columns, rows)


def _print_traffic(title: str, traffic: list[Traffic]) -> None:
    """Two tables: the operations of each dimension, and the layout that each of them changes."""
    operations = [
        (f"{row.dimension} {row.op}, {row.part}", row.calls, size(row.bytes), size(row.wire_bytes))
        for row in traffic
    ]
    print_table(title, ("operation", "calls", "bytes", "on the wire"), operations)
    print_table("\nlayouts that it changed", ("what", "bytes", "on the wire"), _changes(traffic))


def _changes(traffic: list[Traffic]) -> list[tuple[str, str, str]]:
    """Return a row for each conversion; of a send and its receive the send counts."""
    totals: dict[str, tuple[int, int | None]] = {}
    for row in traffic:
        conversion = conversion_of(row)
        if row.op == "recv" or not conversion.tensor:
            continue
        name = f"{row.dimension} {conversion.tensor}: {conversion.before} → {conversion.after}"
        logical, wire = totals.get(name, (0, 0))
        known = wire is not None and row.wire_bytes is not None
        total = (wire or 0) + (row.wire_bytes or 0) if known else None
        totals[name] = (logical + row.bytes, total)
    return [(name, size(logical), size(wire)) for name, (logical, wire) in totals.items()]


def _print_memory(run: "TrainRun") -> None:
    columns = ("rank", "parameters", "gradients", "optimizer", "full copies", "left", "process")
    rows = [
        (str(rank), *(size(value) for value in asdict(done.held).values()))
        for rank, done in sorted(_last(run).items())
    ]
    print_table("\nwhat each rank holds at the end of its last step", columns, rows)


def _last(run: "TrainRun") -> dict[int, StepDone]:
    steps = run.complete_steps()
    return steps[-1] if steps else {}
