"""`perfledger load`: an open-loop client that replays a workload and keeps every sample."""

import argparse
import math
from pathlib import Path
from typing import TYPE_CHECKING

from perfledger.load_summary import print_failures, print_summary
from perfledger.output import add_json, print_json
from perfledger.schema.errors import UsageError
from perfledger.selection import add_store

if TYPE_CHECKING:
    from perfledger.instrumented_runtime.load.plan import LoadPlan, LoadResult
    from perfledger.instrumented_runtime.load.workload import Workload
    from perfledger.schema.store import Store

BUILT_IN = ("azure-code", "mooncake", "servegen")
DEFAULT_GENERATED = 100
INTERRUPTED = 130  # as a shell names the end by Ctrl-C

EXAMPLES = """\
examples:
  perfledger load --generate azure-code --limit 50 --rate 2 --input-scale 0.05
  perfledger load --workload azure_llm_2023_code.csv --limit 200 --time-scale 0.5
  perfledger load --generate mooncake --endpoint chat --max-input 512 --max-output 64
  perfledger load --url http://10.0.0.7:8000 --workload trace.jsonl --json

workload files, recognised by the names of their columns:
  azure     CSV    TIMESTAMP, ContextTokens, GeneratedTokens
  burstgpt  CSV    Timestamp (s), Request tokens, Response tokens
  mooncake  JSONL  timestamp (ms), input_length, output_length, hash_ids
  all of them may have: class, tenant, session, priority, deadline_ms

Requests go out on an absolute schedule, whatever became of the ones before. Ctrl-C ends the run
and keeps what was measured. Exit code 1: no request succeeded, or the server has gone."""


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add `load`."""
    parser = commands.add_parser(
        "load",
        help="replay a workload against a server",
        description=__doc__,
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    _add_workload(parser)
    _add_scaling(parser.add_argument_group("scaling to the machine (all of it is recorded)"))
    _add_server(parser.add_argument_group("server"))
    _add_request(parser.add_argument_group("requests"))
    parser.add_argument(
        "--run", dest="run_id", default="", metavar="ID", help="id of this run (default: made)"
    )
    add_store(parser)
    add_json(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Run the load, write it to the store, print its summary; returns the exit code."""
    import asyncio

    from perfledger.instrumented_runtime.load.results import write_result
    from perfledger.instrumented_runtime.load.summary import summarise
    from perfledger.schema.store import Store

    store = Store.at(args.store, args.namespace)
    plan = _plan(args)
    _require_room(store, plan.run_id)
    _allow_many_connections()
    result = asyncio.run(_run_until_interrupted(plan))
    write_result(store, result)
    summary = summarise(result)
    if args.json:
        print_json(summary)
    else:
        print_summary(summary, args.store)
        print_failures(result)
    if summary.ended == "interrupted":
        return INTERRUPTED
    return 1 if summary.ended == "server_gone" or not summary.ok else 0


