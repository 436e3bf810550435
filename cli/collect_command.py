"""`perfledger collect`: receive OTLP, keep Parquet."""

import argparse
from collections import Counter
from typing import TYPE_CHECKING

from perfledger.collect_flags import CollectOptions, add_flags, options_of

if TYPE_CHECKING:
    from perfledger.collectors.collecting import Collector
    from perfledger.collectors.companions import Companions
    from perfledger.collectors.serving import Endpoints

EXAMPLES = """\
examples:
  perfledger collect                                     OTLP on 127.0.0.1:4317 and :4318
  perfledger collect --store /data/ledger --namespace prod
  perfledger collect --config collect.toml               all flags as keys of a file, and more
  perfledger collect --otlp-grpc 0.0.0.0:4317 --tokens-file tokens.toml \\
    --tls-cert cert.pem --tls-key key.pem                other hosts, told apart by token
  vllm serve MODEL --otlp-traces-endpoint http://127.0.0.1:4317    a service that sends to it

Traces, metrics and logs are taken over gRPC and over HTTP, with protobuf or JSON. Prompts,
answers, log bodies and other content are removed before anything is kept. What is acknowledged has
been synced to a log, and is in a file seconds later. SIGTERM and Ctrl-C write everything and end
with 0. Guarantees, limits, metrics and troubleshooting: docs/collector.md."""


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the command's parser."""
    parser = commands.add_parser(
        "collect",
        help="receive OpenTelemetry data and keep it as Parquet",
        description="Receive OTLP from running services and keep it in a store.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        # --config is looked for before the parser is there, by its whole name.
        allow_abbrev=False,
    )
    add_flags(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Collect until SIGTERM or SIGINT; raises UsageError on what cannot be listened on."""
    import asyncio
    import gc

    import uvloop

    from perfledger.collectors.process_memory import keep_freed_memory

    options = options_of(args)
    keep_freed_memory()
    _prepare_scanner()
    # Requests become objects by the thousand, and those make no cycles: look for some less often.
    gc.freeze()
    gc.set_threshold(100_000, 20, 20)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_collect(options))
    return 0


def _prepare_scanner() -> None:
    """Load the compiled scanner, or compile it where this is its first start here."""
    import sys

    from perfledger.collectors.wire.jit import is_compiled
    from perfledger.collectors.wire.warm_up import warm_up

    if not is_compiled():
        print("compiling the scanner; only a first start takes this half minute", file=sys.stderr)
    warm_up()


async def _collect(options: CollectOptions) -> None:
    import asyncio
    import signal

    from perfledger.collect_status import print_counts, show_status
    from perfledger.collectors.companions import Companions
    from perfledger.collectors.forward.forward_loop import new_instance_id
    from perfledger.collectors.serving import serve
    from perfledger.collectors.transport.access import Access

    own_id = new_instance_id()
    companions = Companions.from_tables(options.tables, own_id, options.folder)
    collectors = _collectors(options, companions)
    access = Access(collectors, options.tokens, options.namespace, own_id)
    stop, has_started = asyncio.Event(), asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)

    def started(bound: "Endpoints") -> None:
        _print_start(options, bound)
        has_started.set()

    def counts() -> Counter[str]:
        return sum(
            (one.counts() for one in collectors.values()), access.counts() + companions.counts()
        )

    status = asyncio.create_task(show_status(counts))
    try:
        await serve(
            *(collectors, access, options.endpoints, options.transport, stop, started),
            companions=companions,
        )
    finally:
        status.cancel()
        if has_started.is_set():
            print_counts(counts())


def _collectors(options: CollectOptions, companions: "Companions") -> "dict[str, Collector]":
    """Return a collector for each namespace; the memory that rows may take is shared out."""
    from perfledger.collectors.collecting import CollectLimits, Collector
    from perfledger.collectors.settling import SettleLimits
    from perfledger.schema.store import Store

    settle = SettleLimits(settle_s=options.settle_s, window_s=max(60.0, 4 * options.settle_s))
    limits = CollectLimits(
        request_bytes=options.transport.request_bytes,
        buffer_bytes=options.buffer_bytes // len(options.namespaces),
        log_bytes=options.log_bytes,
        low_water_bytes=options.low_water_bytes,
        settle=settle,
    )
    collectors = {}
    for namespace in options.namespaces:
        store = Store.at(options.store, namespace)
        store.prepare()
        folder = options.log_folder
        collectors[namespace] = Collector(
            store,
            limits,
            None if folder is None else folder / namespace,
            forward=companions.forwarder.offer if companions.forwarder else None,
            sampler=companions.tail_sampler(),
            sample_after_s=companions.sampling.wait_s if companions.sampling else 0.0,
        )
    return collectors


def _print_start(options: CollectOptions, bound: "Endpoints") -> None:
    scheme = "https" if options.transport.tls else "http"
    names = options.namespaces
    print(f"collecting into {options.store}, namespace{'s' * (len(names) > 1)} {', '.join(names)}")
    print(f"  OTLP over gRPC on {bound.grpc}, over HTTP on {scheme}://{bound.http}", flush=True)
    if bound.metrics is not None:
        scheme = "http" if bound.metrics.is_loopback else scheme
        print(f"  metrics on {scheme}://{bound.metrics}/metrics", flush=True)
