"""Measured ceilings: the fastest that this host moves bytes and multiplies, measured, not promised.

One measurement of a machine is a row of `runs` (kind "ceilings"): its manifest says which machine,
its samples hold every number. It is worth something on that machine only, so whoever reads it
says which machine the numbers are to stand beside, and gets them refused if it is another.
"""

import json
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Self

from perfledger.schema.curves import between
from perfledger.schema.edges import EDGE
from perfledger.schema.errors import NotComparableError, PartialInputError, UsageError
from perfledger.schema.manifest import FIELDS, Difference, Manifest, Value, canonical_json

KIND = "ceilings"
VERSION = 1
LARGEST_BYTES = 4_000_000
HOST = "host"  # no edge: what the CPU does for each operator and step, whatever it moves
UNITS = ("bytes/s", "flop/s", "ns")
DATASHEET, MEASURED = "datasheet", "measured"
# What an edge's bytes/s are a share of: the operations whose best value is its ceiling, in order
# of preference. An edge that is not here has no ceiling of its own.
CEILING_OF: dict[str, tuple[str, ...]] = {
    "device_memory": ("read", "copy"),
    "host_device": ("h2d", "d2h"),
    "scale_up": ("all_reduce busbw", "all_gather busbw"),
    "storage_local": ("read", "write"),
    "storage_object": ("get", "put"),
}


@dataclass(frozen=True)
class Ceiling:
    """One measured limit of an edge (a name in edges.py, or HOST).

    `value` is the best of `samples`: the highest rate, the least ns (STREAM's rule). `variant` says
    of what size or shape, as `size_text` and `MatmulShape` write it.
    """

    edge: str
    operation: str
    variant: str
    unit: str
    value: float
    samples: tuple[float, ...]
    note: str = ""

    @classmethod
    def best(
        cls,
        edge: str,
        operation: str,
        variant: str,
        unit: str,
        samples: Sequence[float],
        note: str = "",
    ) -> Self:
        """Return the ceiling of samples. Raises ValueError without any, or for a senseless one."""
        best = min(samples) if unit == "ns" else max(samples)
        return cls(edge, operation, variant, unit, best, tuple(samples), note)

    def __post_init__(self) -> None:
        if self.edge not in EDGE and self.edge != HOST:
            raise ValueError(f"no edge {self.edge!r}")
        if self.unit not in UNITS:
            raise ValueError(f"no unit {self.unit!r}")
        if not all(math.isfinite(value) and value > 0 for value in (self.value, *self.samples)):
            raise ValueError(f"a ceiling that is not a positive number: {self.operation}")

    @property
    def typical(self) -> float:
        """Return the median of the samples: what to expect, where `value` is what can be."""
        return statistics.median(self.samples) if self.samples else self.value


@dataclass(frozen=True)
class Absent:
    """What could not be measured on this host, and why. Never a ceiling of zero."""

    edge: str
    operation: str
    reason: str


@dataclass(frozen=True)
class MatmulShape:
    """[m, k] times [k, n]; `set_bytes` of such weights were multiplied in turn.

    A set larger than the caches is read from memory each time, as the weights of a model are; of a
    smaller one the caches hold some.
    """

    dtype: str  # of the weights as the runtime holds them: float32, bfloat16, int8, fp8
    m: int
    k: int
    n: int
    set_bytes: int

    @property
    def flops(self) -> int:
        """Return the FLOPs of one product: a multiplication and an addition are two."""
        return 2 * self.m * self.k * self.n

    def __str__(self) -> str:
        return f"{self.dtype} m={self.m} k={self.k} n={self.n} set={size_text(self.set_bytes)}"

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read `str()` back. Raises ValueError for anything else."""
        dtype, *parts = text.split()
        values = dict(part.split("=", 1) for part in parts)
        if values.keys() != {"m", "k", "n", "set"}:
            raise ValueError(f"not a matrix shape: {text!r}")
        m, k, n = (int(values[name]) for name in ("m", "k", "n"))
        return cls(dtype, m, k, n, text_size(values["set"]))


@dataclass(frozen=True)
class AttentionShape:
    """Decode attention of `rows` sequences over `context` tokens each, as the runtime does it."""

    dtype: str
    rows: int
    context: int
    kv_heads: int
    group: int  # query heads that share a KV head
    head_dim: int

    def __str__(self) -> str:
        heads = f"heads={self.kv_heads}x{self.group} dim={self.head_dim}"
        return f"{self.dtype} rows={self.rows} context={self.context} {heads}"

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read `str()` back. Raises ValueError for anything else."""
        dtype, *parts = text.split()
        values = dict(part.split("=", 1) for part in parts)
        if values.keys() != {"rows", "context", "heads", "dim"}:
            raise ValueError(f"not an attention shape: {text!r}")
        kv_heads, group = (int(part) for part in values["heads"].split("x"))
        sizes = int(values["rows"]), int(values["context"])
        return cls(dtype, *sizes, kv_heads, group, int(values["dim"]))


