"""From a GGUF file to a Hugging Face checkpoint folder, for the one model that we take so.

Weights are dequantized to bfloat16; tokenizer and chat template come from the file's metadata.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGUFReader, dequantize
from numpy.typing import NDArray
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor

from perfledger.schema.errors import UsageError

CONTROL_TOKEN = 3  # token_type of special tokens in GGUF

# Names in GGUF and in Hugging Face checkpoints; the former stand under blk.N, the latter under
# model.layers.N.
TENSORS = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
LAYER_TENSORS = {
    "attn_norm.weight": "input_layernorm.weight",
    "attn_q.weight": "self_attn.q_proj.weight",
    "attn_k.weight": "self_attn.k_proj.weight",
    "attn_v.weight": "self_attn.v_proj.weight",
    "attn_output.weight": "self_attn.o_proj.weight",
    "ffn_norm.weight": "post_attention_layernorm.weight",
    "ffn_gate.weight": "mlp.gate_proj.weight",
    "ffn_up.weight": "mlp.up_proj.weight",
    "ffn_down.weight": "mlp.down_proj.weight",
}


def convert(file: Path, folder: Path) -> None:
    """Write the Llama in a GGUF file as a Hugging Face checkpoint into `folder`.

    Raises UsageError for another architecture or kind of tokenizer.
    """
    reader = GGUFReader(file)
    fields: dict[str, Any] = {name: field.contents() for name, field in reader.fields.items()}
    kinds = (fields["general.architecture"], fields["tokenizer.ggml.model"])
    if kinds != ("llama", "gpt2") or fields["tokenizer.ggml.pre"] != "smollm":
        raise UsageError(f"only the GGUF of SmolLM2 is converted, not {kinds}", where=str(file))
    weights = _weights(reader, fields)
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    _tokenizer(fields).save(str(folder / "tokenizer.json"))
    for name, content in _json_files(fields, tied="lm_head.weight" not in weights).items():
        (folder / name).write_text(json.dumps(content, indent=2) + "\n")


def _weights(reader: GGUFReader, fields: dict[str, Any]) -> dict[str, Tensor]:
    heads = {
        "attn_q.weight": fields["llama.attention.head_count"],
        "attn_k.weight": fields["llama.attention.head_count_kv"],
    }
    weights = {}
    for tensor in reader.tensors:
        values = dequantize(tensor.data, tensor.tensor_type)
        kind = tensor.name.split(".", 2)[-1]
        if kind in heads:
            values = _undo_permutation(values, heads[kind])
        name = _hugging_face_name(tensor.name)
        weights[name] = torch.tensor(values).to(torch.bfloat16)
    return weights


def _hugging_face_name(name: str) -> str:
    if name in TENSORS:
        return TENSORS[name]
    _, layer, kind = name.split(".", 2)
    return f"model.layers.{layer}.{LAYER_TENSORS[kind]}"


def _undo_permutation(values: NDArray[np.float32], heads: int) -> NDArray[np.float32]:
    """Put the rows of each head from rotary pairs (0, 1), (2, 3), … back half a head apart."""
    rows, columns = values.shape
    pairs = values.reshape(heads, rows // heads // 2, 2, columns)
    return pairs.swapaxes(1, 2).reshape(rows, columns)


def _tokenizer(fields: dict[str, Any]) -> Tokenizer:
    tokens: list[str] = fields["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ")) for merge in fields["tokenizer.ggml.merges"]]
    vocabulary = {token: number for number, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocabulary, merges))
    # What the name "smollm" stands for: every digit alone, the rest as GPT-2 splits it.
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    kinds = fields["tokenizer.ggml.token_type"]
    special = [token for token, kind in zip(tokens, kinds, strict=True) if kind == CONTROL_TOKEN]
    tokenizer.add_special_tokens([AddedToken(one, special=True) for one in special])
    return tokenizer


def _json_files(fields: dict[str, Any], *, tied: bool) -> dict[str, dict[str, Any]]:
    tokens = fields["tokenizer.ggml.tokens"]
    ids = {
        f"{name}_token_id": fields[f"tokenizer.ggml.{key}_token_id"]
        for name, key in (("bos", "bos"), ("eos", "eos"), ("pad", "padding"))
    }
    heads = fields["llama.attention.head_count"]
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": fields["llama.embedding_length"],
        "intermediate_size": fields["llama.feed_forward_length"],
        "num_hidden_layers": fields["llama.block_count"],
        "num_attention_heads": heads,
        "num_key_value_heads": fields["llama.attention.head_count_kv"],
        "head_dim": fields["llama.embedding_length"] // heads,
        "hidden_act": "silu",
        "vocab_size": fields["llama.vocab_size"],
        "max_position_embeddings": fields["llama.context_length"],
        "rms_norm_eps": float(f"{fields['llama.attention.layer_norm_rms_epsilon']:.6g}"),
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": float(fields["llama.rope.freq_base"]),
        },
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": tied,
        **ids,
        "dtype": "bfloat16",
    }
    tokenizer_config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        **{name.removesuffix("_id"): tokens[number] for name, number in ids.items()},
        "model_max_length": fields["llama.context_length"],
        "chat_template": fields["tokenizer.chat_template"],
    }
    return {
        "config.json": config,
        "generation_config.json": {**ids, "do_sample": False},
        "tokenizer_config.json": tokenizer_config,
    }
