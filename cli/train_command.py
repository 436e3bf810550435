"""`perfledger train`: a few training steps over several processes, every collective recorded."""

import argparse
import importlib.util
import signal
import sys
from dataclasses import replace
from types import FrameType
from typing import TYPE_CHECKING

from perfledger.flag_types import integer
from perfledger.instrumented_runtime.parallel.layout import DIMENSIONS, Layout
from perfledger.instrumented_runtime.training.options import (
    NEWEST,
    SCHEDULES,
    TrainOptions,
    check,
)
from perfledger.instrumented_runtime.training.resuming import find_start
from perfledger.instrumented_runtime.training.shapes import SHAPES
from perfledger.output import add_json, print_json
from perfledger.progress import progress
from perfledger.schema.errors import PerfledgerError, UsageError
from perfledger.train_summary import as_json, print_start, print_summary

if TYPE_CHECKING:
    from perfledger.instrumented_runtime.training.launcher import TrainRun

DEFAULTS = TrainOptions()
INTERRUPTED = 130  # as a shell names the end by Ctrl-C
EXAMPLES = """\
examples:
  perfledger train --steps 5                        one process
  perfledger train --dp 2                           gradients averaged by DDP
  perfledger train --fsdp 2 --tp 2                  four processes, parameters sharded twice
  perfledger train --tp 2 --pp 2 --schedule gpipe --microbatches 4
  perfledger train --dp 2 --ep 2 --json             experts dealt out over two ranks
  perfledger train --fsdp 2 --checkpoint saved --checkpoint-every 5 --resume

Each dimension works alone, and together tp with pp, fsdp with tp, dp with ep.
Telemetry goes to OTEL_EXPORTER_OTLP_ENDPOINT (default http://localhost:4317, where
`perfledger collect` listens): a span train_step for each rank and step, with its parts and its
collectives as children. Ctrl-C ends the run and shows the steps so far."""
_MEANINGS = {
    "pp": "pipeline stages",
    "dp": "copies of the model, each with its share of the sequences (DDP)",
    "fsdp": "shards of every parameter (fully_shard)",
    "cp": "pieces of every sequence (ring attention)",
    "ep": "shares of the experts (all-to-all)",
    "tp": "shards of every matrix (columns, then rows)",
}


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add `train`."""
    parser = commands.add_parser(
        "train",
        help="train a small model over several processes",
        description=__doc__,
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    _add_layout(parser.add_argument_group("layout (processes: the product)"))
    _add_work(parser.add_argument_group("work"))
    _add_checkpoints(parser.add_argument_group("checkpoints"))
    _add_processes(parser.add_argument_group("processes"))
    _add_telemetry(parser.add_argument_group("telemetry"))
    add_json(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Train. Raises UsageError before anything is started where the options cannot be."""
    if importlib.util.find_spec("torch") is None:
        raise UsageError("training needs torch", fix="pip install 'perfledger[runtime]'")
    from perfledger.instrumented_runtime.training.launcher import TrainRun, launch

    options = options_of(args)
    check(options)
    start = find_start(options)
    options = replace(options, first_step=start.step)
    signal.signal(signal.SIGTERM, _interrupt)
    train_run = TrainRun(options, passed_over=start.passed_over)
    for why in start.passed_over:
        print(f"perfledger: a newer checkpoint was passed over: {why}", file=sys.stderr)
    try:
        with progress(options.steps - start.step, "steps") as advance:
            launch(train_run, lambda: None if args.json else print_start(train_run), advance)
    except KeyboardInterrupt:
        print("perfledger: interrupted: the steps so far", file=sys.stderr)
        _show(train_run, args.json)
        return INTERRUPTED
    except PerfledgerError:
        _show(train_run, args.json)
        raise
    _show(train_run, args.json)
    return 0


def options_of(args: argparse.Namespace) -> TrainOptions:
    """Return the options that the flags say."""
    return TrainOptions(
        layout=Layout(**{name: getattr(args, name) for name in DIMENSIONS}),
        model_size=args.model_size,
        schedule=args.schedule,
        microbatches=args.microbatches,
        steps=args.steps,
        batch=args.batch,
        sequence=args.sequence,
        learning_rate=args.learning_rate,
        seed=args.seed,
        device=args.device,
        threads=args.threads,
        observe=args.observe,
        join_timeout_s=args.join_timeout,
        step_timeout_s=args.step_timeout,
        save=args.save,
        checkpoint=args.checkpoint,
        checkpoint_every=args.checkpoint_every,
        resume=args.resume,
        run_id=args.run_id,
        service_name=args.service_name,
        telemetry=not args.no_telemetry,
    )


