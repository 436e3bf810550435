"""The matrices of a model, each in the form that it is multiplied in: dense, int8 or fp8.

A matrix is called with rows [rows, inputs] and gives [rows, outputs]. `bytes` is what one such
call reads of it: quantization shows there and in the time, not in a label.
"""

import warnings
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.nn.functional import linear

from perfledger.schema.errors import UsageError

QUANTIZATIONS = ("none", "int8", "fp8")
# Symmetric: -128 is left out, so that a weight and its negative round alike.
_INT8_LARGEST = 127
_MOST_TURNED_ROWS = 64
# Devices from which on fp8 is multiplied in hardware (Ada, Hopper).
_FP8_CAPABILITY = (8, 9)


class Matrix(Protocol):
    """Weights [outputs, inputs], with their bias where there is one."""

    @property
    def bytes(self) -> int:
        """Bytes of weights, scales and bias that a multiplication reads."""

    def __call__(self, rows: Tensor) -> Tensor:
        """Return rows @ weights.T + bias, in the dtype of `rows`."""


@dataclass(frozen=True, slots=True)
class Dense:
    """Weights in the dtype that the model computes in."""

    weight: Tensor
    bias: Tensor | None = None

    @property
    def bytes(self) -> int:
        """See Matrix."""
        return self.weight.nbytes + (self.bias.nbytes if self.bias is not None else 0)

    def __call__(self, rows: Tensor) -> Tensor:
        """See Matrix."""
        if rows.device.type != "cpu" or not 2 <= len(rows) <= _MOST_TURNED_ROWS:
            return linear(rows, self.weight, self.bias)
        # weight @ rows.T: the CPU's matrix product takes its threads from the first dimension,
        # and a few rows are too few for it (measured: 1.3 to 3 times faster, up to 64 rows).
        turned = self.weight @ rows.t()
        if self.bias is not None:
            turned += self.bias.unsqueeze(1)
        return turned.t().contiguous()


class DynamicInt8:
    """Weights as int8 with a scale for each output; rows become int8 with one scale a call.

    The rows' scale is found anew in each call ("dynamic"), so nothing has to be calibrated.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        wide = weight.float()
        scales = (wide.abs().amax(dim=1) / _INT8_LARGEST).clamp(min=1e-12)
        with warnings.catch_warnings():
            # torch 2.13 announces the end of quantized dtypes; its int8 kernels that take plain
            # tensors were slower than float32 here (docs/runtime.md), so these stay until then.
            warnings.simplefilter("ignore", UserWarning)
            zeros = torch.zeros(len(scales), dtype=torch.int64)
            quantized = torch.quantize_per_channel(wide, scales.double(), zeros, 0, torch.qint8)
            wide_bias = None if bias is None else bias.float()
            self._packed = torch.ops.quantized.linear_prepack(quantized, wide_bias)
        self.bytes = weight.numel() + scales.nbytes + (0 if wide_bias is None else wide_bias.nbytes)

    def __call__(self, rows: Tensor) -> Tensor:
        """See Matrix."""
        # Rows get 7 bits: without VNNI, two products of 8 bits each can overflow the 16 between.
        product: Tensor = torch.ops.quantized.linear_dynamic(rows.float(), self._packed, True)
        return product.to(rows.dtype)


class ScaledFp8:
    """Weights as float8 (e4m3) with a scale for each output; rows are scaled one by one.

    Not run on a device.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self._weight, self._scales = _to_fp8(weight)
        self._bias = bias
        self.bytes = self._weight.nbytes + self._scales.nbytes
        self.bytes += 0 if bias is None else bias.nbytes

    def __call__(self, rows: Tensor) -> Tensor:
        """See Matrix."""
        scaled, scales = _to_fp8(rows)
        return torch._scaled_mm(
            scaled,
            self._weight.t(),
            scale_a=scales,
            scale_b=self._scales.t(),
            bias=self._bias,
            out_dtype=rows.dtype,
        )


def check_quantization(asked: str, dtype: torch.dtype, device: torch.device) -> None:
    """Raise UsageError where weights cannot be multiplied in the form asked for."""
    if asked not in QUANTIZATIONS:
        raise UsageError(f"{asked!r} is not a quantization", fix=", ".join(QUANTIZATIONS))
    if asked == "int8" and device.type != "cpu":
        raise UsageError(f"int8 runs on a CPU only, not on {device}", fix="--quantization fp8")
    if asked != "fp8":
        return
    if device.type != "cuda" or torch.cuda.get_device_capability(device) < _FP8_CAPABILITY:
        raise UsageError(
            f"{device} does not multiply fp8 (NVIDIA from compute capability 8.9 on does)",
            fix="--quantization int8 on a CPU, or none",
        )
    if dtype != torch.bfloat16:
        raise UsageError("fp8 weights give rows of bfloat16", fix="--dtype bfloat16")


def make_matrix(weight: Tensor, bias: Tensor | None, quantization: str) -> Matrix:
    """Return the matrix of `weight` [outputs, inputs] in a form that `check_quantization` passed.

    fp8 needs both sizes to be multiples of 16; other matrices stay dense (and say so in `bytes`).
    """
    if quantization == "int8":
        return DynamicInt8(weight, bias)
    if quantization == "fp8" and all(size % 16 == 0 for size in weight.shape):
        return ScaledFp8(weight, bias)
    return Dense(weight, bias)


def matrix_bytes(
    outputs: int, inputs: int, bias: bool, quantization: str, dtype: torch.dtype
) -> int:
    """Return what `make_matrix` of these sizes has as `bytes`, without making one."""
    scales = outputs * torch.float32.itemsize
    if quantization == "int8":
        return outputs * inputs + scales + bias * scales  # its bias is float32, too
    if quantization == "fp8" and not (outputs % 16 or inputs % 16):
        return outputs * inputs + scales + bias * outputs * dtype.itemsize
    return (outputs * inputs + bias * outputs) * dtype.itemsize


def _to_fp8(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Return rows as e4m3 and the scale [rows, 1] that each must be multiplied with again."""
    largest = torch.finfo(torch.float8_e4m3fn).max
    scales = (rows.abs().amax(dim=1, keepdim=True).float() / largest).clamp(min=1e-12)
    return (rows.float() / scales).to(torch.float8_e4m3fn), scales
