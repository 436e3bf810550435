"""The decoder: Llama, Mistral, Qwen2, Qwen3 and Mixtral are one computation with a few switches.

RMSNorm before each half of a layer, rotary positions, grouped-query attention over the paged
cache, SwiGLU, of one MLP or of experts. Weights that read the same input stand in one matrix (q, k,
v; gate, up). A rank may hold only a part of the model: a stage of its layers, a slice of each, or
some of the experts.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import rms_norm, silu

from perfledger.instrumented_runtime.attention import PagedKvCache, StepRows
from perfledger.instrumented_runtime.checkpoints.config import Llama3Scaling, ModelConfig
from perfledger.instrumented_runtime.checkpoints.model_part import ModelPart
from perfledger.instrumented_runtime.checkpoints.weights import (
    count_parameters,
    expert_names,
    read_weights,
)
from perfledger.instrumented_runtime.linears import Dense, Matrix, make_matrix
from perfledger.instrumented_runtime.moe import MoeMlp, RoutingCounts
from perfledger.instrumented_runtime.parallel.expert_parallel import ExpertParallelMlp
from perfledger.instrumented_runtime.parallel.groups import Group
from perfledger.instrumented_runtime.parallel.tensor_parallel import Gathered, Reduced

WHOLE = ModelPart()
Rows = Callable[[Tensor], Tensor]  # [rows, inputs] to [rows, outputs]


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One decoder layer."""

    attention_norm: Tensor
    qkv: Rows
    query_norm: Tensor | None
    key_norm: Tensor | None
    output: Rows
    ffn_norm: Tensor
    mlp: Rows


@dataclass(frozen=True, slots=True)
class GatedMlp:
    """SwiGLU ("GLU Variants Improve Transformer", Shazeer 2020)."""

    gate_up: Matrix
    down: Matrix

    def __call__(self, rows: Tensor) -> Tensor:
        """Return [rows, hidden_size] of the same."""
        gate, up = self.gate_up(rows).chunk(2, dim=-1)
        return self.down(silu(gate) * up)


@dataclass(frozen=True, slots=True)
class Ends:
    """What stands before the first layer and behind the last; None where the part has no such."""

    embedding: Tensor | None
    norm: Tensor | None
    head: Rows | None


