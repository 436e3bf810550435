"""The whole of scheduler and KV manager against a memory that remembers what was written to it.

Requests of two tenants come, go and are aborted in any order, under limits that make them wait,
share, copy, swap and be evicted. In place of K and V each slot holds what they would depend on:
the tenant and every token up to it. So a step that would read another tenant's block, a block
overwritten too early or one never written fails here, whatever brought it about.
"""

from collections import Counter

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from perfledger.instrumented_runtime.kv.swapping import Move, PlannedMoves
from perfledger.instrumented_runtime.messages import SamplingParams, Submit
from perfledger.instrumented_runtime.scheduling.limits import Limits, never_fits
from perfledger.instrumented_runtime.scheduling.plan import StepPlan
from perfledger.instrumented_runtime.scheduling.scheduler import Scheduler
from perfledger.instrumented_runtime.scheduling.sequences import Request, Sequence, request_of

SIZE = 2
Slots = dict[int, dict[int, object]]  # block -> offset -> what was written there

LIMITS = st.builds(
    Limits,
    max_num_seqs=st.integers(3, 5),
    max_num_batched_tokens=st.integers(5, 12),
    max_model_len=st.just(40),
    block_size=st.just(SIZE),
    kv_blocks=st.integers(2, 20),
    swap_blocks=st.sampled_from([0, 4, 30]),
    watermark_blocks=st.integers(0, 2),
    prefix_cache=st.booleans(),
)


