"""All ceilings of this host, one after another, in about two minutes; quickly, in some seconds.

Each cell is sampled in two rounds: what disturbs a machine for some seconds is not in both.
"""

import platform
import secrets
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from perfledger.instrumented_runtime.ceilings.attending import attention_cells
from perfledger.instrumented_runtime.ceilings.cells import Cell
from perfledger.instrumented_runtime.ceilings.collective_bandwidth import (
    measure_collectives,
    plan,
)
from perfledger.instrumented_runtime.ceilings.crossing import crossing_cells
from perfledger.instrumented_runtime.ceilings.launching import launch_cells
from perfledger.instrumented_runtime.ceilings.matrices import matrix_cells
from perfledger.instrumented_runtime.ceilings.memory import memory_cells
from perfledger.instrumented_runtime.ceilings.storage import measure_storage, storage_steps
from perfledger.instrumented_runtime.devices import choose_device, set_threads
from perfledger.instrumented_runtime.runtime_version import runtime_version
from perfledger.schema.ceilings import Absent, Ceiling, Ceilings
from perfledger.schema.host_facts import device_facts, host_facts
from perfledger.schema.manifest import Manifest, Value
from perfledger.schema.store_places import Place

CELL_S, QUICK_CELL_S = 0.12, 0.02  # of sampling, in one round
ROUNDS, QUICK_ROUNDS = 2, 1
GLOO_RANKS = 2
NO_NETWORK = "a second host would have to answer"


@dataclass(frozen=True)
class CeilingOptions:
    """What to measure with: threads 0 is one for each core; `device` as the runtime names it."""

    threads: int = 0
    device: str = "auto"
    quick: bool = False


class Measuring:
    """A plan of measuring, whose length is known before it begins."""

    def __init__(self, options: CeilingOptions, place: Place) -> None:
        """Choose the device and set torch's threads. Raises UsageError where they cannot be."""
        self.threads = set_threads(options.threads)
        self.device = choose_device(options.device)
        self._quick, self._place = options.quick, place
        matrices, no_matrices = matrix_cells(self.device, quick=self._quick)
        crossings, no_crossings = crossing_cells(self.device, quick=self._quick)
        self._cells = [
            *memory_cells(self.device, quick=self._quick),
            *matrices,
            *attention_cells(self.device, quick=self._quick),
            *launch_cells(self.device, quick=self._quick),
            *crossings,
        ]
        self._absent = [*no_matrices, *no_crossings, Absent("network", "read", NO_NETWORK)]

    @property
    def steps(self) -> int:
        """Return how often `run` calls `advance`."""
        rounds = QUICK_ROUNDS if self._quick else ROUNDS
        return rounds * len(self._cells) + len(plan(quick=self._quick)) + storage_steps()

    def run(self, advance: Callable[[], None] = lambda: None) -> Ceilings:
        """Measure everything. What cannot be measured here is named as absent."""
        created_ns, facts = time.time_ns(), self._facts()
        found = [*self._sampled(advance), *self._others(advance)]
        return Ceilings(
            run_id=f"ceilings-{secrets.token_hex(4)}",
            host=Manifest.of(facts),
            created_ns=created_ns,
            items=tuple(one for one in found if isinstance(one, Ceiling)),
            absent=(*self._absent, *(one for one in found if isinstance(one, Absent))),
        )

    def _sampled(self, advance: Callable[[], None]) -> Iterator[Ceiling | Absent]:
        samples: list[list[float]] = [[] for _ in self._cells]
        failed: dict[int, str] = {}
        seconds, rounds = (QUICK_CELL_S, QUICK_ROUNDS) if self._quick else (CELL_S, ROUNDS)
        for _ in range(rounds):
            for at, cell in enumerate(self._cells):
                if at not in failed:
                    try:
                        samples[at] += cell.sample(seconds)
                    except (RuntimeError, MemoryError) as error:  # no memory, or no such kernel
                        failed[at] = str(error).splitlines()[0]
                advance()
        for at, cell in enumerate(self._cells):
            yield _result(cell, samples[at], failed.get(at))

    def _others(self, advance: Callable[[], None]) -> Iterator[Ceiling | Absent]:
        devices = torch.cuda.device_count() if self.device.type == "cuda" else GLOO_RANKS
        if devices < 2:
            yield Absent("scale_up", "collectives", "there is one device only")
            for _ in plan(quick=self._quick):
                advance()
        else:
            yield from measure_collectives(devices, self.device.type, advance, quick=self._quick)
        yield from measure_storage(self._place, advance, quick=self._quick)

    def _facts(self) -> dict[str, Value]:
        versions = {"python": platform.python_version(), "torch": torch.__version__}
        return {
            **host_facts(),
            **device_facts(),
            "runtime.name": "perfledger",
            "runtime.version": runtime_version(),
            "runtime.versions": versions,
            "runtime.device": str(self.device),
            "runtime.threads": self.threads,
            "run.started_ns": time.time_ns(),
        }


def _result(cell: Cell, samples: list[float], failure: str | None) -> Ceiling | Absent:
    if failure is not None:
        return Absent(cell.edge, f"{cell.operation} {cell.variant}", failure)
    short = [float(f"{one:.6g}") for one in samples]
    return Ceiling.best(cell.edge, cell.operation, cell.variant, cell.unit, short, cell.note)
