"""The reference checkpoints: small Llamas and Mixtrals with random weights, the same everywhere.

They compute what a real model of their shape computes; only their words mean nothing.
"""

import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

from perfledger.instrumented_runtime.checkpoints.cache import made_once
from perfledger.instrumented_runtime.checkpoints.train_tokenizer import (
    SPECIAL_TOKENS,
    TOKENIZER_FILE,
    VOCAB_SIZE,
)

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
    "reference-moe": {"hidden_size": 512, "intermediate_size": 608, "num_hidden_layers": 8},
    "reference-moe-small": {"hidden_size": 256, "intermediate_size": 344, "num_hidden_layers": 3},
}
# Two experts compute a token, each half as wide as the MLP of the reference without experts.
EXPERTS = {"num_local_experts": 8, "num_experts_per_tok": 2, "sliding_window": None}
WEIGHTS_VERSION = 1  # of random_weights.py: a change there must count it up


def make_reference(name: str) -> Path:
    """Return the folder of a reference checkpoint (a name in SHAPES), made on first use."""
    config = _config(name)
    recipe = {
        "config": config,
        "seed": SEED,
        "chat_template": CHAT_TEMPLATE,
        "tokenizer": hashlib.sha256(TOKENIZER_FILE.read_bytes()).hexdigest(),
        "weights": WEIGHTS_VERSION,
    }

    def make(folder: Path) -> None:
        # Here, so that a process that only looks the folder up does not load torch.
        from safetensors.torch import save_file

        from perfledger.instrumented_runtime.checkpoints.random_weights import random_weights

        save_file(random_weights(config, SEED), folder / "model.safetensors", {"format": "pt"})
        shutil.copyfile(TOKENIZER_FILE, folder / "tokenizer.json")
        for file, content in _json_files(config).items():
            (folder / file).write_text(json.dumps(content, indent=2) + "\n")

    return made_once(name, recipe, make)


def _config(name: str) -> dict[str, Any]:
    experts = "-moe" in name
    return {
        "architectures": ["MixtralForCausalLM" if experts else "LlamaForCausalLM"],
        "model_type": "mixtral" if experts else "llama",
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
        **(EXPERTS if experts else {"mlp_bias": False}),
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
