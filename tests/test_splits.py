"""Which part of a model a rank holds: parts make the whole; what cannot be split is refused."""

import dataclasses
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from perfledger.instrumented_runtime.checkpoints.config import (
    ExpertsConfig,
    ModelConfig,
    read_config,
)
from perfledger.instrumented_runtime.checkpoints.model_part import ModelPart
from perfledger.instrumented_runtime.checkpoints.resolve import resolve
from perfledger.instrumented_runtime.checkpoints.weights import (
    count_parameters,
    expected_shapes,
    read_weights,
)
from perfledger.instrumented_runtime.model import load_decoder
from perfledger.instrumented_runtime.parallel.layout import Layout
from perfledger.instrumented_runtime.parallel.splits import check_layout
from perfledger.schema.errors import UsageError

FOLDER = resolve("reference-small")
SMALL = read_config(FOLDER)
BIASED = dataclasses.replace(
    SMALL, layers=7, tied_embeddings=False, qkv_bias=True, output_bias=True, qk_norm=True
)
EXPERTS = ExpertsConfig(count=8, per_token=2, intermediate_size=344, normalized=True)
MOE = dataclasses.replace(BIASED, architecture="MixtralForCausalLM", experts=EXPERTS)
REPLICATED = ("norm.weight", "layernorm.weight", "embed_tokens.weight", "gate.weight")


@given(st.sampled_from([BIASED, MOE]), st.integers(1, 7), st.sampled_from([1, 2, 4]))
@settings(deadline=None, max_examples=30)
def test_every_number_is_held_once_but_for_what_all_need(
    config: ModelConfig, stages: int, shards: int
) -> None:
    held: dict[str, int] = {}
    for stage in range(stages):
        for index in range(shards):
            part = ModelPart(stage, stages, index, shards)
            for name, shape in expected_shapes(config).items():
                if part.holds(name, config):
                    piece = part.piece(name, shape)
                    whole = torch.empty(shape, device="meta")
                    mine = whole if piece is None else whole[piece]
                    held[name] = held.get(name, 0) + mine.numel()
    for name, shape in expected_shapes(config).items():
        copies = shards if name.endswith(REPLICATED) else 1
        assert held[name] == copies * math.prod(shape), name


@given(st.integers(1, 40), st.data())
def test_stages_hold_all_layers_in_order(layers: int, data: st.DataObject) -> None:
    stages = data.draw(st.integers(1, layers))
    config = dataclasses.replace(SMALL, layers=layers)
    parts = [ModelPart(stage, stages).layers(config) for stage in range(stages)]
    assert [one for part in parts for one in part] == list(range(layers))
    assert max(map(len, parts)) - min(map(len, parts)) <= 1
    assert ModelPart(stages - 1, stages).largest(config).layers == max(map(len, parts))


def test_shards_of_the_files_make_the_whole() -> None:
    whole = read_weights(FOLDER, SMALL)
    parts = [read_weights(FOLDER, SMALL, ModelPart(shard=one, shards=2)) for one in range(2)]
    assert sum(tensor.numel() for tensor in whole.values()) == count_parameters(SMALL)
    for name, tensor in whole.items():
        first, second = (part[name] for part in parts)
        dimension = next(
            (at for at, size in enumerate(tensor.shape) if first.shape[at] != size), None
        )
        joined = first if dimension is None else torch.cat((first, second), dimension)
        assert torch.equal(joined, tensor), name


def test_a_tied_head_needs_the_embedding_at_both_ends() -> None:
    first, last = (read_weights(FOLDER, SMALL, ModelPart(stage, 2)) for stage in range(2))
    assert "model.embed_tokens.weight" in first and "model.norm.weight" not in first
    assert "model.embed_tokens.weight" in last and "model.norm.weight" in last
    assert len(first) + len(last) == len(read_weights(FOLDER, SMALL)) + 1


@pytest.mark.parametrize("stage", range(3))
def test_each_stage_of_a_tied_model_is_built(stage: int) -> None:
    decoder = load_decoder(
        FOLDER, SMALL, torch.float32, torch.device("cpu"), part=ModelPart(stage, 3)
    )
    assert decoder.config.layers == 1
    assert decoder.parameters == count_parameters(SMALL)


SMOLLM2 = dataclasses.replace(
    SMALL, heads=9, kv_heads=3, intermediate_size=1536, vocab_size=49152, layers=30
)


@pytest.mark.parametrize(
    ("config", "layout", "said"),
    [
        (SMOLLM2, Layout(tp=2), "9 query heads do not divide among 2 ranks (tp)"),
        (SMALL, Layout(tp=8), "4 KV heads do not divide among 8 ranks (tp)"),
        (
            dataclasses.replace(SMALL, intermediate_size=687),
            Layout(tp=2),
            "687 columns of the MLP (intermediate_size) do not divide among 2 ranks (tp)",
        ),
        (
            dataclasses.replace(SMALL, vocab_size=8191),
            Layout(tp=2),
            "8191 tokens of the vocabulary do not divide among 2 ranks (tp)",
        ),
        (SMALL, Layout(pp=4), "3 layers are too few for 4 stages (pp)"),
        (SMALL, Layout(ep=2), "2 ranks (ep), but LlamaForCausalLM has no experts"),
        (MOE, Layout(ep=3), "8 experts do not divide among 3 ranks (ep)"),
        (SMALL, Layout(cp=3), "a KV block of 16 tokens does not divide among 3 ranks (cp)"),
        (SMALL, Layout(fsdp=2), "a model is not served with fsdp"),
    ],
)
def test_a_split_that_cannot_be_says_why(config: ModelConfig, layout: Layout, said: str) -> None:
    with pytest.raises(UsageError) as refused:
        check_layout(config, layout, 16)
    assert refused.value.what == said


def test_the_way_out_of_nine_heads() -> None:
    with pytest.raises(UsageError) as refused:
        check_layout(SMOLLM2, Layout(tp=2), 16)
    assert refused.value.fix == (
        "--tensor-parallel 3, or --pipeline-parallel 2, which splits layers instead"
    )
    check_layout(SMOLLM2, Layout(tp=3), 16)
    check_layout(SMOLLM2, Layout(pp=2), 16)
