"""What the engine writes into the ring: integers only, one record a step and few beside it."""

from collections.abc import Callable
from itertools import groupby
from time import process_time_ns
from typing import TYPE_CHECKING

from perfledger.instrumented_runtime.expert_records import routed_fields
from perfledger.instrumented_runtime.kv.blocks import KvCounts
from perfledger.instrumented_runtime.records import (
    ADMIT,
    CHOICE_END,
    CHUNK,
    CPU_EVERY_STEPS,
    DEGRADE,
    KV,
    LEAVE,
    LEAVE_REASONS,
    NO_MEMORY,
    NOT_READ,
    PREEMPT,
    ROUTED,
    STEP,
    WAIT_REASONS,
)
from perfledger.instrumented_runtime.ring import to_signed
from perfledger.instrumented_runtime.scheduling.degrading import CODES, Change
from perfledger.instrumented_runtime.scheduling.plan import Chunk, StepPlan
from perfledger.instrumented_runtime.scheduling.sequences import Request
from perfledger.instrumented_runtime.work_records import chunk_sums, pack_decodes

if TYPE_CHECKING:
    from perfledger.instrumented_runtime.moe import StepRouting

WAIT_CODES = {name: code for code, name in enumerate(WAIT_REASONS)}
LEAVE_CODES = {name: code for code, name in enumerate(LEAVE_REASONS)}
LOW_64 = (1 << 64) - 1


