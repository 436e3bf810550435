"""From the engine's records to finished spans: a state machine over plain values, without I/O.

Feed it everything in the order it was written, engine records of a request before the request's
own record. Times stay monotonic ns. Lost records cost their own spans and nothing else.
"""

from collections import Counter
from collections.abc import Callable
from random import Random
from typing import Any

from perfledger.instrumented_runtime.batch_members import (
    BatchMembers,
    BatchRequest,
    Member,
    remember,
)
from perfledger.instrumented_runtime.collective_spans import StepTraffic
from perfledger.instrumented_runtime.expert_records import RoutedSteps
from perfledger.instrumented_runtime.finished_spans import Attributes, FinishedSpan, SpanLink
from perfledger.instrumented_runtime.record_attributes import (
    degrade_attributes,
    forward_end_ns,
    no_memory_attributes,
    step_attributes,
    step_name,
)
from perfledger.instrumented_runtime.records import (
    LEAVE_REASONS,
    NOT_READ,
    WAIT_REASONS,
    Admit,
    ChoiceEnd,
    Chunk,
    Collective,
    Copy,
    Degrade,
    Kv,
    Leave,
    NoMemory,
    Preempt,
    Record,
    Routed,
    ShardMoved,
    Step,
    TrainPart,
    TrainStep,
)
from perfledger.instrumented_runtime.ring import Gap
from perfledger.instrumented_runtime.root_spans import (
    LeftRequest,
    never_admitted,
    root_counts,
    root_span,
)
from perfledger.instrumented_runtime.telemetry import EngineRecord, RequestRecord
from perfledger.instrumented_runtime.training.step_attributes import (
    part_span,
    shard_span,
    train_attributes,
)
from perfledger.instrumented_runtime.work_records import StepWork
from perfledger.schema import metrics
from perfledger.schema.metrics import Metric
from perfledger.schema.model_shape import parse_shape

_DECODE: Attributes = {"perfledger.phase": "decode", "perfledger.tokens": 1}
_KV_ATTRIBUTES = {name: f"perfledger.step.kv_{name}" for name in Kv._fields[1:]}


