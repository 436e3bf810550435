"""Matrix products as the runtime does them: few rows for decoding, many for prefill.

Weights are taken in turn from a set. A model's weights do not fit into the caches, so each step
reads them from memory: only a set of the model's size is measured under the same conditions.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from perfledger.instrumented_runtime.ceilings.cells import Cell, Work, timed
from perfledger.instrumented_runtime.linears import Matrix, check_quantization, make_matrix
from perfledger.schema.ceilings import Absent, MatmulShape
from perfledger.schema.errors import UsageError

MIB = 1 << 20
DECODE_ROWS, QUICK_ROWS = (1, 4, 16, 32), (1, 16)
# Inputs decide more than outputs: rows of weights that are read one after another are so long.
INPUTS, OUTPUTS = (512, 1024, 2048), (512, 2048)
SETS = (8 * MIB, 32 * MIB, 128 * MIB)
PREFILL_ROWS, SIDE, PREFILL_SET = 512, 1024, 4 * MIB
SLOW_BFLOAT16 = "this CPU has no bfloat16 units: it is emulated"


@dataclass(frozen=True)
class Kind:
    """How weights are held: `dtype` of the rows, and how weights are quantized."""

    name: str
    dtype: torch.dtype
    quantization: str
    element_bytes: int
    note: str = ""


def kinds(device: torch.device) -> tuple[list[Kind], list[Absent]]:
    """Return the forms of weights that this device multiplies, and why others are absent."""
    emulated = device.type == "cpu" and not torch.ops.mkldnn._is_mkldnn_bf16_supported()
    wanted = [
        Kind("float32", torch.float32, "none", 4),
        Kind("bfloat16", torch.bfloat16, "none", 2, SLOW_BFLOAT16 if emulated else ""),
        Kind("int8", torch.float32, "int8", 1, "rows become int8 with a scale in each call"),
        Kind("fp8", torch.bfloat16, "fp8", 1),
    ]
    found, absent = [], []
    for kind in wanted:
        try:
            check_quantization(kind.quantization, kind.dtype, device)
            found.append(kind)
        except UsageError as error:
            absent.append(Absent("registers_sram", f"matmul {kind.name}", error.what))
    return found, absent


def matrix_cells(device: torch.device, *, quick: bool) -> tuple[list[Cell], list[Absent]]:
    """Return the cells of all products, those of one form of weights after another."""
    found, absent = kinds(device)
    cells = []
    for kind in found:
        weights = Weights(kind, device)
        for shape in _shapes(kind, device, quick=quick):
            prepare = _multiplying(weights, shape, device)
            amount = shape.flops * weights.count(shape)
            sample = timed(prepare, amount, "flop/s", device)
            cells.append(Cell("registers_sram", "matmul", str(shape), "flop/s", sample, kind.note))
    return cells, absent


def _shapes(kind: Kind, device: torch.device, *, quick: bool) -> Iterator[MatmulShape]:
    """Yield the shapes to measure: fewer quickly, and of what is emulated and so slow."""
    few = quick or kind.note == SLOW_BFLOAT16
    rows = QUICK_ROWS if quick else DECODE_ROWS
    sets = (32 * MIB,) if few else SETS
    if device.type == "cuda" and not quick:
        sets = (*sets, 1024 * MIB)
    for k in (SIDE,) if few else INPUTS:
        for n in (SIDE,) if few else OUTPUTS:
            for set_bytes in sets:
                for m in rows:
                    yield MatmulShape(kind.name, m, k, n, set_bytes)
    yield MatmulShape(kind.name, PREFILL_ROWS, SIDE, SIDE, PREFILL_SET)


class Weights:
    """The matrices of one form of weights: those of one size at a time, made when asked for."""

    def __init__(self, kind: Kind, device: torch.device) -> None:
        self.kind, self._device = kind, device
        self._size, self._matrices = (0, 0), list[Matrix]()

    def count(self, shape: MatmulShape) -> int:
        """Return how many matrices make a set of that size."""
        return max(1, shape.set_bytes // (shape.k * shape.n * self.kind.element_bytes))

    def take(self, shape: MatmulShape) -> list[Matrix]:
        """Return the matrices of a shape's set: equal random weights, each in its own memory."""
        if self._size != (shape.k, shape.n):
            self._size, self._matrices = (shape.k, shape.n), []
        weight = torch.randn(shape.n, shape.k, device=self._device) * shape.k**-0.5
        while len(self._matrices) < self.count(shape):
            own = weight.to(self.kind.dtype, copy=True)
            self._matrices.append(make_matrix(own, None, self.kind.quantization))
        return self._matrices[: self.count(shape)]


def _multiplying(weights: Weights, shape: MatmulShape, device: torch.device) -> Callable[[], Work]:
    """Return what multiplies rows with every matrix of the set once."""

    def prepare() -> Work:
        matrices = weights.take(shape)
        rows = torch.randn(shape.m, shape.k, device=device).to(weights.kind.dtype)

        def multiply() -> None:
            for matrix in matrices:
                matrix(rows)

        return multiply

    return prepare
