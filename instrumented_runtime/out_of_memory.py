"""Memory that runs out in a step: how it shows, which request it is for, and what was held."""

import os
from pathlib import Path

import torch

from perfledger.instrumented_runtime.records import NOT_READ
from perfledger.instrumented_runtime.scheduling.plan import StepPlan
from perfledger.instrumented_runtime.scheduling.sequences import Request

_PAGES = Path("/proc/self/statm")


def is_out_of_memory(error: Exception) -> bool:
    """Return whether an error of a step says that memory, the host's or the device's, ran out."""
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return True
    return "can't allocate memory" in str(error)  # what torch's CPU allocator raises


def culprit(plan: StepPlan) -> Request:
    """Return the request whose part of a step needs the most memory beyond what is held.

    A chunk's attention needs memory for its rows times its context, so the largest chunk is the
    one; among sequences that decode it is the longest, to which all others are padded.
    """
    if plan.chunks:
        largest = max(plan.chunks, key=lambda one: (one.start + one.tokens) * one.tokens)
        return largest.sequence.of
    return max(plan.decodes, key=lambda one: len(one.tokens)).of


def held_bytes(device: torch.device) -> tuple[int, int]:
    """Return the bytes that this process holds of the host and of its device, or NOT_READ."""
    try:
        resident = int(_PAGES.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        resident = NOT_READ
    if device.type != "cuda":
        return resident, NOT_READ
    return resident, int(torch.cuda.memory_allocated(device))
