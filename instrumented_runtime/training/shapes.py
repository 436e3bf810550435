"""Shapes of the models that `perfledger train` trains: small Llamas, dense or with experts."""

from dataclasses import dataclass

from perfledger.schema.errors import UsageError


@dataclass(frozen=True, slots=True)
class ModelShape:
    """A decoder's sizes in elements. `experts` 0 means one dense feed-forward half a layer."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int  # of the feed-forward half, or of each expert
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    experts: int = 0
    experts_per_token: int = 0
    rms_norm_eps: float = 1e-5
    rope_theta: float = 10_000.0


SHAPES: dict[str, ModelShape] = {
    "tiny": ModelShape(256, 32, 64, 2, 4, 2, 8),
    "tiny-moe": ModelShape(256, 32, 32, 2, 4, 2, 8, experts=4, experts_per_token=2),
    "reference-small": ModelShape(8192, 256, 688, 3, 8, 4, 64),
    "reference-small-moe": ModelShape(8192, 256, 344, 3, 8, 4, 64, experts=8, experts_per_token=2),
    "reference": ModelShape(8192, 512, 1216, 8, 8, 4, 64),
    "reference-moe": ModelShape(8192, 512, 608, 8, 8, 4, 64, experts=8, experts_per_token=2),
}


def shape_named(name: str) -> ModelShape:
    """Return a shape by its name. Raises UsageError if there is none of that name."""
    if name not in SHAPES:
        raise UsageError(f"{name!r} is not a model size", fix=", ".join(SHAPES))
    return SHAPES[name]
