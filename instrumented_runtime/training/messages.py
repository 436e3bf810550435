"""What the ranks of a training run tell the process that started them. Monotonic ns."""

from dataclasses import dataclass
from typing import NamedTuple

from perfledger.instrumented_runtime.records import ShardMoved
from perfledger.instrumented_runtime.training.traffic import Traffic
from perfledger.schema.errors import PerfledgerError


@dataclass(frozen=True, slots=True)
class HeldBytes:
    """Bytes that a rank holds when a step has ended."""

    parameters: int  # its shard of them
    gradients: int  # before they were dropped for the next step
    optimizer: int
    full_peak: int  # full copies of sharded parameters: the most seen at one time in the step
    full_left: int  # those still held at the step's end; 0 where all were freed
    process: int  # on CUDA the device memory's peak in the step, else resident memory


class Joined(NamedTuple):
    """A rank has met all others and holds its part of the model."""

    rank: int
    process: int  # its number in the system
    device: str
    backend: str  # gloo, nccl, or "none" of a single rank
    parameters: int  # elements of its shard
    threads: int


class StepDone(NamedTuple):
    """A rank has ended a step."""

    rank: int
    number: int  # from 0
    start_ns: int
    end_ns: int
    loss: float | None  # mean over its tokens; None where another pipeline stage has it
    held: HeldBytes
    traffic: tuple[Traffic, ...] | None  # None: the step was not observed


class Finished(NamedTuple):
    """A rank has ended all steps, and what it sent to gather the whole model, if it did."""

    rank: int
    saved: tuple[Traffic, ...]


class RankFailed(NamedTuple):
    """A rank cannot go on."""

    rank: int
    what: str
    misused: bool  # it could never work as asked
    unexpected: bool  # an error that nobody foresaw: its process has printed the trace
    effect: bool = False  # of what failed on another rank


class PeerDidNotSaveError(PerfledgerError):
    """Another rank could not save its shard; it says itself why."""


Message = Joined | StepDone | ShardMoved | Finished | RankFailed
