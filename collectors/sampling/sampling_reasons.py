"""The reasons for which tail sampling keeps a trace, each as a mask over a table of spans."""

from collections.abc import Callable, Collection, Iterator
from functools import partial

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from perfledger.collectors.sampling.recent_traces import Mask
from perfledger.collectors.sampling.sampling_policy import SamplingPolicy
from perfledger.schema.attributes import STEP_NAMES

REASONS = ("error", "slow", "slow_stage", "slow_first_chunk", "tenant", "class", "engine_step")
# Kinds of a span with which a request enters a service: its root there, whoever called it.
_ENTRIES = ("server", "consumer")


def matched_reasons(spans: pa.Table, policy: SamplingPolicy) -> Iterator[tuple[str, Mask]]:
    """Yield each reason that the policy has, and which rows (columns of SPANS) it holds for."""
    yield "error", _failed(spans)
    yield from _slow(spans, policy)
    if policy.tenants:
        yield "tenant", is_any_of(spans["tenant"], policy.tenants)
    if policy.classes:
        yield "class", is_any_of(spans["traffic_class"], policy.classes)
    if not policy.sample_engine_steps:
        yield "engine_step", is_step(spans)


def is_step(spans: pa.Table) -> Mask:
    """Return which spans are steps of an engine."""
    return is_any_of(spans["name"], STEP_NAMES)


def is_any_of(texts: pa.ChunkedArray, wanted: Collection[str]) -> Mask:
    """Return which texts, as they are or as a dictionary, are among the wanted; null is not."""
    if texts.null_count == len(texts):
        return np.zeros(len(texts), np.bool_)
    return _mask(pc.is_in(texts.cast(pa.string()), pa.array(sorted(wanted), pa.string())))


def _failed(spans: pa.Table) -> Mask:
    failed = is_any_of(spans["status"], ["error"]) | _mask(pc.is_valid(spans["error_type"]))
    outcome = spans["outcome"]
    return failed | (_mask(pc.is_valid(outcome)) & ~is_any_of(outcome, ["ok"]))


def _slow(spans: pa.Table, policy: SamplingPolicy) -> Iterator[tuple[str, Mask]]:
    if policy.slow_ns is not None:
        yield "slow", _longer(spans, policy.slow_ns, _enters)
    if policy.slow_stages_ns:
        stages = np.zeros(spans.num_rows, np.bool_)
        for name, limit_ns in policy.slow_stages_ns:
            stages |= _longer(spans, limit_ns, partial(_named, name))
        yield "slow_stage", stages
    if policy.slow_first_chunk_ns is not None:
        yield "slow_first_chunk", _mask(pc.greater(spans["ttfc_ns"], policy.slow_first_chunk_ns))


def _longer(spans: pa.Table, limit_ns: int, holds: Callable[[pa.Table], Mask]) -> Mask:
    """Return which spans took longer than the limit, among those for which a condition holds."""
    duration_ns = spans["end_ns"].to_numpy() - spans["start_ns"].to_numpy()
    longer: NDArray[np.int64] = np.flatnonzero(duration_ns > limit_ns)
    found = np.zeros(spans.num_rows, np.bool_)
    asked = spans.select(["name", "kind", "parent_span_id"]).take(pa.array(longer))
    found[longer[holds(asked)]] = True
    return found


def _enters(spans: pa.Table) -> Mask:
    return _mask(pc.is_null(spans["parent_span_id"])) | is_any_of(spans["kind"], _ENTRIES)


def _named(name: str, spans: pa.Table) -> Mask:
    return is_any_of(spans["name"], [name])


def _mask(values: pa.ChunkedArray) -> Mask:
    """Return booleans of Arrow as those of numpy; null is false."""
    filled: Mask = pc.fill_null(values, False).to_numpy(zero_copy_only=False)
    return filled
