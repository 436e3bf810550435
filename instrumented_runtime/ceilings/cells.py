"""One thing to measure, and how samples are taken of it: enough calls that a clock can tell."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

Work = Callable[[], object]

SAMPLE_NS = 2_000_000  # a sample is of as many calls as take this long, so that clocks can tell
FEWEST, MOST = 3, 100  # samples of a cell in one round
# Read between two calls that are to find the near caches taken, as behind a layer's weights.
PASSING_BYTES = 8 << 20


@dataclass(frozen=True)
class Cell:
    """One ceiling to be measured; `sample(seconds)` returns samples in its unit."""

    edge: str
    operation: str
    variant: str
    unit: str
    sample: Callable[[float], Sequence[float]]
    note: str = ""


def wait_for(device: torch.device) -> None:
    """Return when the device has done what it was given; at once on the CPU."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def timed(
    prepare: Callable[[], Work], amount: float, unit: str, device: torch.device
) -> Callable[[float], list[float]]:
    """Return what samples a work: `amount` is the bytes, FLOPs or operations of one call.

    The work is prepared anew for each round and called once before the clock runs.
    """

    def sample(seconds: float) -> list[float]:
        with torch.inference_mode():
            work = prepare()
            work()
            times_ns = call_times_ns(work, seconds, device)
        if unit == "ns":
            return [ns / amount for ns in times_ns]
        return [amount / ns * 1e9 for ns in times_ns]

    return sample


def timed_apart(
    prepare: Callable[[], Work], amount: float, device: torch.device
) -> Callable[[float], list[float]]:
    """Return what samples the bytes/s of a work that does not follow on itself.

    Between two calls other memory is read. A device's queue hides what a host's caches lack, so
    there it is `timed`.
    """
    if device.type != "cpu":
        return timed(prepare, amount, "bytes/s", device)

    def sample(seconds: float) -> list[float]:
        passing = torch.ones(PASSING_BYTES // 4)
        with torch.inference_mode():
            work = prepare()
            work()
            deadline_ns = time.perf_counter_ns() + round(seconds * 1e9)
            samples: list[float] = []
            while len(samples) < FEWEST or (
                len(samples) < MOST and time.perf_counter_ns() < deadline_ns
            ):
                passing.sum()
                samples.append(amount / _elapsed_ns(work, 1, device) * 1e9)
        return samples

    return sample


def call_times_ns(work: Work, seconds: float, device: torch.device) -> list[float]:
    """Return samples of the time of one call, each the mean over about SAMPLE_NS of calls."""
    calls = max(1, round(SAMPLE_NS / max(_elapsed_ns(work, 1, device), 1)))
    deadline_ns = time.perf_counter_ns() + round(seconds * 1e9)
    samples: list[float] = []
    while len(samples) < FEWEST or (len(samples) < MOST and time.perf_counter_ns() < deadline_ns):
        samples.append(_elapsed_ns(work, calls, device) / calls)
    return samples


def _elapsed_ns(work: Work, calls: int, device: torch.device) -> int:
    wait_for(device)
    started_ns = time.perf_counter_ns()
    for _ in range(calls):
        work()
    wait_for(device)
    return time.perf_counter_ns() - started_ns
