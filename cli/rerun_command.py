"""`perfledger rerun`: change one variable, run in randomised pairs, and say what that shows."""

import argparse
import signal
import textwrap
from math import expm1
from pathlib import Path
from typing import TYPE_CHECKING

from perfledger.output import WIDTH, add_json, print_json, print_table
from perfledger.progress import progress
from perfledger.schema.errors import UsageError
from perfledger.selection import add_store

if TYPE_CHECKING:
    from perfledger.analyzers.experiments.verdict import Evidence
    from perfledger.rerun import RerunResult

EXAMPLES = """\
examples:
  perfledger rerun --variable max_num_seqs --levels 2,8
  perfledger rerun --variable max_num_seqs --levels 2,8 --pairs 10 --model reference
  perfledger rerun --variable threads --levels 1,2 --requests 48 --json

Each run is a fresh server under the same load; the order within each pair is drawn from --seed.
The verdict is supported, refuted or inconclusive, always with what would decide it. Without an
A/A gate of this machine, wall time is shown but decides nothing. Exit code 0 for any verdict, 5 if
runs differ in more than the variable, 1 if runs failed."""

_LABEL_WIDTH = 14
_UNITS = ((1e9, "s"), (1e6, "ms"), (1e3, "us"), (1.0, "ns"))


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add `rerun`."""
    parser = commands.add_parser(
        "rerun",
        help="test a suspicion: change one variable, in pairs of runs",
        description=__doc__,
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    what = parser.add_argument_group("experiment")
    what.add_argument(
        "--variable",
        default="max_num_seqs",
        metavar="NAME",
        help="max_num_seqs, max_num_batched_tokens, block_size or threads (default %(default)s)",
    )
    what.add_argument(
        "--levels", default="2,8", metavar="A,B", help="its two values (default %(default)s)"
    )
    what.add_argument("--pairs", type=int, default=8, help="8 or more (default %(default)s)")
    what.add_argument("--seed", type=int, default=0, help="of order and prompts (default 0)")
    under = parser.add_argument_group("under test")
    under.add_argument(
        "--model", default="reference-small", help="as in `serve` (default %(default)s)"
    )
    under.add_argument(
        "--threads", type=int, default=0, help="torch threads, 0 takes one a core (default 0)"
    )
    under.add_argument(
        "--requests", type=int, default=24, help="requests in each run (default %(default)s)"
    )
    under.add_argument(
        "--workload", type=Path, metavar="FILE", help="take them from a file (default: a burst)"
    )
    add_store(parser)
    add_json(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Run the experiment and print the verdict; 0 for any verdict."""
    from perfledger.rerun import RerunSettings, rerun

    settings = RerunSettings(
        variable=args.variable,
        levels=_levels(args.levels),
        store=args.store,
        namespace=args.namespace,
        pairs=args.pairs,
        model=args.model,
        requests=args.requests,
        workload=args.workload,
        fixed={"threads": args.threads} if args.threads else {},
        seed=args.seed,
    )
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # ends the children as Ctrl-C does
    with progress(2 * settings.pairs, f"rerun {args.variable} {args.levels}") as advance:
        result = rerun(settings, lambda done, total: advance())
    if args.json:
        print_json(result.as_json())
    else:
        print_result(result)
    return 0


def print_result(result: "RerunResult") -> None:
    """Print evidence and verdict within 80 columns."""
    verdict, (low, high) = result.verdict, result.plan.levels
    requests = result.pairs[0].a.work.requests if result.pairs[0].a.work else 0
    title = (
        f"{result.plan.variable} {low} against {high}, {result.settings.model}, {requests}"
        f" requests a run, {verdict.pairs_used} of {len(result.pairs)} pairs count"
    )
    columns = ("metric, median of runs", f"at {low}", f"at {high}", "change, % (95 %)", "p", "MDE")
    print_table(title, columns, [_evidence_row(row) for row in verdict.evidence])
    judged = [row for row in verdict.evidence if row.role != "exploratory"]
    if judged:
        print()
        rows = [(row.metric.name, _predicted(row), row.result) for row in judged]
        print_table("", ("metric", "predicted", "result"), rows)
    print()
    for label, text in _said(result):
        print(_hanging(label, text))


def _said(result: "RerunResult") -> list[tuple[str, str]]:
    """Return the labelled lines below the tables."""
    verdict, comparison = result.verdict, result.comparison
    said = [("verdict", f"{verdict.outcome.upper()}: {verdict.reason}")]
    if result.hypothesis:
        said.append(("hypothesis", result.hypothesis.claim))
        seen = {True: "seen", False: "not seen", None: "cannot be told"}[result.symptom]
        at = f"{result.plan.variable} {result.plan.levels[0]}"
        said.append(("symptom", f"{seen} at {at}"))
    said.append(("decided on", verdict.basis))
    if comparison and comparison.unknown:
        unknown = ", ".join(comparison.unknown)
        said.append(("confidence", f"{comparison.confidence}; unknown in all runs: {unknown}"))
    said += [("left out", f"pair {index + 1}: {why}") for index, why in verdict.excluded]
    said += [("would decide", text) for text in verdict.would_decide]
    kept = f"{result.run_id}, its runs and their spans in {result.settings.store}"
    return [*said, ("kept", kept)]


def _evidence_row(row: "Evidence") -> tuple[str, ...]:
    effect = row.effect
    change = f"{_percent(expm1(effect.estimate))} "
    if row.exact:
        change += "(exact)"
    else:
        low, high = (
            expm1(x) if x < 700 else x for x in (effect.interval.low, effect.interval.high)
        )
        change += f"({_percent(low)} to {_percent(high)})"
    p = "" if row.exact else f"{effect.p:.3f}"
    smallest = "" if row.exact else _percent(expm1(effect.minimum_detectable))
    values = (_value(row.a, row.metric.unit), _value(row.b, row.metric.unit))
    return (row.metric.name, *values, change, p, smallest.lstrip("+"))


def _predicted(row: "Evidence") -> str:
    return str(row.predicted) if row.predicted else "stays"


def _value(value: float, unit: str) -> str:
    if unit != "ns":
        return f"{value:.3g}"
    factor, name = next((f, n) for f, n in _UNITS if value >= f or n == "ns")
    return f"{value / factor:.3g} {name}"


def _percent(share: float) -> str:
    if share > 99:
        return "+∞" if share == float("inf") else f"x{share + 1:.0f}"
    return f"{100 * share:+.0f}" if abs(share) >= 0.1 else f"{100 * share:+.1f}"


def _hanging(label: str, text: str) -> str:
    lines = textwrap.wrap(text, WIDTH - _LABEL_WIDTH) or [""]
    indent = "\n" + " " * _LABEL_WIDTH
    return label.ljust(_LABEL_WIDTH) + indent.join(lines)


def _levels(text: str) -> tuple[int, int]:
    try:
        low, high = (int(part) for part in text.split(","))
    except ValueError:
        raise UsageError(f"not two levels: {text!r}", fix="--levels 2,8") from None
    return low, high
