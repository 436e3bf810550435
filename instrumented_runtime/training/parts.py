"""The parts of a training step: when each ran."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from perfledger.instrumented_runtime.training.traffic import WHOLE_BATCH, Part
from perfledger.schema.clocks import monotonic_ns


class StepParts:
    """Times the parts of the running step. On CUDA a part ends when the device has done its work,
    so that its length is that of the work and not of its launch."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._ended: list[Part] = []

    @contextmanager
    def part(self, name: str, microbatch: int = WHOLE_BATCH) -> Iterator[None]:
        """Run a part."""
        start_ns = monotonic_ns()
        try:
            yield
        finally:
            if self._device.type == "cuda":
                torch.cuda.synchronize(self._device)
            self._ended.append(Part(name, microbatch, start_ns, monotonic_ns()))

    def take(self) -> list[Part]:
        """Return the parts since the last call, in the order of their ends."""
        ended, self._ended = self._ended, []
        return ended
