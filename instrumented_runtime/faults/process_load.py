"""Work that burdens the serving process from the inside: real threads, real garbage, real logs.

It is started by a `sitecustomize` that `bringing_about.py` puts on PYTHONPATH, so the runtime has
no hook for it and does not know of it. Only the process that was started takes the load, not its
children (engine and exporter have an interpreter each).
"""

import gc
import logging
import multiprocessing
import os
import tempfile
import threading
import time

# What and how much, like "threads:2"; the words say the means, not the fault.
VARIABLE = "PYTHON_PROCESS_LOAD"
SITECUSTOMIZE = f"""\
import os
if os.environ.get("{VARIABLE}"):
    try:
        from perfledger.instrumented_runtime.faults.process_load import start
    except ImportError:
        pass  # some other Python program in the same environment
    else:
        start(os.environ["{VARIABLE}"])
"""
_GARBAGE_OBJECTS = 20_000


def start(what: str) -> None:
    """Start the load in this process, unless it is a child of the one that was started."""
    if multiprocessing.parent_process() is not None or _is_spawned():
        return
    kind, _, amount = what.partition(":")
    loads = {"threads": _spin, "objects": _collect, "lines": _log}
    loads[kind](float(amount))


def _is_spawned() -> bool:
    """Whether multiprocessing is about to make a child of this process (too early to ask it)."""
    with open("/proc/self/cmdline", "rb") as file:
        return b"multiprocessing" in file.read()


def _spin(amount: float) -> None:
    def work() -> None:
        number = 0
        while True:
            number = (number * 31 + 7) % 1_000_003

    for _ in range(round(amount)):
        threading.Thread(target=work, daemon=True).start()


def _collect(amount: float) -> None:
    held = [[number] for number in range(round(amount))]

    def work() -> None:
        while True:
            # Cycles, which counting references does not free: the collector has to visit `held`.
            rings = [[] for _ in range(_GARBAGE_OBJECTS)]  # type: list[list[object]]
            for ring in rings:
                ring.append(ring)
            held[0] = [len(rings)]
            time.sleep(0.02)

    gc.set_threshold(700, 5, 5)
    threading.Thread(target=work, daemon=True).start()


def _log(amount: float) -> None:
    class Synced(logging.StreamHandler):  # type: ignore[type-arg]
        def flush(self) -> None:
            super().flush()
            os.fsync(self.stream.fileno())

    file = tempfile.TemporaryFile("w")  # noqa: SIM115 (open as long as the process)
    root = logging.getLogger()
    root.setLevel(logging.DEBUG)
    root.addHandler(Synced(file))

    def work() -> None:
        logger = logging.getLogger("work")
        while True:
            logger.debug("a line of a program that logs too much: %d", time.monotonic_ns())
            time.sleep(1 / amount)

    threading.Thread(target=work, daemon=True).start()