class Engine(RuleBasedStateMachine):
    """A scheduler, and the memory that its plans read and write."""

    @initialize(limits=LIMITS)
    def start(self, limits: Limits) -> None:
        self.scheduler = Scheduler(limits)
        self.device: Slots = {}
        self.host: Slots = {}
        self.live: list[Request] = []
        self.number = 0

    @rule(
        prompt=st.lists(st.sampled_from([1, 1, 1, 2]), min_size=1, max_size=20),
        tenant=st.sampled_from("ab"),
        output=st.integers(1, 8),
        n=st.sampled_from([1, 1, 2, 3]),
        priority=st.sampled_from([0, 0, 1]),
    )
    def submit(self, prompt: list[int], tenant: str, output: int, n: int, priority: int) -> None:
        if never_fits(len(prompt), output, self.scheduler.limits, n):
            return
        self.number += 1
        sampling = SamplingParams(output, n=n)
        submit = Submit(self.number, prompt, sampling, 0, 0, 0, tenant=tenant, priority=priority)
        request = request_of(submit, self.scheduler.tenants.named(tenant))
        self.scheduler.add(request)
        self.live.append(request)

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        request = data.draw(st.sampled_from(self.live))
        if data.draw(st.booleans()):
            self.scheduler.remove(request)
            self.live.remove(request)
        else:
            # Often the first one: what the others share is computed for it.
            choice = data.draw(st.sampled_from([0, 0, *range(len(request.sequences))]))
            self._end(request.sequences[choice])

    @precondition(lambda self: self.live)
    @rule(steps=st.integers(1, 6))
    def run(self, steps: int) -> None:
        for _ in range(steps):
            if self.live:
                self._step()

    @precondition(lambda self: self.scheduler.running)
    @rule()
    def preempt(self) -> None:
        """As for another's block, but at any time: also of what has begun to be computed again."""
        self.scheduler._preempt(self.scheduler.running.pop())

    @precondition(lambda self: self.live)
    @rule()
    def run_out_of_memory(self) -> None:
        """A step is planned and cannot be computed; if blocks were to move, some may have."""
        plan, scheduler = self._plan(), self.scheduler
        moves = scheduler.tables.take_moves()
        scheduler.take_back(plan)
        assert all(len(one.sequences) == 1 for one in self.live if not one.output_tokens)
        if moves is not None:
            scheduler.forget_swapped({host for _, host in moves.swap_out})
            for request in plan.requests():
                scheduler.remove(request)
                self.live.remove(request)

    def teardown(self) -> None:
        """Whatever is left is served to its end, and then nothing is held."""
        if not hasattr(self, "live"):
            return
        for _ in range(2_000):
            if not self.live:
                break
            self._step()
        assert not self.live and not self.scheduler.running and not self.scheduler.waiting
        assert (self.scheduler.waiting.tokens, self.scheduler.waiting.seats) == (0, 0)
        assert self.scheduler.seats == self.scheduler.kv.used == 0
        assert self.scheduler.host.free == self.scheduler.limits.swap_blocks

    @invariant()
    def counts_are_exact(self) -> None:
        if not hasattr(self, "live"):
            return
        scheduler, kv = self.scheduler, self.scheduler.kv
        held = Counter(b for r in self.live for one in r.sequences for b in one.blocks)
        assert all(kv.references(block) == held[block] for block in range(kv.count))
        assert kv.used == len(held)
        assert kv.used + kv.free == kv.count
        swapped = {b for r in self.live for table in r.host_tables for b in table}
        leaving = self.scheduler.tables._host_leaving
        assert scheduler.host.count - scheduler.host.free == len(swapped) + len(leaving)
        assert scheduler.seats == sum(request.seats for request in scheduler.running)
        assert scheduler.waiting.seats == sum(request.seats for request in scheduler.waiting)
        assert scheduler.waiting.tokens == sum(request.remaining for request in scheduler.waiting)
        assert scheduler.seats <= scheduler.limits.max_num_seqs
        for request in self.live:
            tenants = {self._tenant_of(b) for one in request.sequences for b in one.blocks}
            assert tenants <= {request.tenant.name, None}

    def _plan(self) -> StepPlan:
        scheduler = self.scheduler
        self._forget_free_blocks()
        plan = scheduler.start_step()
        while scheduler.admit_next(plan, 0) is not None:
            pass
        assert plan.decodes or plan.chunks
        computed = len(plan.decodes) + sum(chunk.tokens for chunk in plan.chunks)
        assert computed == scheduler.limits.max_num_batched_tokens - plan.budget
        return plan

    def _step(self) -> None:
        scheduler, plan = self.scheduler, self._plan()
        if (moves := scheduler.tables.take_moves()) is not None:
            self._move(moves)
        self._compute(plan)
        sampled = plan.sampled()
        scheduler.finish_step(plan)
        for sequence in sampled:
            # Choices differ: each samples its own number, over and over.
            if scheduler.append(sequence, 1 + sequence.choice) is not None:
                self._end(sequence)

    def _forget_free_blocks(self) -> None:
        """What nobody holds or finds is not there to be read, though nobody wrote over it yet."""
        kv, moves = self.scheduler.kv, self.scheduler.tables._moves
        leaving = {block for block, _ in moves.swap_out}
        for block in set(self.device) - leaving:
            if not kv.references(block) and kv._hash[block] is None:
                del self.device[block]

    def _move(self, moves: PlannedMoves) -> None:
        def copy(source: Slots, target: Slots, pairs: list[Move]) -> None:
            read = [dict(source[block]) for block, _ in pairs]
            target.update(zip([to for _, to in pairs], read, strict=True))

        copy(self.device, self.host, moves.swap_out)
        copy(self.device, self.device, moves.copies)
        copy(self.host, self.device, moves.swap_in)

    def _compute(self, plan: StepPlan) -> None:
        """Write all rows, then read what each of them attends to, as the model does."""
        rows = [(one, one.computed) for one in plan.decodes]
        for chunk in plan.chunks:
            rows += [(chunk.sequence, chunk.start + at) for at in range(chunk.tokens)]
        for sequence, position in rows:
            block = sequence.blocks[position // SIZE]
            forked_now = not self.scheduler.kv.writable(block)
            assert not forked_now or all(
                one.blocks[position // SIZE] == block for one in sequence.of.sequences
            )
            self.device.setdefault(block, {})[position % SIZE] = _content(sequence, position)
        for sequence, position in rows:
            for before in range(position + 1):
                block = sequence.blocks[before // SIZE]
                assert self.device[block][before % SIZE] == _content(sequence, before)

    def _end(self, sequence: Sequence) -> None:
        request, account = sequence.of, sequence.of.account
        if self.scheduler.end_sequence(sequence):
            self.live.remove(request)
        elif not request.sequences:
            raise AssertionError("a request without sequences goes on")
        assert account.recomputed_tokens == 0 or account.preemptions

    def _tenant_of(self, block: int) -> object:
        slots = self.device.get(block, {})
        hashed = self.scheduler.kv._hash[block] is not None
        return slots[0][0] if hashed else None  # type: ignore[index]


def _content(sequence: Sequence, position: int) -> tuple[object, ...]:
    return (sequence.of.tenant.name, *sequence.tokens[: position + 1])


TestEngine = Engine.TestCase
TestEngine.settings = settings(max_examples=100, stateful_step_count=30, deadline=None)
