"""The engine process: loads a checkpoint, then serves the API process over one pipe.

Nothing here imports torch before the process is set up: the OpenMP runtime and the allocator read
their settings when they are loaded.
"""

import ctypes
import gc
import os
import select
import signal
import sys
import traceback
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING

from perfledger.instrumented_runtime.kv.inspecting import kv_map
from perfledger.instrumented_runtime.messages import (
    USAGE,
    WHOLE_ENGINE,
    Abort,
    Arrived,
    Failed,
    Inspect,
    SamplingParams,
    Shutdown,
    Submit,
)
from perfledger.instrumented_runtime.options import RuntimeOptions
from perfledger.instrumented_runtime.parallel.layout import Layout, RankPlace, name_of
from perfledger.schema.clocks import monotonic_ns
from perfledger.schema.errors import PerfledgerError, UsageError

if TYPE_CHECKING:
    from perfledger.instrumented_runtime.collectives.recording import RingSink
    from perfledger.instrumented_runtime.recorder import Recorder
    from perfledger.instrumented_runtime.stepping import Stepper

# mallopt(3): keep freed memory, and take it from the heap up to the largest size glibc allows.
M_TRIM_THRESHOLD, KEEP_BYTES = -1, 2_000_000_000
M_MMAP_THRESHOLD, LARGEST_BYTES = -3, 32 * 1024 * 1024


def main(
    options: RuntimeOptions,
    checkpoint: Path,
    connection: Connection,
    ring_name: str | None,
    place: RankPlace = RankPlace(Layout()),  # noqa: B008 (frozen)
) -> None:
    """Run one rank of an engine until Shutdown or the end of the pipe: the entry of its process.

    Sends Ready first (rank 0), or Failed(request -1) if it cannot start; writes its records to the
    ring of that name, or none without one. Ends with code 1 after an error of its own.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the API decides
    prepare_process()
    try:
        if not place.alone:
            connection.send(Arrived())
        run = lead if place.rank == 0 else follow
        run(options, checkpoint, connection, ring_name, place)
    except (EOFError, BrokenPipeError, ConnectionResetError):
        return  # the API process is gone
    except PerfledgerError as error:
        reason = USAGE if isinstance(error, UsageError) else "error"
        connection.send(Failed(WHOLE_ENGINE, reason, str(error)))
    except Exception as error:
        traceback.print_exc()
        connection.send(Failed(WHOLE_ENGINE, "error", f"{type(error).__name__}: {error}"))
        sys.exit(1)


def prepare_process() -> None:
    """Set what must be set before torch is loaded; settings of the user win.

    Buffers of some MB come and go in every layer: without the thresholds each is mapped and
    faulted in anew. Waiting OpenMP threads that spin would take the cores from the API process.
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    os.environ.setdefault("GOMP_SPINCOUNT", "0")
    if sys.platform == "linux":
        libc = ctypes.CDLL(None)
        if hasattr(libc, "gnu_get_libc_version"):
            libc.mallopt(M_TRIM_THRESHOLD, KEEP_BYTES)
            libc.mallopt(M_MMAP_THRESHOLD, LARGEST_BYTES)


def lead(
    options: RuntimeOptions,
    checkpoint: Path,
    connection: Connection,
    ring_name: str | None,
    place: RankPlace,
) -> None:
    """Be rank 0, or the only one: schedule, compute with the others, answer the API process."""
    from perfledger.instrumented_runtime.collectives.listening import observe
    from perfledger.instrumented_runtime.loading import load_rank
    from perfledger.instrumented_runtime.parallel.leading import LeadingModel
    from perfledger.instrumented_runtime.stepping import Stepper
    from perfledger.instrumented_runtime.tokenizer import Tokenizer

    rank = load_rank(options, checkpoint, place)
    tokenizer = Tokenizer.load(checkpoint)
    identity = (rank.facts.weights_hash, tokenizer.hash, tokenizer.template_hash)
    peers = rank.placement.peers
    leading = None if peers is None else LeadingModel(rank.model, peers)
    model = leading or rank.model
    try:
        _warm_up(Stepper(model, rank.cache, rank.limits, None))
        recorder, sink = _telemetry(ring_name)
        if leading is not None:
            leading.warmed_up(sink)
        observe(sink)
        connection.send(rank.facts)
        serve(Stepper(model, rank.cache, rank.limits, recorder, identity), connection)
    finally:
        if leading is not None:
            leading.end()


def follow(
    options: RuntimeOptions,
    checkpoint: Path,
    lifeline: Connection,
    ring_name: str | None,
    place: RankPlace,
) -> None:
    """Be another rank: compute what rank 0 says, until it ends or the lifeline does."""
    from perfledger.instrumented_runtime.loading import load_rank
    from perfledger.instrumented_runtime.parallel import following

    following.end_with(lifeline)
    rank = load_rank(options, checkpoint, place)
    peers = rank.placement.peers
    assert peers is not None
    recorder, sink = _telemetry(ring_name)
    gc.freeze()  # as in `serve`
    try:
        following.follow(rank.model, rank.cache, peers, recorder, sink)
    except PerfledgerError as error:
        sys.exit(f"{name_of(place)} ends: {error}")  # with code 1; rank 0 says it to the API
    finally:
        peers.leave()


def serve(stepper: "Stepper", connection: Connection) -> None:
    """Step while there is work, listening between steps; sleep in the pipe when there is none.

    Returns on Shutdown. Raises EOFError or OSError when the other end of the pipe is gone.
    """
    inbox = select.poll()
    inbox.register(connection.fileno(), select.POLLIN)
    gc.freeze()  # the model lives as long as the process: collections need not visit it
    try:
        while True:
            idle_ns = stepper.idle_ns(monotonic_ns())
            wait_ms = None if idle_ns is None else idle_ns // 1_000_000
            while inbox.poll(wait_ms):
                message = connection.recv()
                if isinstance(message, Shutdown):
                    return
                _take(stepper, message, connection)
                wait_ms = 0
            for output in stepper.step():
                connection.send(output)
    finally:
        stepper.abort_all("shutdown")


def _telemetry(ring_name: str | None) -> "tuple[Recorder | None, RingSink | None]":
    """Return what writes into the ring of that name: steps, and collectives and copies."""
    if ring_name is None:
        return None, None
    from perfledger.instrumented_runtime.collectives.recording import RingSink
    from perfledger.instrumented_runtime.recorder import Recorder
    from perfledger.instrumented_runtime.ring import Writer

    write = Writer.attach(ring_name).write
    return Recorder(write), RingSink(write)


def _warm_up(stepper: "Stepper") -> None:
    """Compute one prompt and one decode step: first calls load kernels and take memory."""
    stepper.submit(Submit(0, [0] * 16, SamplingParams(max_tokens=2), 0, 0, 0))
    while stepper.idle_ns(0) == 0:
        stepper.step()


def _take(stepper: "Stepper", message: Submit | Abort | Inspect, connection: Connection) -> None:
    if isinstance(message, Abort):
        stepper.abort(message.request, message.reason, message.choice)
    elif isinstance(message, Inspect):
        connection.send(kv_map(stepper.scheduler))
    elif (refusal := stepper.submit(message)) is not None:
        connection.send(refusal)
