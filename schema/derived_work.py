"""The columns of `steps` that tell bytes and FLOPs: from what step spans say, for many at once.

A step whose engine does not tell its shape, or whose rows are not all known, has nulls.
"""

from dataclasses import asdict

import numpy as np
import polars as pl
from numpy.typing import NDArray

from perfledger.schema.errors import UsageError
from perfledger.schema.intervals import Ints
from perfledger.schema.model_shape import ModelShape, parse_shape
from perfledger.schema.operator_work import step_work
from perfledger.schema.step_work import WORK_COLUMNS, BatchShape

SHAPE_ATTRIBUTE = "perfledger.model.shape"
_DECODE = ("decode_context_tokens", "decode_gathered_blocks")
_CHUNK = (
    "chunks",
    "continued_chunks",
    "chunk_key_tokens",
    "chunk_pairs",
    "continued_pairs",
    "chunk_gathered_blocks",
    "sampled_rows",
)
_MICROBATCH = ("microbatches", "decode_microbatches", "sampled_microbatches")
_MOVED = ("kv_copied", "kv_swapped_out", "kv_swapped_in")
_EXPERTS = ("assignments", "touched_experts")
# Attribute of a step's span to the name of its count here.
WORK_ATTRIBUTES = {
    **{f"perfledger.step.{name}": name for name in (*_DECODE, *_CHUNK, *_MICROBATCH, *_MOVED)},
    **{f"perfledger.moe.{name}": name for name in _EXPERTS},
}

# Attributes come from outside: more models than any collector sees in one go are not looked at,
# and numbers beyond these are no counts of a step.
MAX_SHAPES = 256
_MAX_COUNT = 1 << 40
_MAX_RESULT = float(1 << 62)


def work_columns(shape: pl.Series, told: pl.DataFrame) -> pl.DataFrame:
    """Return step_work.WORK_COLUMNS for steps in their order.

    `shape` are the texts of their models' shapes, `told` their `prefill_tokens`, `decode_tokens`
    and the counts of WORK_ATTRIBUTES; null where not told.
    """
    work = {name: np.zeros(len(told), np.int64) for name in WORK_COLUMNS}
    known = np.zeros(len(told), np.bool_)
    for text in shape.drop_nulls().unique(maintain_order=True).head(MAX_SHAPES):
        try:
            model = parse_shape(text)
        except UsageError:
            continue
        at = (shape == text).fill_null(False).arg_true()
        try:
            batch, sure = _batch(told[at], model)
            found = step_work(model, batch)
        except OverflowError:  # sizes that no model has; nothing else of the batch is touched
            continue
        known[at] = sure
        for name, values in found.items():
            work[name][at] = values
    nulls = pl.Series(~known)
    return pl.DataFrame({name: pl.Series(work[name]).set(nulls, None) for name in WORK_COLUMNS})


def _batch(told: pl.DataFrame, model: ModelShape) -> tuple[BatchShape, NDArray[np.bool_]]:
    """Return the steps' rows, and of which steps they are all known."""
    known = told["decode_tokens"].is_not_null() & told["prefill_tokens"].is_not_null()
    known &= _told(told, _DECODE) | (told["decode_tokens"] == 0)
    known &= _told(told, _CHUNK) | (told["prefill_tokens"] == 0)
    if model.experts:
        known &= _told(told, _EXPERTS)
    if model.microbatches > 1:
        known &= _told(told, _MICROBATCH)
    counts = told.select(pl.all().fill_null(0))
    known &= counts.select(pl.all_horizontal(pl.all().is_between(0, _MAX_COUNT))).to_series()
    sure = known.fill_null(False).to_numpy()
    batch = _shaped({name: counts[name].to_numpy() * sure for name in counts.columns}, model)
    rough = step_work(model, BatchShape(**{k: v * 1.0 for k, v in asdict(batch).items()}))
    fits = np.all([np.broadcast_to(v, len(told)) < _MAX_RESULT for v in rough.values()], axis=0)
    return batch, sure & fits


def _shaped(counts: dict[str, Ints], model: ModelShape) -> BatchShape:
    decoding, computed = counts["decode_tokens"], counts["prefill_tokens"]
    sampled = np.where(computed > 0, counts["sampled_rows"], decoding)
    cut = model.microbatches > 1
    return BatchShape(
        decode_rows=decoding,
        prefill_rows=computed,
        sampled_rows=sampled,
        moved_blocks=sum(counts[name] for name in _MOVED),
        moved_kinds=sum((counts[name] > 0).astype(int) for name in _MOVED),
        **({name: counts[name] for name in _MICROBATCH} if cut else _not_cut(sampled)),
        **{name: counts[name] for name in (*_DECODE, *_CHUNK[:-1], *_EXPERTS)},
    )


def _not_cut(sampled: Ints) -> dict[str, Ints]:
    one = np.ones_like(sampled)
    return dict(zip(_MICROBATCH, (one, one, np.minimum(sampled, 1)), strict=True))


def _told(told: pl.DataFrame, names: tuple[str, ...]) -> pl.Series:
    return told.select(pl.all_horizontal(pl.col(*names).is_not_null())).to_series()
