"""The runtime's two children, engine and exporter: how they start and how they surely end.

A child ends when its channel to the parent closes, so none outlives a parent that was killed.
Ctrl-C and SIGTERM reach a whole process group; only the parent acts on them, and ends its children
in order (engine first: its last records still go through the exporter).
"""

import multiprocessing
import signal
from collections.abc import Callable
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from socket import socket

from perfledger.instrumented_runtime.options import RuntimeOptions
from perfledger.schema.clocks import ClockAnchor

PARENTS_SIGNALS = {signal.SIGINT, signal.SIGTERM}
KILL_WAIT_S = 5.0


def spawn_engine(
    options: RuntimeOptions, checkpoint: Path, ring_name: str | None
) -> tuple[BaseProcess, Connection]:
    """Start the engine; return it and our end of the pipe to it."""
    near, far = multiprocessing.get_context("spawn").Pipe()
    process = _spawn("engine", _run_engine, options, checkpoint, far, ring_name)
    far.close()  # else the pipe would not close with the engine
    return process, near


def spawn_exporter(
    ring_name: str, channel: socket, anchor: ClockAnchor, resource: dict[str, str | int]
) -> BaseProcess:
    """Start the exporter on its end of the channel, which is closed here."""
    process = _spawn("exporter", _run_exporter, ring_name, channel, anchor, resource)
    channel.close()
    return process


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
    options: RuntimeOptions, checkpoint: Path, connection: Connection, ring_name: str | None
) -> None:
    from perfledger.instrumented_runtime import engine

    engine.main(options, checkpoint, connection, ring_name)


def _run_exporter(
    ring_name: str, channel: socket, anchor: ClockAnchor, resource: dict[str, str | int]
) -> None:
    from perfledger.instrumented_runtime import exporter

    exporter.main(ring_name, channel, anchor, resource)
