"""`perfledger attribute`: which stage the time of each request went to."""

import argparse
from dataclasses import asdict
from typing import TYPE_CHECKING

from perfledger.attribution_summary import print_attribution, print_slowest
from perfledger.output import add_json, print_json
from perfledger.schema.errors import PartialInputError
from perfledger.selection import add_selection, add_store, selected

if TYPE_CHECKING:
    import polars as pl

    from perfledger.analyzers.attribution import Attribution
    from perfledger.analyzers.completeness import Completeness
    from perfledger.analyzers.ledger import Selection

BANDS = ("p50", "p95", "p99")
LINES_AT_ONCE = 10_000
EXAMPLES = """\
examples:
  perfledger attribute --from -15m
  perfledger attribute --service my-llm --from 2026-01-31T12:00:00Z --to 2026-01-31T13:00:00Z
  perfledger attribute --run demo-1 --band p99
  perfledger attribute --service my-llm --from -15m --replica 1
  perfledger attribute --per-request --jsonl > requests.jsonl
  perfledger attribute --json | jq .bands.p95.stages_ns.queue

Every ns of a request belongs to one stage; the stages of a request add up to its time. Requests
are ranked by time from arrival to end: band p50 is the 45th to 55th percentile, p95 the slowest
5 %, p99 the slowest 1 %. --json has the same numbers in ns, each with its definition, under
requests, statuses, longest_of_requests, longest_by_status, bands, latency, client, completeness,
losses and definitions.

exit code 3: telemetry was lost or sampled away, or stored rows differ from their spans; what was
found is printed. exit code 4: no request matches, or all were sampled away."""


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add `attribute`."""
    parser = commands.add_parser(
        "attribute",
        help="which stage the time of each request went to",
        description="Say which stage the time of each request went to, and what the tail waits on.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_store(parser)
    add_selection(parser)
    parser.add_argument(
        "--replica", default="", metavar="N", help="only requests that this replica answered"
    )
    parser.add_argument(
        "--band", choices=BANDS, default="p95", help="which band to explain (default p95)"
    )
    parser.add_argument(
        "--per-request",
        action="store_true",
        help="list the slowest requests, or all as JSONL",
    )
    parser.add_argument(
        "--jsonl", action="store_true", help="with --per-request: a JSON line for every request"
    )
    add_json(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Print it. Raises NoDataError on nothing, PartialInputError where something is lost."""
    from perfledger.analyzers.attribution import attribute

    selection = selected(args)
    if args.per_request or args.jsonl:
        return _per_request(args, selection)
    found = attribute(selection)
    if args.json:
        print_json(as_json(found))
    else:
        print_attribution(found, args.band)
    return require_whole(found.completeness)


def require_whole(completeness: "Completeness") -> int:
    """Return 0. Raises PartialInputError where something is lost or in doubt."""
    if losses := completeness.losses():
        raise PartialInputError("; ".join(losses), fix="see completeness in --json")
    return 0


def _per_request(args: argparse.Namespace, selection: "Selection") -> int:
    from perfledger.analyzers.attribution import attribute_requests

    requests, completeness = attribute_requests(selection)
    if args.jsonl:
        for part in request_lines(requests).iter_slices(LINES_AT_ONCE):
            print(part.write_ndjson(), end="")
    elif args.json:
        print_json([line for line in request_lines(requests).iter_rows(named=True)])
    else:
        print_slowest(requests)
    return require_whole(completeness)


def request_lines(requests: "pl.DataFrame") -> "pl.DataFrame":
    """Return what `--per-request --jsonl` prints of each request, a column a key."""
    import polars as pl

    from perfledger.schema.stages import STAGE_NAMES

    stages = pl.struct(pl.col(f"{name}_ns").alias(name) for name in STAGE_NAMES)
    ids = (pl.col(name).bin.encode("hex") for name in ("trace_id", "span_id"))
    times = ("e2e_ns", "ttft_ns", "ttfc_ns", "status")
    return requests.select(*ids, *times, stages.alias("stages"), "longest")


def as_json(found: "Attribution") -> dict[str, object]:
    """Return what `--json` prints: all numbers in ns or tokens/s, and their definitions."""
    from perfledger.analyzers import attribution, client_view, completeness, latency

    return {
        "selection": found.selection,
        "requests": len(found.requests),
        "statuses": found.statuses,
        "longest_of_requests": found.longest_of_requests,
        "longest_by_status": found.longest_by_status,
        "bands": {name: asdict(band) for name, band in found.bands.items()},
        "latency": asdict(found.latency),
        "client": asdict(found.client) if found.client else None,
        "completeness": asdict(found.completeness),
        "losses": found.completeness.losses(),
        "definitions": {
            "bands": dict(attribution.DEFINITIONS),
            "latency": dict(latency.DEFINITIONS),
            "client": dict(client_view.DEFINITIONS),
            "completeness": dict(completeness.DEFINITIONS),
        },
    }
