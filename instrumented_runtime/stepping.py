"""The engine's heart: one step after another over the scheduler, the model and the sampler."""

import time
from collections.abc import Iterable

import torch
from torch import Tensor

from perfledger.instrumented_runtime.attention import PagedKvCache, StepRows
from perfledger.instrumented_runtime.collectives.recording import begin_step
from perfledger.instrumented_runtime.kv.swapping import PlannedMoves
from perfledger.instrumented_runtime.messages import (
    Admitted,
    Failed,
    FromEngine,
    StepOutput,
    Submit,
    Token,
)
from perfledger.instrumented_runtime.out_of_memory import (
    culprit,
    held_bytes,
    is_out_of_memory,
)
from perfledger.instrumented_runtime.parallel.served_model import StepModel
from perfledger.instrumented_runtime.recorder import Recorder
from perfledger.instrumented_runtime.sampling import sample
from perfledger.instrumented_runtime.scheduling.gate import Gate
from perfledger.instrumented_runtime.scheduling.limits import Limits
from perfledger.instrumented_runtime.scheduling.plan import StepPlan
from perfledger.instrumented_runtime.scheduling.scheduler import Scheduler
from perfledger.instrumented_runtime.scheduling.sequences import Request, Sequence
from perfledger.instrumented_runtime.step_rows import PreparedChunk, build_rows, prepare_chunk
from perfledger.schema.clocks import monotonic_ns


