"""The matrix products of a decode step one by one, and which of its launches are not theirs.

A step's work adds all products up; how long one takes depends on its own rows and sizes.
"""

from dataclasses import dataclass, replace

from perfledger.schema.model_shape import ModelShape
from perfledger.schema.operator_work import step_work
from perfledger.schema.step_work import LAUNCHES, BatchShape

_WIDE = 4  # bytes of float32


@dataclass(frozen=True)
class Product:
    """`calls` products of [rows, k] and [k, n] in one step; `kind` is how the weights are held."""

    kind: str  # float32, bfloat16, int8, fp8
    rows: int
    k: int
    n: int
    calls: int

    @property
    def flops(self) -> int:
        """FLOPs of all calls."""
        return 2 * self.rows * self.k * self.n * self.calls


def decode_products(shape: ModelShape, batch: BatchShape) -> tuple[Product, ...]:
    """Return the products of a step in which rows decode; its FLOPs are those of `step_work`.

    Rows of experts are taken as even: each expert that is touched has the mean of them.
    """
    dense = "float32" if shape.element == _WIDE else "bfloat16"
    kind = dense if shape.quantization == "none" else shape.quantization
    rows, layers = batch.rows, shape.layers
    width = shape.heads * shape.head_dim
    found = [
        Product(kind, rows, shape.hidden, width + 2 * shape.kv_heads * shape.head_dim, layers),
        Product(kind, rows, width, shape.hidden, layers),
    ]
    if not shape.experts:
        found += _gated(shape, kind, rows, layers)
    elif batch.touched_experts:
        each = max(1, round(batch.assignments / batch.touched_experts))
        found += _gated(shape, kind, each, batch.touched_experts)
    if shape.experts:
        found.append(Product(dense, rows, shape.hidden, shape.experts, layers))
    if shape.vocabulary:
        found.append(Product(dense, batch.sampled_rows, shape.hidden, shape.vocabulary, 1))
    return tuple(found)


def other_launches(shape: ModelShape, batch: BatchShape) -> int:
    """Return how many operators of a decode step are of no product and not of attention.

    What surrounds a product (rows converted for it, results turned) is a part of it. Counted for
    one row and dense weights, of which each product is one operator and all else is the same.
    """
    plain = replace(shape, quantization="none")
    one_row = replace(
        batch,
        decode_rows=1,
        decode_gathered_blocks=1,
        sampled_rows=1,
        assignments=batch.touched_experts,
    )
    products = sum(product.calls for product in decode_products(plain, one_row))
    launches = int(step_work(plain, one_row)[LAUNCHES])
    return launches - products - shape.layers * attention_launches(shape)


def attention_launches(shape: ModelShape) -> int:
    """Return the operators of one layer's decode attention, as `step_work` counts them.

    K and V stored and gathered (two each), the mask made, attention; off the CPU the heads of a
    group are put back into rows.
    """
    return 6 + (shape.device != "cpu" and shape.heads > shape.kv_heads)


def _gated(shape: ModelShape, kind: str, rows: int, calls: int) -> list[Product]:
    return [
        Product(kind, rows, shape.hidden, 2 * shape.ffn, calls),
        Product(kind, rows, shape.ffn, shape.hidden, calls),
    ]
