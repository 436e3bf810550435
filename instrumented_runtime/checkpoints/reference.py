"""The reference checkpoints: small Llamas with random weights, the same on every machine.

They compute what a real model of their shape computes; only their words mean nothing. Two choices
make them fit for measuring: queries and keys are large, so that heads look at few places and
greedy answers vary instead of repeating a word; and the embedding of the token that ends a turn is
zero, so that greedy answers end by their length alone.
"""

import hashlib
import json
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

from perfledger.instrumented_runtime.checkpoints.cache import made_once
from perfledger.instrumented_runtime.checkpoints.config import parse_config
from perfledger.instrumented_runtime.checkpoints.train_tokenizer import (
    SPECIAL_TOKENS,
    TOKENIZER_FILE,
    VOCAB_SIZE,
)
from perfledger.instrumented_runtime.checkpoints.weights import expected_shapes

if TYPE_CHECKING:  # the API process looks for a checkpoint too, and needs no torch
    from torch import Tensor

SEED = 20_261_130
PAD, BOS, EOS = range(len(SPECIAL_TOKENS))
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
SHAPES: dict[str, dict[str, int]] = {
    "reference": {"hidden_size": 512, "intermediate_size": 1216, "num_hidden_layers": 8},
    "reference-small": {"hidden_size": 256, "intermediate_size": 688, "num_hidden_layers": 3},
}
EMBEDDING_STD = 0.05
QUERY_KEY_GAIN = 2.0


def make_reference(name: str) -> Path:
    """Return the folder of a reference checkpoint (a name in SHAPES), made on first use."""
    config = _config(name)
    recipe = {
        "config": config,
        "seed": SEED,
        "embedding_std": EMBEDDING_STD,
        "query_key_gain": QUERY_KEY_GAIN,
        "chat_template": CHAT_TEMPLATE,
        "tokenizer": hashlib.sha256(TOKENIZER_FILE.read_bytes()).hexdigest(),
        "version": 1,  # of how `random_weights` uses all this
    }

    def make(folder: Path) -> None:
        from safetensors.torch import save_file

        save_file(random_weights(config), folder / "model.safetensors", {"format": "pt"})
        shutil.copyfile(TOKENIZER_FILE, folder / "tokenizer.json")
        for file, content in _json_files(config).items():
            (folder / file).write_text(json.dumps(content, indent=2) + "\n")

    return made_once(name, recipe, make)


def random_weights(config: dict[str, Any]) -> "dict[str, Tensor]":
    """Return seeded weights for a config.json, in float32.

    Norms are one. Other matrices keep the variance of their input (standard deviation
    1 / sqrt(inputs)), but for the two choices above and for the embeddings, which are small beside
    what the layers add to them.
    """
    import torch

    generator = torch.Generator().manual_seed(SEED)
    weights = {}
    for name, shape in expected_shapes(parse_config(config)).items():
        if len(shape) == 1:
            weights[name] = torch.ones(shape)
        else:
            weights[name] = torch.randn(shape, generator=generator) * _std(name, shape[1])
    weights["model.embed_tokens.weight"][EOS] = 0.0
    return weights


def _std(name: str, inputs: int) -> float:
    if name == "model.embed_tokens.weight":
        return EMBEDDING_STD
    gain = QUERY_KEY_GAIN if "q_proj" in name or "k_proj" in name else 1.0
    return float(gain * inputs**-0.5)


def _config(name: str) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        **SHAPES[name],
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 64,
        "hidden_act": "silu",
        "vocab_size": VOCAB_SIZE,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0},
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": True,
        "bos_token_id": BOS,
        "eos_token_id": EOS,
        "pad_token_id": PAD,
        "dtype": "float32",
    }


def _json_files(config: dict[str, Any]) -> dict[str, dict[str, Any]]:
    pad, bos, eos = SPECIAL_TOKENS
    return {
        "config.json": config,
        "generation_config.json": {
            "bos_token_id": BOS,
            "eos_token_id": EOS,
            "pad_token_id": PAD,
            "do_sample": False,
        },
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": bos,
            "eos_token": eos,
            "pad_token": pad,
            "model_max_length": config["max_position_embeddings"],
            "chat_template": CHAT_TEMPLATE,
        },
    }
