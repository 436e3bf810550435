"""A model served over the ranks of a cp group gives one rank's logits, with a part of its cache."""

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from known_steps import STEPS, Known, Step, step_rows
from served_ranks import BLOCK_SIZE, BLOCKS, compute, compute_alone
from spawned_ranks import run_ranks
from transformers import Qwen3Config, Qwen3ForCausalLM

from perfledger.instrumented_runtime.attention import block_bytes
from perfledger.instrumented_runtime.checkpoints.config import read_config
from perfledger.instrumented_runtime.parallel.context_parallel import local_rows
from perfledger.instrumented_runtime.parallel.layout import Layout
from perfledger.instrumented_runtime.parallel.splits import tokens_a_rank
from perfledger.schema.errors import UsageError

TINY = {
    "vocab_size": 300,
    "hidden_size": 64,
    "intermediate_size": 112,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint with random weights."""
    torch.manual_seed(11)
    model = Qwen3ForCausalLM(Qwen3Config(**TINY, head_dim=24))
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, 1.0 if parameter.dim() == 1 else 0.0, 0.15)
    folder = tmp_path_factory.mktemp("checkpoint")
    model.save_pretrained(folder)
    return folder


@pytest.mark.parametrize("ranks", [2, 4])
def test_logits_equal_one_ranks(ranks: int, folder: Path, tmp_path: Path) -> None:
    torch.set_num_threads(1)
    expected = compute_alone(folder)
    (first, held), *others = run_ranks(
        compute, Layout(cp=ranks), tmp_path / "ranks", folder, timeout_s=120
    )
    assert len(first) == len(STEPS)
    for ours, theirs in zip(first, expected, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-4)
        assert (ours.argmax(-1) == theirs.argmax(-1)).all()
    whole = BLOCKS * block_bytes(read_config(folder), BLOCK_SIZE, torch.float32)
    for logits, bytes_there in others:
        assert [one.shape for one in logits] == [(0, 300)] * len(STEPS)  # nobody needs them
        assert bytes_there == held
    assert held * ranks == whole


@settings(deadline=None)
@given(data=st.data(), ranks=st.sampled_from([1, 2, 4]), blocks_a_rank=st.integers(1, 3))
def test_every_row_and_key_is_somewhere_once(
    data: st.DataObject, ranks: int, blocks_a_rank: int
) -> None:
    block_size = ranks * blocks_a_rank
    count = data.draw(st.integers(1, 4))
    computed = [data.draw(st.integers(0, 20)) for _ in range(count)]
    chunk_tokens = [data.draw(st.integers(1, 9)) for _ in range(count)]
    decoding = sorted(data.draw(st.sets(st.sampled_from(range(count)))))
    free = list(range(200))
    data.draw(st.randoms(use_true_random=False)).shuffle(free)
    sequences = [
        Known(list(range(40)), [free.pop() for _ in range(-(-40 // block_size))], computed[one])
        for one in range(count)
    ]
    chunks = [(one, chunk_tokens[one]) for one in range(count) if one not in decoding]
    rows = step_rows(Step(decoding, chunks), sequences, block_size)
    parts = [local_rows(rows, block_size, ranks, rank) for rank in range(ranks)]

    computed_by = torch.stack([part.places >= 0 for part in parts]).sum(0)
    assert computed_by.tolist() == [ranks] * len(decoding) + [1] * sum(t for _, t in chunks)
    stored = [
        slot // blocks_a_rank * block_size + slot % blocks_a_rank * ranks + rank
        for rank, part in enumerate(parts)
        for slot in part.slots.tolist()
    ]
    assert sorted(stored) == sorted(rows.slots.tolist())
    for rank, part in enumerate(parts):
        assert part.tokens.tolist() == rows.tokens[part.places >= 0].tolist()
        for chunk in part.pieces:
            positions = part.positions[chunk.rows]
            visible = torch.stack([mask.sum(1) for mask in chunk.masks]).sum(0)
            assert visible.tolist() == (positions + 1).tolist()
            assert (positions % ranks == rank).all()
    if decoding:
        seen = torch.stack([part.decode_mask.sum((1, 2, 3)) for part in parts]).sum(0)
        assert seen.tolist() == (rows.positions[: len(decoding)] + 1).tolist()


def test_a_block_that_does_not_divide_is_refused() -> None:
    with pytest.raises(UsageError) as error:
        tokens_a_rank(6, 4)
    assert str(error.value) == (
        "a KV block of 6 tokens does not divide among 4 ranks (cp)\n"
        "  try: a --block-size that 4 divides"
    )