def _show(train_run: "TrainRun", json: bool) -> None:
    if json:
        print_json(as_json(train_run))
    elif train_run.complete_steps():
        print_summary(train_run)


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def _add_layout(group: "argparse._ArgumentGroup") -> None:
    for name in ("dp", "fsdp", "tp", "pp", "cp", "ep"):
        group.add_argument(
            f"--{name}",
            type=integer(1, 64),
            default=1,
            metavar="N",
            help=f"{_MEANINGS[name]} (default 1)",
        )


def _add_work(group: "argparse._ArgumentGroup") -> None:
    group.add_argument(
        "--model-size",
        default=DEFAULTS.model_size,
        choices=tuple(SHAPES),
        metavar="NAME",
        help=f"{', '.join(SHAPES)} (default reference-small, with --ep reference-small-moe)",
    )
    group.add_argument(
        "--schedule",
        choices=SCHEDULES,
        default=DEFAULTS.schedule,
        help="of the pipeline (default %(default)s)",
    )
    for flag, low, default, meaning in (
        ("--microbatches", 0, DEFAULTS.microbatches, "pieces of a batch, 0: two a pipeline stage"),
        ("--steps", 1, DEFAULTS.steps, "training steps"),
        ("--batch", 1, DEFAULTS.batch, "sequences in a step, over all processes"),
        ("--sequence", 2, DEFAULTS.sequence, "tokens in a sequence"),
        ("--seed", 0, DEFAULTS.seed, "of weights and text"),
    ):
        _add_integer(group, flag, low, default, meaning)
    group.add_argument(
        "--learning-rate",
        type=float,
        default=DEFAULTS.learning_rate,
        metavar="X",
        help="of AdamW (default %(default)s)",
    )
    group.add_argument(
        "--save", default="", metavar="FILE", help="write the whole model (safetensors)"
    )


def _add_checkpoints(group: "argparse._ArgumentGroup") -> None:
    group.add_argument(
        "--checkpoint", default="", metavar="FOLDER", help="each rank saves its shard there"
    )
    _add_integer(group, "--checkpoint-every", 0, 0, "after every N steps, 0: at the end only")
    group.add_argument(
        "--resume",
        nargs="?",
        type=_checkpoint_step,
        const=NEWEST,
        metavar="STEP",
        help="go on at the checkpoint of that step, or at the newest good one (newest)",
    )


def _add_processes(group: "argparse._ArgumentGroup") -> None:
    group.add_argument(
        "--device", choices=("auto", "cpu", "cuda"), default=DEFAULTS.device, help="auto, cpu, cuda"
    )
    _add_integer(group, "--threads", 0, DEFAULTS.threads, "torch threads of each, 0: shares cores")
    _add_seconds(group, "--join-timeout", DEFAULTS.join_timeout_s, "for all to meet")
    _add_seconds(group, "--step-timeout", DEFAULTS.step_timeout_s, "without a word of any of them")


def _add_telemetry(group: "argparse._ArgumentGroup") -> None:
    _add_integer(
        group, "--observe", 0, DEFAULTS.observe, "observe collectives every N steps, 0: never"
    )
    group.add_argument("--run-id", default="", metavar="ID", help="run that the spans belong to")
    group.add_argument(
        "--service-name",
        default=DEFAULTS.service_name,
        metavar="NAME",
        help="service.name of the telemetry (default %(default)s)",
    )
    group.add_argument("--no-telemetry", action="store_true", help="send nothing")


def _add_integer(
    group: "argparse._ArgumentGroup", flag: str, low: int, default: int, meaning: str
) -> None:
    group.add_argument(
        flag,
        type=integer(low, 2**31 - 1),
        default=default,
        metavar="N",
        help=f"{meaning} (default {default})",
    )


def _add_seconds(group: "argparse._ArgumentGroup", flag: str, default: float, meaning: str) -> None:
    group.add_argument(
        flag, type=_seconds, default=default, metavar="S", help=f"{meaning} (default {default:.0f})"
    )


def _checkpoint_step(text: str) -> int:
    """Parse a step; "newest" is for settings, which cannot be a flag without a value."""
    return NEWEST if text == "newest" else integer(1, 2**31 - 1)(text)


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds") from None
    if not 0 < value <= 86_400:
        raise argparse.ArgumentTypeError(f"{text} is not between 0 and 86400 seconds")
    return value
