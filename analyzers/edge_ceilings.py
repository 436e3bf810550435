"""The ceiling that an edge is held against, and the share of it that was reached. Pure."""

import re

import numpy as np
import polars as pl

from perfledger.analyzers.edge_flows import Seen
from perfledger.analyzers.edges import DATASHEET, MEASURED, CeilingShare, Flow
from perfledger.schema.ceilings import text_size

NO_LINK_SPEED = "no manifest of this host tells the speed of its links"
# As schema/topology.py writes a network card.
_NIC_SPEED = re.compile(r"([^:]+): ([\d.]+) Gb/s")


def rate_ceiling(
    seen: Seen, edge: str, operation: str, bytes_per_s: float | None
) -> tuple[CeilingShare | None, str]:
    """Return the best of an operation's variants, else the datasheet's, else why there is none."""
    measured, peak = seen.ceilings.measured, seen.ceilings.peak
    found = measured.of(edge, operation) if measured is not None else ()
    found = tuple(item for item in found if item.unit == "bytes/s")
    if found:
        best = max(found, key=lambda item: item.value)
        share = None if bytes_per_s is None else bytes_per_s / best.value
        return CeilingShare(operation, best.variant, best.value, MEASURED, share, best.note), ""
    sheet = peak.bytes_per_s(edge) if peak else None
    if sheet:
        share = None if bytes_per_s is None else bytes_per_s / sheet
        return CeilingShare(
            "datasheet", "", sheet, DATASHEET, share, peak.source if peak else ""
        ), ""
    reason = measured.reason(edge) if measured is not None else None
    return None, reason or seen.ceilings.note or f"{operation} was not measured on this host"


def bus_ceiling(seen: Seen) -> tuple[CeilingShare | None, str]:
    """Hold the collective that took the longest against its own bus bandwidth (nccl-tests)."""
    rows = seen.traffic.filter(
        (pl.col("edge") == "scale_up")
        & pl.col("selected")
        & pl.col("bus_bytes_per_s").is_not_null()
        & (pl.col("end_ns") > pl.col("start_ns"))
    )
    if rows.is_empty():
        return None, "no collective whose transfer is known apart from waiting"
    took = pl.col("end_ns") - pl.col("start_ns")
    per = rows.group_by("op", "ranks").agg(
        took=took.sum(),
        rate=(pl.col("bus_bytes_per_s") * took).sum() / took.sum(),
        size=pl.col("message_bytes").median(),
    )
    op, ranks, _, rate, size = per.sort("took", "op").row(-1)
    measured = seen.ceilings.measured
    found = measured.of("scale_up", f"{op} busbw") if measured is not None else ()
    if not found:
        return rate_ceiling(seen, "scale_up", f"{op} busbw", rate)
    alike = [item for item in found if f"ranks={ranks}" in item.variant.split()]
    best = min(alike or found, key=lambda item: _distance(item.variant, float(size)))
    note = f"bus bandwidth of the transfers of {op} over {ranks} ranks, waiting left out"
    share = CeilingShare(f"{op} busbw", best.variant, best.value, MEASURED, rate / best.value, note)
    return share, ""


def link_ceiling(seen: Seen, flow: Flow) -> tuple[CeilingShare | None, str]:
    """Hold the busiest interface, in its busier direction, against the speed that its card says."""
    nics = seen.ceilings.topology.get("topology.nics")
    found = [_NIC_SPEED.match(text) for text in nics] if isinstance(nics, list) else []
    speeds = {told[1]: float(told[2]) * 1e9 / 8 for told in found if told}
    seconds = flow.active_ns / 1e9 / max(1, flow.devices)
    shares = [
        (max(part.forward_bytes, part.backward_bytes or 0) / seconds / speeds[part.name], part.name)
        for part in flow.parts
        if part.name in speeds and seconds
    ]
    if not shares:
        return None, NO_LINK_SPEED
    share, name = max(shares)
    note = "one direction, mean over the window; the speed is what the card says, not measured"
    return CeilingShare("link speed of", name, speeds[name], DATASHEET, share, note), ""


def _distance(variant: str, size: float) -> float:
    """Return how far a measured size is from another, in powers of e; unreadable ones are far."""
    for word in variant.split():
        try:
            return abs(float(np.log(text_size(word.rpartition("=")[2]) / max(size, 1.0))))
        except ValueError:
            continue
    return float("inf")
