"""`perfledger collect`: receive OTLP, keep Parquet."""

import argparse
import sys
from collections import Counter
from typing import TYPE_CHECKING

from perfledger.collectors.address import Address
from perfledger.output import print_table
from perfledger.schema.errors import UsageError
from perfledger.selection import add_store
from perfledger.serve_command import is_loopback

if TYPE_CHECKING:
    from perfledger.collectors.collecting import Collector

EXAMPLES = """\
examples:
  perfledger collect                                     OTLP on 127.0.0.1:4317 and :4318
  perfledger collect --store /data/ledger --namespace prod
  vllm serve MODEL --otlp-traces-endpoint http://127.0.0.1:4317    a service that sends to it

Traces, metrics and logs are taken over gRPC and over HTTP with protobuf. Prompts, answers, log
bodies and other content are removed before anything is kept. An acknowledged span is on disk
about a second later; SIGTERM and Ctrl-C write everything and end with 0."""

_STATUS_EVERY_S = 2.0
_LONGEST_SETTLE_S = 120
_SIGNAL_TABLES = ("spans", "points", "logs")
_DERIVED_TABLES = ("steps", "requests")


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the command's parser."""
    parser = commands.add_parser(
        "collect",
        help="receive OpenTelemetry data and keep it as Parquet",
        description="Receive OTLP from running services and keep it in a store.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_store(parser)
    parser.add_argument(
        "--otlp-grpc",
        default="127.0.0.1:4317",
        metavar="HOST:PORT",
        help="where to take OTLP over gRPC (default 127.0.0.1:4317)",
    )
    parser.add_argument(
        "--otlp-http",
        default="127.0.0.1:4318",
        metavar="HOST:PORT",
        help="where to take OTLP over HTTP (default 127.0.0.1:4318)",
    )
    parser.add_argument(
        "--settle",
        type=float,
        default=5.0,
        metavar="SECONDS",
        help="how long to wait for a request's spans before its row is derived (default 5)",
    )
    parser.add_argument(
        "--buffer-mib",
        type=int,
        default=256,
        metavar="MIB",
        help="rows to hold while they cannot be written, before requests are refused (default 256)",
    )
    parser.add_argument(
        "--insecure",
        action="store_true",
        help="allow addresses other than loopback, although there is no authentication yet",
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Collect until SIGTERM or SIGINT; raises UsageError on what cannot be listened on."""
    import asyncio

    if not 0 < args.settle <= _LONGEST_SETTLE_S:
        raise UsageError(f"--settle must be more than 0 and at most {_LONGEST_SETTLE_S} seconds")
    if args.buffer_mib <= 0:
        raise UsageError("--buffer-mib must be more than 0")
    grpc_address = _address(args.otlp_grpc, "--otlp-grpc", args.insecure)
    http_address = _address(args.otlp_http, "--otlp-http", args.insecure)
    asyncio.run(_collect(args, grpc_address, http_address))
    return 0


async def _collect(args: argparse.Namespace, grpc_address: Address, http_address: Address) -> None:
    import asyncio
    import signal

    from perfledger.collectors.collecting import CollectLimits, Collector
    from perfledger.collectors.serving import serve
    from perfledger.collectors.settling import SettleLimits
    from perfledger.schema.store import Store

    store = Store.at(args.store, args.namespace)
    store.prepare()
    settle = SettleLimits(settle_s=args.settle, window_s=max(60.0, 4 * args.settle))
    limits = CollectLimits(buffer_bytes=args.buffer_mib * 2**20, settle=settle)
    collector = Collector(store, limits)
    stop, has_started = asyncio.Event(), asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)

    def started(grpc: Address, http: Address) -> None:
        print(f"collecting into {store.root}, namespace {store.namespace}")
        print(f"  OTLP over gRPC on {grpc}, over HTTP on http://{http}", flush=True)
        has_started.set()

    status = asyncio.create_task(_show_status(collector))
    try:
        await serve(collector, grpc_address, http_address, limits.request_bytes, stop, started)
    finally:
        status.cancel()
        if has_started.is_set():
            _print_counts(collector.counts())


async def _show_status(collector: "Collector") -> None:
    """Rewrite one line with what happened so far, on a terminal only."""
    import asyncio

    while sys.stderr.isatty():
        await asyncio.sleep(_STATUS_EVERY_S)
        counts = collector.counts()
        line = ", ".join(
            f"{counts[name]:,} {name.replace('_', ' ')}"
            for name in ("spans_received", "spans_written", "spans_rejected", "requests_derived")
        )
        print(f"\r\x1b[2K{line}", end="", file=sys.stderr, flush=True)


def _print_counts(counts: Counter[str]) -> None:
    """Print what was received and what became of it, and whatever else is not 0."""
    if sys.stderr.isatty():
        print(file=sys.stderr)
    fates = ("received", "written", "rejected", "waiting")
    rows = [[table, *(counts[f"{table}_{fate}"] for fate in fates)] for table in _SIGNAL_TABLES]
    rows += [[table, None, counts[f"{table}_written"], None, None] for table in _DERIVED_TABLES]
    print_table("", ["table", *fates], rows)
    told = {f"{table}_{fate}" for table in (*_SIGNAL_TABLES, *_DERIVED_TABLES) for fate in fates}
    for name in sorted(counts.keys() - told):
        print(f"{name.replace('_', ' ')}: {counts[name]:,}")


def _address(text: str, flag: str, insecure: bool) -> Address:
    """Parse HOST:PORT. Raises UsageError where it is none, or is wider than loopback."""
    address = Address.parse(text, flag)
    if not insecure and not is_loopback(address.host):
        raise UsageError(
            f"{address.host} can be reached from other hosts, and there is no authentication yet",
            where=flag,
            fix="a loopback address, or --insecure to take telemetry from anyone",
        )
    return address
