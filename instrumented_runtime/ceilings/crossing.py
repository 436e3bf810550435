"""Copies between the host and the device, each way; none where the CPU is the device."""

from collections.abc import Callable

import torch

from perfledger.instrumented_runtime.ceilings.cells import Cell, Work, timed
from perfledger.schema.ceilings import Absent, size_text

MIB = 1 << 20
SIZES = (MIB, 16 * MIB, 256 * MIB)
QUICK_SIZES = (16 * MIB,)
WAYS = {"h2d": "host to device", "d2h": "device to host"}
NO_CROSSING = "the engine computes on the CPU here: host and device memory are one"


def crossing_cells(device: torch.device, *, quick: bool) -> tuple[list[Cell], list[Absent]]:
    """Return the cells of copies from and to page-locked host memory. Not run on a device."""
    if device.type == "cpu":
        return [], [Absent("host_device", way, NO_CROSSING) for way in WAYS]
    sizes = QUICK_SIZES if quick else SIZES
    cells = [
        Cell(
            "host_device",
            way,
            size_text(size),
            "bytes/s",
            timed(_copying(way, size, device), size, "bytes/s", device),
            f"{meaning}, page-locked",
        )
        for way, meaning in WAYS.items()
        for size in sizes
    ]
    return cells, []


def _copying(way: str, size: int, device: torch.device) -> Callable[[], Work]:
    def prepare() -> Work:
        host = torch.ones(size, dtype=torch.uint8).pin_memory()
        there = torch.ones(size, dtype=torch.uint8, device=device)
        source, target = (host, there) if way == "h2d" else (there, host)
        return lambda: target.copy_(source, non_blocking=True)

    return prepare
