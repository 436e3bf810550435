"""How long a decode step takes, from what it moves and computes and from measured ceilings alone.

Nothing is fitted to measured steps. Each operator's bytes or FLOPs are divided by what the same
kind of operator reached at that shape when the host's ceilings were measured; launches and the
host's part of a step come on top.
"""

from collections.abc import Callable
from dataclasses import dataclass

from perfledger.schema.ceilings import HOST, AttentionShape, Ceiling, Ceilings, MatmulShape
from perfledger.schema.curves import between, surface
from perfledger.schema.decode_products import Product, decode_products, other_launches
from perfledger.schema.errors import NoDataError, UsageError
from perfledger.schema.model_shape import ModelShape
from perfledger.schema.operator_work import step_work
from perfledger.schema.step_work import BatchShape

# Activations of a decode step are small: they pass from operator to operator in a near cache.
_NEAR_BYTES = 256 << 10
_WIDE = 4  # bytes of float32


@dataclass(frozen=True)
class Part:
    """A share of the predicted time. `amount` is bytes, FLOPs or launches, as `unit` says."""

    name: str
    ns: float
    amount: int
    unit: str


@dataclass(frozen=True)
class Prediction:
    """The predicted time of one decode step."""

    parts: tuple[Part, ...]
    ns: float

    def share(self, name: str) -> float:
        """Return what part of all parts' time one has. Raises KeyError for an unknown part."""
        found = {part.name: part.ns for part in self.parts}
        return found[name] / sum(found.values())


def predict_decode(shape: ModelShape, batch: BatchShape, ceilings: Ceilings) -> Prediction:
    """Return the predicted time of a step in which all rows decode.

    On the CPU everything follows on everything; a device computes while the host launches, so
    there the longer of the two counts. Raises UsageError for a step that computes prompts, and
    NoDataError where a ceiling that is needed was not measured (as by `ceilings --quick`).
    """
    if batch.prefill_rows or not batch.decode_rows:
        raise UsageError("only steps in which all rows decode can be predicted")
    work = step_work(shape, batch)
    moved = [
        _linear(shape, batch, ceilings, _working_set(work)),
        _attention(shape, batch, work, ceilings),
        *_activations(work, ceilings),
    ]
    launches = other_launches(shape, batch)
    launched = Part("launches", launches * _cost(ceilings, "launch"), launches, "launches")
    host = Part("host", _per_rows(ceilings, batch.rows), 1, "steps")
    computed_ns = sum(part.ns for part in moved)
    on_cpu = shape.device == "cpu"
    forward_ns = computed_ns + launched.ns if on_cpu else max(computed_ns, launched.ns)
    return Prediction((*moved, launched, host), forward_ns + host.ns)


def _working_set(work: dict[str, int]) -> int:
    """Return the bytes that come round again in each step: all weights, all of K and V."""
    weights = work["linear_weights_read_bytes"] + work["moe_weights_read_bytes"]
    return weights + work["attention_gather_read_bytes"]


def _linear(shape: ModelShape, batch: BatchShape, ceilings: Ceilings, working_set: int) -> Part:
    products = decode_products(shape, batch)
    ns = sum(product_ns(product, ceilings, working_set) for product in products)
    return Part("linear", ns, sum(product.flops for product in products), "FLOPs")


def product_ns(product: Product, ceilings: Ceilings, working_set: int) -> float:
    """Return the time of all calls of a product whose weights are part of a working set."""
    rates: dict[tuple[int, ...], float] = {}
    for item in ceilings.of("registers_sram", "matmul"):
        shape = MatmulShape.parse(item.variant)
        if shape.dtype == product.kind:
            rates[shape.m, shape.k, shape.n, shape.set_bytes] = item.typical
    if not rates:
        raise NoDataError(
            f"no ceiling of matrix products in {product.kind}",
            where=ceilings.run_id,
            fix="perfledger ceilings",
        )
    at = (product.rows, product.k, product.n, working_set)
    return 1e9 * product.flops / surface(rates, at)


def _attention(
    shape: ModelShape, batch: BatchShape, work: dict[str, int], ceilings: Ceilings
) -> Part:
    dtype = "float32" if shape.element == _WIDE else "bfloat16"
    rates: dict[tuple[int, ...], float] = {}
    for item in ceilings.of("device_memory", "attention"):
        at = AttentionShape.parse(item.variant)
        if at.dtype == dtype:
            rates[at.rows, at.context] = item.typical
    if not rates:
        raise NoDataError(
            f"no ceiling of attention in {dtype}", where=ceilings.run_id, fix="perfledger ceilings"
        )
    columns = ("kv_read", "gather_read", "gather_written")
    moved = sum(work[f"attention_{column}_bytes"] for column in columns)
    context = batch.decode_gathered_blocks * shape.block // batch.decode_rows
    ns = 1e9 * moved / surface(rates, (batch.decode_rows, context))
    return Part("attention", ns, moved, "bytes")


def _activations(work: dict[str, int], ceilings: Ceilings) -> list[Part]:
    """Return norms, elementwise operators, embedding and sampling."""
    near = {"norm": "elementwise", "elementwise": "elementwise", "embedding": "copy"}
    parts = []
    for operator, measured in {**near, "moe": "elementwise", "sampling": "argmax"}.items():
        moved = sum(
            size
            for column, size in work.items()
            if column.startswith(f"{operator}_")
            and column.endswith(("activations_read_bytes", "activations_written_bytes"))
            or column in (f"{operator}_logits_read_bytes", f"{operator}_logits_written_bytes")
        )
        rate = ceilings.bandwidth(measured, _NEAR_BYTES, typical=True)
        if rate is None:
            raise NoDataError(f"no ceiling {measured}", where=ceilings.run_id)
        parts.append(Part(operator, 1e9 * moved / rate, moved, "bytes"))
    return parts


def _cost(ceilings: Ceilings, operation: str) -> float:
    return _first(ceilings, operation, lambda items: items[0].typical)


def _per_rows(ceilings: Ceilings, rows: int) -> float:
    def at_rows(items: tuple[Ceiling, ...]) -> float:
        points = {int(item.variant.removeprefix("rows=")): item.typical for item in items}
        return between(points, rows)

    return _first(ceilings, "step", at_rows)


def _first(
    ceilings: Ceilings, operation: str, read: Callable[[tuple[Ceiling, ...]], float]
) -> float:
    items = ceilings.of(HOST, operation)
    if not items:
        raise NoDataError(f"the host's cost of a {operation} was not measured", where="ceilings")
    return read(items)
