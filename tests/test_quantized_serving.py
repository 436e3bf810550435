"""A model whose matrices are int8: it reads a quarter of the bytes and answers almost the same."""

from pathlib import Path

import pytest
import torch

from perfledger.instrumented_runtime.attention import ChunkRows, PagedKvCache, StepRows
from perfledger.instrumented_runtime.checkpoints.config import read_config
from perfledger.instrumented_runtime.checkpoints.resolve import resolve
from perfledger.instrumented_runtime.loading import load_rank
from perfledger.instrumented_runtime.options import RuntimeOptions
from perfledger.instrumented_runtime.parallel.layout import Layout, RankPlace
from perfledger.schema.errors import UsageError

MODEL, TOKENS = "reference-small", 64


def weights_bytes(folder: Path, quantization: str) -> int:
    options = RuntimeOptions(threads=1, dtype="float32", quantization=quantization)
    return load_rank(options, folder, RankPlace(Layout())).facts.capacity["weights_bytes"]


def logits(folder: Path, quantization: str) -> torch.Tensor:
    options = RuntimeOptions(threads=1, dtype="float32", quantization=quantization)
    model = load_rank(options, folder, RankPlace(Layout())).model
    cache = PagedKvCache(read_config(folder), 4, 16, torch.float32, torch.device("cpu"))
    tokens = torch.arange(300, 300 + TOKENS)
    places = torch.arange(TOKENS)
    rows = StepRows(tokens, places, places, None, (ChunkRows(0, TOKENS, 0, None, None),), None)
    return model.forward(rows, cache)


def test_int8_holds_a_quarter_of_the_matrices() -> None:
    folder = resolve(MODEL)
    config = read_config(folder)
    embedding = config.vocab_size * config.hidden_size
    dense, quantized = weights_bytes(folder, "none"), weights_bytes(folder, "int8")
    # Embedding and head (one tensor here) stay dense, and norms, which are small.
    matrices = dense - embedding * 4
    assert matrices / 4 < quantized - embedding * 4 < matrices / 3.9


def test_int8_answers_almost_as_float32_does() -> None:
    folder = resolve(MODEL)
    exact, found = logits(folder, "none"), logits(folder, "int8")
    similar = torch.nn.functional.cosine_similarity(exact, found, dim=-1)
    assert similar.median() > 0.97 and similar.min() > 0.8  # random weights pass errors on
    assert not torch.equal(exact, found)


def test_what_this_device_cannot_multiply_is_refused() -> None:
    options = RuntimeOptions(threads=1, device="cpu", quantization="fp8")
    with pytest.raises(UsageError, match="cpu does not multiply fp8"):
        load_rank(options, resolve(MODEL), RankPlace(Layout()))
