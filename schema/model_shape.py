"""The shape of what one rank of an engine computes with: all that bytes and FLOPs of a step need.

It travels as one text on every step's span, `perfledger.model.shape`.
"""

from dataclasses import dataclass, fields
from typing import Any

from perfledger.schema.errors import UsageError

MAX_SIZE = 1 << 40
MAX_TEXT = 1000


@dataclass(frozen=True)
class ModelShape:
    """What this rank holds of a decoder; sizes are elements unless they say bytes."""

    layers: int
    hidden: int  # elements of a row between layers
    heads: int  # of queries
    kv_heads: int
    head_dim: int
    ffn: int  # columns of the MLP, or of one expert
    element: int  # bytes of one element of rows, K and V, and of dense weights
    block: int  # tokens of a KV block
    matrices: int  # bytes of one layer's matrices but experts, with scales and biases
    vocabulary: int = 0  # logits of a row that are computed here; 0: the head is elsewhere
    shards: int = 1  # ranks over which heads, columns and logits are split
    microbatches: int = 1  # into which a step is cut at most
    experts: int = 0  # of a layer; 0: one MLP for all rows
    per_token: int = 0  # experts that compute a row
    expert_bytes: int = 0  # bytes of the matrices of one expert
    normalized: int = 0  # 1: the weights of a row's experts are scaled to sum to one
    qk_norm: int = 0  # 1: RMSNorm of each query and key head
    qkv_bias: int = 0
    output_bias: int = 0  # of the attention's output projection, if it is held here
    first: int = 0  # 1: holds the embedding
    logits: int = 0  # of a row, from which tokens are chosen here; 0: elsewhere
    quantization: str = "none"
    device: str = "cpu"  # type of the device that computes

    @property
    def row_bytes(self) -> int:
        """Bytes of one row between layers."""
        return self.hidden * self.element

    @property
    def query_bytes(self) -> int:
        """Bytes of one row's queries."""
        return self.heads * self.head_dim * self.element

    @property
    def kv_bytes(self) -> int:
        """Bytes of one token's K and V in one layer."""
        return 2 * self.kv_heads * self.head_dim * self.element

    @property
    def block_bytes(self) -> int:
        """Bytes of K and V of one block in one layer."""
        return self.block * self.kv_bytes

    def __str__(self) -> str:
        """Return the text, like `layers=3,hidden=256,…`; what has its default is left out."""
        return ",".join(
            f"{field.name}={value}"
            for field in fields(self)
            if (value := getattr(self, field.name)) != field.default
        )


def parse_shape(text: str) -> ModelShape:
    """Return the shape of a text. Raises UsageError for one that `str(shape)` does not give."""
    kinds = {field.name: field.type for field in fields(ModelShape)}
    try:
        if len(text) > MAX_TEXT:
            raise ValueError
        values: dict[str, Any] = {}
        for pair in text.split(","):
            name, value = pair.split("=")
            values[name] = value if kinds[name] is str else _size(value)
        return ModelShape(**values)
    except (ValueError, KeyError, TypeError):  # of a number, a name, one that is missing
        raise UsageError(f"{text[:100]!r} is no shape of a model") from None


def _size(text: str) -> int:
    size = int(text)
    if not 0 <= size <= MAX_SIZE:
        raise ValueError
    return size
