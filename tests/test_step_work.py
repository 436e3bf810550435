"""Bytes and FLOPs of a step by the formulas alone: they add up, and change as predicted."""

from dataclasses import asdict, replace

import numpy as np
import polars as pl
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from recorded_work import work_of

from perfledger.instrumented_runtime.checkpoints.config import parse_config
from perfledger.instrumented_runtime.checkpoints.reference import _config
from perfledger.instrumented_runtime.options import RuntimeOptions
from perfledger.instrumented_runtime.parallel.layout import Layout, RankPlace
from perfledger.instrumented_runtime.parallel.served_model import Placement
from perfledger.instrumented_runtime.work_records import chunk_sums
from perfledger.instrumented_runtime.work_shape import rank_shapes, shape_of
from perfledger.schema.derived_work import SHAPE_ATTRIBUTE
from perfledger.schema.errors import UsageError
from perfledger.schema.model_shape import ModelShape, parse_shape
from perfledger.schema.operator_work import step_work
from perfledger.schema.step_work import (
    CELL_COLUMNS,
    CELLS,
    FLOP_COLUMNS,
    FLOPS_TOTAL,
    READ_TOTAL,
    WORK_COLUMNS,
    WRITTEN_TOTAL,
    BatchShape,
)
from perfledger.schema.tables import STEPS

