"""Which checkpoints a training run may load, and where it starts. Nothing here needs torch."""

import hashlib
import json
from dataclasses import asdict, dataclass
from pathlib import Path

from perfledger.instrumented_runtime.checkpoints.sharded import (
    Identity,
    check_identity,
    newest_good,
    steps,
    verify,
)
from perfledger.instrumented_runtime.runtime_version import runtime_version
from perfledger.instrumented_runtime.training.options import NEWEST, TrainOptions
from perfledger.schema.errors import UsageError


@dataclass(frozen=True, slots=True)
class Start:
    """Where a run starts. `passed_over` says of each newer checkpoint why it was not loaded."""

    step: int  # steps that are done already
    passed_over: tuple[str, ...] = ()


def identity_of(options: TrainOptions) -> Identity:
    """Return what a checkpoint must agree with: the model's shape and its optimizer, the layout
    and the runtime. Seed and text are not part of it: who changes them trains on other text."""
    described = {"parameters": "float32", "optimizer": "adamw", **asdict(options.shape)}
    digest = hashlib.sha256(json.dumps(described, sort_keys=True).encode()).hexdigest()
    return Identity(
        model_hash=f"{options.size_name}:{digest[:16]}",
        runtime_version=runtime_version(),
        layout=str(options.layout),
        ranks=options.layout.world,
    )


def find_start(options: TrainOptions) -> Start:
    """Return where to start, after every byte of the checkpoint was checked.

    Raises CheckpointError naming the shard where the checkpoint asked for, or the only one, is
    damaged, or what of it is not this run's; NoDataError without any; UsageError where a new run
    would be written among the checkpoints of an old one, or nothing is left to do.
    """
    folder = Path(options.checkpoint)
    if options.resume is None:
        if options.checkpoint and (found := steps(folder)):
            raise UsageError(
                f"a run has left checkpoints there, up to step {found[-1]}",
                where=options.checkpoint,
                fix="--resume to go on with it, or another folder",
            )
        return Start(0)
    if options.resume == NEWEST:
        manifest, errors = newest_good(folder)
    else:
        manifest, errors = verify(folder, options.resume), []
    check_identity(manifest, identity_of(options), folder)
    if manifest.step >= options.steps:
        raise UsageError(
            f"{manifest.step} of {options.steps} steps are done already",
            where=options.checkpoint,
            fix=f"--steps {manifest.step + options.steps}",
        )
    return Start(manifest.step, tuple(str(error) for error in errors))