@dataclass(frozen=True)
class Ceilings:
    """All ceilings of one host, measured at one time, with one number of threads."""

    run_id: str
    host: Manifest
    created_ns: int  # wall clock
    items: tuple[Ceiling, ...]
    absent: tuple[Absent, ...] = ()

    @property
    def threads(self) -> int | None:
        """Return the CPU threads that they were measured with."""
        threads = self.host.values.get("runtime.threads")
        return threads if isinstance(threads, int) else None

    @property
    def device(self) -> str | None:
        """Return the device that they were measured on, as torch names it."""
        device = self.host.values.get("runtime.device")
        return device if isinstance(device, str) else None

    def of(self, edge: str, operation: str) -> tuple[Ceiling, ...]:
        """Return all variants of one operation, in the order of measuring."""
        return tuple(i for i in self.items if (i.edge, i.operation) == (edge, operation))

    def ceiling(self, edge: str) -> Ceiling | None:
        """Return what the bytes/s of a whole edge are a share of; None if it was not measured.

        Of the memory's working sets the largest one counts: smaller ones are of the caches.
        """
        for operation in CEILING_OF.get(edge, ()):
            found = self.of(edge, operation)
            if found and edge == "device_memory":
                return max(found, key=lambda item: text_size(item.variant))
            if found:
                return max(found, key=lambda item: item.value)
        return None

    def reason(self, edge: str) -> str | None:
        """Return why an edge has no ceiling, if measuring found out."""
        return next((one.reason for one in self.absent if one.edge == edge), None)

    def bandwidth(self, operation: str, set_bytes: int, *, typical: bool = False) -> float | None:
        """Return the bytes/s of the memory for a working set, between the sizes measured.

        Linear between the logarithms of the neighbours; beyond the ends, the end. None where the
        operation was not measured.
        """
        found = self.of("device_memory", operation)
        points = {
            text_size(item.variant): item.typical if typical else item.value
            for item in found
            if item.unit == "bytes/s"
        }
        return between(points, set_bytes) if points else None

    def to_row(self) -> dict[str, object]:
        """Return the row of `runs` that keeps them (`received_ns` is the writer's)."""
        samples = {
            "version": VERSION,
            "items": [asdict(item) for item in self.items],
            "absent": [asdict(one) for one in self.absent],
        }
        return {
            "run_id": self.run_id,
            "kind": KIND,
            "created_ns": self.created_ns,
            "manifest": self.host.to_json(),
            "manifest_hash": self.host.hash(),
            "samples": canonical_json(samples),
        }

    @classmethod
    def from_row(cls, row: Mapping[str, Any]) -> Self:
        """Read `to_row` back. Raises PartialInputError for a row that holds something else."""
        run_id, text = str(row["run_id"]), str(row["samples"])
        if len(text) > LARGEST_BYTES:
            raise PartialInputError(f"ceilings of more than {LARGEST_BYTES:,} bytes", where=run_id)
        try:
            samples = json.loads(text)
            if samples["version"] != VERSION:
                raise ValueError(f"version {samples['version']}, not {VERSION}")
            items = tuple(_ceiling(item) for item in samples["items"])
            absent = tuple(Absent(**one) for one in samples["absent"])
            host = Manifest.from_json(str(row["manifest"]))
        except (ValueError, TypeError, KeyError, RecursionError, UsageError) as error:
            raise PartialInputError(f"not ceilings: {error}", where=f"run {run_id}") from error
        return cls(run_id, host, int(row["created_ns"]), items, absent)


def host_differences(a: Mapping[str, Value], b: Mapping[str, Value]) -> tuple[Difference, ...]:
    """Return in which facts of the machine two manifests' values differ.

    A fact that both do not know is no difference; one that only one of them knows is.
    """
    fields = [field for field in FIELDS if _of_host(field.name) and not field.volatile]
    return tuple(
        Difference(field.name, a.get(field.name), b.get(field.name), field.why)
        for field in fields
        if a.get(field.name) != b.get(field.name)
    )


def same_host(a: Mapping[str, Value], b: Mapping[str, Value]) -> bool:
    """Return whether two manifests' values are of one machine, in one state of it."""
    return not host_differences(a, b)


def choose(
    rows: Sequence[Mapping[str, Any]], host: Mapping[str, Value] | None, asked: str = MEASURED
) -> Ceilings | None:
    """Return the ceilings to measure a run against, of the `runs` rows of kind "ceilings".

    `host` holds the values of the manifest of that run (None: nobody said which machine it was, and
    the newest ceilings stand, which the caller has to say). `asked` is MEASURED: the newest of that
    host; DATASHEET: none, ever; or the id of one row. None also where there are no ceilings at
    all. Raises NotComparableError where all there are (or the one asked for) are of another
    machine, and UsageError for an id that is not there.
    """
    if asked == DATASHEET:
        return None
    found = sorted((Ceilings.from_row(row) for row in rows), key=lambda one: one.created_ns)
    if asked != MEASURED:
        found = [one for one in found if one.run_id == asked]
        if not found:
            raise UsageError(f"no ceilings {asked!r} here", fix="measured, datasheet or a run id")
    if not found:
        return None
    mine = [one for one in found if host is None or same_host(one.host.values, host)]
    if mine:
        return mine[-1]
    assert host is not None
    differences = "; ".join(map(str, host_differences(found[-1].host.values, host)))
    raise NotComparableError(
        f"the ceilings {found[-1].run_id} were measured on another host: {differences}",
        fix="run `perfledger ceilings` on the run's host, or ask with --ceilings datasheet",
    )


def size_text(size_bytes: int) -> str:
    """Return a size in the largest unit that divides it: 4MiB, 256KiB, 100B."""
    for unit, scale in _SCALES:
        if size_bytes >= scale and size_bytes % scale == 0:
            return f"{size_bytes // scale}{unit}"
    return f"{size_bytes}B"


def text_size(text: str) -> int:
    """Read `size_text` back. Raises ValueError for anything else."""
    for unit, scale in (*_SCALES, ("B", 1)):
        if text.endswith(unit) and text.removesuffix(unit).isdigit():
            return int(text.removesuffix(unit)) * scale
    raise ValueError(f"not a size: {text!r}")


_SCALES = (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10))


def _of_host(name: str) -> bool:
    return name.startswith(("host.", "device."))


def _ceiling(item: Mapping[str, Any]) -> Ceiling:
    samples = tuple(float(value) for value in item["samples"])
    return Ceiling(**{**item, "value": float(item["value"]), "samples": samples})
