"""The engine's heart: one step after another over the scheduler, the model and the sampler."""

import time
from collections.abc import Iterable

import torch
from torch import Tensor

from perfledger.instrumented_runtime.attention import PagedKvCache, StepRows
from perfledger.instrumented_runtime.messages import Failed, FromEngine, StepOutput, Submit, Token
from perfledger.instrumented_runtime.model import Decoder
from perfledger.instrumented_runtime.recorder import Recorder
from perfledger.instrumented_runtime.sampling import sample
from perfledger.instrumented_runtime.scheduler import Limits, Scheduler, StepPlan, never_fits
from perfledger.instrumented_runtime.sequences import Sequence, sequence_of
from perfledger.instrumented_runtime.step_rows import PreparedChunk, build_rows, prepare_chunk
from perfledger.schema.clocks import monotonic_ns


class Stepper:
    """Requests in, messages out; all state of the engine between two steps is here."""

    def __init__(
        self, model: Decoder, cache: PagedKvCache, limits: Limits, recorder: Recorder | None
    ) -> None:
        self.scheduler = Scheduler(limits)
        self._model, self._cache, self._recorder = model, cache, recorder
        self._live: dict[int, Sequence] = {}
        self._seq = 0  # of the last step, counted from 1
        self._delays_planted = False

    def submit(self, submit: Submit) -> Failed | None:
        """Queue a request, or return why it is refused."""
        limits, vocab_size = self.scheduler.limits, self._model.config.vocab_size
        why = never_fits(len(submit.prompt), submit.sampling.max_tokens, limits)
        if why is None and not 0 <= min(submit.prompt) <= max(submit.prompt) < vocab_size:
            why = f"the prompt holds a token outside the vocabulary of {vocab_size}"
        if why is None and submit.request in self._live:
            why = f"request {submit.request} is already in the engine"
        if why is not None:
            return Failed(submit.request, "error", why)
        sequence = self._live[submit.request] = sequence_of(submit)
        self.scheduler.add(sequence)
        self._delays_planted |= bool(submit.delays_ns)
        return None

    def abort(self, request: int, reason: str) -> None:
        """End a request now and free its blocks; nothing if it has ended already."""
        sequence = self._live.pop(request, None)
        if sequence is not None:
            self.scheduler.remove(sequence)
            self._record_leave(sequence, monotonic_ns(), reason)

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
        return max(0, (self.scheduler.next_release_ns() or 0) - now_ns)

    def step(self) -> list[FromEngine]:
        """Compute one step; return its output: nothing if no request got a token."""
        if self._delays_planted:
            self._plant("host_gap", (one for one in self.scheduler.running if one.decoded))
        start_ns = monotonic_ns()
        plan = self.scheduler.start_step()
        prepared = self._prepare(plan)
        if not plan.decodes and not prepared:
            return []
        self._seq += 1
        try:
            output = self._compute(plan, prepared, start_ns)
        except (RuntimeError, MemoryError) as error:
            if not _is_out_of_memory(error):
                raise
            return self._fail(plan, str(error))
        return [output] if output.tokens else []

    def _prepare(self, plan: StepPlan) -> list[PreparedChunk]:
        """Prepare the rows of all chunks, admitting requests as long as there is room."""
        seq, block_size = self._seq + 1, self.scheduler.limits.block_size
        for victim in plan.preempted:
            victim.queue_start_ns = monotonic_ns()
            if self._recorder is not None:
                self._recorder.preempt(victim, seq, victim.queue_start_ns)
        if self._recorder is not None:
            for chunk in plan.chunks:
                self._recorder.chunk(chunk, seq)
        prepared = [prepare_chunk(chunk, block_size) for chunk in plan.chunks]
        while True:
            queue_end_ns = monotonic_ns()
            sequence = self.scheduler.admit_next(plan, queue_end_ns)
            if sequence is None:
                return prepared
            prepared.append(prepare_chunk(plan.chunks[-1], block_size))
            self._plant("context", (sequence,))
            if self._recorder is not None:
                self._recorder.admit(sequence, seq, queue_end_ns, monotonic_ns())
                self._recorder.chunk(plan.chunks[-1], seq)

    def _compute(self, plan: StepPlan, prepared: list[PreparedChunk], start_ns: int) -> StepOutput:
        kv, sampled = self.scheduler.kv, plan.sampled()
        rows = build_rows(plan, prepared, kv.block_size, self._model.device)
        waiting, used = len(self.scheduler.waiting), kv.used
        schedule_end_ns = monotonic_ns()
        logits = self._forward(plan, rows)
        sample_start_ns = monotonic_ns()
        tokens = sample(logits, sampled)
        if self._delays_planted:
            self._plant("sample", sampled)
        sample_end_ns = monotonic_ns()
        self.scheduler.finish_step(plan)
        output = [self._append(one, token) for one, token in zip(sampled, tokens, strict=True)]
        end_ns = monotonic_ns()
        if self._recorder is not None:
            times = (start_ns, schedule_end_ns, sample_start_ns, sample_end_ns, end_ns)
            emptied = not self.scheduler.running
            self._recorder.step(plan, self._seq, times, (waiting, used, kv.count), emptied)
        for token, sequence in zip(output, sampled, strict=True):
            if token.finish is not None:
                self._record_leave(sequence, end_ns, token.finish)
        return StepOutput(self._seq, monotonic_ns(), output)

    def _forward(self, plan: StepPlan, rows: StepRows) -> Tensor:
        logits = self._model.forward(rows, self._cache)
        if self._delays_planted:
            self._plant("prefill", (chunk.sequence for chunk in plan.chunks))
            self._plant("decode", plan.decodes)
        if self._model.device.type == "cuda":
            torch.cuda.synchronize(self._model.device)  # or sampling would be said to take it all
        return logits

    def _append(self, sequence: Sequence, token: int) -> Token:
        sequence.tokens.append(token)
        finish = sequence.finish_reason()
        if finish is not None:
            self.scheduler.remove(sequence)
            del self._live[sequence.request]
        return Token(sequence.request, token, finish)

    def _fail(self, plan: StepPlan, detail: str) -> list[FromEngine]:
        """End the requests of a step that found no memory; the others go on."""
        if self._model.device.type == "cuda":
            torch.cuda.empty_cache()
        failed: list[FromEngine] = []
        for sequence in plan.sequences():
            self.abort(sequence.request, "out_of_memory")
            failed.append(Failed(sequence.request, "out_of_memory", detail))
        return failed

    def _record_leave(self, sequence: Sequence, at_ns: int, reason: str) -> None:
        if self._recorder is not None and sequence.admitted:
            self._recorder.leave(sequence, self._seq, at_ns, reason)

    def _plant(self, stage: str, sequences: Iterable[Sequence]) -> None:
        """Sleep for the delays planted in `stage`, each once (tests and drills)."""
        for sequence in sequences:
            time.sleep(sequence.delays_ns.pop(stage, 0) / 1e9)


def _is_out_of_memory(error: Exception) -> bool:
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return True
    return "can't allocate memory" in str(error)  # what torch's CPU allocator raises
