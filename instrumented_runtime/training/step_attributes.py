"""What the spans of a training run say, from its records."""

from perfledger.instrumented_runtime.checkpoints.sharded import shard_name
from perfledger.instrumented_runtime.records import (
    NOT_READ,
    TRAIN_PARTS,
    ShardMoved,
    TrainPart,
    TrainStep,
)

Attributes = dict[str, str | int | float | bool | list[str]]
SpanParts = tuple[str, int, int, Attributes]  # name, start, end, attributes; monotonic ns


def train_attributes(step: TrainStep) -> Attributes:
    """Return the attributes of a `train_step` span; bytes are those held at its end."""
    attributes: Attributes = {
        "perfledger.step.seq": step.seq,
        "perfledger.tokens": step.tokens,
        "perfledger.train.parameter_bytes": step.parameter_bytes,
        "perfledger.train.gradient_bytes": step.gradient_bytes,
        "perfledger.train.optimizer_bytes": step.optimizer_bytes,
        "perfledger.train.full_peak_bytes": step.full_peak_bytes,
        "perfledger.train.full_left_bytes": step.full_left_bytes,
        "perfledger.train.memory_bytes": step.memory_bytes,
        "perfledger.train.observed": bool(step.observed),
    }
    if step.loss_millionths != NOT_READ:
        attributes["perfledger.train.loss"] = step.loss_millionths / 1e6
    return attributes


def part_span(part: TrainPart) -> SpanParts:
    """Return what a part's span is made of."""
    told: Attributes = {}
    if part.microbatch != NOT_READ:
        told["perfledger.microbatch"] = part.microbatch
    return TRAIN_PARTS[part.part], part.start_ns, part.end_ns, told


def shard_span(moved: ShardMoved, place: Attributes) -> SpanParts:
    """Return what the span of a shard that was saved or loaded is made of; `place` names the
    rank on it."""
    told: Attributes = {
        "perfledger.checkpoint.step": moved.step,
        "perfledger.checkpoint.shard": shard_name(moved.rank, moved.ranks),
        "perfledger.checkpoint.bytes": moved.bytes,
    }
    name = "checkpoint_load" if moved.loaded else "checkpoint_save"
    return name, moved.start_ns, moved.end_ns, place | told