def _add_workload(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("workload").add_mutually_exclusive_group(required=True)
    group.add_argument("--workload", type=Path, metavar="FILE", help="trace to replay")
    group.add_argument(
        "--generate",
        choices=BUILT_IN,
        help=f"built-in workload ({DEFAULT_GENERATED} requests unless --limit says otherwise)",
    )


def _add_scaling(group: "argparse._ArgumentGroup") -> None:
    group.add_argument("--limit", type=_count, metavar="N", help="only the first N requests")
    group.add_argument(
        "--time-scale", type=_factor, default=1.0, metavar="F", help="0.5 is twice the load"
    )
    group.add_argument(
        "--rate", type=_factor, metavar="R", help="mean rate, requests a second, in place of it"
    )
    for flag, what in (("--input-scale", "prompt"), ("--output-scale", "answer")):
        help_text = f"multiplies {what} lengths"
        group.add_argument(flag, type=_factor, default=1.0, metavar="F", help=help_text)
    for flag, what in (("--max-input", "prompts"), ("--max-output", "answers")):
        help_text = f"cuts {what} at so many tokens"
        group.add_argument(flag, type=_count, metavar="N", help=help_text)
    group.add_argument(
        "--spread-grid", action="store_true", help="spread arrivals that a file rounded to seconds"
    )
    group.add_argument(
        "--seed", type=_seed, default=0, metavar="N", help="of lengths and prompts (default 0)"
    )


def _add_server(group: "argparse._ArgumentGroup") -> None:
    group.add_argument(
        "--url", default="http://127.0.0.1:8000", help="an OpenAI-compatible server (%(default)s)"
    )
    group.add_argument(
        "--endpoint",
        choices=("chat", "completions"),
        default="completions",
        help="completions sends token ids of exact length, chat sends words (default %(default)s)",
    )
    group.add_argument("--model", default="", metavar="NAME", help="default: the server's first")
    group.add_argument(
        "--api-key", default="", metavar="KEY", help="better as PERFLEDGER_API_KEY, out of sight"
    )


def _add_request(group: "argparse._ArgumentGroup") -> None:
    group.add_argument(
        "--warmup",
        type=_count_or_0,
        default=2,
        metavar="N",
        help="requests sent one by one first; kept, not summarised (default %(default)s)",
    )
    group.add_argument(
        "--timeout", type=_factor, default=600.0, metavar="S", help="of one request (default 600)"
    )
    group.add_argument(
        "--respect-eos", action="store_true", help="let answers end early: no ignore_eos is sent"
    )
    group.add_argument(
        "--temperature", type=_temperature, default=0.0, metavar="T", help="(default 0: greedy)"
    )
    group.add_argument(
        "--token-ids",
        type=_id_range,
        default=(300, 2000),
        metavar="LOW:HIGH",
        help="range that prompts of completions draw from (default 300:2000)",
    )
    group.add_argument(
        "--n", type=_count, default=1, metavar="N", help="answers to each prompt (default 1)"
    )
    _add_traffic(group)


def _add_traffic(group: "argparse._ArgumentGroup") -> None:
    """What a workload's columns tenant, priority and deadline_ms may say of each request."""
    group.add_argument(
        "--tenant", default="", metavar="NAME", help="of requests whose workload names none"
    )
    group.add_argument(
        "--priority", type=int, metavar="N", help="lower goes first; where the workload has none"
    )
    group.add_argument(
        "--deadline-ms",
        type=_count,
        metavar="MS",
        help="wait for the first token; where the workload has none",
    )


def _plan(args: argparse.Namespace) -> "LoadPlan":
    from perfledger.instrumented_runtime.load.plan import LoadPlan
    from perfledger.instrumented_runtime.load.workload import Scaling, scale, with_defaults

    scaling = Scaling(
        time_scale=args.time_scale,
        rate=args.rate,
        input_scale=args.input_scale,
        output_scale=args.output_scale,
        max_input=args.max_input,
        max_output=args.max_output,
        limit=args.limit,
        spread_grid=args.spread_grid,
    )
    workload = with_defaults(
        scale(_workload(args), scaling, args.seed),
        tenant=args.tenant,
        priority=args.priority,
        deadline_ms=args.deadline_ms,
    )
    return LoadPlan(
        url=args.url,
        workload=workload,
        endpoint=args.endpoint,
        model=args.model,
        api_key=args.api_key,
        run_id=args.run_id or _new_run_id(),
        seed=args.seed,
        warm_up=args.warmup,
        timeout_s=args.timeout,
        ignore_eos=not args.respect_eos,
        temperature=args.temperature,
        n=args.n,
        token_ids=args.token_ids,
    )


def _workload(args: argparse.Namespace) -> "Workload":
    from perfledger.instrumented_runtime.load.formats import read_workload
    from perfledger.instrumented_runtime.load.generator import generate

    if args.generate:
        return generate(args.generate, args.limit or DEFAULT_GENERATED, args.seed)
    return read_workload(args.workload, args.limit)


def _new_run_id() -> str:
    import secrets
    from datetime import UTC, datetime

    return f"load-{datetime.now(UTC):%Y%m%dT%H%M%S}-{secrets.token_hex(2)}"


def _require_room(store: "Store", run_id: str) -> None:
    """Raise UsageError where the result could not be written, before anything is measured."""
    import os

    import polars as pl

    try:
        store.root.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        what = f"cannot make the store: {error.strerror}"
        raise UsageError(what, where=str(store.root)) from error
    if not os.access(store.root, os.W_OK):
        raise UsageError("cannot write to the store", where=str(store.root))
    if not store.scan("runs").filter(pl.col("run_id") == run_id).collect().is_empty():
        where = f"store {store.root}"
        raise UsageError(f"run {run_id!r} is already there", where=where, fix="another --run")


async def _run_until_interrupted(plan: "LoadPlan") -> "LoadResult":
    """Run the plan; the first Ctrl-C ends it and keeps what there is, a second one breaks off."""
    import asyncio
    import signal

    from perfledger.instrumented_runtime.load.open_loop import run_load
    from perfledger.progress import progress

    stop, loop = asyncio.Event(), asyncio.get_running_loop()

    def end() -> None:
        stop.set()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.remove_signal_handler(number)

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, end)
    with progress(len(plan.workload.arrivals), "load") as advance:
        return await run_load(plan, on_sample=lambda sample: advance(), stop=stop)


def _allow_many_connections() -> None:
    """Raise the limit of open files as far as it goes: each request under way is a connection."""
    import resource

    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def _count(text: str) -> int:
    value = _count_or_0(text)
    if value == 0:
        raise argparse.ArgumentTypeError("must be at least 1")
    return value


def _count_or_0(text: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) < 16):
        raise argparse.ArgumentTypeError(f"not a whole number: {text!r}")
    return int(text)


_seed = _count_or_0


def _factor(text: str) -> float:
    value = _temperature(text)
    if value == 0:
        raise argparse.ArgumentTypeError("must be above 0")
    return value


def _temperature(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not (math.isfinite(value) and value >= 0):
        raise argparse.ArgumentTypeError(f"not a number of at least 0: {text!r}")
    return value


def _id_range(text: str) -> tuple[int, int]:
    low, _, high = text.partition(":")
    return _count_or_0(low), _count_or_0(high)
