"""`perfledger topology`: what is near to what on this machine."""

import argparse
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from perfledger.nvml_files import add_recording, recorder
from perfledger.output import add_json, print_json
from perfledger.schema.errors import UsageError

if TYPE_CHECKING:
    from perfledger.collectors.device.nvml_calls import Calls

EXAMPLES = """\
examples:
  perfledger topology                      this machine, and where this process is placed
  perfledger topology --pid 4711           where a server and what it started is placed
  perfledger topology --json               the same as one object, with the manifest's fields
  perfledger topology --record gpus.jsonl  keep what NVML answers
  perfledger topology --replay gpus.jsonl  show GPUs as recorded, or as written by hand

NUMA nodes and network cards are read from /sys, processes from /proc, GPUs and their links asked
of NVML. What cannot be read is named with its reason, and is unknown in a manifest. NVn are n
NVLinks; PIX, PXB, PHB, NODE, SYS go over PCIe, from near to far."""


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add `topology`."""
    parser = commands.add_parser(
        "topology",
        help="show NUMA nodes, GPUs, network cards and the links between them",
        description=__doc__,
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--pid", type=int, help="a process, with all that it started")
    parser.add_argument(
        "--root",
        type=Path,
        default=Path("/"),
        metavar="DIR",
        help="where the machine's /proc and /sys are (default /)",
    )
    add_recording(parser)
    add_json(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Print the topology; raises UsageError where a recording or a process is not there."""
    from perfledger.collectors.topology.reading import read_topology
    from perfledger.topology_summary import print_topology

    if args.pid is not None and not (args.root / "proc" / str(args.pid)).is_dir():
        raise UsageError(f"there is no process {args.pid}")
    calls, note = _calls(args)
    try:
        topology = read_topology(args.root, pid=args.pid, nvml=calls)
    finally:
        if calls is not None:
            calls.close()
    if args.json:
        print_json({**asdict(topology), "manifest": topology.facts(), "note": note})
        return 0
    if note:
        print(note)
    print_topology(topology)
    return 0


def _calls(args: argparse.Namespace) -> "tuple[Calls | None, str]":
    """Return what answers for NVML (None: the library itself), and what has to be said of it."""
    from perfledger.collectors.device.nvml_recording import Replay, read_recording

    if args.record is not None:
        return recorder(args.record), ""
    if args.replay is None:
        return None, ""
    recording = read_recording(args.replay)
    kind = "synthetic: written by hand, no device said this" if recording.synthetic else "recorded"
    note = "".join(filter(str.isprintable, recording.note))
    return Replay(recording), f"GPUs are replayed ({kind})" + (f": {note}" if note else "")
