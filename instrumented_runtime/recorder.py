"""What the engine writes into the ring: integers only, one record a step and few beside it."""

from collections.abc import Callable
from time import process_time_ns

from perfledger.instrumented_runtime.records import (
    ADMIT,
    CHUNK,
    CPU_EVERY_STEPS,
    LEAVE,
    LEAVE_REASONS,
    NOT_READ,
    PREEMPT,
    STEP,
    WAIT_REASONS,
)
from perfledger.instrumented_runtime.ring import to_signed
from perfledger.instrumented_runtime.scheduler import Chunk, StepPlan
from perfledger.instrumented_runtime.sequences import Sequence

WAIT_CODES = {name: code for code, name in enumerate(WAIT_REASONS)}
LEAVE_CODES = {name: code for code, name in enumerate(LEAVE_REASONS)}
LOW_64 = (1 << 64) - 1


class Recorder:
    """Writes records.py tuples with `write(kind, fields)`. Times are monotonic ns."""

    def __init__(self, write: Callable[[int, tuple[int, ...]], None]) -> None:
        self._write = write
        self._cpu_ns = process_time_ns()

    def admit(self, one: Sequence, seq: int, queue_end_ns: int, context_end_ns: int) -> None:
        """A sequence enters the batch, with nothing cached (there is no prefix cache yet)."""
        fields = (
            one.request,
            seq,
            to_signed(one.trace_id >> 64),
            to_signed(one.trace_id & LOW_64),
            to_signed(one.span_id),
            one.queue_start_ns,
            queue_end_ns,
            context_end_ns,
            one.prompt_tokens,
            one.computed,
            WAIT_CODES[one.wait_reason],
        )
        self._write(ADMIT, fields)

    def chunk(self, chunk: Chunk, seq: int) -> None:
        """Step `seq` computes a piece of a prompt."""
        flags = (int(chunk.recompute), int(chunk.last))
        self._write(CHUNK, (chunk.sequence.request, seq, chunk.tokens, *flags))

    def preempt(self, one: Sequence, seq: int, at_ns: int) -> None:
        """A sequence loses its blocks while step `seq` is planned."""
        self._write(PREEMPT, (one.request, seq, at_ns))

    def step(
        self,
        plan: StepPlan,
        seq: int,
        times_ns: tuple[int, int, int, int, int],
        counts: tuple[int, int, int],
        emptied: bool = False,
    ) -> None:
        """Step `seq` ended. `times_ns` are start, end of scheduling, start and end of sampling,
        end; `counts` are requests waiting, KV blocks used and KV blocks in all; `emptied` says
        that it left the batch empty."""
        chunks, decodes, cpu_ns = plan.chunks, len(plan.decodes), NOT_READ
        if emptied or not seq % CPU_EVERY_STEPS:
            now_ns = process_time_ns()
            cpu_ns, self._cpu_ns = now_ns - self._cpu_ns, now_ns
        if chunks:
            batch = (decodes + len(chunks), sum([chunk.tokens for chunk in chunks]), decodes)
        else:
            batch = (decodes, 0, decodes)
        self._write(STEP, (seq, *times_ns, *batch, *counts, cpu_ns))

    def leave(self, one: Sequence, seq: int, at_ns: int, reason: str) -> None:
        """A sequence that was in the batch ends after step `seq`."""
        code = LEAVE_CODES.get(reason, LEAVE_CODES["error"])
        self._write(LEAVE, (one.request, seq, at_ns, code, one.output_tokens))
