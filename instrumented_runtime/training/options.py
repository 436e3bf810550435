"""What `perfledger train` is asked to do, and what of it cannot be."""

import os
from dataclasses import dataclass, field
from pathlib import Path

from perfledger.instrumented_runtime.parallel.layout import Layout
from perfledger.instrumented_runtime.training.shapes import ModelShape, shape_named
from perfledger.schema.errors import UsageError

SCHEDULES = ("1f1b", "gpipe")
# Each dimension works alone, and in these pairs.
PAIRS = (frozenset({"tp", "pp"}), frozenset({"fsdp", "tp"}), frozenset({"dp", "ep"}))
MAX_WORLD = 64
MAX_TOKENS = 16 * 1024 * 1024  # of one step
NEWEST = -1  # in the place of a step to resume at
DATA_DIMENSIONS = ("dp", "fsdp", "ep")  # whose ranks see different sequences


@dataclass(frozen=True)
class TrainOptions:
    """Options of `perfledger train`; the command line's help is made of the same words."""

    layout: Layout = field(default_factory=Layout)
    model_size: str = ""  # a name in SHAPES; empty: reference-small, its -moe with experts
    schedule: str = "1f1b"  # 1f1b, gpipe: of the pipeline
    microbatches: int = 0  # pieces of a rank's batch in the pipeline; 0: two a stage
    steps: int = 10
    batch: int = 8  # sequences in a step, over all ranks
    sequence: int = 64  # tokens in a sequence
    learning_rate: float = 3e-3
    seed: int = 0
    device: str = "auto"  # auto, cpu, cuda
    threads: int = 0  # torch threads of each rank; 0 shares the cores
    observe: int = 1  # every so many steps the collectives are observed; 0: never
    join_timeout_s: float = 60.0  # for all ranks to meet
    step_timeout_s: float = 300.0  # without a sign of a rank before the run is given up
    save: str = ""  # file for the whole model's parameters (safetensors)
    checkpoint: str = ""  # folder of the checkpoints; empty: none
    checkpoint_every: int = 0  # steps; 0: at the end only
    resume: int | None = None  # step of the checkpoint to go on with; NEWEST: the newest good one
    first_step: int = 0  # steps that were done before this run
    run_id: str = ""  # resource attribute perfledger.run.id
    service_name: str = "perfledger-train"
    telemetry: bool = True
    ring_slots: int = 65_536

    @property
    def shape(self) -> ModelShape:
        """The model's sizes. Raises UsageError for a name that is none."""
        return shape_named(self.size_name)

    @property
    def size_name(self) -> str:
        """Name of the model's sizes."""
        default = "reference-small-moe" if self.layout.ep > 1 else "reference-small"
        return self.model_size or default

    @property
    def data_parallel(self) -> int:
        """How many shares the sequences of a step are cut into."""
        return self.layout.dp * self.layout.fsdp * self.layout.ep

    @property
    def pieces(self) -> int:
        """Microbatches of a rank's share in one step."""
        return self.microbatches or (2 * self.layout.pp if self.layout.pp > 1 else 1)


def check(options: TrainOptions) -> None:
    """Raise UsageError for what can never work: an unknown name, sizes that do not divide."""
    _check_ranges(options)
    _check_combination(options)
    _check_divisions(options)
    _check_checkpoints(options)


def _check_ranges(options: TrainOptions) -> None:
    for name, low in (("steps", 1), ("batch", 1), ("sequence", 2), ("microbatches", 0)):
        if getattr(options, name) < low:
            raise UsageError(f"{name} is {getattr(options, name)}, but must be at least {low}")
    if options.observe < 0 or options.threads < 0:
        raise UsageError("observe and threads must be at least 0")
    if not 0 < options.learning_rate < 1:
        raise UsageError(f"learning_rate is {options.learning_rate}, but must be within (0, 1)")
    if options.batch * options.sequence > MAX_TOKENS:
        raise UsageError(f"a step of more than {MAX_TOKENS} tokens does not fit")
    if options.schedule not in SCHEDULES:
        raise UsageError(f"{options.schedule!r} is not a schedule", fix=", ".join(SCHEDULES))
    if options.save and not _can_be_written(Path(options.save).resolve()):
        raise UsageError("cannot write the whole model there", where=options.save)
    if options.layout.world > MAX_WORLD:
        raise UsageError(f"{options.layout.world} ranks are more than {MAX_WORLD}")


def _can_be_written(file: Path) -> bool:
    return not file.is_dir() and os.access(file.parent, os.W_OK)


def _check_combination(options: TrainOptions) -> None:
    used = frozenset(options.layout.used())
    if len(used) > 1 and used not in PAIRS:
        raise UsageError(
            f"the combination {options.layout} is not one that this trains",
            fix="one dimension, or " + ", ".join(" with ".join(sorted(pair)) for pair in PAIRS),
        )
    if options.microbatches > 1 and options.layout.pp == 1:
        raise UsageError("microbatches are pieces of a pipeline's batch", fix="--pp 2")
    if options.layout.ep > 1 and not options.shape.experts:
        raise UsageError(f"{options.size_name} has no experts to spread", fix="its -moe shape")
    if options.shape.experts and used - {"dp", "ep"}:
        raise UsageError(
            f"a model with experts trains over dp and ep only, not {options.layout}",
            fix=options.size_name.removesuffix("-moe"),
        )


def _check_divisions(options: TrainOptions) -> None:
    shape, layout = options.shape, options.layout
    share = options.data_parallel * options.pieces
    for what, size, parts, ranks in (
        ("query heads", shape.heads, layout.tp, "tensor-parallel ranks"),
        ("KV heads", shape.kv_heads, layout.tp, "tensor-parallel ranks"),
        ("feed-forward columns", shape.intermediate_size, layout.tp, "tensor-parallel ranks"),
        ("experts", shape.experts, layout.ep, "expert-parallel ranks"),
        ("sequences of a step", options.batch, share, "data shares times microbatches"),
    ):
        if size % parts:
            raise UsageError(f"{size} {what} do not divide among {parts} {ranks}")
    if layout.cp > 1 and options.sequence % (2 * layout.cp):
        raise UsageError(
            f"{options.sequence} tokens of a sequence do not divide into two pieces for each of"
            f" {layout.cp} context-parallel ranks"
        )
    if layout.pp > shape.layers:
        raise UsageError(f"{shape.layers} layers do not fill {layout.pp} pipeline stages")
    if layout.pp > 1 and options.pieces < layout.pp and options.schedule == "1f1b":
        raise UsageError(
            f"1f1b needs a microbatch for each of {layout.pp} stages, not {options.pieces}"
        )


def _check_checkpoints(options: TrainOptions) -> None:
    if options.checkpoint_every < 0:
        raise UsageError("checkpoint_every must be at least 0")
    if not options.checkpoint:
        if options.checkpoint_every or options.resume is not None:
            raise UsageError("the folder of the checkpoints is missing", fix="--checkpoint FOLDER")
        return
    folder = Path(options.checkpoint)
    there = next(place for place in (folder, *folder.resolve().parents) if place.exists())
    if not there.is_dir() or not os.access(there, os.W_OK):
        raise UsageError("cannot write checkpoints there", where=options.checkpoint)
