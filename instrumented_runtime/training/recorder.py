"""What a rank of a training run writes into its ring: integers only, a few records a step."""

from collections.abc import Callable, Sequence

from perfledger.instrumented_runtime.records import (
    NOT_READ,
    SHARD_IO,
    TRAIN_PART,
    TRAIN_PARTS,
    TRAIN_STEP,
    ShardMoved,
    TrainPart,
    TrainStep,
)
from perfledger.instrumented_runtime.training.messages import StepDone
from perfledger.instrumented_runtime.training.traffic import WHOLE_BATCH, Part

_PART_CODES = {name: code for code, name in enumerate(TRAIN_PARTS)}


class TrainRecorder:
    """Writes records.py tuples with `write(kind, fields)`. Times are monotonic ns."""

    def __init__(self, write: Callable[[int, tuple[int, ...]], None]) -> None:
        self._write = write

    def step(self, done: StepDone, parts: Sequence[Part], tokens: int) -> None:
        """A step has ended, and these parts of it before."""
        for part in parts:
            number = NOT_READ if part.microbatch == WHOLE_BATCH else part.microbatch
            code = _PART_CODES[part.name]
            self._write(
                TRAIN_PART, TrainPart(done.number, code, number, part.start_ns, part.end_ns)
            )
        self._write(
            TRAIN_STEP,
            TrainStep(
                seq=done.number,
                start_ns=done.start_ns,
                end_ns=done.end_ns,
                loss_millionths=NOT_READ if done.loss is None else round(done.loss * 1e6),
                tokens=tokens,
                parameter_bytes=done.held.parameters,
                gradient_bytes=done.held.gradients,
                optimizer_bytes=done.held.optimizer,
                full_peak_bytes=done.held.full_peak,
                full_left_bytes=done.held.full_left,
                memory_bytes=done.held.process,
                observed=int(done.traffic is not None),
            ),
        )

    def shard(self, moved: ShardMoved) -> None:
        """The rank's shard of a checkpoint was saved or loaded."""
        self._write(SHARD_IO, moved)
