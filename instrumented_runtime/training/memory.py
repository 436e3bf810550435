"""What a rank holds: parameters, gradients, optimizer state, and the full copies that FSDP makes.

FSDP gathers a full copy of a layer's parameters before it computes and frees it after. The copies'
storages are watched, so that what was freed (and what was not) is counted and not believed.
"""

import resource
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from perfledger.instrumented_runtime.training.messages import HeldBytes

_STATM = Path("/proc/self/statm")


class FullCopies:
    """Watches the full copies that an FSDP model makes; without FSDP there are none."""

    def __init__(self, model: nn.Module) -> None:
        self._storages: dict[int, torch.UntypedStorage] = {}
        self._peak_bytes = 0
        for module in model.modules():
            if isinstance(module, FSDPModule):  # our hooks run behind those of FSDP
                module.register_forward_pre_hook(self._gathered)
                module.register_forward_hook(self._look)

    def take(self) -> tuple[int, int]:
        """Return (most bytes seen at one time since the last call, bytes held now)."""
        left = self.held_bytes()
        peak, self._peak_bytes = max(self._peak_bytes, left), left
        return peak, left

    def held_bytes(self) -> int:
        """Return the bytes of the full copies that are in memory now."""
        return sum(storage.nbytes() for storage in self._storages.values())

    def _gathered(self, module: nn.Module, _: object) -> None:
        for parameter in module.parameters():
            if not (isinstance(parameter, DTensor) and _is_sharded_by_fsdp(parameter)):
                storage = local_part(parameter).untyped_storage()
                self._storages[storage._cdata] = storage
        self._look()

    def _look(self, *_: object) -> None:
        self._peak_bytes = max(self._peak_bytes, self.held_bytes())


def held_by(
    model: nn.Module, optimizer: torch.optim.Optimizer, copies: FullCopies, device: torch.device
) -> HeldBytes:
    """Return what the rank holds now; call it before gradients are dropped."""
    parameters = list(model.parameters())
    gradients = (p.grad for p in parameters if p.grad is not None)
    peak, left = copies.take()
    return HeldBytes(
        parameters=_bytes_of(parameters),
        gradients=_bytes_of(gradients),
        optimizer=_bytes_of(_states(optimizer)),
        full_peak=peak,
        full_left=left,
        process=_process_bytes(device),
    )


def local_part(tensor: Tensor) -> Tensor:
    """Return this rank's part of a DTensor, or the tensor itself."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _is_sharded_by_fsdp(parameter: DTensor) -> bool:
    return "fsdp" in (parameter.device_mesh.mesh_dim_names or ())


def _states(optimizer: torch.optim.Optimizer) -> Iterator[Tensor]:
    for state in optimizer.state.values():
        yield from (value for value in state.values() if isinstance(value, Tensor))


def _bytes_of(tensors: Iterable[Tensor]) -> int:
    return sum(local_part(tensor).nbytes for tensor in tensors)


def _process_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        peak = torch.cuda.max_memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        return peak
    if _STATM.exists():
        return int(_STATM.read_text().split()[1]) * resource.getpagesize()
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
