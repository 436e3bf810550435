"""What the model runs on: device, dtype and threads, chosen once and recorded."""

import os
from pathlib import Path

import torch

from perfledger.schema.errors import UsageError

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def choose_device(asked: str) -> torch.device:
    """Return the device of the option; "auto" takes CUDA where there is one. Raises UsageError."""
    if asked == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(asked)
    except RuntimeError:
        raise UsageError(f"{asked!r} is not a device", fix="auto, cpu, cuda or cuda:1") from None
    if device.type not in ("cpu", "cuda"):
        raise UsageError(f"the device {asked!r} is not supported", fix="auto, cpu or cuda")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise UsageError(
            f"the device {asked} is not there ({torch.cuda.device_count()} CUDA devices found)",
            fix="--device cpu",
        )
    return device


def choose_dtype(asked: str, stored: str, device: torch.device) -> torch.dtype:
    """Return the dtype to compute in; "auto" takes the fastest that this device is exact enough in.

    On CUDA: float16 if the weights are `stored` so, else bfloat16. On a CPU: float32, but bfloat16
    where the weights are and the CPU multiplies it in hardware (elsewhere it would be slower).
    Raises UsageError for a name that is none.
    """
    if asked != "auto":
        if asked not in DTYPES:
            raise UsageError(f"{asked!r} is not a dtype", fix="auto, " + ", ".join(DTYPES))
        return DTYPES[asked]
    if device.type == "cuda":
        return torch.float16 if stored == "float16" else torch.bfloat16
    fast = stored == "bfloat16" and torch.ops.mkldnn._is_mkldnn_bf16_supported()
    return torch.bfloat16 if fast else torch.float32


def memory_bytes(device: torch.device) -> int:
    """Return the memory of a device; of the CPU the host's, or less where a cgroup limits it."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    host = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    try:
        limit = Path("/sys/fs/cgroup/memory.max").read_text().strip()
    except OSError:
        return host
    return min(host, int(limit)) if limit.isdigit() else host


def set_threads(asked: int) -> int:
    """Set torch's threads (0: one for each core this process may use); return their number.

    Raises UsageError for a negative number.
    """
    if asked < 0:
        raise UsageError(f"threads is {asked}, but must be at least 0")
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    torch.set_num_threads(asked or cores or 1)
    return torch.get_num_threads()