class Decoder:
    """A model, or a rank's part of one, with its weights on one device.

    It keeps no state between steps. `config` is the shape of what is held here.
    """

    def __init__(
        self,
        config: ModelConfig,
        layers: list[LayerWeights],
        ends: Ends,
        dtype: torch.dtype,
        device: torch.device,
        parameters: int,
        routing: RoutingCounts | None = None,
    ) -> None:
        """`parameters` is the number of the whole model's, `routing` what the experts' layers tell
        of each step."""
        self.config, self.dtype, self.device = config, dtype, device
        self.parameters, self.routing = parameters, routing
        self.weights_bytes = 0  # held here; set when they are loaded
        self._layers, self._ends = layers, ends
        cos, sin = rotary_tables(config)
        self._cos, self._sin = cos.to(device, dtype), sin.to(device, dtype)

    @torch.inference_mode()
    def forward(self, rows: StepRows, cache: PagedKvCache) -> Tensor:
        """Compute one step; return the logits [sampled rows, vocab_size] in the model's dtype."""
        if rows.moves is not None:
            cache.apply(rows.moves)
        hidden = self.hidden(rows, cache)
        if rows.sampled is not None:
            hidden = hidden.index_select(0, rows.sampled)
        return self.logits(hidden)

    @torch.inference_mode()
    def hidden(self, rows: StepRows, cache: PagedKvCache, hidden: Tensor | None = None) -> Tensor:
        """Return the rows behind the last layer held here, [rows, hidden_size].

        `hidden` are the rows behind the layer before the first one held, if that is not the first
        of the model.
        """
        eps = self.config.rms_norm_eps
        if hidden is None:
            assert self._ends.embedding is not None
            hidden = self._ends.embedding.index_select(0, rows.tokens)
        cos = self._cos.index_select(0, rows.positions).unsqueeze(1)
        sin = self._sin.index_select(0, rows.positions).unsqueeze(1)
        for index, layer in enumerate(self._layers):
            normed = rms_norm(hidden, hidden.shape[-1:], layer.attention_norm, eps)
            query, key, value = self._project(layer, normed, cos, sin)
            hidden = hidden + layer.output(cache.attend(index, query, key, value, rows))
            normed = rms_norm(hidden, hidden.shape[-1:], layer.ffn_norm, eps)
            hidden = hidden + layer.mlp(normed)
        return hidden

    @torch.inference_mode()
    def logits(self, hidden: Tensor) -> Tensor:
        """Return the logits [rows, vocab_size] of rows behind the model's last layer."""
        norm, head = self._ends.norm, self._ends.head
        assert norm is not None and head is not None
        return head(rms_norm(hidden, hidden.shape[-1:], norm, self.config.rms_norm_eps))

    def _project(
        self, layer: LayerWeights, normed: Tensor, cos: Tensor, sin: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return rotated queries, rotated keys and values, each [rows, heads, head_dim]."""
        config = self.config
        qkv = layer.qkv(normed).view(len(normed), -1, config.head_dim)
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
    folder: Path,
    config: ModelConfig,
    dtype: torch.dtype,
    device: torch.device,
    *,
    quantization: str = "none",
    part: ModelPart = WHOLE,
    groups: Mapping[str, Group] | None = None,
) -> Decoder:
    """Read a part of the weights of a checkpoint folder, of a model of shape `config`.

    `groups` are the process groups whose ranks hold the other parts. Raises UsageError as
    `read_weights` does.
    """
    tensors = read_weights(folder, config, part)
    return build_decoder(
        tensors, config, dtype, device, quantization=quantization, part=part, groups=groups
    )


def build_decoder(
    tensors: dict[str, Tensor],
    config: ModelConfig,
    dtype: torch.dtype,
    device: torch.device,
    *,
    quantization: str = "none",
    part: ModelPart = WHOLE,
    groups: Mapping[str, Group] | None = None,
) -> Decoder:
    """Make a model, or a part of one, of its tensors, which are used up on the way."""
    builder = _Builder(config, tensors, dtype, device, quantization, part, groups or {})
    layers = [builder.layer(index) for index in part.layers(config)]
    parameters = count_parameters(config)
    decoder = Decoder(
        part.held(config), layers, builder.ends(), dtype, device, parameters, builder.routing
    )
    decoder.weights_bytes = builder.weights_bytes
    return decoder


class _Builder:
    """Makes layers of tensors, and uses these up on the way: no weight stands in memory twice."""

    def __init__(
        self,
        config: ModelConfig,
        tensors: dict[str, Tensor],
        dtype: torch.dtype,
        device: torch.device,
        quantization: str,
        part: ModelPart,
        groups: Mapping[str, Group],
    ) -> None:
        self._config, self._tensors, self._part = config, tensors, part
        self._dtype, self._device, self._quantization = dtype, device, quantization
        self._tp, self._ep = groups.get("tp"), groups.get("ep")
        self.routing = None if config.experts is None else RoutingCounts(config.experts.count)
        self.weights_bytes = 0

    def layer(self, index: int) -> LayerWeights:
        prefix, config = f"model.layers.{index}", self._config
        heads = [f"{prefix}.self_attn.{name}" for name in ("q_proj", "k_proj", "v_proj")]
        qk_norm = config.qk_norm
        return LayerWeights(
            attention_norm=self._take(f"{prefix}.input_layernorm.weight"),
            qkv=self._matrix(*heads),
            query_norm=self._take(f"{prefix}.self_attn.q_norm.weight") if qk_norm else None,
            key_norm=self._take(f"{prefix}.self_attn.k_norm.weight") if qk_norm else None,
            output=self._reduced(self._matrix(f"{prefix}.self_attn.o_proj")),
            ffn_norm=self._take(f"{prefix}.post_attention_layernorm.weight"),
            mlp=self._reduced(self._mlp(prefix)),
        )

    def ends(self) -> Ends:
        part, tied = self._part, self._config.tied_embeddings
        needed = part.first or (part.last and tied)
        embedding = self._take("model.embed_tokens.weight") if needed else None
        if not part.last:
            return Ends(embedding, None, None)
        if tied:
            assert embedding is not None
            weight = embedding[part.vocabulary(self._config)]
        else:
            weight = self._take("lm_head.weight")
        head = Dense(weight)
        norm = self._take("model.norm.weight")
        return Ends(embedding, norm, Gathered(head, self._tp) if self._tp else head)

    def _mlp(self, prefix: str) -> Rows:
        shape = self._config.experts
        if shape is None:
            return self._gated(*(f"{prefix}.mlp.{name}_proj" for name in ("gate", "up", "down")))
        names = expert_names(self._config)
        router = self._take(f"{prefix}.{names.router}.weight")
        experts = []
        for number in self._part.experts or range(shape.count):
            expert = f"{prefix}.{names.expert.format(number)}"
            matrices = (f"{expert}.{name}" for name in (names.gate, names.up, names.down))
            experts.append(self._gated(*matrices))
        if self._ep is None:
            return MoeMlp(router, experts, shape, self.routing)
        return ExpertParallelMlp(router, experts, shape, self._ep, self.routing)

    def _gated(self, gate: str, up: str, down: str) -> GatedMlp:
        return GatedMlp(self._matrix(gate, up), self._matrix(down))

    def _reduced(self, matrix: Rows) -> Rows:
        return Reduced(matrix, self._tp) if self._tp else matrix

    def _matrix(self, *names: str) -> Matrix:
        """Return the matrices of these names as one, their outputs one after another."""
        weight = self._joined([f"{name}.weight" for name in names])
        biases = [f"{name}.bias" for name in names]
        bias = self._joined(biases) if biases[0] in self._tensors else None
        matrix = make_matrix(weight, bias, self._quantization)
        dense_bytes = weight.nbytes + (bias.nbytes if bias is not None else 0)
        self.weights_bytes += matrix.bytes - dense_bytes  # what quantizing it saved
        return matrix

    def _joined(self, names: list[str]) -> Tensor:
        taken = [self._take(name) for name in names]
        return taken[0] if len(taken) == 1 else torch.cat(taken)

    def _take(self, name: str) -> Tensor:
        tensor = self._tensors.pop(name).to(self._device, self._dtype)
        self.weights_bytes += tensor.nbytes
        return tensor


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
