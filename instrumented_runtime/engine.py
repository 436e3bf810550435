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

from perfledger.instrumented_runtime.messages import (
    USAGE,
    WHOLE_ENGINE,
    Abort,
    Failed,
    Ready,
    SamplingParams,
    Shutdown,
    Submit,
)
from perfledger.instrumented_runtime.options import RuntimeOptions
from perfledger.schema.clocks import monotonic_ns
from perfledger.schema.errors import PerfledgerError, UsageError

if TYPE_CHECKING:
    from perfledger.instrumented_runtime.stepping import Stepper

# mallopt(3): keep freed memory, and take it from the heap up to the largest size glibc allows.
M_TRIM_THRESHOLD, KEEP_BYTES = -1, 2_000_000_000
M_MMAP_THRESHOLD, LARGEST_BYTES = -3, 32 * 1024 * 1024


def main(
    options: RuntimeOptions, checkpoint: Path, connection: Connection, ring_name: str | None
) -> None:
    """Run the engine until Shutdown or the end of the pipe: the entry of its process.

    Sends Ready first, or Failed(request -1) if it cannot start; writes its records to the ring of
    that name, or none without one. Ends with code 1 after an error of its own.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the API decides
    prepare_process()
    try:
        stepper, ready = load(options, checkpoint, ring_name)
        connection.send(ready)
        serve(stepper, connection)
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


def load(
    options: RuntimeOptions, checkpoint: Path, ring_name: str | None
) -> tuple["Stepper", Ready]:
    """Load the model and make its cache; return the engine and the facts about it.

    Raises UsageError for a checkpoint or options that can never work.
    """
    from perfledger.instrumented_runtime import attention, devices
    from perfledger.instrumented_runtime.checkpoints.config import read_config
    from perfledger.instrumented_runtime.checkpoints.weights import weights_hash
    from perfledger.instrumented_runtime.kv_blocks import blocks_for
    from perfledger.instrumented_runtime.model import load_decoder
    from perfledger.instrumented_runtime.recorder import Recorder
    from perfledger.instrumented_runtime.ring import Writer
    from perfledger.instrumented_runtime.scheduler import check_options, limits_of
    from perfledger.instrumented_runtime.stepping import Stepper

    check_options(options)
    threads = devices.set_threads(options.threads)
    config = read_config(checkpoint)
    max_model_len = _model_len(options, config.max_position_embeddings)
    device = devices.choose_device(options.device)
    dtype = devices.choose_dtype(options.dtype, config.dtype, device)
    # More blocks than all sequences need at their full length would never be used.
    most = options.max_num_seqs * blocks_for(max_model_len, options.block_size)
    block_bytes = attention.block_bytes(config, options.block_size, dtype)
    kv_blocks = min(options.kv_memory_bytes // block_bytes, most)
    limits = limits_of(options, max_model_len=max_model_len, kv_blocks=kv_blocks)
    model = load_decoder(checkpoint, config, dtype, device)
    cache = attention.PagedKvCache(config, kv_blocks, options.block_size, dtype, device)
    _warm_up(Stepper(model, cache, limits, None))
    recorder = None if ring_name is None else Recorder(Writer.attach(ring_name).write)
    ready = Ready(
        device=str(device),
        dtype=str(dtype).removeprefix("torch."),
        kernel_path=attention.kernel_path(config, dtype, device),
        threads=threads,
        kv_blocks=kv_blocks,
        max_model_len=max_model_len,
        parameters=model.parameters,
        weights_hash=weights_hash(checkpoint),
    )
    return Stepper(model, cache, limits, recorder), ready


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


def _warm_up(stepper: "Stepper") -> None:
    """Compute one prompt and one decode step: first calls load kernels and take memory."""
    stepper.submit(Submit(0, [0] * 16, SamplingParams(max_tokens=2), 0, 0, 0))
    while stepper.idle_ns(0) == 0:
        stepper.step()


def _take(stepper: "Stepper", message: Submit | Abort, connection: Connection) -> None:
    if isinstance(message, Abort):
        stepper.abort(message.request, message.reason)
    elif (refusal := stepper.submit(message)) is not None:
        connection.send(refusal)


def _model_len(options: RuntimeOptions, checkpoint_limit: int) -> int:
    if not 0 <= options.max_model_len <= checkpoint_limit:
        raise UsageError(
            f"max_model_len is {options.max_model_len}, but the checkpoint takes"
            f" {checkpoint_limit} tokens"
        )
    return options.max_model_len or checkpoint_limit
