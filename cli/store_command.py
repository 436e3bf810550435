"""`perfledger store`: merge small files, drop old hours, check everything, or count what is there.

compact merges the small files of each hour and deletes merged ones after a grace; retain drops
whole hours by age or size, never those of runs that a verdict cites; verify reads every file and
compares checksums, and exits with 6 where something is wrong; stats counts files, rows and bytes.
All are safe while the store is written and read."""

import argparse
import re
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from perfledger.output import add_json, print_json, print_table
from perfledger.progress import progress
from perfledger.schema.errors import GateError, NoDataError, PartialInputError, UsageError
from perfledger.selection import add_store

if TYPE_CHECKING:
    from perfledger.collectors.upkeep.compaction import Compaction, CompactionLimits
    from perfledger.collectors.upkeep.retention import Hour
    from perfledger.schema.store import Store
    from perfledger.schema.store_snapshot import StoredFile

EXAMPLES = """\
examples:
  perfledger store stats
  perfledger store compact --store s3://bucket/telemetry
  perfledger store retain --max-age 30d --dry-run
  perfledger store retain --table points --max-size 10GiB
  perfledger store verify --json

Run compact and retain from cron, every few minutes and every hour."""

_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86_400}
_BYTES = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_BYTES |= {"KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add `store`."""
    parser = commands.add_parser(
        "store",
        help="compact, retain, verify or count what is stored",
        description=__doc__,
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("action", choices=tuple(_ACTIONS), help="what to do")
    add_store(parser)
    parser.add_argument("--table", default="", metavar="NAME", help="one table (default all)")
    compacting = parser.add_argument_group("compact and retain")
    compacting.add_argument(
        "--min-age",
        type=_seconds,
        default=300,
        metavar="T",
        help="merge files older than this (default 5m)",
    )
    compacting.add_argument(
        "--grace",
        type=_seconds,
        default=900,
        metavar="T",
        help="how long merged and dropped files stay for their readers (default 15m)",
    )
    retaining = parser.add_argument_group("retain")
    retaining.add_argument(
        "--max-age", type=_seconds, metavar="T", help="drop hours older than this: 30d"
    )
    retaining.add_argument(
        "--max-size",
        type=_size,
        metavar="SIZE",
        help="drop the oldest hours of a larger table: 10GiB",
    )
    retaining.add_argument("--dry-run", action="store_true", help="only say what would go")
    verifying = parser.add_argument_group("verify")
    verifying.add_argument(
        "--log-folder",
        default="",
        metavar="FOLDER",
        help="also read the write-ahead log in this folder: STORE/NAMESPACE/wal",
    )
    add_json(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Do one of the four; raises GateError where verify finds something wrong."""
    from perfledger.schema.store import Store
    from perfledger.schema.tables import TABLES

    if args.table and args.table not in TABLES:
        raise UsageError(f"no table {args.table!r}", fix=f"one of {', '.join(TABLES)}")
    tables = [args.table] if args.table else list(TABLES)
    action: Callable[[argparse.Namespace, Store, list[str]], None] = _ACTIONS[args.action]
    store = Store.at(args.store, args.namespace)
    if not args.log_folder:  # a log may be there before anything is stored
        _require_namespace(store)
    action(args, store, tables)
    return 0


def _require_namespace(store: "Store") -> None:
    try:
        there = store.place.folders()
    except FileNotFoundError:
        there = []
    if store.namespace not in there:
        fix = f"--namespace with one of: {', '.join(there)}" if there else "--store with another"
        where = f"namespace {store.namespace}"
        what = f"nothing is stored in {store.url}"
        raise NoDataError(what, where=where, fix=fix)


def _compact(args: argparse.Namespace, store: "Store", tables: list[str]) -> None:
    from perfledger.collectors.upkeep.compaction import compact

    with progress(len(tables), "compacting tables") as advance:
        done = compact(store, _limits(args), tables=tables, advance=advance)
    names = ("files_merged", "files_made", "rows", "rows_sent_again", "files_deleted")
    others = ("races_lost", "hours_leased", "files_damaged")
    counts = {name: done.counts[name] for name in (*names, *others)}
    if args.json:
        print_json({**counts, "damaged": done.damaged, "kept": done.kept})
    else:
        shown = [(_words(name), counts[name]) for name in names]
        shown += [(_words(name), counts[name]) for name in others if counts[name]]
        print_table(f"compacted {store.url}, namespace {store.namespace}", ("", "count"), shown)
        _print_kept(done)
    _require_undamaged(done)


def _print_kept(done: "Compaction") -> None:
    if done.kept:
        print("\nkept, as what replaces them is missing or damaged:")
        print("\n".join(f"  {where}" for where in done.kept))


def _require_undamaged(done: "Compaction") -> None:
    if done.damaged:
        kept = f"; {len(done.kept)} files that they replace are kept" if done.kept else ""
        missing = " or missing" if done.kept else ""
        raise PartialInputError(
            f"{len(done.damaged)} damaged{missing} files were left alone{kept}",
            where=done.damaged[0],
            fix="perfledger store verify",
        )


def _retain(args: argparse.Namespace, store: "Store", tables: list[str]) -> None:
    from perfledger.collectors.upkeep.compaction import Compaction, clean
    from perfledger.collectors.upkeep.retention import RetentionRule, drop, plan

    if args.max_age is None and args.max_size is None:
        raise UsageError("retain what?", fix="--max-age 30d, --max-size 10GiB, or both")
    hours = plan(store, RetentionRule(args.max_age, args.max_size), tables=tables)
    done = Compaction()
    if not args.dry_run:
        drop(store, hours)
        done = clean(store, _limits(args), tables=tables)
    if args.json:
        told = [hour.__dict__ for hour in hours]
        deleted = {"files_deleted": done.counts["files_deleted"]}
        lost = {"damaged": done.damaged, "kept": done.kept}
        print_json({"dry_run": args.dry_run, "hours": told, **deleted, **lost})
    else:
        _print_retained(args, store, hours, done)
    _require_undamaged(done)


def _print_retained(
    args: argparse.Namespace, store: "Store", hours: "list[Hour]", done: "Compaction"
) -> None:
    verb = "would be dropped" if args.dry_run else "dropped"
    rows = [
        (f"{hour.table} {hour.hour}", hour.files, _bytes(hour.bytes), fate)
        for hour in hours
        for fate in ["kept" if hour.kept_because else verb]
    ]
    print_table(f"hours over the rule in {store.url}", ("hour", "files", "size", "fate"), rows)
    for hour in hours:
        if hour.kept_because:
            print(f"\n{hour.table} {hour.hour} is kept:\n  {hour.kept_because}")
    print(f"\n{done.counts['files_deleted']:,} files deleted whose grace is over")
    _print_kept(done)


def _verify(args: argparse.Namespace, store: "Store", tables: list[str]) -> None:
    from perfledger.collectors.upkeep.store_check import check_store

    log_folder = Path(args.log_folder) if args.log_folder else None
    if log_folder is not None and not log_folder.is_dir():
        raise UsageError(f"no folder {log_folder}", where="--log-folder")
    count = sum(len(store.place.list(f"{store.namespace}/{table}")) for table in tables)
    with progress(count, "reading files") as advance:
        check = check_store(store, tables=tables, log_folder=log_folder, advance=advance)
    problems = [problem.__dict__ for problem in check.problems]
    if args.json:
        print_json({"counts": dict(check.counts), "problems": problems})
    else:
        shown = [(_words(name), check.counts[name]) for name in sorted(check.counts)]
        print_table(f"read {store.url}, namespace {store.namespace}", ("", "count"), shown)
        for problem in check.problems:
            print(f"\n{problem.where}\n  {problem.what}")
    if problems:
        first, many = check.problems[0], "s" * (len(problems) > 1)
        raise GateError(f"{len(problems)} problem{many} in this store", where=first.where)


def _stats(args: argparse.Namespace, store: "Store", tables: list[str]) -> None:
    found = {table: store.visible(table) for table in tables}
    with progress(sum(map(len, found.values())), "reading footers") as advance:
        read = {table: _readable(store, files, advance) for table, files in found.items()}
    told = {table: _count(files) for table, files in read.items() if files}
    known = {file for files in read.values() for file in files}
    lost = [file for files in found.values() for file in files if file not in known]
    damaged = [store.place.address(file.key) for file in lost]
    namespaces = store.place.folders()
    if args.json:
        stored = {"store": store.url, "namespaces": namespaces}
        print_json({**stored, "tables": told, "damaged": damaged})
    else:
        _print_stats(store, told, namespaces)
    if damaged:
        raise PartialInputError(
            f"not counted, as missing or with a damaged footer: {len(damaged)}",
            where=damaged[0],
            fix="perfledger store verify tells what else is damaged",
        )


def _print_stats(store: "Store", told: dict[str, dict[str, int]], namespaces: list[str]) -> None:
    columns = ("table", "files", "rows", "size", "B a row", "oldest (UTC)", "newest (UTC)")
    rows = [
        (
            table,
            counts["files"],
            counts["rows"],
            _bytes(counts["bytes"]),
            f"{counts['bytes'] / counts['rows']:.1f}" if counts["rows"] else "–",
            _stamp(counts["oldest_ns"]),
            _stamp(counts["newest_ns"]),
        )
        for table, counts in told.items()
    ]
    print_table(f"{store.url}, namespace {store.namespace}", columns, rows)
    print(f"\nnamespaces: {', '.join(namespaces) or 'none'}")


def _readable(
    store: "Store", files: "list[StoredFile]", advance: Callable[..., None]
) -> "dict[StoredFile, int]":
    """Return the rows of each file whose footer can be read."""
    import pyarrow as pa

    rows: dict[StoredFile, int] = {}
    for file in files:
        with suppress(pa.ArrowException, OSError):
            rows[file] = store.footer(file).num_rows
        advance()
    return rows


def _count(rows: "dict[StoredFile, int]") -> dict[str, int]:
    written = [file.written_ns for file in rows]
    size = sum(file.bytes for file in rows)
    stamps = {"oldest_ns": min(written), "newest_ns": max(written)}
    return {"files": len(rows), "rows": sum(rows.values()), "bytes": size, **stamps}


def _limits(args: argparse.Namespace) -> "CompactionLimits":
    from perfledger.collectors.upkeep.compaction import CompactionLimits

    return CompactionLimits(min_age_s=args.min_age, grace_s=args.grace)


def _seconds(text: str) -> float:
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([smhd]?)", text)
    if not match:
        raise argparse.ArgumentTypeError(f"{text!r} is no time: 90s, 15m, 12h or 30d")
    return float(match[1]) * _SECONDS[match[2] or "s"]


def _size(text: str) -> int:
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([A-Za-z]*)", text)
    if not match or match[2].upper() not in _BYTES:
        raise argparse.ArgumentTypeError(f"{text!r} is no size: 500MB or 10GiB")
    return int(float(match[1]) * _BYTES[match[2].upper()])


def _bytes(size: int) -> str:
    for unit, factor in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if size >= factor:
            return f"{size / factor:,.1f} {unit}"
    return f"{size} B"


def _stamp(wall_ns: int) -> str:
    from datetime import UTC, datetime

    return datetime.fromtimestamp(wall_ns / 1e9, UTC).strftime("%m-%d %H:%M")


def _words(name: str) -> str:
    return name.replace("_", " ")


_ACTIONS: dict[str, Callable[..., None]] = {
    "compact": _compact,
    "retain": _retain,
    "verify": _verify,
    "stats": _stats,
}
