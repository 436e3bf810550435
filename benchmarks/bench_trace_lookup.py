"""How long a trace's spans take to find in a store of many spans: traces that are there, and not.

    python benchmarks/bench_trace_lookup.py [--spans 10000000] [--files 24] [--lookups 300]

The rows are those of the reference payload as `perfledger collect` keeps them, written again and
again with new ids through Store.write. One trace in ten has spans in two files, as one that goes
on while a file ends. Lookups are timed warm: the files are in the page cache once written.
"""

import argparse
import random
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from perfledger.schema.store import Store

sys.path.insert(0, str(Path(__file__).parent))  # python -P leaves it out
from collect_cost import send  # noqa: E402
from collect_servers import collector  # noqa: E402
from collect_service import quantiles  # noqa: E402
from otlp_load import write_bodies  # noqa: E402
from recording import write_result  # noqa: E402
from reference_payload import SPANS_A_TRACE  # noqa: E402

GOAL = "trace by id in 10 M spans: p50 under 5 ms, misses under 3 ms"
GOES_ON = 0.1  # of the traces of a file
TIMES = ("start_ns", "end_ns", "received_ns")


def received_rows(folder: Path, requests: int) -> pa.Table:
    """Return the rows that a collector makes of the payload, one trace after the other."""
    bodies = write_bodies(folder / "bodies", "reference", requests)
    with collector(folder / "received") as server:
        send(server, "http", bodies, requests=requests)
        assert server.store is not None
        rows = server.store.scan("spans").collect().to_arrow()
    return rows.sort_by([("trace_id", "ascending"), ("start_ns", "ascending")])


def fill(store: Store, rows: pa.Table, spans: int, files: int, seed: int) -> list[bytes]:
    """Write files of `rows` with new ids; return the trace ids, in the order of the files."""
    draw = np.random.default_rng(seed)
    traces = spans // files // SPANS_A_TRACE
    goes_on = int(traces * GOES_ON)
    ids: list[bytes] = []
    for number in range(files):
        new = [draw.bytes(16) for _ in range(traces)]
        if number:
            new[:goes_on] = ids[-goes_on:]
        in_order = _with_ids(rows, sorted(new), draw, number * 10**9)
        store.write("spans", in_order, is_sorted=True)
        ids += new
    return ids


def _with_ids(
    rows: pa.Table, traces: list[bytes], draw: np.random.Generator, later_ns: int
) -> pa.Table:
    """Repeat `rows` until there are 8 for each trace; give them its id, new span ids and times."""
    wanted = len(traces) * SPANS_A_TRACE
    repeated = pa.concat_tables([rows] * -(-wanted // len(rows))).slice(0, wanted)
    words = draw.integers(1, 1 << 63, wanted, np.uint64)
    columns = {
        "trace_id": pa.array(np.repeat(np.array(traces, "V16"), SPANS_A_TRACE).tolist()),
        "span_id": _binary(words),
        "parent_span_id": _parents(words),
    }
    for name in TIMES:
        columns[name] = pa.array(repeated[name].to_numpy() + later_ns)
    for name, column in columns.items():
        place = repeated.schema.get_field_index(name)
        field = repeated.schema.field(name)
        repeated = repeated.set_column(place, field, column.cast(field.type))
    return repeated


def _binary(words: np.ndarray) -> pa.Array:
    return pa.Array.from_buffers(pa.binary(8), len(words), [None, pa.py_buffer(words.tobytes())])


def _parents(words: np.ndarray) -> pa.Array:
    """Return the first span of each trace as the parent of its others."""
    first = np.repeat(words[::SPANS_A_TRACE], SPANS_A_TRACE)
    is_root = pa.array(np.arange(len(words)) % SPANS_A_TRACE == 0)
    return pc.if_else(is_root, pa.scalar(None, pa.binary(8)), _binary(first))


def lookups_ms(
    url: str, ids: list[bytes], kept: Store | None = None
) -> tuple[list[float], list[int]]:
    """Look ids up in `kept`, or in a store opened anew each time; return ms and rows of each."""
    taken, rows = [], []
    for trace_id in ids:
        start_ns = time.perf_counter_ns()
        reader = kept or Store.at(url)
        rows.append(len(reader.trace(trace_id)))
        taken.append((time.perf_counter_ns() - start_ns) / 1e6)
    return taken, rows


def measure(url: str, ids: list[bytes], lookups: int, seed: int) -> dict[str, Any]:
    """Time the first lookup of a fresh reader, then many: kept open, and opened anew."""
    draw = random.Random(seed)
    there, absent = draw.sample(ids, lookups), [draw.randbytes(16) for _ in range(lookups)]
    kept = Store.at(url)
    first_ms, _ = lookups_ms(url, there[:1], kept)
    found: dict[str, Any] = {"first_ms": first_ms[0]}
    for name, reader in (("kept_open", kept), ("opened_each_time", None)):
        hit_ms, rows = lookups_ms(url, there, reader)
        miss_ms, none = lookups_ms(url, absent, reader)
        assert min(rows) >= SPANS_A_TRACE and max(none) == 0, (min(rows), max(none))
        two_files = [ms for ms, count in zip(hit_ms, rows, strict=True) if count > SPANS_A_TRACE]
        found[name] = {"hits_ms": with_p95(hit_ms), "misses_ms": with_p95(miss_ms)}
        found[name]["hits_in_two_files_ms"] = with_p95(two_files) if two_files else None
        print(f"  {name}: {found[name]}")
    return found


def with_p95(values: list[float]) -> dict[str, float]:
    return {**quantiles(values), "p95": round(float(np.quantile(values, 0.95)), 3)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--spans", type=int, default=10_000_000)
    parser.add_argument("--files", type=int, default=24)
    parser.add_argument("--lookups", type=int, default=300)
    parser.add_argument("--requests", type=int, default=200, help="different requests underneath")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", type=Path, help="work here instead of in a temporary folder")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=asked.folder, prefix="bench-trace-") as name:
        folder = Path(name)
        url = str(folder / "store")
        start = time.monotonic()
        rows = received_rows(folder, asked.requests)
        ids = fill(Store.at(url), rows, asked.spans, asked.files, asked.seed)
        print(f"{asked.spans:,} spans in {asked.files} files: {time.monotonic() - start:.0f} s")
        found = measure(url, ids, asked.lookups, asked.seed)
    given = {name: value for name, value in vars(asked).items() if name != "folder"}
    written = len(ids) * SPANS_A_TRACE
    write_result("trace_lookup", GOAL, {**given, "spans_written": written, **found})


if __name__ == "__main__":
    main()