class Recorder:
    """Writes records.py tuples with `write(kind, fields)`. Times are monotonic ns."""

    def __init__(self, write: Callable[[int, tuple[int, ...]], None]) -> None:
        self._write = write
        self._cpu_ns = process_time_ns()
        self._kv = KvCounts().told()

    def admit(
        self, one: Request, seq: int, queue_end_ns: int, context_end_ns: int, swapped_blocks: int
    ) -> None:
        """A request enters the batch with what was found of it in the cache, or swapped in."""
        fields = (
            one.number,
            seq,
            to_signed(one.trace_id >> 64),
            to_signed(one.trace_id & LOW_64),
            to_signed(one.span_id),
            one.queue_start_ns,
            queue_end_ns,
            context_end_ns,
            one.prompt_tokens,
            0 if swapped_blocks else one.sequences[0].computed,
            WAIT_CODES[one.wait_reason],
            len(one.sequences) if one.decoding else 0,
            swapped_blocks,
        )
        self._write(ADMIT, fields)

    def chunks(self, chunks: list[Chunk], seq: int, block_size: int) -> None:
        """Step `seq` computes these pieces of prompts: one record for each request."""
        for request, group in groupby(chunks, key=lambda chunk: chunk.sequence.of):
            of_it = list(group)
            tokens = sum([chunk.tokens for chunk in of_it])
            recomputed = sum([chunk.recomputed for chunk in of_it])
            last = of_it[-1]
            after = (int(last.last), len(request.sequences), len(last.samples))
            sums = chunk_sums([(chunk.start, chunk.tokens) for chunk in of_it], block_size)
            self._write(CHUNK, (request.number, seq, tokens, recomputed, *after, *sums))

    def preempt(self, one: Request, seq: int, at_ns: int) -> None:
        """A request loses its blocks while step `seq` is planned."""
        swapped = {block for table in one.host_tables for block in table}
        self._write(PREEMPT, (one.number, seq, at_ns, len(swapped)))

    def step(
        self,
        plan: StepPlan,
        seq: int,
        times_ns: tuple[int, int, int, int, int],
        counts: tuple[int, int, int],
        emptied: bool = False,
        gathered_blocks: int = 0,
    ) -> None:
        """Step `seq` ended. `times_ns` are start, end of scheduling, start and end of sampling,
        end; `counts` are requests waiting, KV blocks used and KV blocks in all; `emptied` says
        that it left the batch empty; `gathered_blocks` are those of its decodes."""
        chunks, decodes, cpu_ns = plan.chunks, len(plan.decodes), NOT_READ
        if emptied or not seq % CPU_EVERY_STEPS:
            now_ns = process_time_ns()
            cpu_ns, self._cpu_ns = now_ns - self._cpu_ns, now_ns
        if chunks:
            batch = (decodes + len(chunks), sum([chunk.tokens for chunk in chunks]), decodes)
        else:
            batch = (decodes, 0, decodes)
        decoded = pack_decodes(plan.context_tokens, gathered_blocks)
        self._write(STEP, (seq, *times_ns, *batch, *counts, cpu_ns, decoded))

    def followed_chunk(
        self, seq: int, piece: tuple[int, int], samples: int, block_size: int
    ) -> None:
        """A rank that schedules nothing computes a piece (tokens before it, its tokens)."""
        sums = chunk_sums([piece], block_size)
        self._write(CHUNK, (NOT_READ, seq, piece[1], 0, 0, 0, samples, *sums))

    def followed_moves(self, seq: int, moved: tuple[int, int, int]) -> None:
        """A rank that schedules nothing copied so many blocks, swapped out and swapped in."""
        self._write(KV, (seq, 0, 0, *moved))

    def followed(
        self,
        seq: int,
        times_ns: tuple[int, int, int],
        batch: tuple[int, int, int],
        decodes: tuple[int, int],
    ) -> None:
        """A rank that schedules nothing ended step `seq`. `times_ns` are its start, when its rows
        were there, its end; `batch` are its sequences, prompt tokens and decoded tokens; `decodes`
        the tokens that these attended to, and the blocks that they gathered."""
        start_ns, known_ns, end_ns = times_ns
        now_ns = process_time_ns()
        cpu_ns, self._cpu_ns = now_ns - self._cpu_ns, now_ns
        unknown = (NOT_READ, NOT_READ, NOT_READ)  # requests that wait and KV blocks: rank 0's
        times = (start_ns, known_ns, end_ns, end_ns, end_ns)
        self._write(STEP, (seq, *times, *batch, *unknown, cpu_ns, pack_decodes(*decodes)))

    def kv(self, counts: KvCounts, seq: int) -> None:
        """Tell what happened to KV blocks since the last time, if anything did."""
        told = counts.told()
        if told != self._kv:
            changed = [now - before for now, before in zip(told, self._kv, strict=True)]
            self._write(KV, (seq, *changed))
            self._kv = told

    def routed(self, routing: "StepRouting", seq: int) -> None:
        """Tell where the rows of step `seq` went among experts; before the step itself."""
        for fields in routed_fields(routing, seq):
            self._write(ROUTED, fields)

    def choice_end(self, one: Request, seq: int, at_ns: int) -> None:
        """An answer of a request ended after step `seq`; others go on."""
        self._write(CHOICE_END, (one.number, seq, at_ns, len(one.sequences), int(one.decoding)))

    def leave(self, one: Request, seq: int, at_ns: int, reason: str) -> None:
        """A request that was in the batch ends after step `seq`."""
        code, account = LEAVE_CODES.get(reason, LEAVE_CODES["error"]), one.account
        fields = (
            one.number,
            seq,
            at_ns,
            code,
            one.output_tokens,
            one.computed_tokens,
            account.recomputed_tokens,
            account.peak_blocks,
            account.evicted_blocks,
            account.copied_blocks,
            account.swapped_blocks,
            one.degraded,
        )
        self._write(LEAVE, fields)

    def degrade(self, change: Change, at_ns: int) -> None:
        """A step of degrading went on or off."""
        self._write(DEGRADE, (at_ns, CODES[change.step], int(change.on), change.pressure))

    def no_memory(
        self, one: Request, seq: int, at_ns: int, held_bytes: tuple[int, int], kv: tuple[int, int]
    ) -> None:
        """Step `seq` found no memory and ends this request. `held_bytes`: process and device
        (NOT_READ where unknown); `kv`: blocks used and in all."""
        blocks = len({block for sequence in one.sequences for block in sequence.blocks})
        self._write(NO_MEMORY, (one.number, seq, at_ns, *held_bytes, *kv, blocks))
