"""The memory of the device: bytes a second for each working set, and the latency of one access.

A set that fits into a cache is read from there, so the curve over the sizes shows the caches; its
right end is the memory itself. Bytes read and written both count (as in STREAM).
"""

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch.nn.functional import silu

from perfledger.instrumented_runtime.ceilings.cells import Cell, Work, timed
from perfledger.instrumented_runtime.sampling import greedy
from perfledger.schema.ceilings import size_text

KIB, MIB = 1 << 10, 1 << 20
SETS = (256 * KIB, MIB, 4 * MIB, 16 * MIB, 32 * MIB, 64 * MIB, 256 * MIB)
QUICK_SETS = (256 * KIB, 16 * MIB, 64 * MIB)
CHASED = (32 * KIB, 256 * KIB, 4 * MIB, 32 * MIB, 256 * MIB)
QUICK_CHASED = (32 * KIB, 32 * MIB)
ELEMENTWISE = (16 * KIB, 256 * KIB, 4 * MIB)
LINE_BYTES = 64
STEPS = 20_000  # accesses of one call of the chase
ARGMAX_ROWS, ARGMAX_VOCABULARY = 16, 8192


def memory_cells(device: torch.device, *, quick: bool) -> list[Cell]:
    """Return the cells of the memory: reading, copying, what sampling reads, latency on a CPU."""
    sets: Sequence[int] = QUICK_SETS if quick else SETS
    if device.type == "cuda" and not quick:
        sets = (*sets, 1024 * MIB, 4096 * MIB)
    cells = [_cell("read", size, size, _reading(size, device), device) for size in sets]
    cells += [_cell("copy", size, size, _copying(size, device), device) for size in sets]
    few = ELEMENTWISE[1:2] if quick else ELEMENTWISE
    cells += [
        _cell("elementwise", size, 5 * size // 4, _gating(size, device), device) for size in few
    ]
    logits = ARGMAX_ROWS * ARGMAX_VOCABULARY * 4
    cells.append(_cell("argmax", logits, logits, _choosing(device), device))
    if device.type == "cpu":
        cells += [_chase_cell(size, device) for size in (QUICK_CHASED if quick else CHASED)]
    return cells


def _cell(
    operation: str, size: int, amount: int, prepare: Callable[[], Work], device: torch.device
) -> Cell:
    sample = timed(prepare, amount, "bytes/s", device)
    return Cell("device_memory", operation, size_text(size), "bytes/s", sample)


def _reading(size: int, device: torch.device) -> Callable[[], Work]:
    def prepare() -> Work:
        return torch.ones(size // 4, device=device).sum

    return prepare


def _copying(size: int, device: torch.device) -> Callable[[], Work]:
    """Copy one half of the set into the other."""

    def prepare() -> Work:
        source = torch.ones(size // 8, device=device)
        target = torch.zeros_like(source)
        return lambda: target.copy_(source)

    return prepare


def _gating(size: int, device: torch.device) -> Callable[[], Work]:
    """SwiGLU's middle, `silu(gate) * up`: four tensors, of which one is written and read again."""

    def prepare() -> Work:
        gate = torch.ones(size // 16, device=device)
        up = torch.ones_like(gate)
        return lambda: silu(gate) * up

    return prepare


def _choosing(device: torch.device) -> Callable[[], Work]:
    def prepare() -> Work:
        logits = torch.rand(ARGMAX_ROWS, ARGMAX_VOCABULARY, device=device)
        return lambda: greedy(logits)

    return prepare


def _chase_cell(size: int, device: torch.device) -> Cell:
    note = "one load after another, each at the address that the last one gave"
    sample = timed(_chasing(size), STEPS, "ns", device)
    return Cell("device_memory", "latency", size_text(size), "ns", sample, note)


def _chasing(size: int) -> Callable[[], Work]:
    def prepare() -> Work:
        from perfledger.instrumented_runtime.ceilings.pointer_chase import follow

        stride = LINE_BYTES // 8
        order = np.random.default_rng(size).permutation(size // LINE_BYTES) * stride
        successors = np.zeros(size // 8, np.int64)
        successors[order] = np.roll(order, -1)  # one circle through all lines
        at = 0

        def walk() -> None:
            nonlocal at
            at = follow(successors, at, STEPS)

        return walk

    return prepare
