"""Tail sampling: which spans of a segment are written, decided when their trace has been seen.

A trace is kept whole for a reason (an error, slow, chosen), or by chance. Chance is a function of
the trace id alone (OpenTelemetry, "Probability sampling"), so nothing needs to be remembered of it
and several collectors agree; reasons are remembered, and hold for the spans that follow.

`kept_share` makes counts right: null on a row that is kept for a reason, else the probability with
which its trace was kept, so that the sum of 1 / kept_share (null: 1) estimates, without bias, how
many spans arrived. It is this collector's share alone: what a sender sampled before is told by `th`
in `trace_state`, and a trace that this sampling could not have dropped any more gets null.

Trace ids must be random in their last 56 bits, as W3C Trace Context level 2 asks; an explicit `rv`
in `trace_state` takes their place. (A sender that keeps less than 1 trace in 256 by its id and does
not say so in `th` breaks that, and so do counted-up ids.)
"""

from collections import Counter
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from perfledger.collectors.sampling.recent_traces import Keys, Mask, RecentTraces
from perfledger.collectors.sampling.sampling_policy import RANDOMNESS_BITS, SamplingPolicy
from perfledger.collectors.sampling.sampling_reasons import REASONS, is_step, matched_reasons

Words = NDArray[np.uint64]
Value = TypeVar("Value", bound=np.generic)
COUNTS = (
    *(f"sampling_spans_{reason}" for reason in REASONS),
    "sampling_traces_kept_late",
    "sampling_traces_forgotten",
)
_CERTAIN = 1 << RANDOMNESS_BITS
_MOST_ENGINES = 65_536
# OpenTelemetry's entry of a W3C tracestate, and the randomness and threshold in it.
_OT = r"(?:^|,)[ \t]*ot=([^,]*)"
_RV = r"(?:^|;)rv:([0-9a-f]{14})(?:;|$)"
_TH = r"(?:^|;)th:([0-9a-f]{1,14})(?:;|$)"


@dataclass(frozen=True)
class _Units:
    """What is kept or dropped as one: runs of rows of one trace (or of one step), in row order.

    A segment is sorted by trace, so a trace is one run; the answers hold for any order.
    """

    starts: NDArray[np.int64]
    rows: int
    key: Keys
    randomness: Words
    sender_threshold: Words  # with which its sender sampled it before; 0 where it did not

    def of_rows(self, rows: Mask) -> Mask:
        """Return which units have one of the rows."""
        found: Mask = np.logical_or.reduceat(rows, self.starts)
        return found

    def each_row(self, values: NDArray[Value]) -> NDArray[Value]:
        """Return for each row what its unit has."""
        return np.repeat(values, np.diff(np.append(self.starts, self.rows)))

    def share(self, threshold: int) -> NDArray[np.float64]:
        """Return the share that is kept of what the sender left."""
        left = _CERTAIN - self.sender_threshold.astype(np.float64)
        return np.minimum(1.0, (_CERTAIN - threshold) / left)


