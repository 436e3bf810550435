"""`perfledger demo`: serve real weights, load them, say where the time went, and test one cause."""

import argparse
import signal
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from perfledger.output import add_json, print_json
from perfledger.progress import progress

if TYPE_CHECKING:
    from perfledger.rerun import RerunResult

EXAMPLES = """\
examples:
  perfledger demo
  perfledger demo --workload trace.csv --store ./my-demo
  perfledger demo --model reference --no-rerun

It serves SmolLM2-135M-Instruct, asks it one question, replays a workload scaled to this machine,
and prints where the time of its requests went. Then it reruns a small model with 2 and with 8
slots, in random order, and says whether slots were the cause of waiting. Everything is kept in the
store, with a report page and a Perfetto trace beside it. Ctrl-C stops all that it started."""

REPORT_FILE, TRACE_FILE = "report.html", "trace.json"


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add `demo`."""
    parser = commands.add_parser(
        "demo",
        help="all of it on this machine, in minutes",
        description=__doc__,
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--workload", type=Path, metavar="FILE", help="replay it (default: generate azure-code)"
    )
    parser.add_argument(
        "--store", default="./perfledger-demo", metavar="DIR", help="default %(default)s"
    )
    parser.add_argument("--namespace", default="default", help="part of the store")
    parser.add_argument("--model", default="smollm2", help="as in `serve` (default %(default)s)")
    parser.add_argument(
        "--requests", type=int, default=40, help="at most so many (default %(default)s)"
    )
    parser.add_argument(
        "--pairs", type=int, default=8, help="pairs of runs of the rerun (default %(default)s)"
    )
    parser.add_argument("--no-rerun", action="store_true", help="leave the rerun out")
    add_json(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Run the demo; 0 for any verdict, the code of the error otherwise."""
    from perfledger import analyzers
    from perfledger.analyzers.attribution import attribute
    from perfledger.attribute_command import as_json, require_whole
    from perfledger.attribution_summary import print_attribution
    from perfledger.demo import DemoSettings, serve_and_load
    from perfledger.report import write_report
    from perfledger.rerun_command import print_result

    signal.signal(signal.SIGTERM, signal.default_int_handler)  # ends the children as Ctrl-C does
    settings = DemoSettings(args.store, args.namespace, args.model, args.requests, args.workload)
    quiet = args.json
    say = _hush if quiet else _say
    steps = 3 if args.no_rerun else 4
    say(f"1/{steps} serve {settings.model} and replay a workload, all of it traced")
    served = serve_and_load(settings, say, progress)
    say(f"\n2/{steps} where the time went (run {served.run_id})\n")
    selection = analyzers.open(args.store, args.namespace).where(
        run=served.run_id, from_ns=served.measured_from_ns
    )
    found = attribute(selection)
    if not quiet:
        print_attribution(found)
    result = None if args.no_rerun else _rerun(args, say)
    if result and not quiet:
        print_result(result)
    say(f"\n{steps}/{steps} to look at")
    report, trace = Path(args.store) / REPORT_FILE, Path(args.store) / TRACE_FILE
    write_report(selection, found, result, report, trace)
    say(f"  report  {report}\n  trace   {trace}  (open it in ui.perfetto.dev)")
    if quiet:
        said = {"run_id": served.run_id, "answer": served.probe.answer}
        parts = {"attribution": as_json(found), "rerun": result.as_json() if result else None}
        print_json({**said, **parts, "report": str(report), "trace": str(trace)})
    return require_whole(found.completeness)


def _rerun(args: argparse.Namespace, say: Callable[[str], None]) -> "RerunResult":
    from perfledger.rerun import RerunSettings, rerun

    say(f"\n3/4 are there too few slots? {args.pairs} pairs of runs, one variable changes\n")
    settings = RerunSettings("max_num_seqs", (2, 8), args.store, args.namespace, args.pairs)
    with progress(2 * args.pairs, "rerun") as advance:
        return rerun(settings, lambda done, total: advance())


def _say(text: str) -> None:
    print(text, flush=True)


def _hush(text: str) -> None:
    del text