class Stepper:
    """Requests in, messages out; all state of the engine between two steps is here.

    `identity` is what the cached K and V depend on: hashes of weights, tokenizer and template.
    """

    def __init__(
        self,
        model: StepModel,
        cache: PagedKvCache,
        limits: Limits,
        recorder: Recorder | None,
        identity: tuple[str, ...] = (),
    ) -> None:
        self.scheduler = Scheduler(limits, identity)
        self._gate = Gate(self.scheduler, model.config.vocab_size)
        self._model, self._cache, self._recorder = model, cache, recorder
        self._live: dict[int, Request] = {}
        self._seq = 0  # of the last step, counted from 1
        self._moves: PlannedMoves | None = None  # of the step that is being computed
        self._admitted: list[Admitted] = []
        self._delays_planted = False

    def submit(self, submit: Submit) -> Failed | None:
        """Queue a request, or return why it is refused."""
        if submit.request in self._live:
            why = f"request {submit.request} is already in the engine"
            return Failed(submit.request, "error", why)
        now_ns = monotonic_ns()
        self._degrade(now_ns)
        taken = self._gate.judge(submit, now_ns)
        if isinstance(taken, Failed):
            return taken
        self._live[submit.request] = taken
        self.scheduler.add(taken)
        self._delays_planted |= bool(submit.delays_ns)
        return None

    def abort(self, number: int, reason: str, choice: int | None = None) -> None:
        """End a request, or one answer of it, now and free its blocks.

        Nothing if it has ended already.
        """
        request = self._live.get(number)
        if request is None:
            return
        if choice is None:
            del self._live[number]
            self._admitted = [one for one in self._admitted if one.request != number]
            self.scheduler.remove(request)
            self._record_leave(request, monotonic_ns(), reason)
            return
        for sequence in request.sequences:
            if sequence.choice == choice:
                self._end(sequence, monotonic_ns(), reason)
                return

    def abort_all(self, reason: str) -> None:
        """End every request."""
        for request in list(self._live):
            self.abort(request, reason)

    def idle_ns(self, now_ns: int) -> int | None:
        """Return how long nothing can be computed: 0 if now, None until a request comes."""
        if self.scheduler.running:
            return 0
        if not self.scheduler.waiting:
            return None
        return max(0, (self.scheduler.next_event_ns() or 0) - now_ns)

    def step(self) -> list[FromEngine]:
        """Compute one step; return its output: nothing if no request got a token or an end."""
        if self._delays_planted:
            self._plant("host_gap", (one for one in self.scheduler.running if one.decoded))
        start_ns = monotonic_ns()
        refused: list[FromEngine] = [*self._turn_away(start_ns)]
        plan = self.scheduler.start_step(shrink="shrink-chunk" in self._gate.degrading.on)
        prepared = self._prepare(plan)
        if not plan.decodes and not prepared:
            return refused
        self._seq += 1
        begin_step(self._seq)
        try:
            output = self._compute(plan, prepared, start_ns)
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            return refused + self._fail(plan, str(error))
        self._degrade(output.sent_ns)
        return [*refused, output] if output.tokens else refused

    def _turn_away(self, now_ns: int) -> list[Failed]:
        """End the waiting requests whose time is up, or that are shed."""
        failed = self._gate.turn_away(now_ns)
        for one in failed:
            del self._live[one.request]
        return failed

    def _degrade(self, now_ns: int) -> None:
        for change in self._gate.degrade():
            if self._recorder is not None:
                self._recorder.degrade(change, now_ns)

    def _prepare(self, plan: StepPlan) -> list[PreparedChunk]:
        """Prepare the rows of all chunks, admitting requests as long as there is room."""
        seq, block_size = self._seq + 1, self.scheduler.limits.block_size
        for victim in plan.preempted:
            victim.queue_start_ns = monotonic_ns()
            if self._recorder is not None:
                self._recorder.preempt(victim, seq, victim.queue_start_ns)
        if self._recorder is not None and plan.chunks:
            self._recorder.chunks(plan.chunks, seq, block_size)
        prepared = [prepare_chunk(chunk, block_size) for chunk in plan.chunks]
        while True:
            queue_end_ns, planned = monotonic_ns(), len(plan.chunks)
            request = self.scheduler.admit_next(plan, queue_end_ns)
            if request is None:
                self._gate.mark_shrunk(plan)
                return prepared
            chunks = plan.chunks[planned:]
            prepared += [prepare_chunk(chunk, block_size) for chunk in chunks]
            self._plant("context", (request,))
            self._record_admission(request, seq, queue_end_ns)
            if self._recorder is not None:
                self._recorder.chunks(chunks, seq, block_size)

    def _record_admission(self, request: Request, seq: int, queue_end_ns: int) -> None:
        account = request.account
        swapped = account.swapped_in_last
        if not account.preemptions:
            said = self._gate.degraded_text(request)
            self._admitted.append(Admitted(request.number, account.cached_tokens, said))
        if self._recorder is not None:
            self._recorder.admit(request, seq, queue_end_ns, monotonic_ns(), swapped)

    def _compute(self, plan: StepPlan, prepared: list[PreparedChunk], start_ns: int) -> StepOutput:
        kv, sampled = self.scheduler.kv, plan.sampled()
        self._moves = self.scheduler.tables.take_moves()
        rows = build_rows(plan, prepared, kv.block_size, self._model.device, self._moves)
        waiting, used = len(self.scheduler.waiting), kv.used
        schedule_end_ns = monotonic_ns()
        logits = self._forward(plan, rows)
        routing = None if self._model.routing is None else self._model.routing.take()
        sample_start_ns = monotonic_ns()
        tokens = sample(logits, sampled)
        if self._delays_planted:
            self._plant("sample", [sequence.of for sequence in sampled])
        sample_end_ns = monotonic_ns()
        self.scheduler.finish_step(plan)
        output = [self._append(one, token) for one, token in zip(sampled, tokens, strict=True)]
        end_ns = monotonic_ns()
        ended = [one for one, token in zip(sampled, output, strict=True) if token.finish]
        self._gate.observe(plan, end_ns - start_ns, len(ended), waiting)
        if self._recorder is not None:
            times = (start_ns, schedule_end_ns, sample_start_ns, sample_end_ns, end_ns)
            self._recorder.kv(kv.counts, self._seq)
            if routing is not None:
                self._recorder.routed(routing, self._seq)
            emptied = bool(ended) and self.scheduler.seats == len(ended)
            gathered = 0 if rows.decode is None else len(rows.decode.table)
            self._recorder.step(
                plan, self._seq, times, (waiting, used, kv.count), emptied, gathered
            )
        for sequence, token in zip(sampled, output, strict=True):
            if token.finish is not None:
                self._end(sequence, end_ns, token.finish)
        return self._output(output)

    def _output(self, tokens: list[Token]) -> StepOutput:
        """Return the message of a step, with the load after it."""
        scheduler, admitted = self.scheduler, self._admitted
        if admitted and tokens:
            self._admitted = []
        return StepOutput(
            self._seq,
            monotonic_ns(),
            tokens,
            tuple(admitted),
            waiting=len(scheduler.waiting),
            running=len(scheduler.running),
            kv_blocks_used=scheduler.kv.used,
            waiting_tokens=scheduler.tokens_to_prefill(),
        )

    def _forward(self, plan: StepPlan, rows: StepRows) -> Tensor:
        logits = self._model.forward(rows, self._cache)
        if self._delays_planted:
            self._plant("prefill", [chunk.sequence.of for chunk in plan.chunks])
            self._plant("decode", [sequence.of for sequence in plan.decodes])
        if self._model.device.type == "cuda":
            torch.cuda.synchronize(self._model.device)  # or sampling would be said to take it all
        return logits

    def _append(self, sequence: Sequence, token: int) -> Token:
        finish = self.scheduler.append(sequence, token)
        return Token(sequence.of.number, token, finish, sequence.choice)

    def _end(self, sequence: Sequence, at_ns: int, reason: str) -> None:
        """Take out an answer that has ended, and its request with the last one."""
        request = sequence.of
        if self.scheduler.end_sequence(sequence):
            del self._live[request.number]
            self._record_leave(request, at_ns, reason)
        elif self._recorder is not None:
            self._recorder.choice_end(request, self._seq, at_ns)

    def _fail(self, plan: StepPlan, detail: str) -> list[FromEngine]:
        """End the request that a step found no memory for; the others are computed again.

        The plan is taken back, so all stands as before the step, but for blocks that it moved:
        after a failed move nobody knows what they hold, and all requests of the step end.
        """
        self.scheduler.take_back(plan)
        if self._model.routing is not None:
            self._model.routing.take()  # of half a step
        kv, device = self.scheduler.kv, self._model.device
        held, used = held_bytes(device), (kv.used, kv.count)
        if device.type == "cuda":
            torch.cuda.empty_cache()
        ended = [culprit(plan)]
        if self._moves is not None:
            self.scheduler.forget_swapped({host for _, host in self._moves.swap_out})
            ended = plan.requests()
        failed: list[FromEngine] = []
        for request in ended:
            if self._recorder is not None:
                self._recorder.no_memory(request, self._seq, monotonic_ns(), held, used)
            self.abort(request.number, "out_of_memory")
            said = f"{detail} (KV blocks held: {used[0]} of {used[1]})"
            failed.append(Failed(request.number, "out_of_memory", said))
        return failed

    def _record_leave(self, request: Request, at_ns: int, reason: str) -> None:
        if self._recorder is not None and request.admitted:
            self._recorder.leave(request, self._seq, at_ns, reason)

    def _plant(self, stage: str, requests: Iterable[Request]) -> None:
        """Sleep for the delays planted in `stage`, each once (tests and drills)."""
        for request in requests:
            time.sleep(request.delays_ns.pop(stage, 0) / 1e9)
