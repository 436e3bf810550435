"""What a rank does in the tests of a model served over several: load its part, compute steps."""

from pathlib import Path
from typing import Any

import torch
from known_steps import run_steps

from perfledger.instrumented_runtime.checkpoints.config import read_config
from perfledger.instrumented_runtime.options import RuntimeOptions
from perfledger.instrumented_runtime.parallel.groups import Peers, join
from perfledger.instrumented_runtime.parallel.layout import Layout, RankPlace
from perfledger.instrumented_runtime.parallel.served_model import (
    Placement,
    load_model,
    make_cache,
)

BLOCKS, BLOCK_SIZE, SWAP_BLOCKS = 24, 16, 8


def compute_alone(folder: Path) -> list[Any]:
    """Return the logits of all steps, in one process."""
    return _compute(folder, RankPlace(Layout()), None)[0]


def compute(place: RankPlace, folder: Path) -> tuple[list[Any], int]:
    """Return what this rank gives for all steps, and the bytes of its KV cache."""
    peers = join(place, torch.device("cpu"))
    results = _compute(folder, place, peers)
    peers.leave()
    return results


def _compute(folder: Path, place: RankPlace, peers: Peers | None) -> tuple[list[Any], int]:
    config = read_config(folder)
    placement = Placement(config, place, torch.float32, torch.device("cpu"), peers)
    model = load_model(folder, RuntimeOptions(), placement)
    cache = make_cache(placement, BLOCKS, BLOCK_SIZE, SWAP_BLOCKS)
    logits = run_steps(
        lambda rows: model.forward(rows, cache), config.vocab_size, BLOCKS, BLOCK_SIZE
    )
    held_bytes = sum(layer.nbytes for layer in cache._layers)
    return [one.numpy() for one in logits], held_bytes
