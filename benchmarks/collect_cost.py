"""What a span costs the collector: CPU to the last file, beside rotel, and bytes on disk."""

import random
import statistics
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from itertools import count, product
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
from collect_servers import ROTEL_HINT, Server, collector, find_rotel, rotel, wait_until
from otlp_load import Acks, Load, run_load

SERVER_CORE, CLIENT_CORE = 1, 0
_WARM_UP_REQUESTS = 24
_WRITTEN_WITHIN_S = 180.0
_seeds = count(1)


@dataclass(frozen=True)
class Effort:
    """How long and how often to measure."""

    repeats: int
    seconds: float
    placements: tuple[str, ...]  # "pinned": server and client on a core each; "free"
    watch_s: float = 1  # after the last file: rows that are derived later cost CPU too
    connections: int = 4


@dataclass(frozen=True)
class Cost:
    """What one load cost one server. `wall_rate` is spans acknowledged a second."""

    server: str
    protocol: str
    placement: str
    spans: int
    us_per_span: float
    spans_per_core_s: float
    wall_rate: float
    client_us_per_span: float
    retries: int


def cpu_cost(folder: Path, bodies: Path, effort: Effort) -> dict[str, Any]:
    """Measure both servers over both protocols, in random order; return medians and ratios."""
    names = ["perfledger"] + (["rotel"] if find_rotel() else [])
    costs: list[Cost] = []
    for repeat, placement in product(range(effort.repeats), effort.placements):
        for name in random.sample(names, len(names)):
            place = folder / f"{name}-{placement}-{repeat}"
            costs += measured(start(name, place), bodies, placement, effort)
    note = {} if len(names) == 2 else {"rotel": ROTEL_HINT}
    return {"summary": summary(costs), "ratio_to_rotel": ratios(costs), **note} | {
        "raw": [vars(cost) for cost in costs]
    }


def start(name: str, folder: Path) -> AbstractContextManager[Server]:
    return collector(folder) if name == "perfledger" else rotel(folder)


def measured(
    starting: AbstractContextManager[Server], bodies: Path, placement: str, effort: Effort
) -> Iterator[Cost]:
    """Start a server, warm it up, and yield what each protocol costs."""
    with starting as server:
        if placement == "pinned":
            server.bind(SERVER_CORE)
        core = CLIENT_CORE if placement == "pinned" else None
        for protocol in ("grpc", "http"):
            send(server, protocol, bodies, requests=_WARM_UP_REQUESTS, cpu=core)
        for protocol in random.sample(("grpc", "http"), 2):
            server.settle()
            before_ns = server.cpu_ns()
            acks = send(
                server,
                protocol,
                bodies,
                seconds=effort.seconds,
                connections=effort.connections,
                cpu=core,
            )
            server.settle(effort.watch_s)
            yield _cost(server, protocol, placement, acks, server.cpu_ns() - before_ns)


def send(server: Server, protocol: str, bodies: Path, **load: Any) -> Acks:
    """Send a load and wait until its spans lie in files, where the server keeps any."""
    rows = server.rows()
    plan = Load(protocol, server.ports[protocol], bodies, seed=next(_seeds), **load)
    acks = run_load(plan, bodies.with_name("acks.npz"))
    if server.store is not None:
        wait_until(lambda: server.rows() - rows >= acks.spans, _WRITTEN_WITHIN_S, "the last file")
        assert server.rows() - rows == acks.spans, "more spans than were acknowledged"
    return acks


def _cost(server: Server, protocol: str, placement: str, acks: Acks, cpu_ns: int) -> Cost:
    wall_s = (int(acks.acked_ns.max()) - int(acks.sent_ns.min())) / 1e9
    cost = Cost(
        server.name,
        protocol,
        placement,
        acks.spans,
        cpu_ns / acks.spans / 1e3,
        acks.spans * 1e9 / cpu_ns,
        acks.spans / wall_s,
        acks.cpu_ns / acks.spans / 1e3,
        len(acks.refusals),
    )
    print(
        f"  {cost.server:10} {cost.protocol} {cost.placement:6} {cost.spans_per_core_s:11,.0f} "
        f"spans/s per core, {cost.wall_rate:9,.0f} acknowledged a second, {cost.retries} retries"
    )
    return cost


def summary(costs: list[Cost]) -> dict[str, Any]:
    """Return the median of each server, protocol and placement, and its extremes."""
    found = {}
    for key in sorted({(c.server, c.protocol, c.placement) for c in costs}):
        rates = [c.spans_per_core_s for c in costs if (c.server, c.protocol, c.placement) == key]
        walls = [c.wall_rate for c in costs if (c.server, c.protocol, c.placement) == key]
        found[" ".join(key)] = {
            "spans_per_core_s": statistics.median(rates),
            "lowest": min(rates),
            "highest": max(rates),
            "us_per_span": 1e6 / statistics.median(rates),
            "wall_spans_per_s": statistics.median(walls),
        }
    return found


def ratios(costs: list[Cost]) -> dict[str, Any]:
    """Return ours over rotel's spans per core, repeat by repeat and their median; above 1 wins."""
    found = {}
    for protocol, placement in sorted({(c.protocol, c.placement) for c in costs}):
        ours, theirs = (
            [
                c.spans_per_core_s
                for c in costs
                if (c.server, c.protocol, c.placement) == (name, protocol, placement)
            ]
            for name in ("perfledger", "rotel")
        )
        pairs = [a / b for a, b in zip(ours, theirs, strict=False)]
        if pairs:
            found[f"{protocol} {placement}"] = {"median": statistics.median(pairs), "each": pairs}
    return found


def bytes_on_disk(folder: Path, bodies: Path, requests: int) -> dict[str, Any]:
    """Send different requests once each, flat out; return the bytes of the files they became."""
    with collector(folder) as server:
        acks = send(server, "http", bodies, requests=requests)
        assert server.store is not None
        files = server.store.files("spans")
        sizes = [path.stat().st_size for path in files]
        groups = sum(pq.read_metadata(path).num_row_groups for path in files)
    return {
        "bytes_per_span": sum(sizes) / acks.spans,
        "spans": acks.spans,
        "files": len(files),
        "row_groups": groups,
        "columns": _column_bytes(files, acks.spans),
    }


def _column_bytes(files: list[Path], spans: int) -> dict[str, float]:
    """Return the compressed bytes a span of each column, the largest first."""
    sizes: dict[str, int] = {}
    for path in files:
        found = pq.read_metadata(path)
        for group in map(found.row_group, range(found.num_row_groups)):
            for column in map(group.column, range(group.num_columns)):
                name = column.path_in_schema
                sizes[name] = sizes.get(name, 0) + column.total_compressed_size
    largest = sorted(sizes.items(), key=lambda item: -item[1])
    return {name: round(size / spans, 3) for name, size in largest}
