"""Copies that cross a boundary, told to the process's sink: host and device, dtype, stage, offload.

What crosses none is not told of: on the CPU a tensor that already is where it is wanted stays what
it is. On CUDA the times are those of the device (see device_times.py).
"""

import torch
from torch import Tensor

from perfledger.instrumented_runtime.collectives.device_times import DEVICE_TIMES
from perfledger.instrumented_runtime.collectives.listening import LISTENER
from perfledger.instrumented_runtime.collectives.observed import CopyCall
from perfledger.schema.clocks import monotonic_ns


class Crossing:
    """One copy: runs inside, and is told of at its end unless it raises.

    `boundary` is a name of records.BOUNDARIES; `source` and `target` name devices or stages.
    """

    __slots__ = ("_copy", "_device", "_device_start", "_start_ns")

    def __init__(
        self,
        boundary: str,
        source: str,
        target: str,
        dtype: torch.dtype,
        size: int,
        device: str = "cpu",
    ) -> None:
        """`size` is in bytes; `device` is the type of the one whose stream does the copy."""
        self._copy = (boundary, source, target, str(dtype).removeprefix("torch."), size)
        self._device = device

    def __enter__(self) -> None:
        self._device_start = None
        if LISTENER.sink is not None and self._device == "cuda":
            self._device_start = DEVICE_TIMES.mark()
        self._start_ns = monotonic_ns()

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        sink = LISTENER.sink
        if sink is None or kind is not None:
            return
        copy, step_seq = self._copy, sink.step_seq
        if self._device_start is None:
            sink.copy(CopyCall(*copy, step_seq, self._start_ns, monotonic_ns()))
            return
        DEVICE_TIMES.ends(
            self._device_start,
            lambda start_ns, end_ns: sink.copy(CopyCall(*copy, step_seq, start_ns, end_ns)),
        )


def recorded_copy(
    tensor: Tensor, *, device: torch.device | None = None, dtype: torch.dtype | None = None
) -> Tensor:
    """Return the tensor on a device and in a dtype; the same one if it already is."""
    target, wanted = device or tensor.device, dtype or tensor.dtype
    stays = tensor.device.type == target.type and target.index in (None, tensor.device.index)
    if stays and tensor.dtype == wanted:
        return tensor
    if LISTENER.sink is None:
        return tensor.to(target, wanted)
    boundary = "dtype"
    if tensor.device.type != target.type:
        boundary = "device_to_host" if target.type == "cpu" else "host_to_device"
    size = tensor.numel() * wanted.itemsize
    on = "cuda" if "cuda" in (tensor.device.type, target.type) else "cpu"
    with Crossing(boundary, str(tensor.device), str(target), wanted, size, on):
        return tensor.to(target, wanted)
