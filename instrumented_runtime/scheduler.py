"""Which tokens the next step computes. Pure policy over plain data: no torch, no clock, no I/O.

Continuous batching: a step is put together anew each time. Sequences that decode come first and
each gets one token; the rest of the token budget goes to prompts in chunks, first come, first
served. When blocks run out, the sequence admitted last loses its blocks, goes back to the front
of the queue and is computed again later.
"""

from collections import deque
from dataclasses import dataclass, field

from perfledger.instrumented_runtime.kv_blocks import KvBlocks, blocks_for
from perfledger.instrumented_runtime.options import RuntimeOptions
from perfledger.instrumented_runtime.sequences import Sequence
from perfledger.schema.errors import UsageError


@dataclass(frozen=True, slots=True)
class Limits:
    """What bounds a request and a step. Lengths and sizes are tokens."""

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    block_size: int
    kv_blocks: int


def check_options(options: RuntimeOptions) -> None:
    """Raise UsageError for options with which no step could ever be planned."""
    for name in ("max_num_seqs", "block_size"):
        if getattr(options, name) < 1:
            raise UsageError(f"{name} is {getattr(options, name)}, but must be at least 1")
    if options.max_num_batched_tokens < options.max_num_seqs:
        raise UsageError(
            f"max_num_batched_tokens is {options.max_num_batched_tokens}, but each of"
            f" {options.max_num_seqs} sequences may need a token in a step",
            fix="raise max_num_batched_tokens or lower max_num_seqs",
        )


def limits_of(options: RuntimeOptions, *, max_model_len: int, kv_blocks: int) -> Limits:
    """Return the limits of a runtime, from its options and two facts of its Ready message.

    Raises UsageError where they could never run a step.
    """
    check_options(options)
    if kv_blocks < 1:
        raise UsageError("the KV memory holds no block", fix="raise --kv-memory")
    return Limits(
        options.max_num_seqs,
        options.max_num_batched_tokens,
        max_model_len,
        options.block_size,
        kv_blocks,
    )


def most_output_tokens(prompt_tokens: int, limits: Limits) -> int:
    """Return how many tokens can follow such a prompt at most; 0 or less if it cannot fit.

    The last token is sampled and never computed, so it needs no place in the KV cache.
    """
    cached = limits.kv_blocks * limits.block_size
    return min(limits.max_model_len, cached + 1) - prompt_tokens


def never_fits(prompt_tokens: int, max_tokens: int, limits: Limits) -> str | None:
    """Return why a request could never be served, even alone, or None if it can."""
    if prompt_tokens < 1:
        return "the prompt has no tokens"
    if max_tokens < 1:
        return f"max_tokens is {max_tokens}, but must be at least 1"
    total = prompt_tokens + max_tokens
    asked = f"{prompt_tokens} prompt tokens and max_tokens {max_tokens} make {total}"
    if total > limits.max_model_len:
        return f"{asked}, but the model takes {limits.max_model_len} tokens"
    if blocks_for(total - 1, limits.block_size) > limits.kv_blocks:
        return f"{asked}, but the KV cache holds {limits.kv_blocks * limits.block_size} tokens"
    return None


@dataclass(frozen=True, slots=True)
class Chunk:
    """A piece of a sequence, `[start, start + tokens)`, that a step computes."""

    sequence: Sequence
    start: int
    tokens: int

    @property
    def last(self) -> bool:
        """Whether the step samples the next token of the sequence."""
        return self.start + self.tokens == len(self.sequence.tokens)

    @property
    def recompute(self) -> bool:
        """Whether its first token was in the batch before (and a preemption dropped it)."""
        return self.start < self.sequence.recompute_below


@dataclass(slots=True)
class StepPlan:
    """What one step computes; `budget` is what is left of max_num_batched_tokens."""

    budget: int
    decodes: list[Sequence] = field(default_factory=list)
    chunks: list[Chunk] = field(default_factory=list)
    preempted: list[Sequence] = field(default_factory=list)

    def sampled(self) -> list[Sequence]:
        """Return the sequences that get a token, in the order of the batch's rows."""
        return self.decodes + [chunk.sequence for chunk in self.chunks if chunk.last]

    def sequences(self) -> list[Sequence]:
        """Return every sequence with a token in the step."""
        return self.decodes + [chunk.sequence for chunk in self.chunks]


