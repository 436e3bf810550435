"""`perfledger ceilings`: how fast this host moves bytes and multiplies, measured and kept."""

import argparse
import importlib.util
import signal
import time
from dataclasses import replace
from types import FrameType
from typing import TYPE_CHECKING

from perfledger.flag_types import integer
from perfledger.output import add_json, print_json
from perfledger.progress import progress
from perfledger.schema.errors import UsageError
from perfledger.selection import add_store

if TYPE_CHECKING:
    from perfledger.schema.ceilings import Ceilings
    from perfledger.schema.store import Store

LARGEST_THREADS = 4096
EXAMPLES = """\
examples:
  perfledger ceilings                      about two minutes, kept in ./perfledger-data
  perfledger ceilings --quick              some seconds, fewer sizes: a first look
  perfledger ceilings --threads 1          as a runtime with one thread would find them
  perfledger ceilings --store s3://bucket/ledger    the bucket's speed as well

Measured: memory bandwidth and latency by working set, matrix products by dtype and rows, decode
attention, host-device copies, collectives between local ranks, the store's disk or bucket, and
what an operator and an engine step cost beside. Other work on the machine makes all of it slower:
run it while nothing else does. `perfledger ledger` takes the newest that were measured on the
run's own host, and refuses those of another one."""


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add `ceilings`."""
    parser = commands.add_parser(
        "ceilings",
        help="measure how fast this host can be",
        description=__doc__,
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    group = parser.add_argument_group("measuring")
    group.add_argument("--quick", action="store_true", help="fewer sizes, in some seconds")
    group.add_argument(
        "--threads",
        type=integer(0, LARGEST_THREADS),
        default=0,
        metavar="N",
        help="CPU threads (default 0: one for each core)",
    )
    group.add_argument("--device", default="auto", help="auto, cpu, cuda or cuda:1 (default auto)")
    add_store(parser)
    add_json(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Measure, keep and show. Raises UsageError before it begins where it cannot be."""
    if importlib.util.find_spec("torch") is None:
        raise UsageError("measuring needs torch", fix="pip install 'perfledger[runtime]'")
    from perfledger.ceilings_summary import as_json, print_summary
    from perfledger.instrumented_runtime.engine import prepare_process
    from perfledger.schema.store import Store

    signal.signal(signal.SIGTERM, _interrupt)  # ranks and their folder are cleared up, too
    store = Store.at(args.store, args.namespace)
    store.prepare()
    prepare_process()  # as an engine is: before torch is loaded
    ceilings = _measure(args, store)
    _keep(store, ceilings)
    if args.json:
        print_json(as_json(ceilings))
    else:
        print_summary(ceilings, store.url)
    return 0


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def _measure(args: argparse.Namespace, store: "Store") -> "Ceilings":
    from perfledger.collectors.topology.reading import read_topology
    from perfledger.instrumented_runtime.ceilings.measuring import CeilingOptions, Measuring
    from perfledger.schema.manifest import Manifest

    options = CeilingOptions(args.threads, args.device, args.quick)
    measuring = Measuring(options, store.place)
    with progress(measuring.steps, "ceilings") as advance:
        found = measuring.run(advance)
    # Where this process may run says nothing about the engines that will be held against it.
    facts = {n: v for n, v in read_topology().facts().items() if n != "topology.placement"}
    host = Manifest.of({**found.host.values, **facts})
    return replace(found, host=host)


def _keep(store: "Store", ceilings: "Ceilings") -> None:
    from perfledger.schema.tables import RUNS

    row = {**ceilings.to_row(), "received_ns": time.time_ns()}
    store.write(RUNS.name, RUNS.from_rows([row]))
