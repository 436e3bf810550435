"""The decoder: Llama, Mistral, Qwen2 and Qwen3 are one computation with three switches.

RMSNorm before each half of a layer, rotary positions, grouped-query attention over the paged
cache, SwiGLU. Weights that read the same input stand in one matrix (q, k, v; gate, up).
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import linear, rms_norm, silu

from perfledger.instrumented_runtime.attention import PagedKvCache, StepRows
from perfledger.instrumented_runtime.checkpoints.config import Llama3Scaling, ModelConfig
from perfledger.instrumented_runtime.checkpoints.weights import read_weights


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """The matrices of one decoder layer, as [outputs, inputs]."""

    attention_norm: Tensor
    qkv: Tensor
    qkv_bias: Tensor | None
    query_norm: Tensor | None
    key_norm: Tensor | None
    output: Tensor
    output_bias: Tensor | None
    ffn_norm: Tensor
    gate_up: Tensor
    down: Tensor


class Decoder:
    """A model with its weights on one device. It keeps no state between steps.

    `tensors` is used up on the way, so that no weight stands in memory twice.
    """

    def __init__(
        self,
        config: ModelConfig,
        tensors: dict[str, Tensor],
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        def take(name: str) -> Tensor:
            return tensors.pop(name).to(device, dtype)

        self.parameters = sum(tensor.numel() for tensor in tensors.values())
        self.config, self.dtype, self.device = config, dtype, device
        self._embedding = take("model.embed_tokens.weight")
        self._layers = [_layer_weights(take, config, index) for index in range(config.layers)]
        self._norm = take("model.norm.weight")
        self._head = self._embedding if config.tied_embeddings else take("lm_head.weight")
        cos, sin = rotary_tables(config)
        self._cos, self._sin = cos.to(device, dtype), sin.to(device, dtype)

    @torch.inference_mode()
    def forward(self, rows: StepRows, cache: PagedKvCache) -> Tensor:
        """Compute one step; return the logits [sampled rows, vocab_size] in the model's dtype."""
        eps = self.config.rms_norm_eps
        hidden = self._embedding.index_select(0, rows.tokens)
        cos = self._cos.index_select(0, rows.positions).unsqueeze(1)
        sin = self._sin.index_select(0, rows.positions).unsqueeze(1)
        for index, layer in enumerate(self._layers):
            normed = rms_norm(hidden, hidden.shape[-1:], layer.attention_norm, eps)
            query, key, value = self._project(layer, normed, cos, sin)
            attended = cache.attend(index, query, key, value, rows)
            hidden = hidden + linear(attended, layer.output, layer.output_bias)
            normed = rms_norm(hidden, hidden.shape[-1:], layer.ffn_norm, eps)
            gate, up = linear(normed, layer.gate_up).chunk(2, dim=-1)
            hidden = hidden + linear(silu(gate) * up, layer.down)
        if rows.sampled is not None:
            hidden = hidden.index_select(0, rows.sampled)
        return linear(rms_norm(hidden, hidden.shape[-1:], self._norm, eps), self._head)

    def _project(
        self, layer: LayerWeights, normed: Tensor, cos: Tensor, sin: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return rotated queries, rotated keys and values, each [rows, heads, head_dim]."""
        config = self.config
        qkv = linear(normed, layer.qkv, layer.qkv_bias).view(len(normed), -1, config.head_dim)
        rotated = qkv[:, : config.heads + config.kv_heads]
        if layer.query_norm is not None and layer.key_norm is not None:
            shape, eps = (config.head_dim,), config.rms_norm_eps
            query = rms_norm(rotated[:, : config.heads], shape, layer.query_norm, eps)
            key = rms_norm(rotated[:, config.heads :], shape, layer.key_norm, eps)
            rotated = torch.cat((query, key), dim=1)
        # x * cos + (the other half of x) * (-sin, sin): a rotation of each pair (i, i + half).
        swapped = rotated.roll(config.head_dim // 2, -1)
        rotated = torch.addcmul(rotated * cos, swapped, sin)
        return rotated[:, : config.heads], rotated[:, config.heads :], qkv[:, -config.kv_heads :]


def load_decoder(
    folder: Path, config: ModelConfig, dtype: torch.dtype, device: torch.device
) -> Decoder:
    """Read the weights of a checkpoint folder. Raises UsageError as `read_weights` does."""
    return Decoder(config, read_weights(folder, config), dtype, device)


def rotary_tables(config: ModelConfig) -> tuple[Tensor, Tensor]:
    """Return (cos, sin) of every position, each [positions, head_dim] in float32.

    The first half of `sin` is negative: it multiplies the second half of a head. Definition:
    "RoFormer" (Su et al. 2021), with pairs half a head apart as in Hugging Face checkpoints.
    """
    half = torch.arange(0, config.head_dim, 2, dtype=torch.int64).float() / config.head_dim
    inverse = 1.0 / config.rope_theta**half
    if config.rope_scaling is not None:
        inverse = _scale_llama3(inverse, config.rope_scaling)
    angles = torch.outer(torch.arange(config.max_position_embeddings).float(), inverse)
    cos, sin = angles.cos(), angles.sin()
    return torch.cat((cos, cos), dim=-1), torch.cat((-sin, sin), dim=-1)


def _scale_llama3(inverse: Tensor, scaling: Llama3Scaling) -> Tensor:
    """Divide low frequencies by `factor`, keep high ones, blend between (Llama 3.1's rule)."""
    turns = scaling.original_max_position_embeddings * inverse / (2 * math.pi)
    span = scaling.high_freq_factor - scaling.low_freq_factor
    keep = ((turns - scaling.low_freq_factor) / span).clamp(0, 1)
    return inverse * keep + inverse / scaling.factor * (1 - keep)


def _layer_weights(take: Callable[[str], Tensor], config: ModelConfig, index: int) -> LayerWeights:
    prefix = f"model.layers.{index}"

    def joined(names: tuple[str, ...]) -> Tensor:
        return torch.cat([take(f"{prefix}.{name}") for name in names])

    heads = ("q_proj", "k_proj", "v_proj")
    return LayerWeights(
        attention_norm=take(f"{prefix}.input_layernorm.weight"),
        qkv=joined(tuple(f"self_attn.{name}.weight" for name in heads)),
        qkv_bias=joined(tuple(f"self_attn.{name}.bias" for name in heads))
        if config.qkv_bias
        else None,
        query_norm=take(f"{prefix}.self_attn.q_norm.weight") if config.qk_norm else None,
        key_norm=take(f"{prefix}.self_attn.k_norm.weight") if config.qk_norm else None,
        output=take(f"{prefix}.self_attn.o_proj.weight"),
        output_bias=take(f"{prefix}.self_attn.o_proj.bias") if config.output_bias else None,
        ffn_norm=take(f"{prefix}.post_attention_layernorm.weight"),
        gate_up=joined(("mlp.gate_proj.weight", "mlp.up_proj.weight")),
        down=take(f"{prefix}.mlp.down_proj.weight"),
    )