class RecordSpans:
    """All requests of one engine (one rank of a replica), and its counters and gauges.

    `counts` is keyed by (metric, value of its attribute); `gauges` hold the last step's values.
    """

    def __init__(self, random: Random, *, replica: str = "0", rank: int = 0) -> None:
        self.counts: Counter[tuple[Metric, str]] = Counter()
        self.gauges: dict[Metric, int] = {}
        self._capacity: dict[Metric, int] = {}
        self._random = random
        self._engine_trace_id = random.getrandbits(128) or 1
        self._engine: Attributes = {"perfledger.replica": replica, "perfledger.rank": rank}
        self._rank = rank
        self._batch = BatchMembers()
        self._left: dict[int, LeftRequest] = {}
        self._kv: Kv | None = None  # of the coming step
        self._routed = RoutedSteps()
        self._work = StepWork()
        self._train_parts: list[TrainPart] = []  # of the coming training step
        self._traffic = StepTraffic(self._engine_span, self._engine)
        self._missing = 0  # records lost since the last one with a time
        self._last_ns = 0  # when the last record with a time was written
        self._gap_end_ns = 0
        self._handlers: dict[type, Callable[[Any], list[FinishedSpan]]] = {
            Step: self._step,
            Admit: self._admit,
            Chunk: self._chunk,
            Preempt: self._preempt,
            Leave: self._leave,
            ChoiceEnd: self._choice_end,
            Kv: self._kv_changed,
            Routed: self._experts_routed,
            Degrade: self._degrade,
            NoMemory: self._no_memory,
            TrainPart: self._train_part,
            TrainStep: self._train_step,
            ShardMoved: self._shard_moved,
            Collective: self._traffic.take,
            Copy: self._traffic.take,
            Gap: self._gap,
            RequestRecord: self._finish,
            EngineRecord: self._ready,
        }

    def feed(self, record: Record | Gap | RequestRecord | EngineRecord) -> list[FinishedSpan]:
        """Take the next record and return the spans that it finished."""
        return self._handlers[type(record)](record)

    def end(self) -> list[FinishedSpan]:
        """Return what is still open once all processes have ended: the last LEAVEs are lost."""
        spans = self._bridge_gap(self._last_ns) if self._last_ns else []
        spans += self._traffic.leave()
        for request in self._batch:
            spans += self._close(request, request.last_step_end_ns)
        return spans

    # --- what the engine wrote ---

    def _admit(self, admit: Admit) -> list[FinishedSpan]:
        spans = self._bridge_gap(admit.context_end_ns)
        request = self._batch.named(admit.request)
        if request is None:
            request = self._batch.admit(admit)
            self.counts[metrics.TOKENS, "input"] += admit.prompt_tokens - admit.cached_tokens
            self.counts[metrics.TOKENS, "cached"] += admit.cached_tokens
        request.wait(None)
        request.resume(admit.sequences)
        waited: Attributes = {"perfledger.reason": WAIT_REASONS[admit.wait_reason]}
        cached: Attributes = {"gen_ai.usage.cache_read.input_tokens": admit.cached_tokens}
        if admit.swapped_blocks:
            cached["perfledger.kv_blocks_swapped"] = admit.swapped_blocks
        start_ns, end_ns = admit.queue_start_ns, admit.queue_end_ns
        spans.append(self._child(request, "queue", start_ns, end_ns, waited))
        spans.append(self._child(request, "context", end_ns, admit.context_end_ns, cached))
        return spans

    def _chunk(self, chunk: Chunk) -> list[FinishedSpan]:
        self._work.take(chunk)
        if chunk.request == NOT_READ:
            return []
        if chunk.recompute:
            self.counts[metrics.RECOMPUTED_TOKENS, ""] += chunk.recompute
        if request := self._named(chunk.request):
            request.wait(None)
            request.chunk = chunk
        return []

    def _preempt(self, preempt: Preempt) -> list[FinishedSpan]:
        self.counts[metrics.PREEMPTIONS, ""] += 1
        if request := self._named(preempt.request):
            request.wait(preempt.at_ns)
        return self._bridge_gap(preempt.at_ns)

    def _leave(self, leave: Leave) -> list[FinishedSpan]:
        spans = self._bridge_gap(leave.at_ns)
        reason = LEAVE_REASONS[leave.reason]
        if reason == "out_of_memory":
            self.counts[metrics.OUT_OF_MEMORY, ""] += 1
        request = self._batch.leave(leave.request)
        if request is None or request.ended_ns is None:
            cached_tokens = request.cached_tokens if request else None
            left = LeftRequest(leave.at_ns, reason, cached_tokens, leave if request else None)
            remember(self._left, leave.request, left)
        if request is not None:
            spans += self._close(request, leave.at_ns, reason, leave.output_tokens)
        return spans

    def _choice_end(self, end: ChoiceEnd) -> list[FinishedSpan]:
        if request := self._named(end.request):
            request.end_choice(end)
        return self._bridge_gap(end.at_ns)

    def _kv_changed(self, kv: Kv) -> list[FinishedSpan]:
        self._kv = kv
        if self._rank:
            return []  # the blocks that rank 0 counts are those of all ranks
        for name, blocks in zip(_KV_ATTRIBUTES, kv[1:], strict=True):
            if blocks:
                self.counts[metrics.KV_EVENTS, name] += blocks
        return []

    def _experts_routed(self, routed: Routed) -> list[FinishedSpan]:
        self._routed.take(routed)
        return []

    def _degrade(self, degrade: Degrade) -> list[FinishedSpan]:
        spans, at_ns = self._bridge_gap(degrade.at_ns), degrade.at_ns
        changed = self._engine | degrade_attributes(degrade)
        return [*spans, self._engine_span("degrade", at_ns, at_ns, changed)]

    def _no_memory(self, one: NoMemory) -> list[FinishedSpan]:
        self._batch.step_failed(one.seq)
        request = self._named(one.request)
        if request is None:
            return []
        held = no_memory_attributes(one)
        return [self._child(request, "out_of_memory", one.at_ns, one.at_ns, held)]

    def _step(self, step: Step) -> list[FinishedSpan]:
        spans = self._bridge_gap(step.end_ns)
        for request in self._batch.let_go_ended(step.start_ns):
            spans += self._close(request, request.last_step_end_ns)
        members = self._batch.members(step, self._gap_end_ns)
        step_spans = self._step_spans(step, members)
        spans += step_spans + self._traffic.step_ended(step.seq, step_spans[0].span_id)
        for member in members:
            spans += self._part_spans(step, member)
        self._measure(step, sum(member.samples for member in members))
        return spans

    def _train_part(self, part: TrainPart) -> list[FinishedSpan]:
        self._train_parts.append(part)
        return []

    def _train_step(self, step: TrainStep) -> list[FinishedSpan]:
        spans, parts = self._bridge_gap(step.end_ns), self._train_parts
        self._train_parts = []
        attributes = self._engine | train_attributes(step)
        root = self._engine_span("train_step", step.start_ns, step.end_ns, attributes)
        spans += [root, *self._traffic.step_ended(step.seq, root.span_id)]
        mine = (part_span(part) for part in parts if part.seq == step.seq)
        return spans + [self._engine_span(*part, root.span_id) for part in mine]

    def _shard_moved(self, moved: ShardMoved) -> list[FinishedSpan]:
        spans = self._bridge_gap(moved.end_ns)
        return [*spans, self._engine_span(*shard_span(moved, self._engine))]

    def _gap(self, gap: Gap) -> list[FinishedSpan]:
        self.counts[metrics.TELEMETRY_LOST, "ring"] += gap.dropped
        self._missing += gap.dropped
        self._batch.lose_sight()
        return []

    def _named(self, number: int) -> BatchRequest | None:
        request = self._batch.named(number)
        if request is None:
            self.counts[metrics.TELEMETRY_LOST, "unmatched"] += 1
        return request

    # --- what the API said ---

    def _ready(self, engine: EngineRecord) -> list[FinishedSpan]:
        attributes = dict(engine.attributes)
        for metric in metrics.CAPACITY:
            if metric.name in attributes:
                self._capacity[metric] = int(str(attributes.pop(metric.name)))
        self._engine = {**self._engine, **attributes}
        if shape := attributes.get("perfledger.model.shape"):
            self._work.microbatches = parse_shape(str(shape)).microbatches
        return []

    def _finish(self, record: RequestRecord) -> list[FinishedSpan]:
        request, left = self._batch.peek(record.request), self._left.pop(record.request, None)
        cached_tokens = left.cached_tokens if left else None
        if request is not None:
            request.ended_ns, cached_tokens = record.end_ns, request.cached_tokens
        root = root_span(record, cached_tokens, left)
        self.counts.update(root_counts(root))
        owner = request or BatchRequest(record.trace_id, record.span_id, 0)
        spans = [
            self._child(owner, s.name, s.start_ns, s.end_ns, s.attributes) for s in record.spans
        ]
        # If records were lost meanwhile, its ADMIT may be one.
        sure = not self._missing and (record.sent_ns or 0) > self._gap_end_ns
        if sure and record.sent_ns is not None and never_admitted(record, cached_tokens):
            waited: Attributes = {"perfledger.reason": "admission"}
            end_ns = left.at_ns if left else record.end_ns
            spans.append(self._child(owner, "queue", record.sent_ns, end_ns, waited))
        return [root, *spans]

    # --- spans of a request ---

    def _part_spans(self, step: Step, member: Member) -> list[FinishedSpan]:
        request = member.request
        request.last_step_end_ns = step.end_ns
        spans = []
        if member.phase != "decode":
            computed: Attributes = {
                "perfledger.tokens": member.tokens,
                "perfledger.step.seq": step.seq,
            }
            if member.phase == "recompute":
                computed["perfledger.reason"] = "preempted"
            start_ns, end_ns = step.schedule_end_ns, forward_end_ns(step)
            spans.append(self._child(request, "prefill", start_ns, end_ns, computed))
        if member.samples and not request.sampled:
            request.sampled, request.first_sample_end_ns = True, step.sample_end_ns
            request.first_tokens = member.samples
            first: Attributes = {
                "perfledger.tokens": member.samples,
                "perfledger.step.seq": step.seq,
            }
            start_ns, end_ns = step.sample_start_ns, step.sample_end_ns
            spans.append(self._child(request, "sample", start_ns, end_ns, first))
        return spans

    def _close(
        self, request: BatchRequest, at_ns: int, reason: str = "", output_tokens: int | None = None
    ) -> list[FinishedSpan]:
        spans = []
        since_ns, first_ns = request.waiting_since_ns, request.first_sample_end_ns
        if since_ns is not None and since_ns < at_ns:
            waited: Attributes = {"perfledger.reason": "preempted"}
            spans.append(self._child(request, "queue", since_ns, at_ns, waited))
        if first_ns is not None and output_tokens != request.first_tokens:
            attributes: Attributes = {"perfledger.reason": reason} if reason else {}
            if output_tokens is not None:
                attributes["perfledger.tokens"] = output_tokens - request.first_tokens
            spans.append(self._child(request, "decode", first_ns, at_ns, attributes))
        return spans

    def _child(
        self, of: BatchRequest, name: str, start_ns: int, end_ns: int, attributes: Attributes
    ) -> FinishedSpan:
        span_id = self._random.getrandbits(64) or 1
        return FinishedSpan(name, of.trace_id, span_id, of.span_id, start_ns, end_ns, attributes)

    # --- spans of the engine trace ---

    def _step_spans(self, step: Step, members: list[Member]) -> list[FinishedSpan]:
        root = self._engine_span(
            step_name(step),
            step.start_ns,
            step.end_ns,
            self._engine
            | step_attributes(step)
            | self._kv_attributes(step)
            | self._routed.attributes(step.seq)
            | self._work.attributes(step, complete=self._gap_end_ns <= step.start_ns),
            links=tuple(_link(member) for member in members),
        )
        children = [
            ("schedule", step.start_ns, step.schedule_end_ns),
            ("forward", step.schedule_end_ns, forward_end_ns(step)),
        ]
        if step.sample_end_ns > step.sample_start_ns:
            children.append(("sample", step.sample_start_ns, step.sample_end_ns))
        return [root] + [
            self._engine_span(name, start_ns, end_ns, {}, root.span_id)
            for name, start_ns, end_ns in children
        ]

    def _kv_attributes(self, step: Step) -> Attributes:
        kv, self._kv = self._kv, None
        if kv is None or kv.seq != step.seq:
            return {}
        return {name: n for name, n in zip(_KV_ATTRIBUTES.values(), kv[1:], strict=True) if n}

    def _bridge_gap(self, now_ns: int) -> list[FinishedSpan]:
        """Note when this record was written; if records are missing before it, say so in a span."""
        since_ns, self._last_ns = self._last_ns or now_ns, now_ns
        if not self._missing:
            return []
        lost = self._engine | {"perfledger.dropped": self._missing}
        self._missing, self._gap_end_ns = 0, now_ns
        return [self._engine_span("telemetry_dropped", since_ns, now_ns, lost)]

    def _engine_span(
        self,
        name: str,
        start_ns: int,
        end_ns: int,
        attributes: Attributes,
        parent: int | None = None,
        links: tuple[SpanLink, ...] = (),
    ) -> FinishedSpan:
        trace_id, span_id = self._engine_trace_id, self._random.getrandbits(64) or 1
        return FinishedSpan(name, trace_id, span_id, parent, start_ns, end_ns, attributes, links)

    def _measure(self, step: Step, sampled: int) -> None:
        self.counts[metrics.STEPS, ""] += 1
        self.counts[metrics.ENGINE_CPU, ""] += max(0, step.cpu_ns)
        self.counts[metrics.TOKENS, "output"] += sampled
        self.gauges = {
            metrics.QUEUE_LENGTH: step.waiting,
            metrics.BATCH_WIDTH: step.width,
            metrics.KV_BLOCKS_USED: step.kv_blocks_used,
            metrics.KV_BLOCKS_TOTAL: step.kv_blocks_total,
            **self._capacity,
        }


def _link(member: Member) -> SpanLink:
    attributes = _DECODE
    if member.phase != "decode" or member.tokens != 1:
        attributes = {"perfledger.phase": member.phase, "perfledger.tokens": member.tokens}
    return SpanLink(member.request.trace_id, member.request.span_id, attributes)
