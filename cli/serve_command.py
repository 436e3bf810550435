"""`perfledger serve`: the reference runtime behind an OpenAI-compatible API."""

import argparse
import importlib.util
import re
from collections.abc import Callable

from perfledger.collectors.transport.address import is_loopback
from perfledger.instrumented_runtime.options import RuntimeOptions
from perfledger.schema.errors import UsageError

DEFAULTS = RuntimeOptions()
EXAMPLES = """\
examples:
  perfledger serve --model reference-small          a tiny checkpoint made on the spot
  perfledger serve --model smollm2 --port 8001      real weights
  perfledger serve --model ./my-checkpoint --kv-memory 2GiB
  curl http://127.0.0.1:8000/v1/chat/completions -H 'Content-Type: application/json' \\
    -d '{"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 16}'

Telemetry goes to OTEL_EXPORTER_OTLP_ENDPOINT (default http://localhost:4317, where
`perfledger collect` listens). Without a collector the runtime serves all the same and
/health counts what is lost."""

_UNIT_BYTES = {"": 1, "K": 1024, "M": 1024**2, "G": 1024**3, "T": 1024**4}
_MEMORY = re.compile(r"(\d{1,15})\s*(?:([KMGT])(?:i?B)?|B)?", re.IGNORECASE)


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add `serve`."""
    parser = commands.add_parser(
        "serve",
        help="run the reference runtime",
        description=__doc__,
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--model",
        default=DEFAULTS.model,
        metavar="NAME|FOLDER",
        help="reference, reference-small, smollm2 or a Hugging Face checkpoint folder"
        " (default %(default)s)",
    )
    _add_network(parser.add_argument_group("network"))
    _add_engine(parser.add_argument_group("engine"))
    _add_telemetry(parser.add_argument_group("telemetry"))
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Serve until SIGINT or SIGTERM. Raises UsageError before anything is started."""
    if not (is_loopback(args.host) or args.api_key or args.insecure):
        raise UsageError(
            f"--host {args.host} is reachable from outside and has no API key",
            fix="set PERFLEDGER_API_KEY, or say --insecure",
        )
    if importlib.util.find_spec("torch") is None:
        raise UsageError("the runtime needs torch", fix="pip install 'perfledger[runtime]'")
    from perfledger.instrumented_runtime.serve import serve

    return serve(options_of(args), args.api_key)


def options_of(args: argparse.Namespace) -> RuntimeOptions:
    """Return the options that the flags say."""
    return RuntimeOptions(
        model=args.model,
        host=args.host,
        port=args.port,
        device=args.device,
        dtype=args.dtype,
        threads=args.threads,
        max_num_seqs=args.max_num_seqs,
        max_num_batched_tokens=args.max_num_batched_tokens,
        block_size=args.block_size,
        kv_memory_bytes=args.kv_memory,
        max_model_len=args.max_model_len,
        run_id=args.run_id,
        service_name=args.service_name,
        telemetry=not args.no_telemetry,
        allow_faults=args.allow_faults,
    )


def memory_bytes(text: str) -> int:
    """Return the bytes of `512MiB`, `2G` or `1048576`; K, M, G and T are powers of 1024."""
    match = _MEMORY.fullmatch(text.strip())
    if match is None or int(match[1]) == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a size like 512MiB")
    return int(match[1]) * _UNIT_BYTES[(match[2] or "").upper()]


def _add_network(group: "argparse._ArgumentGroup") -> None:
    group.add_argument("--host", default=DEFAULTS.host, help="address (default %(default)s)")
    group.add_argument(
        "--port",
        type=_integer(0, 65_535),
        default=DEFAULTS.port,
        help="port, 0 takes a free one (default %(default)s)",
    )
    group.add_argument(
        "--api-key",
        default="",
        metavar="KEY",
        help="demand this bearer token; better set as PERFLEDGER_API_KEY, unseen by `ps`",
    )
    group.add_argument(
        "--insecure", action="store_true", help="listen beyond this host without a key"
    )


def _add_engine(group: "argparse._ArgumentGroup") -> None:
    group.add_argument(
        "--device", type=_device, default=DEFAULTS.device, help="auto, cpu, cuda or cuda:N"
    )
    group.add_argument(
        "--dtype",
        choices=("auto", "float32", "bfloat16", "float16"),
        default=DEFAULTS.dtype,
        help="of weights and KV cache (default %(default)s)",
    )
    for flag, low, default, meaning in (
        ("--threads", 0, DEFAULTS.threads, "torch threads, 0 takes one a core"),
        ("--max-num-seqs", 1, DEFAULTS.max_num_seqs, "sequences in a batch at most"),
        (
            "--max-num-batched-tokens",
            1,
            DEFAULTS.max_num_batched_tokens,
            "tokens in a step at most: longer prompts go in chunks",
        ),
        ("--block-size", 1, DEFAULTS.block_size, "tokens in a KV block"),
        (
            "--max-model-len",
            0,
            DEFAULTS.max_model_len,
            "tokens in prompt and answer at most, 0 takes the checkpoint's limit",
        ),
    ):
        group.add_argument(
            flag,
            type=_integer(low, 2**31 - 1),
            default=default,
            metavar="N",
            help=f"{meaning} (default {default})",
        )
    group.add_argument(
        "--kv-memory",
        type=memory_bytes,
        default=DEFAULTS.kv_memory_bytes,
        metavar="SIZE",
        help="memory of the KV cache, like 512MiB or 2GiB (default 512MiB)",
    )


def _add_telemetry(group: "argparse._ArgumentGroup") -> None:
    group.add_argument(
        "--run-id", default=DEFAULTS.run_id, metavar="ID", help="run that the telemetry belongs to"
    )
    group.add_argument(
        "--service-name",
        default=DEFAULTS.service_name,
        metavar="NAME",
        help="service.name of the telemetry (default %(default)s)",
    )
    group.add_argument("--no-telemetry", action="store_true", help="record nothing")
    group.add_argument(
        "--allow-faults",
        action="store_true",
        help="honour the header x-perfledger-fault: delays for tests and drills",
    )


def _integer(low: int, high: int) -> Callable[[str], int]:
    """Return an argparse type: an integer in a range."""

    def parse(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r} is not an integer") from None
        if not low <= value <= high:
            raise argparse.ArgumentTypeError(f"{value} is not between {low} and {high}")
        return value

    return parse


def _device(text: str) -> str:
    if not re.fullmatch(r"auto|cpu|cuda(:\d+)?", text):
        raise argparse.ArgumentTypeError(f"{text!r} is not auto, cpu, cuda or cuda:N")
    return text
