"""Which tokens the next step computes. Policy over plain data: no torch, no clock, no I/O.

Continuous batching: a step is put together anew each time. Sequences that decode come first and
each gets one token; the rest of the token budget goes to prompts in chunks. The batch is ordered
by priority, then by admission: when blocks run out, the last one gives up its blocks (to the host,
or to be computed again), goes back to the front of the queue and is resumed later.
"""

import bisect

from perfledger.instrumented_runtime.kv.blocks import KvBlocks, blocks_for
from perfledger.instrumented_runtime.kv.swapping import HostBlocks
from perfledger.instrumented_runtime.kv.tables import KvTables
from perfledger.instrumented_runtime.scheduling.degrading import SHRINK_DIVISOR
from perfledger.instrumented_runtime.scheduling.fairness import (
    OUTPUT_WEIGHT,
    PROMPT_WEIGHT,
    Tenants,
)
from perfledger.instrumented_runtime.scheduling.limits import Limits
from perfledger.instrumented_runtime.scheduling.plan import Chunk, StepPlan
from perfledger.instrumented_runtime.scheduling.sequences import Request, Sequence, fork
from perfledger.instrumented_runtime.scheduling.waiting import WaitingLine


class Scheduler:
    """The queue, the batch, and the policy between them.

    A step is `plan = start_step()`, `admit_next(plan, now_ns)` until it returns None, and, once
    computed, `finish_step(plan)` and `append` for each token sampled.
    """

    def __init__(self, limits: Limits, identity: tuple[str, ...] = ()) -> None:
        self.limits = limits
        self.kv = KvBlocks(limits.kv_blocks, limits.block_size)
        self.host = HostBlocks(limits.swap_blocks)
        self.tables = KvTables(
            self.kv, self.host, prefix_cache=limits.prefix_cache, identity=identity
        )
        self.tenants = Tenants()
        self.waiting = WaitingLine(self.tenants)
        self.running: list[Request] = []  # by priority, then in the order of admission
        self.seats = 0  # that they take

    def add(self, request: Request) -> None:
        """Put a new request into the queue. Callers check `never_fits` first."""
        self.waiting.add(request)

    def start_step(self, *, shrink: bool = False) -> StepPlan:
        """Plan a token for each decoding sequence, then chunks for prompts already begun.

        With `shrink` (a step of degrading) prompts get a smaller share.
        """
        budget = self.limits.max_num_batched_tokens
        if shrink:
            budget = max(self.limits.max_num_seqs, budget // SHRINK_DIVISOR)
        plan = StepPlan(budget)
        at = 0
        while at < len(self.running):  # who is preempted leaves from its end
            request = self.running[at]
            if request.decoding and self._make_room(request, plan):
                plan.decodes += request.sequences
            at += 1
        plan.budget -= len(plan.decodes)
        for request in self.running:
            if not request.decoding and plan.budget:
                self._add_chunks(request, plan)
        return plan

    def admit_next(self, plan: StepPlan, now_ns: int) -> Request | None:
        """Move the next waiting request into the batch and plan its first tokens.

        None when nothing more is admitted in this step: no budget, no seat, no blocks (the first
        in the queue is not overtaken), or all who wait are held back until after `now_ns`.
        """
        if not plan.budget or plan.preempted or self.seats >= self.limits.max_num_seqs:
            return None
        while (request := self.waiting.first(now_ns)) is not None:
            if self.seats + request.seats > self.limits.max_num_seqs:
                return None
            if request.decoding and len(request.sequences) > plan.budget:
                return None
            if delay_ns := request.delays_ns.pop("queue", 0):
                self.waiting.hold(request, now_ns + delay_ns)
                continue
            if not self._give_blocks(request):
                return None
            self._admit(request, plan)
            return request
        return None

    def next_event_ns(self) -> int | None:
        """Return when a request held back may be admitted, or a deadline comes (monotonic ns)."""
        return self.waiting.next_event_ns()

    def take_back(self, plan: StepPlan) -> None:
        """Undo a plan that could not be computed; the next one plans its tokens anew.

        Blocks given stay with who got them.
        """
        for chunk in plan.chunks:
            if len(chunk.samples) > 1:
                self.tables.unshare_prompt(chunk.sequence.of)

    def finish_step(self, plan: StepPlan) -> None:
        """Note what the step computed. Tokens sampled are appended by the caller, after this."""
        size, store = self.kv.block_size, self.limits.prefix_cache
        context = 0
        for sequence in plan.decodes:
            computed = sequence.computed = sequence.computed + 1
            context += computed
            if store and not computed % size:
                self.tables.store_full(sequence)
        plan.context_tokens = context
        for chunk in plan.chunks:
            sequence, account = chunk.sequence, chunk.sequence.of.account
            account.recomputed_tokens += chunk.recomputed
            account.computed_tokens += chunk.tokens - chunk.recomputed - len(chunk.samples)
            sequence.computed += chunk.tokens
            self.tables.store_full(sequence)
            if chunk.last:
                sequence.of.decoding = True
                for other in chunk.samples[1:]:
                    other.computed, other.stored = sequence.computed, sequence.stored

    def append(self, sequence: Sequence, token: int) -> str | None:
        """Give a sequence the token sampled for it; return why it ends with it, if it does."""
        request = sequence.of
        sequence.tokens.append(token)
        request.output_tokens += 1
        request.tenant.served += OUTPUT_WEIGHT
        return sequence.finish_reason()

    def end_sequence(self, sequence: Sequence) -> bool:
        """Take out an answer that has ended; return whether its request has ended with it."""
        request = sequence.of
        if len(request.sequences) == 1:
            self.remove(request)
            return True
        self.tables.release(sequence)
        was_first = sequence is request.sequences[0]
        request.sequences.remove(sequence)
        if request in self.waiting:
            self.waiting.recount(request)
        else:
            self.seats -= 1
            if was_first:
                self.tables.inherit(request.sequences[0], sequence)
            # The one that was left to compute again may be the one that has ended.
            request.decoding = request.decoding or not request.remaining
        return False

    def remove(self, request: Request) -> None:
        """Take a request out of the batch or the queue and free its blocks."""
        if request in self.waiting:
            self.waiting.remove(request)
        else:
            self.running.remove(request)
            self.seats -= request.seats
        self.tables.release_all(request)
        self.tenants.end(request.tenant)

    def expired(self, now_ns: int) -> list[Request]:
        """Take out and return the requests whose deadline came before their admission."""
        gone = self.waiting.expired(now_ns)
        for request in gone:
            self.tenants.end(request.tenant)
        return gone

    def forget_swapped(self, host_blocks: set[int]) -> None:
        """Have the waiting requests computed again whose blocks never reached the host."""
        for request in self.waiting:
            if any(not host_blocks.isdisjoint(table) for table in request.host_tables):
                self.tables.forget_swapped(request)
                self.waiting.recount(request)

    def tokens_to_prefill(self) -> int:
        """Return the tokens to compute, of those that wait or run, before all can decode."""
        begun = sum([one.remaining for one in self.running if not one.decoding])
        return self.waiting.tokens + begun

    def pressure(self) -> int:
        """Return what is wanted as a share of what there is, in thousandths: see degrading.py."""
        wanted = self.kv.used + blocks_for(self.waiting.tokens, self.kv.block_size)
        seats = self.seats + self.waiting.seats
        return max(1000 * seats // self.limits.max_num_seqs, 1000 * wanted // self.kv.count)

    # --- admission ---

    def _give_blocks(self, request: Request) -> bool:
        """Give a request its blocks, if some stay free: one for each running sequence, so that an
        admission does not force a preemption a step later, and the watermark."""
        reserve = max(self.seats, self.limits.watermark_blocks) if self.running else 0
        if not self.tables.admit(request, reserve):
            if request.wait_reason != "preempted":
                request.wait_reason = "kv_full"
            return False
        return True

    def _admit(self, request: Request, plan: StepPlan) -> None:
        self.waiting.take(request)
        bisect.insort(self.running, request, key=lambda one: one.priority)
        self.seats += request.seats
        if not request.admitted:
            paid = request.prompt_tokens - request.account.cached_tokens
            request.tenant.served += PROMPT_WEIGHT * paid
        request.admitted = True
        if not request.decoding and request.forked and not request.remaining:
            request.decoding = True
        if request.decoding:
            plan.decodes += request.sequences
            plan.budget -= len(request.sequences)
        else:
            self._add_chunks(request, plan)

    def _add_chunks(self, request: Request, plan: StepPlan) -> None:
        left, alone = request.remaining, len(request.sequences) == 1
        for sequence in list(request.sequences):
            tokens = min(sequence.remaining, plan.budget)
            if not tokens:
                continue
            plan.budget -= tokens
            left -= tokens
            samples: tuple[Sequence, ...] = ()
            if not left and alone:
                if not request.forked:
                    self.tables.share_prompt(request, fork(request))
                samples = tuple(request.sequences)
            plan.chunks.append(Chunk(sequence, sequence.computed, tokens, samples, not left))

    # --- giving up blocks ---

    def _make_room(self, request: Request, plan: StepPlan) -> bool:
        """Grow a decoding request by its newest tokens, preempting from the end of the batch."""
        while not self.tables.extend(request):
            victim = self.running.pop()
            self._preempt(victim)
            plan.preempted.append(victim)
            if victim is request:
                return False
        return True

    def _preempt(self, victim: Request) -> None:
        self.seats -= victim.seats
        victim.account.preemptions += 1
        if not (self.limits.swap_blocks and self.tables.swap_out(victim)):
            self.tables.drop(victim)
            victim.decoding = False
        victim.wait_reason = "preempted"
        self.waiting.put_back(victim)
