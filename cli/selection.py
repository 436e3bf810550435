"""The flags with which every command says which store and which part of it."""

import argparse
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING

from perfledger.schema.errors import UsageError

if TYPE_CHECKING:
    from perfledger.analyzers.ledger import Selection

_AGO = re.compile(r"-(\d+)([smhd])")
_UNIT_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86_400}


@dataclass(frozen=True)
class TimeRange:
    """Wall ns, half open; None is unbounded."""

    from_ns: int | None
    to_ns: int | None


def add_store(parser: argparse.ArgumentParser) -> None:
    """Add --store and --namespace."""
    group = parser.add_argument_group("store")
    group.add_argument(
        "--store",
        default="./perfledger-data",
        metavar="URL",
        help="folder, or s3://bucket/prefix (default ./perfledger-data, or PERFLEDGER_STORE)",
    )
    group.add_argument("--namespace", default="default", help="part of the store (default default)")


def add_selection(parser: argparse.ArgumentParser) -> None:
    """Add --run, --service, --from and --to."""
    group = parser.add_argument_group("selection")
    group.add_argument("--run", dest="run_id", default="", metavar="ID", help="one run")
    group.add_argument("--service", default="", metavar="NAME", help="one service")
    for flag, meaning in (("--from", "start"), ("--to", "end")):
        group.add_argument(
            flag,
            dest=f"{flag[2:]}_time",
            default="",
            metavar="T",
            help=f"{meaning} of the range: RFC 3339, or -15m, -2h, -1d before now",
        )


def join_relative_times(arguments: Sequence[str]) -> list[str]:
    """Write `--from -15m` as `--from=-15m`: argparse would take -15m for a flag."""
    joined: list[str] = []
    for argument in arguments:
        if joined and joined[-1] in ("--from", "--to") and re.match(r"-\d", argument):
            joined[-1] += f"={argument}"
        else:
            joined.append(argument)
    return joined


def time_range(arguments: argparse.Namespace, now_ns: int | None = None) -> TimeRange:
    """Return the range asked for. Raises UsageError on a time that is neither form."""
    now_ns = time.time_ns() if now_ns is None else now_ns
    bounds = [_parse(text, now_ns) for text in (arguments.from_time, arguments.to_time)]
    if None not in bounds and bounds[0] >= bounds[1]:  # type: ignore[operator]
        raise UsageError("--from is not before --to")
    return TimeRange(bounds[0], bounds[1])


def selected(arguments: argparse.Namespace) -> "Selection":
    """Return what the flags select, of one replica where the command has --replica.

    Raises UsageError on a bad store or time.
    """
    from perfledger import analyzers

    times = time_range(arguments)
    return analyzers.open(arguments.store, arguments.namespace).where(
        run=arguments.run_id,
        service=arguments.service,
        from_ns=times.from_ns,
        to_ns=times.to_ns,
        replica=getattr(arguments, "replica", ""),
    )


def _parse(text: str, now_ns: int) -> int | None:
    if not text:
        return None
    if ago := _AGO.fullmatch(text):
        return now_ns - int(ago[1]) * _UNIT_SECONDS[ago[2]] * 1_000_000_000
    try:
        stamp = datetime.fromisoformat(text)
    except ValueError as error:
        raise UsageError(f"not a time: {text!r}", fix="-15m or 2026-01-31T12:00:00Z") from error
    if stamp.tzinfo is None:
        raise UsageError(f"no time zone in {text!r}", fix="add Z or +01:00")
    return round(stamp.timestamp() * 1_000_000) * 1000
