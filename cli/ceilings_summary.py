"""What `perfledger ceilings` shows: tables of the measured limits, and what could not be."""

import textwrap
from dataclasses import asdict

from perfledger.output import WIDTH, print_table
from perfledger.schema.ceilings import (
    HOST,
    AttentionShape,
    Ceiling,
    Ceilings,
    MatmulShape,
    size_text,
    text_size,
)
from perfledger.schema.hardware_peaks import Peak, peak_of

GIGA = 1e9
Row = list[object]


def as_json(ceilings: Ceilings) -> dict[str, object]:
    """Return JSON objects only: every ceiling with its samples."""
    return {
        "run_id": ceilings.run_id,
        "created_ns": ceilings.created_ns,
        "host_fingerprint": ceilings.host.host_fingerprint(),
        "threads": ceilings.threads,
        "device": ceilings.device,
        "ceilings": [{**asdict(item), "typical": item.typical} for item in ceilings.items],
        "absent": [asdict(one) for one in ceilings.absent],
        "datasheet": [asdict(peak) for peak in _peaks(ceilings)],
    }


def print_summary(ceilings: Ceilings, url: str) -> None:
    """Print the tables."""
    print(
        f"{ceilings.run_id}: {ceilings.device}, {ceilings.threads} threads,"
        f" host {ceilings.host.host_fingerprint()[:12]}\n"
        f"kept in {url}; each number is the best of its samples\n"
    )
    for title, columns, rows in (
        _memory(ceilings),
        _latency(ceilings),
        _matrices(ceilings),
        _attention(ceilings),
        _host(ceilings),
        _crossing(ceilings),
        _collectives(ceilings),
        _storage(ceilings),
    ):
        if rows:
            print_table(title, columns, rows)
            print()
    for peak in _peaks(ceilings):
        print(f"{peak.name}: {_share_of(peak, ceilings)} ({peak.source})")
    for one in ceilings.absent:
        line = f"not measured: {one.edge} {one.operation}: {one.reason}"
        print(textwrap.fill(line, WIDTH, subsequent_indent="  "))


Table = tuple[str, list[str], list[Row]]


def _memory(ceilings: Ceilings) -> Table:
    operations = ("read", "copy", "elementwise")
    found = {name: _by_variant(ceilings, "device_memory", name) for name in operations}
    sizes = sorted({size for items in found.values() for size in items}, key=text_size)
    rows: list[Row] = [
        [size, *(_giga(found[name].get(size)) for name in operations)] for size in sizes
    ]
    return "device memory, GB/s", ["working set", "read", "copy", "SwiGLU"], rows


def _latency(ceilings: Ceilings) -> Table:
    items = ceilings.of("device_memory", "latency")
    rows: list[Row] = [[item.variant, f"{item.value:.1f}"] for item in items]
    return "latency of one load, ns", ["working set", "ns"], rows


def _matrices(ceilings: Ceilings) -> Table:
    """Show the largest matrices: the smallest set of them, and the largest."""
    items = [(MatmulShape.parse(i.variant), i) for i in ceilings.of("registers_sram", "matmul")]
    sets = sorted({shape.set_bytes for shape, _ in items if shape.m <= 32})
    best: dict[tuple[str, int], dict[int, float]] = {}
    for shape, item in items:
        rates = best.setdefault((shape.dtype, shape.m), {})
        rates[shape.set_bytes] = max(rates.get(shape.set_bytes, 0.0), item.value)
    rows: list[Row] = []
    for (dtype, m), rates in best.items():
        whole = m > 32  # of prefill one set is measured
        cells = [rates.get(size) for size in sets] if not whole else [max(rates.values())]
        cells += [None] * (len(sets) - len(cells))
        rows.append([f"{dtype}, {m} rows", *(_tenth(cell) for cell in cells)])
    return "matrix products, GFLOP/s", ["weights in", *map(size_text, sets)], rows


def _attention(ceilings: Ceilings) -> Table:
    items = [
        (AttentionShape.parse(i.variant), i) for i in ceilings.of("device_memory", "attention")
    ]
    contexts = sorted({shape.context for shape, _ in items})
    found: dict[tuple[str, int], dict[int, float]] = {}
    for shape, item in items:
        found.setdefault((shape.dtype, shape.rows), {})[shape.context] = item.value
    rows: list[Row] = [
        [f"{dtype}, {count} rows", *(_tenth(rates.get(context)) for context in contexts)]
        for (dtype, count), rates in found.items()
    ]
    return "decode attention, GB/s gathered and read", ["context", *map(str, contexts)], rows


def _host(ceilings: Ceilings) -> Table:
    items = [item for item in ceilings.items if item.edge == HOST]
    rows: list[Row] = [
        [f"{item.operation}, {item.variant}", f"{item.value / 1000:.1f}"] for item in items
    ]
    return "host, µs", ["of each", "µs"], rows


def _crossing(ceilings: Ceilings) -> Table:
    rows = _plain_rows(ceilings, "host_device")
    return "host and device, GB/s", ["copy", "GB/s"], rows


def _collectives(ceilings: Ceilings) -> Table:
    items = [item for item in ceilings.items if item.edge == "scale_up"]
    operations = list(dict.fromkeys(i.operation for i in items if i.operation.endswith("busbw")))
    variants = list(dict.fromkeys(item.variant for item in items))
    found = {(item.operation, item.variant): item for item in items}
    rows: list[Row] = [
        [name.removesuffix(" busbw"), *(_giga(found.get((name, one))) for one in variants)]
        for name in operations
    ]
    columns = [one.rpartition("=")[2] for one in variants]
    ranks = variants[0].split()[0] if variants else ""
    return f"collectives, bus bandwidth, GB/s, {ranks}", ["size", *columns], rows


def _storage(ceilings: Ceilings) -> Table:
    rows = _plain_rows(ceilings, "storage_local") + _plain_rows(ceilings, "storage_object")
    return "storage", ["", "GB/s or ms"], rows


def _plain_rows(ceilings: Ceilings, edge: str) -> list[Row]:
    rows: list[Row] = []
    for item in ceilings.items:
        if item.edge == edge:
            name = f"{item.operation} {item.variant}, {item.note}"
            slow = item.unit == "ns"
            value = f"{item.value / 1e6:.2f} ms" if slow else f"{item.value / GIGA:.2f} GB/s"
            rows.append([name, value])
    return rows


def _by_variant(ceilings: Ceilings, edge: str, operation: str) -> dict[str, Ceiling]:
    return {item.variant: item for item in ceilings.of(edge, operation)}


def _giga(item: Ceiling | None) -> str | None:
    return None if item is None else f"{item.value / GIGA:.2f}"


def _tenth(rate: float | None) -> str | None:
    return None if rate is None else f"{rate / GIGA:.1f}"


def _peaks(ceilings: Ceilings) -> list[Peak]:
    """Return the datasheets of this host's devices; a device that has none is left out."""
    names = ceilings.host.values.get("device.names")
    found = [peak_of(str(name)) for name in names] if isinstance(names, list) else []
    return list({peak.name: peak for peak in found if peak is not None}.values())


def _share_of(peak: Peak, ceilings: Ceilings) -> str:
    measured = ceilings.ceiling("device_memory")
    if measured is None or not str(ceilings.device).startswith("cuda"):
        return f"datasheet memory {peak.memory_bytes_per_s / GIGA:.0f} GB/s"
    share = measured.value / peak.memory_bytes_per_s
    return f"memory measured at {share:.0%} of the datasheet's"
