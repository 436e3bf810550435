"""`perfledger fault`: runs a command under a fault that only its sealed answer names."""

import argparse
import os
import random
import signal
import subprocess
import tempfile
import textwrap
import time
from pathlib import Path

from perfledger.output import WIDTH, add_json, print_json, print_table
from perfledger.schema.errors import UsageError
from perfledger.selection import add_store

EXAMPLES = """\
examples:
  perfledger fault list
  perfledger fault run --fault busy_neighbour --answer /tmp/answer.json -- serve --model reference
  perfledger fault run --fault any --seed 7 --answer /tmp/answer.json -- serve --model reference
  perfledger fault show /tmp/answer.json

`any` draws a fault (or none) and says nothing about which. Faults are natural: other work on the
cores, less memory, a thin link; nothing sleeps inside the stage that will be blamed. The name goes
to the answer file alone, which lies outside the store; its digest is printed."""


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add `fault`."""
    parser = commands.add_parser(
        "fault",
        help="run a command under a fault, for drills",
        description=__doc__,
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    actions = parser.add_subparsers(title="actions", metavar="ACTION", required=True)
    listing = actions.add_parser("list", help="what faults there are")
    add_json(listing)
    listing.set_defaults(run=list_faults)
    showing = actions.add_parser("show", help="open a sealed answer")
    showing.add_argument("answer", type=Path, help="the file")
    showing.add_argument("--digest", help="refuse the file if it is not the one of this digest")
    add_json(showing)
    showing.set_defaults(run=show_answer)
    _add_run(actions)


def _add_run(actions: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    running = actions.add_parser(
        "run",
        help="run `serve` or `train` under a fault",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    running.add_argument("--fault", required=True, metavar="NAME|any", help="from `fault list`")
    running.add_argument("--amount", type=float, help="its strength, in the unit of the list")
    running.add_argument("--answer", type=Path, required=True, help="file that will name it")
    running.add_argument("--seed", type=int, help="of `any`")
    running.add_argument("command", nargs="+", help="-- serve … or -- train …")
    add_store(running)
    running.set_defaults(run=run_fault)


def list_faults(args: argparse.Namespace) -> int:
    """Print the catalogue."""
    from dataclasses import asdict

    from perfledger.instrumented_runtime.faults.catalogue import FAULTS

    if args.json:
        print_json([asdict(fault) for fault in FAULTS])
        return 0
    rows = [
        (
            fault.name,
            f"{fault.amount:g} {fault.unit}" if fault.unit else "",
            ", ".join(fault.blamed),
        )
        for fault in FAULTS
    ]
    print_table("faults", ("name", "strength", "shows in"), rows)
    for fault in FAULTS:
        needs = f" (needs {fault.needs})" if fault.needs else ""
        print("\n" + textwrap.fill(f"{fault.name}: {fault.meaning}{needs}", WIDTH))
    return 0


def show_answer(args: argparse.Namespace) -> int:
    """Print a sealed answer. Raises PerfledgerError if it was changed."""
    from dataclasses import asdict

    from perfledger.instrumented_runtime.faults.sealing import unseal

    answer = unseal(args.answer, args.digest)
    if args.json:
        print_json(asdict(answer) | {"digest": answer.digest})
        return 0
    print(f"fault   {answer.fault}" + (f", {answer.amount:g}" if answer.amount else ""))
    print(f"blamed  {', '.join(answer.blamed) or 'nothing'}")
    print(f"digest  {answer.digest}")
    return 0


def run_fault(args: argparse.Namespace) -> int:
    """Run the command; return its exit code. Raises UsageError before anything is started."""
    from perfledger.instrumented_runtime.faults.bringing_about import (
        Prepared,
        brought_about,
        can_have,
    )
    from perfledger.instrumented_runtime.faults.catalogue import BY_NAME, Fault, strength
    from perfledger.instrumented_runtime.faults.sealing import NO_FAULT, Answer, new_salt, seal

    arguments = tuple(args.command)
    if arguments[:1] not in (("serve",), ("train",)):
        raise UsageError(
            "a fault is run around `serve` or `train`",
            fix="fault run --fault NAME --answer FILE -- serve …",
        )
    fault: Fault | None
    if args.fault == "any":
        possible = [one for one in BY_NAME.values() if can_have(one, arguments)]
        fault = random.Random(args.seed).choice([*possible, None])
    elif (fault := BY_NAME.get(args.fault)) is None:
        raise UsageError(f"there is no fault {args.fault!r}", fix="perfledger fault list")
    amount = 0.0 if fault is None else strength(fault, args.amount)
    name, blamed = (fault.name, fault.blamed) if fault else (NO_FAULT, ())
    answer = Answer(name, amount, blamed, time.time_ns(), new_salt())
    print(f"answer  {args.answer}, digest {seal(answer, args.answer, args.store)}", flush=True)
    prepared = Prepared(arguments, dict(os.environ))
    with tempfile.TemporaryDirectory() as folder:
        if fault is None:
            return _run(prepared.command, prepared.environment)
        try:
            with brought_about(fault, amount, prepared, Path(folder)) as under:
                return _run(under.command, under.environment)
        except UsageError:  # refused before anything was started
            args.answer.unlink()
            raise


def _run(command: list[str], environment: dict[str, str]) -> int:
    """Run to the end. Ctrl-C reaches the command too and it decides; SIGTERM is passed on."""
    process = subprocess.Popen(command, env=environment)
    before = {
        signal.SIGINT: signal.signal(signal.SIGINT, lambda number, frame: None),
        signal.SIGTERM: signal.signal(signal.SIGTERM, lambda *_: process.terminate()),
    }
    try:
        return process.wait()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
