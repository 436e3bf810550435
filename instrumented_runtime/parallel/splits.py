"""Whether a model can be split as a layout says: asked before any process is started."""

from perfledger.instrumented_runtime.checkpoints.config import ModelConfig
from perfledger.instrumented_runtime.checkpoints.model_part import check_split
from perfledger.instrumented_runtime.parallel.layout import Layout
from perfledger.schema.errors import UsageError

SERVING = ("pp", "cp", "ep", "tp")


def check_layout(config: ModelConfig, layout: Layout, block_size: int) -> None:
    """Raise UsageError, with the size that does not divide, if a model cannot be served so."""
    for name in layout.used():
        if name not in SERVING:
            raise UsageError(f"a model is not served with {name}", fix="--replicas for more copies")
    if layout.cp > 1 and (layout.pp > 1 or layout.tp > 1):
        raise UsageError("context parallelism goes with no other split of a served model but ep")
    check_split(config, layout.pp, layout.tp)
    if layout.ep > 1:
        held_experts(config, layout.ep, 0)
    tokens_a_rank(block_size, layout.cp)


def held_experts(config: ModelConfig, ranks: int, rank: int) -> range:
    """Return the numbers of the experts that a rank of an ep group holds.

    Raises UsageError if the model has none, or they do not divide.
    """
    if config.experts is None:
        raise UsageError(
            f"{ranks} ranks (ep), but {config.architecture} has no experts",
            fix="a mixture-of-experts checkpoint, such as --model reference-moe",
        )
    if config.experts.count % ranks:
        raise UsageError(f"{config.experts.count} experts do not divide among {ranks} ranks (ep)")
    each = config.experts.count // ranks
    return range(rank * each, (rank + 1) * each)


def tokens_a_rank(block_size: int, ranks: int) -> int:
    """Return how many tokens of a KV block each rank of a cp group holds.

    Raises UsageError if they do not divide.
    """
    if block_size % ranks:
        raise UsageError(
            f"a KV block of {block_size} tokens does not divide among {ranks} ranks (cp)",
            fix=f"a --block-size that {ranks} divides",
        )
    return block_size // ranks


def runs_of(sizes: list[int], pieces: int) -> list[tuple[int, int]]:
    """Return [start, end) of runs of `sizes`, each closed as soon as it has its share."""
    bounds: list[tuple[int, int]] = []
    total, start, done = sum(sizes), 0, 0
    for index, size in enumerate(sizes, 1):
        done += size
        if done * pieces >= total * (len(bounds) + 1) or index == len(sizes):
            bounds.append((start, index))
            start = index
    return bounds
