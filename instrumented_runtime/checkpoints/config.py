"""config.json of a Hugging Face checkpoint, read strictly: what we do not compute is refused.

Keys and their defaults are those of the configuration classes in `transformers`.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from perfledger.schema.errors import UsageError

ARCHITECTURES = (
    "LlamaForCausalLM",
    "MistralForCausalLM",
    "Qwen2ForCausalLM",
    "Qwen3ForCausalLM",
    "MixtralForCausalLM",
    "Qwen3MoeForCausalLM",
)
WITH_WINDOW = ("MistralForCausalLM", "MixtralForCausalLM")  # unless sliding_window says null
MAX_JSON_BYTES = 256 * 1024 * 1024


@dataclass(frozen=True)
class Llama3Scaling:
    """The `llama3` change of the rotary frequencies, for contexts longer than trained on."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int


@dataclass(frozen=True)
class ExpertsConfig:
    """The feed-forward part of a mixture-of-experts model: every layer has the same."""

    count: int
    per_token: int  # experts that compute each token: the router's top k
    intermediate_size: int  # of one expert
    normalized: bool  # whether the weights of a token's experts are scaled to sum to one


@dataclass(frozen=True)
class ModelConfig:
    """The shape of a decoder. Sizes are elements, `max_position_embeddings` is tokens."""

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    max_position_embeddings: int
    rms_norm_eps: float
    rope_theta: float
    rope_scaling: Llama3Scaling | None
    tied_embeddings: bool
    qkv_bias: bool
    output_bias: bool  # of the attention's output projection
    qk_norm: bool  # RMSNorm of each query and key head (Qwen3)
    dtype: str  # of the stored weights: float32, bfloat16 or float16
    experts: ExpertsConfig | None = None  # None: one MLP of `intermediate_size` for all tokens


