"""Logits of a split model are those of the whole one, whatever a step holds."""

import random
from pathlib import Path

import pytest
import torch
from spawned_ranks import run_ranks
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from perfledger.instrumented_runtime.attention import (
    BlockMoves,
    ChunkRows,
    DecodeRows,
    StepRows,
)
from perfledger.instrumented_runtime.checkpoints.config import read_config
from perfledger.instrumented_runtime.options import RuntimeOptions
from perfledger.instrumented_runtime.parallel.following import follow
from perfledger.instrumented_runtime.parallel.groups import join
from perfledger.instrumented_runtime.parallel.layout import Layout, RankPlace
from perfledger.instrumented_runtime.parallel.leading import LeadingModel
from perfledger.instrumented_runtime.parallel.served_model import (
    Placement,
    load_model,
    make_cache,
)

CPU = torch.device("cpu")
BLOCKS, BLOCK_SIZE = 32, 4
TINY = {
    "vocab_size": 300,
    "hidden_size": 64,
    "intermediate_size": 112,
    "num_hidden_layers": 5,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "initializer_range": 0.2,
}
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None}
MODELS = {
    "mixtral": lambda: MixtralForCausalLM(MixtralConfig(**TINY, **EXPERTS)),
    "biased": lambda: LlamaForCausalLM(LlamaConfig(**TINY, attention_bias=True)),
    "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**TINY, head_dim=24, tie_word_embeddings=True)),
}


def chunk_rows(start: int, context: int, tokens: int, table: list[int]) -> ChunkRows:
    if not context:
        return ChunkRows(start, tokens, 0, None, None)
    positions = torch.arange(context, context + tokens)
    mask = torch.arange(context + tokens) <= positions[:, None]
    return ChunkRows(start, tokens, context, torch.tensor(table), mask)


def step_of(
    decodes: list[tuple[int, list[int]]],
    chunks: list[tuple[int, int, list[int]]],
    moves: BlockMoves | None = None,
) -> StepRows:
    """Rows for sequences by (position, table) and chunks by (context, tokens, table)."""
    draw = random.Random(len(decodes) + len(chunks))
    positions, slots, pieces, sampled = [], [], [], []
    for position, table in decodes:
        sampled.append(len(positions))
        positions.append(position)
        slots.append(table[position // BLOCK_SIZE] * BLOCK_SIZE + position % BLOCK_SIZE)
    for context, tokens, table in chunks:
        pieces.append(chunk_rows(len(positions), context, tokens, table))
        own = range(context, context + tokens)
        positions += own
        slots += [table[at // BLOCK_SIZE] * BLOCK_SIZE + at % BLOCK_SIZE for at in own]
        sampled.append(len(positions) - 1)
    decode = None
    if decodes:
        width = max(len(table) for _, table in decodes)
        tables = [table + [0] * (width - len(table)) for _, table in decodes]
        lengths = torch.tensor([position + 1 for position, _ in decodes])[:, None]
        mask = torch.arange(width * BLOCK_SIZE) < lengths
        decode = DecodeRows(len(decodes), torch.tensor(tables).flatten(), mask[:, None, None])
    tokens = [draw.randrange(TINY["vocab_size"]) for _ in positions]
    return StepRows(
        *(torch.tensor(one) for one in (tokens, positions, slots)),
        decode,
        tuple(pieces),
        torch.tensor(sampled),
        moves,
    )


# A prompt in two chunks, a second one beside it, both decode, and a copied block is read.
STEPS = (
    step_of([], [(0, 9, [3, 7, 5])]),
    step_of([], [(9, 7, [3, 7, 5, 1]), (0, 6, [9, 2])]),
    step_of([(16, [3, 7, 5, 1, 8])], [(6, 3, [9, 2, 4]), (0, 5, [10, 11])]),
    step_of(
        [(17, [3, 7, 5, 1, 8]), (9, [12, 2, 4]), (5, [10, 11])],
        [],
        BlockMoves(copies=torch.tensor([[9, 12]])),
    ),
)


def logits_of(place: RankPlace, folder: Path) -> list[list[list[float]]]:
    options, config = RuntimeOptions(), read_config(folder)
    peers = None if place.alone else join(place, CPU, 50)
    placement = Placement(config, place, torch.float32, CPU, peers)
    model = load_model(folder, options, placement)
    cache = make_cache(placement, BLOCKS, BLOCK_SIZE, 0)
    if peers is None:
        return [model.forward(rows, cache).tolist() for rows in STEPS]
    if place.rank:
        follow(model, cache, peers, None, None)
        peers.leave()
        return []
    leading = LeadingModel(model, peers)
    logits = [leading.forward(rows, cache).tolist() for rows in STEPS]
    leading.end()
    return logits


@pytest.mark.parametrize("name", MODELS)
def test_logits_of_all_splits(name: str, tmp_path: Path) -> None:
    torch.manual_seed(1)
    torch.set_num_threads(1)
    MODELS[name]().eval().save_pretrained(tmp_path)
    whole = logits_of(RankPlace(Layout()), tmp_path)
    layouts = {
        "biased": Layout(pp=2, tp=2),
        "qwen3": Layout(pp=3),
        "mixtral": Layout(ep=2, tp=2),
    }
    got = run_ranks(logits_of, layouts[name], tmp_path / "ranks", tmp_path, timeout_s=150)
    assert got[1:] == [[]] * (layouts[name].world - 1), got
    for ours, theirs in zip(got[0], whole, strict=True):
        expected = torch.tensor(theirs)
        assert (torch.tensor(ours) - expected).abs().max() <= 1e-4 * expected.abs().max()