CPU = torch.device("cpu")
# Two layers of 32, grouped queries, float32 and blocks of 4 tokens: numbers to follow by hand.
TINY = ModelShape(
    layers=2,
    hidden=32,
    heads=4,
    kv_heads=2,
    head_dim=8,
    ffn=48,
    element=4,
    block=4,
    matrices=4 * (32 * (4 + 2 * 2) * 8 + 32 * 32 + 3 * 32 * 48),
    vocabulary=100,
    logits=100,
    first=1,
)
MIXTURE = replace(
    TINY,
    matrices=4 * (32 * 64 + 32 * 32),
    experts=8,
    per_token=2,
    expert_bytes=4 * 3 * 32 * 48,
    normalized=1,
)
SHAPES = (
    TINY,
    MIXTURE,
    replace(TINY, element=2, matrices=TINY.matrices // 2, qk_norm=1),
    replace(TINY, quantization="int8", matrices=TINY.matrices // 4 + 4 * (64 + 32 + 96 + 32)),
    replace(TINY, vocabulary=50, shards=2, logits=0, microbatches=2, device="cuda"),
    replace(MIXTURE, element=2, quantization="fp8", logits=0, vocabulary=0, first=0),
)
counts = st.integers(0, 300)


@st.composite
def batches(draw: st.DrawFn) -> BatchShape:
    """A step as there can be one: decodes with contexts, and chunks of prompts."""
    contexts = draw(st.lists(st.integers(1, 90), max_size=5))
    pieces = draw(st.lists(st.tuples(st.integers(0, 50), st.integers(1, 40)), max_size=4))
    longest = -(-max(contexts, default=0) // TINY.block)
    touched, sampled = draw(st.integers(1, 16)), draw(st.integers(0, len(pieces)))
    sums = chunk_sums(pieces, TINY.block)
    rows = len(contexts) + sum(tokens for _, tokens in pieces)
    return BatchShape(
        len(contexts),
        sum(contexts),
        len(contexts) * longest,
        rows - len(contexts),
        *sums,
        sampled_rows=len(contexts) + sampled,
        moved_blocks=draw(st.integers(0, 3)),
        moved_kinds=draw(st.integers(0, 3)),
        assignments=2 * 2 * rows,
        touched_experts=touched,
        sampled_microbatches=int(len(contexts) + sampled > 0),
    )


@given(st.sampled_from(SHAPES), batches())
def test_cells_add_up_to_totals(shape: ModelShape, batch: BatchShape) -> None:
    work = step_work(shape, batch)
    assert tuple(work) == WORK_COLUMNS
    assert all(type(value) is int and value >= 0 for value in work.values()), work
    for total, direction in ((READ_TOTAL, "read"), (WRITTEN_TOTAL, "written")):
        assert work[total] == sum(work[CELL_COLUMNS[c]] for c in CELLS if c[2] == direction)
    assert work[FLOPS_TOTAL] == sum(work[column] for column in FLOP_COLUMNS.values())


@given(st.sampled_from(SHAPES), st.lists(batches(), min_size=1, max_size=6))
def test_many_steps_at_once_are_those_one_by_one(
    shape: ModelShape, steps: list[BatchShape]
) -> None:
    columns = {name: np.array([getattr(one, name) for one in steps]) for name in asdict(steps[0])}
    together = step_work(shape, BatchShape(**columns))
    for at, one in enumerate(steps):
        alone = step_work(shape, one)
        assert {name: int(np.broadcast_to(v, len(steps))[at]) for name, v in together.items()} == (
            alone
        )


@given(st.sampled_from(SHAPES))
def test_a_shape_is_its_text(shape: ModelShape) -> None:
    assert parse_shape(str(shape)) == shape
    assert len(str(shape)) < 300


@pytest.mark.parametrize(
    "text",
    ["", "layers", "layers=1", f"{TINY},heads=x", f"{TINY},more=1", f"{TINY},heads=-1", "x" * 2000],
)
def test_another_text_is_no_shape(text: str) -> None:
    with pytest.raises(UsageError, match="is no shape of a model"):
        parse_shape(text)


def changed(before: dict[str, int], after: dict[str, int]) -> dict[str, int]:
    return {name: after[name] - before[name] for name in before if after[name] != before[name]}


def test_one_more_block_of_context() -> None:
    """Two decode; the longer of them begins a block, so both rows gather one more."""
    before = step_work(TINY, BatchShape(2, 20, 2 * 3, sampled_rows=2))
    same = step_work(TINY, BatchShape(2, 22, 2 * 3, sampled_rows=2))
    after = step_work(TINY, BatchShape(2, 24, 2 * 4, sampled_rows=2))
    assert same == before  # the rest of a block is read with it
    tokens, layers = 2 * 4, 2
    kv = tokens * (2 * 2 * 8 * 4) * layers
    grown = changed(before, after)
    masks = (grown.pop("attention_activations_read_bytes"), grown.pop("memory_read_bytes"))
    written = (grown.pop("attention_activations_written_bytes"), grown.pop("memory_written_bytes"))
    assert grown == {
        "attention_kv_read_bytes": kv,
        "attention_gather_read_bytes": kv,
        "attention_gather_written_bytes": kv,
        "attention_flops": 4 * tokens * (4 * 8) * layers,
        "flops": 4 * tokens * (4 * 8) * layers,
    }
    assert masks[1] - masks[0] == 2 * kv and written[1] - written[0] == kv


def test_a_prompt_in_chunks_costs_pairs_that_a_whole_one_does_not_spare() -> None:
    """By FlopCounterMode a mask spares nothing: 30 rows at once are laid against 30 keys each."""
    whole = step_work(TINY, BatchShape(prefill_rows=30, **sums((0, 30))))
    cut = [
        step_work(TINY, BatchShape(prefill_rows=tokens, **sums((start, tokens))))
        for start, tokens in ((0, 10), (10, 10), (20, 10))
    ]
    pair = 4 * (4 * 8) * 2
    assert whole["attention_flops"] == 30 * 30 * pair
    assert [one["attention_flops"] for one in cut] == [100 * pair, 200 * pair, 300 * pair]
    assert sum(one["linear_flops"] for one in cut) == whole["linear_flops"]
    assert sum(one["linear_weights_read_bytes"] for one in cut) == (
        3 * whole["linear_weights_read_bytes"]
    )


def sums(*pieces: tuple[int, int]) -> dict[str, int]:
    names = ("chunks", "continued_chunks", "chunk_key_tokens", "chunk_pairs", "continued_pairs")
    values = chunk_sums(pieces, TINY.block)
    return dict(zip((*names, "chunk_gathered_blocks"), values, strict=True))


def reference_shape(quantization: str = "none", dtype: str = "float32") -> ModelShape:
    config = parse_config(_config("reference-small"))
    at = Placement(config, RankPlace(Layout()), getattr(torch, dtype), CPU)
    return shape_of(at, RuntimeOptions(quantization=quantization))


def test_quantization_changes_weights_by_the_predicted_integer() -> None:
    batch = BatchShape(100, 2500, 300, sampled_rows=100)  # too many to be turned around
    dense, quantized = (step_work(reference_shape(one), batch) for one in ("none", "int8"))
    outputs = (8 + 2 * 4) * 64 + 256 + 2 * 688 + 256  # of the four matrices of a layer
    elements = 256 * ((8 + 2 * 4) * 64 + 8 * 64 + 3 * 688)
    saved = 3 * (3 * elements - 4 * outputs)  # 3 of 4 bytes in 3 layers, less a scale an output
    assert changed(dense, quantized) == {
        "linear_weights_read_bytes": -saved,
        "memory_read_bytes": -saved,
    }
    halved = step_work(reference_shape(dtype="bfloat16"), batch)
    assert 2 * halved["linear_weights_read_bytes"] == dense["linear_weights_read_bytes"]
    assert 2 * halved["attention_kv_read_bytes"] == dense["attention_kv_read_bytes"]
    assert halved["flops"] == dense["flops"]


def test_ranks_share_the_work_of_one() -> None:
    """Products split among ranks; what every rank computes is computed by each."""
    config = parse_config(_config("reference-small"))
    batch = BatchShape(4, 100, 12, sampled_rows=4)
    alone = step_work(reference_shape(), batch)
    for layout in (Layout(tp=2), Layout(pp=2), Layout(pp=2, tp=2)):
        at = Placement(config, RankPlace(layout), torch.float32, CPU)
        shapes = [parse_shape(text) for text in rank_shapes(at, RuntimeOptions())]
        assert len(shapes) == layout.world
        ranks = [step_work(shape, batch) for shape in shapes]
        for column in (
            "linear_weights_read_bytes",
            "attention_kv_read_bytes",
            "attention_kv_written_bytes",
            "flops",
            "linear_logits_written_bytes",
            "sampling_logits_read_bytes",
        ):
            assert sum(one[column] for one in ranks) == alone[column], (layout, column)
    for layout in (Layout(ep=2), Layout(cp=2)):
        at = Placement(parse_config(_config("reference-moe-small")), RankPlace(layout), *HERE)
        assert rank_shapes(at, RuntimeOptions()) == ()


HERE = (torch.float32, CPU)
DECODE = {
    SHAPE_ATTRIBUTE: str(TINY),
    "perfledger.step.prefill_tokens": 0,
    "perfledger.step.decode_tokens": 2,
    "perfledger.step.decode_context_tokens": 20,
    "perfledger.step.decode_gathered_blocks": 6,
}


def without(step: dict[str, object], *names: str) -> dict[str, object]:
    return {key: value for key, value in step.items() if key not in names}


def test_what_is_not_told_is_null() -> None:
    nothing = dict.fromkeys(WORK_COLUMNS, None)
    told = step_work(TINY, BatchShape(2, 20, 6, sampled_rows=2))
    unknown: list[dict[str, object]] = [
        {},
        without(DECODE, SHAPE_ATTRIBUTE),
        DECODE | {SHAPE_ATTRIBUTE: "layers=3"},
        without(DECODE, "perfledger.step.decode_tokens"),
        without(DECODE, "perfledger.step.decode_gathered_blocks"),
        DECODE | {"perfledger.step.prefill_tokens": 5},  # but nothing of its chunks
        DECODE | {SHAPE_ATTRIBUTE: str(MIXTURE)},  # but not where its rows went
        DECODE | {SHAPE_ATTRIBUTE: str(replace(TINY, microbatches=2))},  # but not into how many
        DECODE | {"perfledger.step.decode_gathered_blocks": -6},
        DECODE | {"perfledger.step.decode_gathered_blocks": 1 << 62},
        DECODE | {SHAPE_ATTRIBUTE: str(replace(TINY, layers=1 << 40, hidden=1 << 40))},
        DECODE | {SHAPE_ATTRIBUTE: "hidden=1099511627776,element=1099511627776,first=1"},
        DECODE | {SHAPE_ATTRIBUTE: str(replace(TINY, hidden=1 << 40, element=1 << 40))},
    ]
    assert work_of([DECODE, *unknown, DECODE]) == [told, *[nothing] * len(unknown), told]


def test_steps_of_more_shapes_than_there_can_be_are_not_computed() -> None:
    shapes = [str(replace(TINY, ffn=1 + at)) for at in range(300)]
    rows = work_of([DECODE | {SHAPE_ATTRIBUTE: shape} for shape in shapes])
    assert [row["flops"] is None for row in rows] == [False] * 256 + [True] * 44


def test_the_table_has_all_columns() -> None:
    kinds = {column.name: column.type for column in STEPS.columns}
    assert all(str(kinds[name]) == "int64" for name in WORK_COLUMNS)
    assert pl.Schema(STEPS.arrow())["flops"] == pl.Int64
