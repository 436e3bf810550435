"""`perfledger report`: a page for people and a trace for ui.perfetto.dev, from a store."""

import argparse
from pathlib import Path

from perfledger.output import add_json, print_json
from perfledger.schema.errors import UsageError
from perfledger.selection import add_selection, add_store, selected

EXAMPLES = """\
examples:
  perfledger report --store ./perfledger-demo
  perfledger report --service my-service --from -15m --output incident.html
  perfledger report --run demo-1a2b3c4d --output run.html --trace run.json

The page needs neither network nor script. The trace opens in ui.perfetto.dev."""


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add `report`."""
    parser = commands.add_parser(
        "report",
        help="write a report page and a Perfetto trace",
        description=__doc__,
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--output", type=Path, default=Path("report.html"), metavar="FILE", help="the page"
    )
    parser.add_argument(
        "--trace", type=Path, metavar="FILE", help="the trace (default: trace.json beside the page)"
    )
    add_store(parser)
    add_selection(parser)
    add_json(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Write both files; 4 where no request matches."""
    from perfledger.analyzers.attribution import attribute
    from perfledger.report import write_report

    trace = args.trace or args.output.with_name("trace.json")
    for path in (args.output, trace):
        if path.is_dir():
            raise UsageError(f"{path} is a folder", fix=f"name a file: {path / 'report.html'}")
    selection = selected(args)
    found = attribute(selection)
    traced = write_report(selection, found, None, args.output, trace)
    if args.json:
        counts = {"requests": len(found.requests), "traced_requests": traced}
        print_json({"report": str(args.output), "trace": str(trace), **counts})
    else:
        print(f"report  {args.output}  ({len(found.requests)} requests)")
        print(f"trace   {trace}  ({traced} requests)")
    return 0
