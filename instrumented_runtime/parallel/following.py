"""All ranks but 0 follow: each computes the steps that rank 0 tells it of, and records them."""

import os
import threading
from multiprocessing.connection import Connection

import torch

from perfledger.instrumented_runtime.attention import PagedKvCache, StepRows
from perfledger.instrumented_runtime.collectives.listening import observe
from perfledger.instrumented_runtime.collectives.recording import RingSink
from perfledger.instrumented_runtime.parallel.groups import Peers
from perfledger.instrumented_runtime.parallel.served_model import StepModel
from perfledger.instrumented_runtime.parallel.step_messages import (
    END,
    STEP,
    StepMessages,
)
from perfledger.instrumented_runtime.recorder import Recorder
from perfledger.schema.clocks import monotonic_ns


def follow(
    model: StepModel,
    cache: PagedKvCache,
    peers: Peers,
    recorder: Recorder | None,
    sink: RingSink | None,
) -> None:
    """Compute steps until rank 0 says that it ends. Raises PerfledgerError if a rank is gone."""
    messages = StepMessages(peers, model.device)
    while True:
        waiting_ns = monotonic_ns()
        with peers.named():
            header = messages.wait()
            if header.kind == END:
                return
            if sink is not None and header.kind == STEP:
                observe(sink)
                sink.step_seq = header.seq
            rows = messages.receive(header)
            known_ns = monotonic_ns()
            model.forward(rows, cache)
            if model.device.type == "cuda":
                torch.cuda.synchronize(model.device)  # or the step would seem to end at once
        routing = None if model.routing is None else model.routing.take()
        if recorder is not None and header.kind == STEP:
            start_ns = max(waiting_ns, header.sent_ns)  # before that, there was no step
            end_ns = monotonic_ns()
            if routing is not None:
                recorder.routed(routing, header.seq)
            recorder.followed(header.seq, (start_ns, known_ns, end_ns), _batch(rows))


def _batch(rows: StepRows) -> tuple[int, int, int]:
    """Return a step's sequences, its tokens of prompts, and its sequences that decode."""
    decoding = 0 if rows.decode is None else rows.decode.count
    return decoding + len(rows.chunks), len(rows.tokens) - decoding, decoding


def end_with(lifeline: Connection) -> None:
    """End this process when the other end of the pipe is closed, whatever it does just then.

    It may wait for a peer that will never answer: only a thread of its own can still act.
    """

    def wait() -> None:
        lifeline.poll(None)
        os._exit(0)

    threading.Thread(target=wait, name="lifeline", daemon=True).start()
