"""The flags of `perfledger serve`, by what they are about, and the options that they say."""

import argparse
import re

from perfledger.flag_types import integer
from perfledger.instrumented_runtime.options import RuntimeOptions

DEFAULTS = RuntimeOptions()
MOST_PROCESSES = 64

_UNIT_BYTES = {"": 1, "K": 1024, "M": 1024**2, "G": 1024**3, "T": 1024**4}
_MEMORY = re.compile(r"(\d{1,15})\s*(?:([KMGT])(?:i?B)?|B)?", re.IGNORECASE)


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add all of them."""
    parser.add_argument(
        "--model",
        default=DEFAULTS.model,
        metavar="NAME|FOLDER",
        help="reference[-small], reference-moe[-small], smollm2 or a Hugging Face checkpoint"
        " folder (default %(default)s)",
    )
    _add_network(parser.add_argument_group("network"))
    _add_engine(parser.add_argument_group("engine"))
    _add_batch(parser.add_argument_group("batch"))
    _add_cache(parser.add_argument_group("KV cache"))
    _add_replicas(parser.add_argument_group("replicas: engines behind one API"))
    _add_parallel(parser.add_argument_group("parallel: processes of one engine, their product"))
    _add_telemetry(parser.add_argument_group("telemetry"))


def options_of(args: argparse.Namespace) -> RuntimeOptions:
    """Return the options that the flags say."""
    return RuntimeOptions(
        model=args.model,
        host=args.host,
        port=args.port,
        device=args.device,
        dtype=args.dtype,
        quantization=args.quantization,
        threads=args.threads,
        max_num_seqs=args.max_num_seqs,
        max_num_batched_tokens=args.max_num_batched_tokens,
        block_size=args.block_size,
        kv_memory_bytes=args.kv_memory,
        max_model_len=args.max_model_len,
        prefix_cache=not args.no_prefix_cache,
        preemption=args.preemption,
        swap_memory_bytes=args.swap_memory,
        watermark=args.watermark,
        degrade=args.degrade,
        replicas=args.replicas,
        route=args.route,
        health_timeout_s=args.health_timeout,
        tensor_parallel=args.tp,
        pipeline_parallel=args.pp,
        expert_parallel=args.ep,
        context_parallel=args.cp,
        microbatches=args.microbatches,
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
        type=integer(0, 65_535),
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
    group.add_argument(
        "--admin-token",
        default="",
        metavar="TOKEN",
        help="serve /admin to this host with this bearer token; better set as"
        " PERFLEDGER_ADMIN_TOKEN (default: no /admin)",
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
    group.add_argument(
        "--quantization",
        choices=("none", "int8", "fp8"),
        default=DEFAULTS.quantization,
        help="of the weights' matrices; fp8 where the device has it (default %(default)s)",
    )
    what = "torch threads of a process, 0 shares the cores among all"
    _count(group, "--threads", 0, DEFAULTS.threads, what)


def _add_batch(group: "argparse._ArgumentGroup") -> None:
    what = "sequences in a batch at most"
    _count(group, "--max-num-seqs", 1, DEFAULTS.max_num_seqs, what)
    what = "tokens in a step at most: longer prompts go in chunks"
    _count(group, "--max-num-batched-tokens", 1, DEFAULTS.max_num_batched_tokens, what)
    what = "tokens in prompt and answer at most, 0 takes the checkpoint's limit"
    _count(group, "--max-model-len", 0, DEFAULTS.max_model_len, what)
    group.add_argument(
        "--degrade",
        type=_names,
        default=DEFAULTS.degrade,
        metavar="STEP,…",
        help="under load, in this order: shrink-chunk, refuse-n, cap-max-tokens,"
        " shed-low-priority (default: none)",
    )


def _add_cache(group: "argparse._ArgumentGroup") -> None:
    _count(group, "--block-size", 1, DEFAULTS.block_size, "tokens in a KV block")
    _memory(group, "--kv-memory", DEFAULTS.kv_memory_bytes, "memory of the KV cache of a process")
    group.add_argument(
        "--no-prefix-cache", action="store_true", help="compute equal prompt beginnings each time"
    )
    group.add_argument(
        "--preemption",
        choices=("recompute", "swap"),
        default=DEFAULTS.preemption,
        help="what becomes of the KV blocks of a request that is put back (default %(default)s)",
    )
    _memory(group, "--swap-memory", DEFAULTS.swap_memory_bytes, "host memory for swapped KV blocks")
    group.add_argument(
        "--watermark",
        type=_share,
        default=DEFAULTS.watermark,
        metavar="SHARE",
        help="share of the KV blocks kept free at an admission (default %(default)s)",
    )


def _add_replicas(group: "argparse._ArgumentGroup") -> None:
    what = "engines, each with its own weights and KV cache"
    _count(group, "--replicas", 1, DEFAULTS.replicas, what, MOST_PROCESSES)
    group.add_argument(
        "--route",
        choices=("round-robin", "least-queue", "prefix-affinity"),
        default=DEFAULTS.route,
        help="how a request finds its replica (default %(default)s)",
    )
    group.add_argument(
        "--health-timeout",
        type=_seconds,
        default=DEFAULTS.health_timeout_s,
        metavar="S",
        help="an engine silent for so long while it has work gets no new requests"
        " (default %(default)s)",
    )


def _add_parallel(group: "argparse._ArgumentGroup") -> None:
    for flag, long, default, what in (
        (
            "--tp",
            "--tensor-parallel",
            DEFAULTS.tensor_parallel,
            "share every matrix; N divides the heads",
        ),
        ("--pp", "--pipeline-parallel", DEFAULTS.pipeline_parallel, "share the layers: stages"),
        (
            "--ep",
            "--expert-parallel",
            DEFAULTS.expert_parallel,
            "share the experts of an MoE model",
        ),
        ("--cp", "--context-parallel", DEFAULTS.context_parallel, "share each long sequence"),
    ):
        _count(group, flag, 1, default, what, MOST_PROCESSES, long)
    what = "pieces of a step in the pipeline, 0 makes one a stage"
    _count(group, "--microbatches", 0, DEFAULTS.microbatches, what, 1024)


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


def _count(
    group: "argparse._ArgumentGroup",
    flag: str,
    low: int,
    default: int,
    meaning: str,
    high: int = 2**31 - 1,
    *aliases: str,
) -> None:
    group.add_argument(
        flag,
        *aliases,
        type=integer(low, high),
        default=default,
        metavar="N",
        help=f"{meaning} (default {default})",
    )


def _memory(group: "argparse._ArgumentGroup", flag: str, default: int, meaning: str) -> None:
    group.add_argument(
        flag,
        type=memory_bytes,
        default=default,
        metavar="SIZE",
        help=f"{meaning}, like 2GiB (default {default // 1024**2}MiB)",
    )


def _number(text: str, low: float, high: float, like: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not low <= value <= high:
        raise argparse.ArgumentTypeError(f"{text!r} is not {like}")
    return value


def _share(text: str) -> float:
    return _number(text, 0.0, 0.99, "a share from 0 to 0.99")


def _seconds(text: str) -> float:
    return _number(text, 0.1, 3600.0, "between 0.1 and 3600 seconds")


def _names(text: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in text.split(",") if name.strip())


def _device(text: str) -> str:
    if not re.fullmatch(r"auto|cpu|cuda(:\d+)?", text):
        raise argparse.ArgumentTypeError(f"{text!r} is not auto, cpu, cuda or cuda:N")
    return text