def read_json(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file. Raises UsageError if it is missing or malformed."""
    try:
        if path.stat().st_size > MAX_JSON_BYTES:
            raise UsageError(f"{path.name} is larger than {MAX_JSON_BYTES} bytes", where=str(path))
        content = json.loads(path.read_bytes())
    except OSError as error:
        raise UsageError(f"cannot read {path.name}: {error.strerror}", where=str(path)) from None
    except ValueError as error:
        raise UsageError(f"{path.name} is not valid JSON: {error}", where=str(path)) from None
    if not isinstance(content, dict):
        raise UsageError(f"{path.name} holds no JSON object", where=str(path))
    return content


def read_config(folder: Path) -> ModelConfig:
    """Return the shape of the checkpoint in `folder`.

    Raises UsageError for a missing or malformed file and for anything the decoder cannot compute:
    another architecture, a rope type, quantized weights, an active sliding window.
    """
    path = folder / "config.json"
    try:
        return parse_config(read_json(path))
    except UsageError as error:
        error.where = error.where or str(path)
        raise


def parse_config(raw: dict[str, Any]) -> ModelConfig:
    """Return the shape that a config.json describes. Raises UsageError as `read_config` does."""
    architecture = _architecture(raw)
    _refuse_what_we_do_not_compute(raw, architecture)
    heads = _positive_int(raw, "num_attention_heads")
    hidden_size = _positive_int(raw, "hidden_size")
    head_dim = 128 if architecture == "Qwen3ForCausalLM" else hidden_size // heads
    kv_heads = _positive_int(
        raw, "num_key_value_heads", heads if architecture == "LlamaForCausalLM" else None
    )
    if heads % kv_heads:
        raise UsageError(f"{heads} query heads do not divide among {kv_heads} KV heads")
    rope_theta, rope_scaling = _rope(raw)
    bias = bool(raw.get("attention_bias", False)) and architecture not in WITH_WINDOW
    return ModelConfig(
        architecture=architecture,
        vocab_size=_positive_int(raw, "vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=_positive_int(raw, "intermediate_size"),
        layers=_positive_int(raw, "num_hidden_layers"),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=_even(_positive_int(raw, "head_dim", head_dim), "head_dim"),
        max_position_embeddings=_positive_int(raw, "max_position_embeddings"),
        rms_norm_eps=_positive_number(raw, "rms_norm_eps", 1e-6),
        rope_theta=rope_theta,
        rope_scaling=rope_scaling,
        tied_embeddings=bool(raw.get("tie_word_embeddings", False)),
        qkv_bias=architecture == "Qwen2ForCausalLM" or bias,
        output_bias=architecture != "Qwen2ForCausalLM" and bias,
        qk_norm=architecture in ("Qwen3ForCausalLM", "Qwen3MoeForCausalLM"),
        dtype=_dtype(raw),
        experts=_experts(raw, architecture),
    )


def _architecture(raw: dict[str, Any]) -> str:
    named = raw.get("architectures") or []
    if not isinstance(named, list) or len(named) != 1 or named[0] not in ARCHITECTURES:
        raise UsageError(
            f"the architecture {named!r} is not one that this runtime computes",
            fix="a checkpoint of " + ", ".join(ARCHITECTURES),
        )
    return str(named[0])


def _experts(raw: dict[str, Any], architecture: str) -> ExpertsConfig | None:
    if architecture not in ("MixtralForCausalLM", "Qwen3MoeForCausalLM"):
        return None
    qwen = architecture == "Qwen3MoeForCausalLM"
    if raw.get("mlp_only_layers") or raw.get("decoder_sparse_step", 1) != 1:
        raise UsageError("layers without experts in a model with experts are not supported")
    # transformers 5 writes num_local_experts for both; before, Qwen3 wrote num_experts.
    both = {"num_local_experts": raw.get("num_experts"), **raw}
    count = _positive_int(both, "num_local_experts", 128 if qwen else 8)
    per_token = _positive_int(raw, "num_experts_per_tok", 8 if qwen else 2)
    if per_token > count:
        raise UsageError(f"{per_token} experts a token, but there are only {count}")
    return ExpertsConfig(
        count=count,
        per_token=per_token,
        intermediate_size=_positive_int(
            raw, "moe_intermediate_size" if qwen else "intermediate_size", 768 if qwen else None
        ),
        normalized=not qwen or bool(raw.get("norm_topk_prob", False)),
    )


def _refuse_what_we_do_not_compute(raw: dict[str, Any], architecture: str) -> None:
    if raw.get("quantization_config"):
        raise UsageError(
            "the weights are quantized (quantization_config)",
            fix="the same model with float32, bfloat16 or float16 weights",
        )
    if raw.get("hidden_act", "silu") != "silu":
        raise UsageError(f"the activation {raw['hidden_act']!r} is not supported, only silu")
    if raw.get("mlp_bias"):
        raise UsageError("biases in the feed-forward layers (mlp_bias) are not supported")
    if raw.get("partial_rotary_factor", 1.0) != 1.0:
        raise UsageError("rotary embedding of a part of each head is not supported")
    windowed = architecture in WITH_WINDOW
    window = raw.get("sliding_window", 4096 if architecture == "MistralForCausalLM" else None)
    switched_on = windowed or raw.get("use_sliding_window", False)
    shorter = isinstance(window, int) and window < raw.get("max_position_embeddings", 0)
    if (switched_on and shorter) or "sliding_attention" in (raw.get("layer_types") or []):
        raise UsageError(
            f"sliding-window attention (sliding_window {window}) is not supported",
            fix="a checkpoint whose sliding_window is null",
        )


def _rope(raw: dict[str, Any]) -> tuple[float, Llama3Scaling | None]:
    # transformers 5 writes everything into rope_parameters; before, rope_theta stood alone.
    rope = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    if not isinstance(rope, dict) or any(isinstance(value, dict) for value in rope.values()):
        raise UsageError("rope parameters that differ by layer are not supported")
    theta = _positive_number({**raw, **rope}, "rope_theta", 10_000.0)
    kind = rope.get("rope_type", rope.get("type", "default"))
    if rope.get("partial_rotary_factor", 1.0) != 1.0:
        raise UsageError("rotary embedding of a part of each head is not supported")
    if kind == "default":
        return theta, None
    if kind != "llama3":
        raise UsageError(
            f"the rope type {kind!r} is not supported, only default and llama3",
            fix="a checkpoint without rope scaling",
        )
    return theta, Llama3Scaling(
        _positive_number(rope, "factor"),
        _positive_number(rope, "low_freq_factor"),
        _positive_number(rope, "high_freq_factor"),
        _positive_int(rope, "original_max_position_embeddings"),
    )


def _dtype(raw: dict[str, Any]) -> str:
    dtype = raw.get("dtype") or raw.get("torch_dtype") or "float32"
    if dtype not in ("float32", "bfloat16", "float16"):
        raise UsageError(f"weights of type {dtype!r} are not supported")
    return str(dtype)


def _positive_int(raw: dict[str, Any], key: str, default: int | None = None) -> int:
    value = default if raw.get(key) is None else raw[key]
    if type(value) is not int or value < 1:
        raise UsageError(f"{key} is {value!r}, but must be a positive integer")
    return value


def _positive_number(raw: dict[str, Any], key: str, default: float | None = None) -> float:
    value = default if raw.get(key) is None else raw[key]
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < 1e12:
        raise UsageError(f"{key} is {value!r}, but must be a positive number")
    return float(value)


def _even(value: int, key: str) -> int:
    if value % 2:
        raise UsageError(f"{key} is {value}, but rotary embedding needs an even number")
    return value
