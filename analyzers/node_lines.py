"""The places that hold bytes: how much fits there and what holds it, as gauges last said. Pure."""

import polars as pl

from perfledger.analyzers.counter_growth import last_values
from perfledger.analyzers.edge_flows import Seen
from perfledger.analyzers.edges import MEASURED, NOT_OBSERVABLE, Held, NodeLine
from perfledger.analyzers.ledger import Selection
from perfledger.schema.edges import NODES, Node

LIMIT = "perfledger.capacity.memory"
HELD = {
    "device_memory": (
        "perfledger.capacity.weights",
        "perfledger.capacity.kv",
        "perfledger.capacity.activations",
    ),
    "host_memory": ("perfledger.capacity.swap",),
}
CAPACITY_NAMES = (
    LIMIT,
    *(name for names in HELD.values() for name in names),
    "system.memory.limit",
    "system.memory.usage",
)
_SERIES = ("name", "service_name", "instance", "perfledger.replica", "system.memory.state")


def node_lines(seen: Seen, selection: Selection) -> tuple[NodeLine, ...]:
    """Return a line for each node of schema/edges.py, in its order."""
    newest = last_values(seen.points.filter(pl.col("name").is_in(CAPACITY_NAMES)), _SERIES)
    ours = newest.filter(_is_ours(selection, seen))
    return tuple(_node(node, ours, newest, seen) for node in NODES)


def _is_ours(selection: Selection, seen: Seen) -> pl.Expr:
    """Return what selects the gauges of the selected services."""
    services = {rank.service for rank in seen.steps.ranks if rank.selected}
    chosen = {selection.service} if selection.service else services
    return pl.col("service_name").is_in(list(chosen))


def _node(node: Node, ours: pl.DataFrame, newest: pl.DataFrame, seen: Seen) -> NodeLine:
    held = tuple(
        Held(name.rpartition(".")[2], int(values["value"].sum()))
        for name in HELD.get(node.name, ())
        if not (values := ours.filter(pl.col("name") == name)).is_empty()
    )
    if node.name == "device_memory":
        limits = ours.filter(pl.col("name") == LIMIT)["value"]
        # Engines on one CPU each tell the host's memory; devices are apart.
        limit = limits.max() if seen.on_cpu else limits.sum()
        return _line(node, None if limits.is_empty() else limit, held)
    if node.name == "host_memory":
        limits = newest.filter(pl.col("name") == "system.memory.limit")["value"]
        used = newest.filter(
            (pl.col("name") == "system.memory.usage") & (pl.col("system.memory.state") == "used")
        )["value"]
        if len(used):
            held = (*held, Held("used by all processes", int(used.sum())))
        return _line(node, None if limits.is_empty() else limits.sum(), held)
    return NodeLine(node.name, node.meaning, None, (), NOT_OBSERVABLE, "nobody tells its capacity")


def _line(node: Node, limit: object, held: tuple[Held, ...]) -> NodeLine:
    if limit is None and not held:
        why = "no capacity gauge in this selection"
        return NodeLine(node.name, node.meaning, None, (), NOT_OBSERVABLE, why)
    size = None if limit is None else int(float(str(limit)))
    return NodeLine(node.name, node.meaning, size, held, MEASURED, "")
