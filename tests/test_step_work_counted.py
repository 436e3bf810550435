"""The formulas against torch: FLOPs of FlopCounterMode exactly, bytes of every operator called.

What the engine recorded of its steps goes the way to the columns of `steps`; beside it stand the
operators that torch really called in each of these steps. The rest, under 1 %, is what
operator_work.py leaves out: index tensors, statistics of rows, scalars. With experts there is one
thing more: which of them had a single row, and so did not turn it around, is not recorded.
"""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from counted_ranks import compute
from operator_counter import CountedModel, Counts
from recorded_work import step_attributes, work_of
from spawned_ranks import run_ranks
from stepping_engine import Engine, prompt_of

from perfledger.instrumented_runtime.checkpoints.config import parse_config
from perfledger.instrumented_runtime.checkpoints.random_weights import random_weights
from perfledger.instrumented_runtime.checkpoints.reference import _config
from perfledger.instrumented_runtime.checkpoints.resolve import resolve
from perfledger.instrumented_runtime.model import build_decoder
from perfledger.instrumented_runtime.options import RuntimeOptions
from perfledger.instrumented_runtime.parallel.layout import Layout, RankPlace
from perfledger.instrumented_runtime.parallel.served_model import Placement
from perfledger.instrumented_runtime.records import KINDS, Admit, Chunk, Kv, Preempt
from perfledger.instrumented_runtime.scheduling.limits import Limits
from perfledger.instrumented_runtime.work_shape import shape_of
from perfledger.schema.step_work import CELL_COLUMNS

CPU = torch.device("cpu")
LLAMA, MIXTRAL = _config("reference-small"), _config("reference-moe-small")
BIASED = {**LLAMA, "attention_bias": True, "num_key_value_heads": 8}
QWEN3 = {**LLAMA, "architectures": ["Qwen3ForCausalLM"], "head_dim": 32}
QWEN3_MOE = {
    **QWEN3,
    "architectures": ["Qwen3MoeForCausalLM"],
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 96,
    "norm_topk_prob": False,
}
MODELS: dict[str, tuple[dict[str, Any], str, str]] = {
    "llama": (LLAMA, "float32", "none"),
    "llama-bfloat16": (LLAMA, "bfloat16", "none"),
    "llama-int8": (LLAMA, "float32", "int8"),
    "llama-bfloat16-int8": (LLAMA, "bfloat16", "int8"),
    "llama-bias": (BIASED, "float32", "none"),
    "qwen3": (QWEN3, "float32", "none"),
    "mixtral": (MIXTRAL, "float32", "none"),
    "mixtral-bfloat16": (MIXTRAL, "bfloat16", "none"),
    "qwen3-moe-int8": (QWEN3_MOE, "float32", "int8"),
}
ROOMY = Limits(16, 64, 512, 16, kv_blocks=128)
TIGHT = Limits(16, 64, 256, 4, kv_blocks=40)
SWAPPING = Limits(16, 64, 256, 4, kv_blocks=40, swap_blocks=200)


def run(
    name: str, limits: Limits, submit: Callable[[Engine], None]
) -> tuple[Engine, list[Counts], list[dict[str, int | None]]]:
    """Return the engine after its run, what torch counted in each step, and what is derived."""
    raw, dtype, quantization = MODELS[name]
    torch.set_num_threads(1)
    config = parse_config(raw)
    kind: torch.dtype = getattr(torch, dtype)
    decoder = build_decoder(random_weights(raw, 1), config, kind, CPU, quantization=quantization)
    counted = CountedModel(decoder)
    engine = Engine(limits, counted)
    submit(engine)
    engine.run()
    options = RuntimeOptions(quantization=quantization, block_size=limits.block_size)
    shape = shape_of(Placement(config, RankPlace(Layout()), kind, CPU), options)
    derived = work_of(step_attributes(str(shape), engine.records))
    assert len(derived) == len(counted.steps) > 5
    return engine, counted.steps, derived


def check(counted: list[Counts], derived: list[dict[str, int | None]]) -> None:
    """FLOPs, calls and the bytes that attention reads exactly, all bytes within 1 %."""
    for torch_says, we_say in zip(counted, derived, strict=True):
        assert None not in we_say.values()
        flops = torch_says.flops
        attention = flops["aten._scaled_dot_product_flash_attention_for_cpu"]
        assert attention == we_say["attention_flops"]
        assert torch_says.kv_read == we_say["attention_kv_read_bytes"]
        if "quantized::linear_dynamic" not in torch_says.calls:  # of which torch counts no FLOPs
            assert flops.total() == we_say["flops"]
        turned = 0.1 * torch_says.calls.total() if we_say["moe_flops"] else 0
        assert torch_says.calls.total() == pytest.approx(we_say["launches"], abs=turned)
        read, written = (
            sum(
                value
                for cell in CELL_COLUMNS
                if cell[2] == direction
                and cell[0] != "sampling"
                and (value := we_say[CELL_COLUMNS[cell]]) is not None
            )
            for direction in ("read", "written")
        )
        assert read == pytest.approx(torch_says.read.total(), rel=0.01), torch_says.read
        assert written == pytest.approx(torch_says.written.total(), rel=0.01), torch_says.written


@pytest.mark.parametrize("name", MODELS)
def test_every_model_and_form(name: str) -> None:
    def submit(engine: Engine) -> None:
        for number in range(6):
            engine.submit(number, prompt_of(number), max_tokens=6)
        engine.submit(9, prompt_of(9) * 3, max_tokens=4)

    engine, counted, derived = run(name, ROOMY, submit)
    assert {bool(one.seq) for one in engine.of(Chunk)} == {True}
    check(counted, derived)


def test_prefix_cache_and_chunks() -> None:
    def submit(engine: Engine) -> None:
        engine.submit(1, [5] * 200, max_tokens=2)
        engine.run()
        engine.submit(2, [5] * 160 + [6] * 30, max_tokens=2)
        engine.submit(3, [5] * 160, max_tokens=2)  # all of it is found: its last block is copied

    caching = replace(ROOMY, prefix_cache=True)
    engine, counted, derived = run("llama", caching, submit)
    assert [one.cached_tokens for one in engine.of(Admit)] == [0, 160, 159]
    assert any(one.copied for one in engine.of(Kv))
    check(counted, derived)


@pytest.mark.parametrize("limits", [TIGHT, SWAPPING], ids=["recompute", "swap"])
def test_several_answers_and_preemption(limits: Limits) -> None:
    def submit(engine: Engine) -> None:
        for number in range(6):
            engine.submit(number, prompt_of(number), n=1 + number % 3, temperature=1.0, seed=number)

    engine, counted, derived = run("llama", limits, submit)
    assert len(engine.of(Preempt)) >= 2
    assert any(one.swapped_out for one in engine.of(Kv)) == bool(limits.swap_blocks)
    check(counted, derived)


def test_each_rank_of_a_split_model(tmp_path: Path) -> None:
    """Chunks, decodes, copied and swapped blocks; the pipeline cuts each step in two."""
    folder, layout = resolve("reference-small"), Layout(pp=2, tp=2)
    ranks = run_ranks(compute, layout, tmp_path / "ranks", folder, timeout_s=150)
    assert all(isinstance(one, tuple) for one in ranks), ranks
    for number, (shape, records, counted) in enumerate(ranks):
        told = [KINDS[kind](*fields) for kind, fields in records]
        check(counted, work_of(step_attributes(shape, told, number)))
