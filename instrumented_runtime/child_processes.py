"""The runtime's children, the ranks of engines and the exporter: how they start and surely end.

A child ends when its channel to the parent closes, so none outlives a parent that was killed.
Ctrl-C and SIGTERM reach a whole process group; only the parent acts on them, and ends its children
in order (engine first: its last records still go through the exporter).
"""

import multiprocessing
import shutil
import signal
import tempfile
from collections.abc import Callable, Sequence
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from socket import socket

from perfledger.instrumented_runtime.options import RuntimeOptions
from perfledger.instrumented_runtime.parallel.layout import Layout, RankPlace
from perfledger.instrumented_runtime.telemetry import RankRing
from perfledger.instrumented_runtime.training.options import TrainOptions
from perfledger.schema.clocks import ClockAnchor

PARENTS_SIGNALS = {signal.SIGINT, signal.SIGTERM}
KILL_WAIT_S = 5.0


def spawn_engine(
    options: RuntimeOptions,
    checkpoint: Path,
    ring_name: str | None,
    place: RankPlace = RankPlace(Layout()),  # noqa: B008 (frozen)
) -> tuple[BaseProcess, Connection]:
    """Start one rank of an engine; return it and our end of the pipe to it."""
    near, far = multiprocessing.get_context("spawn").Pipe()
    name = f"engine {place.replica}.{place.rank}"
    process = _spawn(name, _run_engine, options, checkpoint, far, ring_name, place)
    far.close()  # else the pipe would not close with the engine
    return process, near


def spawn_train_rank(
    options: TrainOptions, place: RankPlace, ring_name: str | None
) -> tuple[BaseProcess, Connection]:
    """Start one rank of a training run; return it and our end of the connection to it."""
    near, far = multiprocessing.get_context("spawn").Pipe()
    process = _spawn(f"train {place.rank}", _run_train_rank, options, place, far, ring_name)
    far.close()  # else the connection would not close with the rank
    return process, near


def spawn_exporter(
    rings: Sequence[RankRing],
    channel: socket,
    anchor: ClockAnchor,
    resource: dict[str, str | int],
) -> BaseProcess:
    """Start the exporter on its end of the channel, which is closed here."""
    process = _spawn("exporter", _run_exporter, rings, channel, anchor, resource)
    channel.close()
    return process


def make_rendezvous() -> str:
    """Return the URL of a file in a new private folder, by which ranks meet."""
    return f"file://{tempfile.mkdtemp(prefix='perfledger-ranks-')}/meet"


def remove_rendezvous(place: RankPlace) -> None:
    """Remove the folder of `make_rendezvous`; nothing where it is gone, or there was none."""
    if place.rank == 0 and place.rendezvous.startswith("file:///"):
        folder = Path(place.rendezvous.removeprefix("file://")).parent
        shutil.rmtree(folder, ignore_errors=True)


def end(process: BaseProcess, timeout_s: float) -> None:
    """Wait until a child that was told to end has ended; kill it after `timeout_s`."""
    process.join(timeout_s)
    if process.exitcode is None:
        process.kill()
        process.join(KILL_WAIT_S)


def _spawn(name: str, target: Callable[..., None], *args: object) -> BaseProcess:
    """Start a child that never sees the parent's signals: a blocked signal stays blocked in it."""
    process = multiprocessing.get_context("spawn").Process(name=name, target=target, args=args)
    resource_tracker.ensure_running()  # starting it would unblock them
    before = signal.pthread_sigmask(signal.SIG_BLOCK, PARENTS_SIGNALS)
    try:
        process.start()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    return process


# Entries of the children. They import what only the child needs: torch, the OTLP exporters.


def _run_engine(
    options: RuntimeOptions,
    checkpoint: Path,
    connection: Connection,
    ring_name: str | None,
    place: RankPlace,
) -> None:
    from perfledger.instrumented_runtime import engine

    try:
        engine.main(options, checkpoint, connection, ring_name, place)
    finally:
        remove_rendezvous(place)  # the parent may have been killed


def _run_train_rank(
    options: TrainOptions, place: RankPlace, connection: Connection, ring_name: str | None
) -> None:
    from perfledger.instrumented_runtime.training import worker

    worker.main(options, place, connection, ring_name)


def _run_exporter(
    rings: Sequence[RankRing],
    channel: socket,
    anchor: ClockAnchor,
    resource: dict[str, str | int],
) -> None:
    from perfledger.instrumented_runtime import exporter

    exporter.main(rings, channel, anchor, resource)