class Scheduler:
    """The queue, the batch, and the policy between them.

    A step is `plan = start_step()`, `admit_next(plan, now_ns)` until it returns None, and, once
    computed, `finish_step(plan)`.
    """

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.kv = KvBlocks(limits.kv_blocks, limits.block_size)
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []  # in the order of admission

    def add(self, sequence: Sequence) -> None:
        """Put a new sequence at the end of the queue. Callers check `never_fits` first."""
        self.waiting.append(sequence)

    def start_step(self) -> StepPlan:
        """Plan a token for each decoding sequence, then chunks for prompts already begun."""
        plan = StepPlan(self.limits.max_num_batched_tokens)
        for sequence in [one for one in self.running if one.decoding]:
            if sequence.decoding and self._make_room(sequence, plan):
                plan.decodes.append(sequence)
                plan.budget -= 1
        for sequence in self.running:
            if not sequence.decoding and plan.budget:
                self._add_chunk(sequence, plan)
        return plan

    def admit_next(self, plan: StepPlan, now_ns: int) -> Sequence | None:
        """Move the next waiting sequence into the batch and plan its first chunk.

        None when nothing more is admitted in this step: no budget, no seat, no blocks (the first
        in the queue is not overtaken), or all who wait are held back until after `now_ns`.
        """
        if not plan.budget or plan.preempted or len(self.running) >= self.limits.max_num_seqs:
            return None
        for sequence in self.waiting:
            if sequence.held_until_ns > now_ns:
                continue
            if not self._has_room(sequence):
                if sequence.wait_reason == "admission":
                    sequence.wait_reason = "kv_full"
                return None
            if delay_ns := sequence.delays_ns.pop("queue", 0):
                sequence.held_until_ns = now_ns + delay_ns
                continue
            self._admit(sequence, plan)
            return sequence
        return None

    def next_release_ns(self) -> int | None:
        """Return when the first sequence held back may be admitted (monotonic ns), if any."""
        held = [sequence.held_until_ns for sequence in self.waiting if sequence.held_until_ns]
        return min(held, default=None)

    def finish_step(self, plan: StepPlan) -> None:
        """Note what the step computed. Tokens sampled are appended by the caller, after this."""
        for sequence in plan.decodes:
            sequence.computed += 1
        for chunk in plan.chunks:
            chunk.sequence.computed += chunk.tokens
            chunk.sequence.decoding = chunk.last

    def remove(self, sequence: Sequence) -> None:
        """Take a sequence out of the batch or the queue and free its blocks."""
        (self.running if sequence in self.running else self.waiting).remove(sequence)
        self.kv.release(sequence.blocks)

    def _admit(self, sequence: Sequence, plan: StepPlan) -> None:
        self.waiting.remove(sequence)
        self.running.append(sequence)
        sequence.admitted = True
        self.kv.grow(sequence.blocks, len(sequence.tokens))
        self._add_chunk(sequence, plan)

    def _has_room(self, sequence: Sequence) -> bool:
        # One block is left for each running sequence, so that an admission does not force a
        # preemption a step later.
        needed = self.kv.missing(sequence.blocks, len(sequence.tokens))
        return needed + len(self.running) <= self.kv.free

    def _make_room(self, sequence: Sequence, plan: StepPlan) -> bool:
        """Grow a decoding sequence by its newest token, preempting from the end of the batch."""
        while not self.kv.grow(sequence.blocks, len(sequence.tokens)):
            victim = self.running.pop()
            self._preempt(victim)
            plan.preempted.append(victim)
            if victim is sequence:
                return False
        return True

    def _preempt(self, victim: Sequence) -> None:
        self.kv.release(victim.blocks)
        lost = len(victim.tokens) if victim.decoding else victim.computed
        victim.recompute_below = max(lost, victim.recompute_below)
        victim.computed = 0
        victim.decoding = False
        victim.wait_reason = "preempted"
        self.waiting.appendleft(victim)

    def _add_chunk(self, sequence: Sequence, plan: StepPlan) -> None:
        tokens = min(sequence.remaining, plan.budget)
        plan.chunks.append(Chunk(sequence, sequence.computed, tokens))
        plan.budget -= tokens
