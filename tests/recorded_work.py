"""From an engine's records to the columns of `steps` that tell its work."""

from collections.abc import Sequence
from random import Random
from typing import Any

import polars as pl

from perfledger.instrumented_runtime.record_spans import RecordSpans
from perfledger.instrumented_runtime.records import Record
from perfledger.instrumented_runtime.telemetry import EngineRecord
from perfledger.schema.attributes import STEP_NAMES
from perfledger.schema.derived_work import SHAPE_ATTRIBUTE, WORK_ATTRIBUTES, work_columns

COUNTS = {
    "perfledger.step.prefill_tokens": "prefill_tokens",
    "perfledger.step.decode_tokens": "decode_tokens",
    **WORK_ATTRIBUTES,
}


def step_attributes(shape: str, records: Sequence[Record], rank: int = 0) -> list[dict[str, Any]]:
    """Return the attributes of each step's span."""
    spans = RecordSpans(Random(1), rank=rank)
    spans.feed(EngineRecord({SHAPE_ATTRIBUTE: shape}, rank=rank))
    made = [span for record in records for span in spans.feed(record)]
    return [dict(span.attributes) for span in made if span.name in STEP_NAMES]


def work_of(steps: Sequence[dict[str, Any]]) -> list[dict[str, int | None]]:
    """Return the columns of steps with these attributes."""
    told = pl.DataFrame(
        {name: [step.get(key) for step in steps] for key, name in COUNTS.items()},
        schema=dict.fromkeys(COUNTS.values(), pl.Int64),
    )
    shapes = pl.Series([step.get(SHAPE_ATTRIBUTE) for step in steps], dtype=pl.String)
    return work_columns(shapes, told).to_dicts()