class TailSampler:
    """Decides by trace. Show it each segment (`observe`), and ask `keep` when it is written.

    With `sample_engine_steps` an engine step and its children are kept or dropped as one, by the
    span id of the step: by its trace id all steps of an engine would share one fate.
    One caller at a time. A restart forgets reasons; counts stay right all the same.
    """

    def __init__(self, policy: SamplingPolicy) -> None:
        self._policy = policy
        self._keeps_all = policy.threshold == 0
        self._kept = RecentTraces(policy.remembered_traces)
        self._cut = RecentTraces(policy.remembered_traces)
        self._engines = RecentTraces(_MOST_ENGINES)
        self._factors = np.random.default_rng().integers(1 << 63, size=2, dtype=np.uint64) * 2 + 1
        self._counts = Counter({name: 0 for name in COUNTS})

    def counts(self) -> Counter[str]:
        """Return how many spans matched each reason, and traces kept late or forgotten.

        A trace is kept late if its reason came when some of its spans were sampled away already;
        of a trace that is forgotten, later spans are kept by chance alone.
        """
        return Counter({**self._counts, "sampling_traces_forgotten": self._kept.forgotten})

    def observe(self, spans: pa.Table) -> None:
        """Learn from spans (columns of SPANS) which traces are to be kept, and remember them."""
        if self._keeps_all or not spans.num_rows:
            return
        keep = np.zeros(spans.num_rows, np.bool_)
        for reason, matched in matched_reasons(spans, self._policy):
            keep |= matched
            self._counts[f"sampling_spans_{reason}"] += int(matched.sum())
        self._learn_engines(spans)
        units = self._units(spans)
        keys = np.unique(units.key[units.of_rows(keep)])
        late = ~self._kept.holds(keys) & self._cut.holds(keys)
        self._counts["sampling_traces_kept_late"] += int(late.sum())
        self._kept.add(keys)

    def keep(self, spans: pa.Table) -> tuple[pa.Table, int]:
        """Return the rows to write, in their order and with `kept_share`, and how many others."""
        if self._keeps_all or not spans.num_rows:
            return spans, 0
        units, threshold = self._units(spans), self._policy.threshold
        always = self._kept.holds(units.key)
        share = np.where(always, 1.0, units.share(threshold))
        kept = always | (units.randomness >= np.uint64(threshold))
        share, rows = units.each_row(share), units.each_row(kept)
        dropped = spans.num_rows - int(rows.sum())
        if dropped:
            self._cut.add(np.unique(units.key[~kept]))
            spans, share = spans.filter(pa.array(rows)), share[rows]
        place = spans.schema.get_field_index("kept_share")
        column = pa.array(share, mask=share >= 1)
        return spans.set_column(place, spans.schema.field(place), column), dropped

    def _learn_engines(self, spans: pa.Table) -> None:
        """Remember which traces are an engine's, where its steps are sampled."""
        if self._policy.sample_engine_steps and (steps := is_step(spans)).any():
            high, low = _trace_words(spans)
            self._engines.add(np.unique(self._key(high[steps], low[steps])))

    def _units(self, spans: pa.Table) -> _Units:
        high, low = _trace_words(spans)
        rows, told = len(low), spans["trace_state"].null_count < len(low)
        starts = np.arange(rows)
        if not (told or self._policy.sample_engine_steps):
            changes = (high[1:] != high[:-1]) | (low[1:] != low[:-1])
            starts = np.flatnonzero(np.concatenate([[True], changes]))
            high, low = high[starts], low[starts]
        key, randomness = self._key(high, low), _randomness(low)
        sender_threshold = np.zeros(len(starts), np.uint64)
        if told:
            randomness, sender_threshold = _sampled_before(spans["trace_state"], randomness)
        if self._policy.sample_engine_steps:
            engine, step = self._engines.holds(key), _step_of_each(spans)
            key = np.where(engine, self._key(step, key), key)
            randomness = np.where(engine, _randomness(step), randomness)
            sender_threshold[engine] = 0
        return _Units(starts, rows, key, randomness, sender_threshold)

    def _key(self, high: Words, low: Words) -> Keys:
        key: Keys = high * self._factors[0] + low * self._factors[1]
        return key


def _trace_words(spans: pa.Table) -> tuple[Words, Words]:
    """Return the first and the last eight bytes of each trace id."""
    trace_id = spans["trace_id"].combine_chunks()
    first = 2 * trace_id.offset
    words = np.frombuffer(trace_id.buffers()[1], np.uint64)[first : first + 2 * len(trace_id)]
    return words[0::2], words[1::2]


def _step_of_each(spans: pa.Table) -> Words:
    """Return for spans of an engine the id of their step: of their parent, if they are none."""
    own, parent = spans["span_id"], spans["parent_span_id"]
    of_parent = pa.array(~is_step(spans))
    step = pc.if_else(of_parent, pc.coalesce(parent, own), own).combine_chunks()
    first = step.offset
    return np.frombuffer(step.buffers()[1], np.uint64)[first : first + len(step)]


def _randomness(words: Words) -> Words:
    """Return the last 56 bits of ids whose last eight bytes lie in these words."""
    last: Words = words.view(">u8").astype(np.uint64) & np.uint64(_CERTAIN - 1)
    return last


def _sampled_before(trace_state: pa.ChunkedArray, randomness: Words) -> tuple[Words, Words]:
    """Return randomness and senders' thresholds, as OpenTelemetry's entry in tracestate says.

    A threshold that contradicts the randomness is void.
    """
    ot = pl.Series(trace_state).str.extract(_OT)
    explicit = ot.str.extract(_RV).str.to_integer(base=16).cast(pl.UInt64)
    threshold = ot.str.extract(_TH).str.pad_end(14, "0").str.to_integer(base=16).cast(pl.UInt64)
    randomness = np.where(explicit.is_not_null(), explicit.fill_null(0), randomness)
    thresholds = threshold.fill_null(0).to_numpy()
    return randomness, np.where(thresholds <= randomness, thresholds, np.uint64(0))
