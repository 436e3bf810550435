"""The command line: parse, run one command, turn errors into exit codes. Nothing else."""

import argparse
import importlib
import os
import signal
import sys
from collections.abc import Sequence

from perfledger import __version__
from perfledger.config import apply_settings, read_settings
from perfledger.schema.errors import PerfledgerError
from perfledger.selection import join_relative_times

COMMANDS = (
    "demo",
    "serve",
    "train",
    "collect",
    "store",
    "load",
    "attribute",
    "ledger",
    "rerun",
    "ceilings",
    "report",
    "fault",
    "counters",
    "topology",
)

DESCRIPTION = "Perfledger: where the time of every LLM request went, and why."
EXAMPLES = """\
start here:
  perfledger demo                          everything below on one machine, in minutes
attach to a service:
  perfledger collect                       receive OTLP on 4317 and 4318, keep Parquet
  perfledger attribute --from -15m         which stage the time of each request went to
  perfledger store compact                 merge small files; also retain, verify, stats
try a change:
  perfledger rerun --variable max_num_seqs --levels 2,8

settings come from flags, then PERFLEDGER_* variables (PERFLEDGER_STORE, …), then
perfledger.toml ([serve] max_num_seqs = 8), then defaults.
exit codes: 0 fine, 1 failed, 2 usage, 3 partial input, 4 no data, 5 not comparable, 6 gate"""


def build_parser() -> argparse.ArgumentParser:
    """Return the whole parser; each command's module adds its own part."""
    parser = argparse.ArgumentParser(
        prog="perfledger",
        description=DESCRIPTION,
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"perfledger {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for name in COMMANDS:
        importlib.import_module(f"perfledger.{name}_command").add_parser(commands)
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code."""
    try:
        parser = build_parser()
        given = sys.argv[1:] if arguments is None else arguments
        apply_settings(parser, read_settings(os.environ, given))
        parsed = parser.parse_args(join_relative_times(given))
        code: int = parsed.run(parsed)
        sys.stdout.flush()
        return code
    except PerfledgerError as error:
        print(f"perfledger: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print("perfledger: interrupted", file=sys.stderr)
        return 128 + signal.SIGINT
    except BrokenPipeError:
        # The reader of our output (head, less) has gone: not an error, and nothing more to say.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


if __name__ == "__main__":
    sys.exit(main())
