"""All ranks but 0 follow: each computes the steps that rank 0 tells it of, and records them."""

import os
import threading
from collections import Counter
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
            record_step(recorder, header.seq, (start_ns, known_ns, end_ns), rows, cache.block_size)


def _batch(rows: StepRows) -> tuple[int, int, int]:
    """Return a step's sequences, its tokens of prompts, and its sequences that decode."""
    decoding = 0 if rows.decode is None else rows.decode.count
    return decoding + len(rows.chunks), len(rows.tokens) - decoding, decoding


def _decodes(rows: StepRows) -> tuple[int, int]:
    """Return the tokens that a step's decodes attend to, and the blocks that they gather."""
    if rows.decode is None:
        return 0, 0
    before = int(rows.positions[: rows.decode.count].sum())
    return before + rows.decode.count, len(rows.decode.table)


def record_step(
    recorder: Recorder, seq: int, times_ns: tuple[int, int, int], rows: StepRows, block_size: int
) -> None:
    """Tell of a step by its rows, as rank 0 does by its plan: chunks, moved blocks, the step.

    `times_ns` are its start, when its rows were there, its end.
    """
    if rows.chunks:
        every = range(len(rows.tokens))
        sampled = Counter(every if rows.sampled is None else rows.sampled.tolist())
    for one in rows.chunks:
        samples = sampled[one.start + one.tokens - 1]
        recorder.followed_chunk(seq, (one.context, one.tokens), samples, block_size)
    if rows.moves is not None:
        moves = (rows.moves.copies, rows.moves.swap_out, rows.moves.swap_in)
        copied, out, back = (0 if pairs is None else len(pairs) for pairs in moves)
        recorder.followed_moves(seq, (copied, out, back))
    recorder.followed(seq, times_ns, _batch(rows), _decodes(rows))


def end_with(lifeline: Connection) -> None:
    """End this process when the other end of the pipe is closed, whatever it does just then.

    It may wait for a peer that will never answer: only a thread of its own can still act.
    """

    def wait() -> None:
        lifeline.poll(None)
        os._exit(0)

    threading.Thread(target=wait, name="lifeline", daemon=True).start()
