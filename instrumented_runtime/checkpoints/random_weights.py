"""Weights of the reference checkpoints: random, seeded, and scaled to behave like a model.

Two choices make them fit for measuring: queries and keys are large, so that heads look at few
places and greedy answers vary instead of repeating a word; and the embedding of the token that
ends a turn is zero, so that greedy answers end by their length alone.
"""

from typing import Any

import torch
from torch import Tensor

from perfledger.instrumented_runtime.checkpoints.config import parse_config
from perfledger.instrumented_runtime.checkpoints.weights import expected_shapes

EMBEDDING_STD = 0.05
QUERY_KEY_GAIN = 2.0


def random_weights(config: dict[str, Any], seed: int) -> dict[str, Tensor]:
    """Return weights for a config.json, in float32.

    Norms are one. Other matrices keep the variance of their input (standard deviation
    1 / sqrt(inputs)), but for the two choices above and for the embeddings, which are small beside
    what the layers add to them.
    """
    generator = torch.Generator().manual_seed(seed)
    weights = {}
    for name, shape in expected_shapes(parse_config(config)).items():
        if len(shape) == 1:
            weights[name] = torch.ones(shape)
        else:
            weights[name] = torch.randn(shape, generator=generator) * _std(name, shape[1])
    weights["model.embed_tokens.weight"][config["eos_token_id"]] = 0.0
    return weights


def _std(name: str, inputs: int) -> float:
    if name == "model.embed_tokens.weight":
        return EMBEDDING_STD
    gain = QUERY_KEY_GAIN if "q_proj" in name or "k_proj" in name else 1.0
    return float(gain * inputs**-0.5)
