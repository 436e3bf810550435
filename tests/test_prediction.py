"""The predicted time of a decode step: exactly the sum of its parts over the measured ceilings."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perfledger.analyzers.prediction import predict_decode
from perfledger.instrumented_runtime.ceilings.attending import moved_bytes
from perfledger.instrumented_runtime.ceilings.launching import TINY, tiny_shape
from perfledger.schema.ceilings import AttentionShape, Ceiling, Ceilings, MatmulShape
from perfledger.schema.decode_products import (
    attention_launches,
    decode_products,
    other_launches,
)
from perfledger.schema.errors import NoDataError, UsageError
from perfledger.schema.manifest import Manifest
from perfledger.schema.model_shape import ModelShape
from perfledger.schema.operator_work import step_work
from perfledger.schema.step_work import BatchShape

MIB = 1 << 20
SHAPE = ModelShape(
    layers=2,
    hidden=256,
    heads=8,
    kv_heads=4,
    head_dim=64,
    ffn=512,
    element=4,
    block=16,
    matrices=4 * 256 * (512 + 512 + 512 + 3 * 512),
    vocabulary=1024,
    first=1,
    logits=1024,
)
BATCH = BatchShape(
    decode_rows=4, decode_context_tokens=400, decode_gathered_blocks=28, sampled_rows=4
)


def ceilings(
    flops: float = 1e10,
    attention: float = 1e9,
    near: float = 2e9,
    launch_ns: float = 1000.0,
    step_ns: float = 50_000.0,
    leave_out: str = "",
) -> Ceilings:
    """Return ceilings that are the same at every shape."""
    items = [
        Ceiling.best("registers_sram", "matmul", str(shape), "flop/s", [flops])
        for dtype in ("float32", "int8")
        for shape in (MatmulShape(dtype, 1, 8, 8, MIB), MatmulShape(dtype, 4, 8, 8, MIB))
    ]
    shape = AttentionShape("float32", 4, 64, 4, 2, 64)
    items += [
        Ceiling.best("device_memory", "attention", str(shape), "bytes/s", [attention]),
        Ceiling.best("device_memory", "elementwise", "256KiB", "bytes/s", [near]),
        Ceiling.best("device_memory", "copy", "256KiB", "bytes/s", [near]),
        Ceiling.best("device_memory", "argmax", "256KiB", "bytes/s", [near]),
        Ceiling.best("host", "launch", "operator", "ns", [launch_ns]),
        Ceiling.best("host", "step", "rows=1", "ns", [step_ns]),
    ]
    kept = tuple(item for item in items if item.operation != leave_out)
    return Ceilings("c1", Manifest.of({}), 1, kept)


def test_the_parts_are_the_work_over_the_ceilings() -> None:
    found, work = predict_decode(SHAPE, BATCH, ceilings()), step_work(SHAPE, BATCH)
    parts = {part.name: part for part in found.parts}
    moved = ("attention_kv_read", "attention_gather_read", "attention_gather_written")
    attended = sum(work[f"{name}_bytes"] for name in moved)
    launches = other_launches(SHAPE, BATCH)
    assert parts["linear"].amount == work["linear_flops"]
    assert parts["linear"].ns == pytest.approx(work["linear_flops"] / 10)
    assert (parts["attention"].amount, parts["attention"].ns) == (attended, float(attended))
    assert (parts["launches"].amount, parts["launches"].ns) == (launches, launches * 1000.0)
    assert parts["host"].ns == 50_000.0
    assert parts["sampling"].amount == 4 * 1024 * 4
    assert parts["norm"].amount == (
        work["norm_activations_read_bytes"] + work["norm_activations_written_bytes"]
    )
    assert found.ns == pytest.approx(sum(part.ns for part in found.parts))
    assert found.share("linear") == pytest.approx(parts["linear"].ns / found.ns)


def test_on_a_device_launches_hide_behind_computing_or_the_other_way_round() -> None:
    device = replace(SHAPE, device="cuda")
    slow_host = predict_decode(device, BATCH, ceilings(launch_ns=1e9))
    parts = {part.name: part.ns for part in slow_host.parts}
    assert slow_host.ns == pytest.approx(parts["launches"] + parts["host"])
    slow_device = predict_decode(device, BATCH, ceilings(flops=1e3))
    parts = {part.name: part.ns for part in slow_device.parts}
    assert slow_device.ns == pytest.approx(sum(parts.values()) - parts["launches"])


def test_int8_weights_take_the_rates_of_int8_but_for_the_head() -> None:
    quantized = replace(SHAPE, quantization="int8")
    kinds = [product.kind for product in decode_products(quantized, BATCH)]
    assert kinds == ["int8"] * 4 + ["float32"]


@pytest.mark.parametrize(
    "missing", ["matmul", "attention", "elementwise", "copy", "argmax", "launch", "step"]
)
def test_without_a_ceiling_that_it_needs_nothing_is_predicted(missing: str) -> None:
    with pytest.raises(NoDataError):
        predict_decode(SHAPE, BATCH, ceilings(leave_out=missing))


def test_bfloat16_needs_ceilings_of_its_own() -> None:
    with pytest.raises(NoDataError, match="bfloat16"):
        predict_decode(replace(SHAPE, element=2), BATCH, ceilings())


@pytest.mark.parametrize("batch", [BatchShape(), replace(BATCH, prefill_rows=8, chunks=1)])
def test_steps_that_compute_prompts_or_nothing_are_refused(batch: BatchShape) -> None:
    with pytest.raises(UsageError, match="all rows decode"):
        predict_decode(SHAPE, batch, ceilings())


@given(
    layers=st.integers(1, 40),
    sizes=st.tuples(*[st.integers(1, 64)] * 3),
    heads=st.tuples(st.integers(1, 8), st.integers(1, 8)),
    rows=st.integers(1, 64),
    quantization=st.sampled_from(["none", "int8"]),
    qk_norm=st.integers(0, 1),
)
def test_products_have_the_flops_of_the_step_and_leave_launches(
    layers: int,
    sizes: tuple[int, int, int],
    heads: tuple[int, int],
    rows: int,
    quantization: str,
    qk_norm: int,
) -> None:
    hidden, ffn, vocabulary = (16 * size for size in sizes)
    shape = replace(
        SHAPE,
        layers=layers,
        hidden=hidden,
        ffn=ffn,
        vocabulary=vocabulary,
        kv_heads=heads[0],
        heads=heads[0] * heads[1],
        quantization=quantization,
        qk_norm=qk_norm,
    )
    batch = BatchShape(
        decode_rows=rows,
        decode_context_tokens=rows * 20,
        decode_gathered_blocks=rows * 2,
        sampled_rows=rows,
    )
    products = decode_products(shape, batch)
    assert sum(product.flops for product in products) == step_work(shape, batch)["linear_flops"]
    # norms alone are twelve operators of a layer on a CPU
    assert other_launches(shape, batch) >= 12 * layers


def test_experts_are_products_of_those_that_are_touched() -> None:
    shape = replace(SHAPE, experts=8, per_token=2, expert_bytes=4 * 256 * 3 * 512, normalized=1)
    batch = replace(BATCH, assignments=16, touched_experts=8)
    work = step_work(shape, batch)
    products = decode_products(shape, batch)
    assert sum(one.flops for one in products) == work["linear_flops"] + work["moe_flops"]
    assert predict_decode(shape, batch, ceilings()).ns > 0


def test_the_model_that_launches_are_measured_with_tells_its_own_shape() -> None:
    import torch

    from perfledger.instrumented_runtime.checkpoints.config import parse_config
    from perfledger.instrumented_runtime.options import RuntimeOptions
    from perfledger.instrumented_runtime.parallel.layout import Layout, RankPlace
    from perfledger.instrumented_runtime.parallel.served_model import Placement
    from perfledger.instrumented_runtime.work_shape import rank_shapes

    config, cpu = parse_config(TINY), torch.device("cpu")
    placement = Placement(config, RankPlace(Layout()), torch.float32, cpu)
    (told,) = rank_shapes(placement, RuntimeOptions())
    assert told == str(tiny_shape())


def test_the_launches_of_attention_are_the_operators_that_torch_calls_for_it() -> None:
    import torch
    from operator_counter import OperatorCounter

    from perfledger.instrumented_runtime.attention import DecodeRows, PagedKvCache, StepRows
    from perfledger.instrumented_runtime.checkpoints.config import parse_config

    config, cpu = parse_config(TINY), torch.device("cpu")
    cache = PagedKvCache(config, 1, 16, torch.float32, cpu)
    nothing = torch.zeros(1, dtype=torch.int64)
    mask = torch.ones(1, 1, 1, 16, dtype=torch.bool)
    rows = StepRows(nothing, nothing, nothing, DecodeRows(1, nothing, mask), (), None)
    projected = torch.ones(1, config.heads + 2 * config.kv_heads, config.head_dim)
    parts = projected.split((config.heads, config.kv_heads, config.kv_heads), dim=1)
    counter = OperatorCounter()
    with torch.inference_mode(), counter:
        cache.attend(0, *parts, rows)
    assert counter.counts.calls.total() == attention_launches(tiny_shape())


@given(st.integers(1, 32), st.integers(1, 2000))
def test_the_bytes_of_measured_attention_are_those_of_the_step_work(
    rows: int, context: int
) -> None:
    shape = AttentionShape("float32", rows, context, SHAPE.kv_heads, 2, SHAPE.head_dim)
    batch = BatchShape(
        decode_rows=rows,
        decode_context_tokens=rows * context,
        decode_gathered_blocks=rows * -(-context // 16),
        sampled_rows=rows,
    )
    work = step_work(replace(SHAPE, layers=1), batch)
    columns = ("kv_read", "gather_read", "gather_written")
    assert moved_bytes(shape) == sum(work[f"attention_{column}_bytes"] for column in columns)
