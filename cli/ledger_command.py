"""`perfledger ledger`: what moved over each edge of the hierarchy, and how near its ceiling."""

import argparse
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from perfledger.output import add_json, print_json
from perfledger.schema.edges import EDGE
from perfledger.schema.errors import PartialInputError, UsageError
from perfledger.selection import add_selection, add_store, selected

if TYPE_CHECKING:
    from perfledger.analyzers.edges import EdgeLedger
    from perfledger.analyzers.energy import Energy

EXAMPLES = """\
examples:
  perfledger ledger --from -15m
  perfledger ledger --service my-llm --edge scale_up
  perfledger ledger --run demo-1 --ceilings datasheet
  perfledger ledger --run demo-1 --page ledger.html
  perfledger ledger --json | jq '.edges[] | {edge, provenance, ceiling}'

Bytes are measured (a counter or a span of the thing itself), derived (exact integers from the
model's shapes and the batch: what operators ask for) or not observable (and why). Ceilings come
from `perfledger ceilings`, measured on the selection's own host; those of another host are refused.
--json has every number, with its definition, under selection, edges, nodes, roofline, nearest,
unranked, ceilings, energy, losses and definitions. Bytes are powers of 10 (GB), working sets powers
of 2 (MiB).

exit code 3: telemetry was lost; what was found is printed. exit code 4: nothing matches.
exit code 5: the ceilings are of another host."""


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add `ledger`."""
    parser = commands.add_parser(
        "ledger",
        help="what moved over each edge, how near its ceiling, who contends",
        description="Say what moved over each edge of the memory hierarchy, how near each is to\n"
        "its ceiling, who contends for it, and what that rests on.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_store(parser)
    add_selection(parser)
    parser.add_argument("--replica", default="", metavar="N", help="only this engine replica")
    parser.add_argument(
        "--ceilings",
        default="measured",
        metavar="WHICH",
        help="measured, datasheet, or the run id of one measurement (default measured)",
    )
    parser.add_argument(
        "--edge",
        choices=list(EDGE),
        metavar="NAME",
        help=f"show all that is known of one edge: {', '.join(EDGE)}",
    )
    parser.add_argument(
        "--page", type=Path, metavar="FILE", help="write a page with the pictures as well (HTML)"
    )
    add_json(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Print it. Raises NoDataError on nothing, PartialInputError where something is lost."""
    from perfledger.analyzers.edge_ledger import edge_ledger
    from perfledger.analyzers.energy import energy_of
    from perfledger.ledger_summary import print_edge, print_ledger

    selection = selected(args)
    found = edge_ledger(selection, args.ceilings)
    energy = energy_of(selection)
    if args.page:
        _write_page(args.page, found, energy)
    if args.json:
        print_json(as_json(found, energy))
    elif args.edge:
        print_edge(found, args.edge)
    else:
        print_ledger(found, energy)
    if found.losses:
        raise PartialInputError("; ".join(found.losses), fix="see losses in --json")
    return 0


def _write_page(page: Path, found: "EdgeLedger", energy: "Energy") -> None:
    from perfledger.dashboards.report import render_ledger

    if page.is_dir():
        raise UsageError(f"{page} is a folder", fix=f"name a file: {page / 'ledger.html'}")
    page.parent.mkdir(parents=True, exist_ok=True)
    page.write_text(render_ledger(found, energy))


def as_json(found: "EdgeLedger", energy: "Energy") -> dict[str, object]:
    """Return what `--json` prints: bytes, FLOPs and ns as integers, and their definitions."""
    from perfledger.analyzers import edge_ledger
    from perfledger.analyzers import energy as joules

    return {
        **asdict(found),
        "energy": asdict(energy),
        "definitions": {
            "ledger": dict(edge_ledger.DEFINITIONS),
            "energy": dict(joules.DEFINITIONS),
        },
    }
