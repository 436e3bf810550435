"""The Llama of the serving runtime as an nn.Module that trains: whole, or one pipeline stage.

Two seams make it parallel: `attend` of an attention half (ring attention with context
parallelism) and `group` of an expert half (all-to-all with expert parallelism). Tensor
parallelism and FSDP shard its Linears from outside. Embedding and head are not tied, so that they
can stand in different stages.
"""

from collections.abc import Callable, Iterable
from zlib import crc32

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention, silu

from perfledger.instrumented_runtime.training.experts import Experts
from perfledger.instrumented_runtime.training.shapes import ModelShape

# (query, key, value) -> output, each [batch, tokens, heads, head_dim]; causal.
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


def causal_attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Attend to all earlier tokens; each group of query heads shares one KV head."""
    out = scaled_dot_product_attention(
        query.transpose(1, 2),
        key.transpose(1, 2),
        value.transpose(1, 2),
        is_causal=True,
        enable_gqa=key.shape[2] != query.shape[2],
    )
    return out.transpose(1, 2)


class Attention(nn.Module):
    """Rotary positions and grouped-query attention. Its heads are those of this rank's shard."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        queries, keys = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
        self.head_dim = shape.head_dim
        self.q_proj = nn.Linear(shape.hidden_size, queries, bias=False)
        self.k_proj = nn.Linear(shape.hidden_size, keys, bias=False)
        self.v_proj = nn.Linear(shape.hidden_size, keys, bias=False)
        self.o_proj = nn.Linear(queries, shape.hidden_size, bias=False)
        self.attend: Attend = causal_attention

    def forward(self, hidden: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Return the attention's output [batch, tokens, hidden]."""
        heads = (*hidden.shape[:2], -1, self.head_dim)
        query = rotate(self.q_proj(hidden).view(heads), cos, sin)
        key = rotate(self.k_proj(hidden).view(heads), cos, sin)
        attended = self.attend(query, key, self.v_proj(hidden).view(heads))
        out: Tensor = self.o_proj(attended.flatten(2))
        return out


class FeedForward(nn.Module):
    """SwiGLU."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.up_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.down_proj = nn.Linear(shape.intermediate_size, shape.hidden_size, bias=False)

    def forward(self, hidden: Tensor) -> Tensor:
        """Return the output [batch, tokens, hidden]."""
        out: Tensor = self.down_proj(silu(self.gate_proj(hidden)) * self.up_proj(hidden))
        return out


class Layer(nn.Module):
    """RMSNorm before each half, and the residual around it."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.self_attn = Attention(shape)
        self.post_attention_layernorm = nn.RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.mlp = Experts(shape) if shape.experts else FeedForward(shape)

    def forward(self, hidden: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Return the layer's output [batch, tokens, hidden]."""
        hidden = hidden + self.self_attn(self.input_layernorm(hidden), cos, sin)
        out: Tensor = hidden + self.mlp(self.post_attention_layernorm(hidden))
        return out


class Decoder(nn.Module):
    """Some consecutive layers, with the embedding before the first and the head behind the last.

    Layers keep the number that they have in the whole model, so a parameter has one name in every
    layout. `cos` and `sin` [tokens, head_dim] are those of the tokens that this rank holds.
    """

    def __init__(self, shape: ModelShape, layers: Iterable[int], *, first: bool, last: bool):
        super().__init__()
        self.embed_tokens = nn.Embedding(shape.vocab_size, shape.hidden_size) if first else None
        self.layers = nn.ModuleDict({str(number): Layer(shape) for number in layers})
        self.norm = nn.RMSNorm(shape.hidden_size, shape.rms_norm_eps) if last else None
        self.lm_head = nn.Linear(shape.hidden_size, shape.vocab_size, bias=False) if last else None
        # Not buffers: those are made equal on all ranks.
        self.cos = self.sin = torch.empty(0)

    def forward(self, hidden: Tensor) -> Tensor:
        """Take tokens [batch, tokens] or the stage before's hidden states; return logits or
        hidden states."""
        if self.embed_tokens is not None:
            hidden = self.embed_tokens(hidden)
        for layer in self.layers.values():
            hidden = layer(hidden, self.cos, self.sin)
        if self.norm is not None and self.lm_head is not None:
            hidden = self.lm_head(self.norm(hidden))
        return hidden

    def attentions(self) -> Iterable[Attention]:
        """All attention halves."""
        return (layer.self_attn for layer in self.layers.values())  # type: ignore[misc]


def rotate(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate each pair (i, i + half) of every head by its position's angle.

    "RoFormer" (Su et al. 2021), with pairs half a head apart as in Hugging Face checkpoints.
    """
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    return heads * cos + heads.roll(heads.shape[-1] // 2, -1) * sin


def rotary(shape: ModelShape, positions: Tensor) -> tuple[Tensor, Tensor]:
    """Return (cos, sin) of positions, each [positions, head_dim]; the first half of sin is
    negative, as it multiplies the second half of a head."""
    half = torch.arange(0, shape.head_dim, 2, dtype=torch.int64).float() / shape.head_dim
    angles = torch.outer(positions.float(), 1.0 / shape.rope_theta**half)
    cos, sin = angles.cos(), angles.sin()
    return torch.cat((cos, cos), dim=-1), torch.cat((-sin, sin), dim=-1)


def build(shape: ModelShape, seed: int, layers: range, *, first: bool, last: bool) -> Decoder:
    """Return the part of the model that `layers` name, its weights those of the whole model.

    Every parameter has a generator of its own, seeded by its name: a part has the same weights
    as it has in the whole, whatever else is made.
    """
    model = Decoder(shape, layers, first=first, last=last)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1:
                parameter.copy_(initial_weights(name, parameter.shape, seed))
    return model


def initial_weights(name: str, shape: torch.Size, seed: int) -> Tensor:
    """Return a matrix of a standard deviation of 1 / sqrt(inputs), 0.02 for embedding and head."""
    generator = torch.Generator().manual_seed(crc32(f"{seed} {name}".encode()))
    std = 0.02 if name in ("embed_tokens.weight", "lm_head.weight") else float(shape[-1] ** -0.5)
    return torch.randn(shape, generator=generator) * std
