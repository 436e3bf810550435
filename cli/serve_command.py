"""`perfledger serve`: the reference runtime behind an OpenAI-compatible API."""

import argparse
import importlib.util

from perfledger.collectors.transport.address import is_loopback
from perfledger.instrumented_runtime.options import RuntimeOptions
from perfledger.schema.errors import UsageError
from perfledger.serve_flags import MOST_PROCESSES, add_flags, options_of

EXAMPLES = """\
examples:
  perfledger serve --model reference-small          a tiny checkpoint made on the spot
  perfledger serve --model smollm2 --port 8001      real weights
  perfledger serve --model ./my-checkpoint --kv-memory 2GiB
  perfledger serve --tp 2                           two processes share every matrix
  perfledger serve --model smollm2 --pp 2           two processes share the layers
  perfledger serve --replicas 2 --route prefix-affinity
  PERFLEDGER_ADMIN_TOKEN=… perfledger serve --replicas 2
  curl -X POST -H "Authorization: Bearer …" http://127.0.0.1:8000/admin/restart
  curl http://127.0.0.1:8000/v1/chat/completions -H 'Content-Type: application/json' \\
    -d '{"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 16}'

Telemetry goes to OTEL_EXPORTER_OTLP_ENDPOINT (default http://localhost:4317, where
`perfledger collect` listens). Without a collector the runtime serves all the same and
/health counts what is lost."""


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add `serve`."""
    parser = commands.add_parser(
        "serve",
        help="run the reference runtime",
        description=__doc__,
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_flags(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Serve until SIGINT or SIGTERM. Raises UsageError before anything is started."""
    if not (is_loopback(args.host) or args.api_key or args.insecure):
        raise UsageError(
            f"--host {args.host} is reachable from outside and has no API key",
            fix="set PERFLEDGER_API_KEY, or say --insecure",
        )
    options = options_of(args)
    refuse_contradictions(options)
    if importlib.util.find_spec("torch") is None:
        raise UsageError("the runtime needs torch", fix="pip install 'perfledger[runtime]'")
    from perfledger.instrumented_runtime.serve import serve

    return serve(options, args.api_key, args.admin_token)


def refuse_contradictions(options: RuntimeOptions) -> None:
    """Raise UsageError for flags that cannot be meant together."""
    if options.route == "prefix-affinity" and not options.prefix_cache:
        raise UsageError(
            "--route prefix-affinity looks for cached prefixes, but --no-prefix-cache keeps none",
            fix="another --route",
        )
    if options.microbatches and options.pipeline_parallel == 1:
        raise UsageError("--microbatches is for a pipeline", fix="say --pp, or leave it out")
    if options.replicas * options.layout.world > MOST_PROCESSES:
        raise UsageError(
            f"{options.replicas} replicas of {options.layout.world} ranks are too many processes",
            fix=f"{MOST_PROCESSES} at most on one host",
        )
