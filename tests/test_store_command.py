"""`perfledger store`: the four actions as a user runs them."""

import argparse
import json
import time
from pathlib import Path

import pytest

from perfledger import store_command
from perfledger.schema.errors import GateError, NoDataError, PartialInputError, UsageError
from perfledger.schema.store import Store
from perfledger.schema.tables import SPANS

OLD_NS = time.time_ns() - 50 * 3600 * 10**9


def run(*arguments: object) -> int:
    parser = argparse.ArgumentParser()
    store_command.add_parser(parser.add_subparsers())
    args = parser.parse_args(["store", *map(str, arguments)])
    code: int = args.run(args)
    return code


@pytest.fixture
def store(tmp_path: Path) -> Store:
    store = Store(tmp_path)
    for number in range(4):
        row = {"trace_id": bytes(16), "span_id": number.to_bytes(8, "big"), "name": "chat"}
        times = {"start_ns": number, "end_ns": number, "received_ns": 1}
        rows = SPANS.from_rows([{**row, **times, "kind": "server"}])
        store.write("spans", rows, name=f"{OLD_NS + number}-{number:04x}")
    return store


def answer(capsys: pytest.CaptureFixture[str], *arguments: object) -> dict[str, object]:
    assert run(*arguments, "--json") == 0
    told: dict[str, object] = json.loads(capsys.readouterr().out)
    return told


def test_stats(store: Store, capsys: pytest.CaptureFixture[str]) -> None:
    Store(store.root, "other").prepare()
    told = answer(capsys, "stats", "--store", store.root)
    size = sum(path.stat().st_size for path in store.files("spans"))
    stamps = {"oldest_ns": OLD_NS, "newest_ns": OLD_NS + 3}
    assert told == {
        "store": str(store.root),
        "namespaces": ["default", "other"],
        "tables": {"spans": {"files": 4, "rows": 4, "bytes": size, **stamps}},
        "damaged": [],
    }
    assert run("stats", "--store", store.root) == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines[1:])) <= 80
    assert lines[-1] == "namespaces: default, other"


def test_stats_of_what_can_be_read(store: Store, capsys: pytest.CaptureFixture[str]) -> None:
    cut = store.files("spans")[1]
    cut.write_bytes(cut.read_bytes()[:-40])
    with pytest.raises(PartialInputError, match=f"not counted.* 1 .*{cut.name}"):
        run("stats", "--store", store.root, "--json")
    told = json.loads(capsys.readouterr().out)
    assert (told["damaged"], told["tables"]["spans"]["rows"]) == ([str(cut)], 3)
    with pytest.raises(PartialInputError, match=cut.name):
        run("stats", "--store", store.root)
    assert "namespaces: default" in capsys.readouterr().out


@pytest.mark.parametrize("action", ["stats", "verify", "compact"])
def test_what_is_not_there_is_no_empty_answer(action: str, store: Store) -> None:
    with pytest.raises(NoDataError, match="--namespace with one of: default"):
        run(action, "--store", store.root, "--namespace", "other")
    with pytest.raises(NoDataError, match="nothing is stored in .*/none"):
        run(action, "--store", store.root / "none")
    Store(store.root, "empty").prepare()
    assert run(action, "--store", store.root, "--namespace", "empty") == 0


def test_files_whose_replacement_is_missing_stay(
    store: Store, capsys: pytest.CaptureFixture[str]
) -> None:
    sources = store.files("spans")
    assert run("compact", "--store", store.root, "--min-age", "0") == 0
    (merged,) = store.files("spans")
    merged.unlink()
    capsys.readouterr()
    told = f"1 damaged or missing files were left alone; 4 files.*{merged.name}"
    rules = {"compact": (), "retain": ("--max-age", "30d")}
    for action, rule in rules.items():
        with pytest.raises(PartialInputError, match=told):
            run(action, "--store", store.root, "--grace", "0s", *rule)
        shown = capsys.readouterr().out
        assert all(path.exists() and str(path) in shown for path in sources)
    with pytest.raises(PartialInputError):
        run("compact", "--store", store.root, "--grace", "0s", "--json")
    answered = json.loads(capsys.readouterr().out)
    assert answered["kept"] == [str(path) for path in sources]
    assert answered["damaged"] == [str(merged)]
    assert sorted(store.scan("spans").collect()["start_ns"]) == [0, 1, 2, 3]


def test_compact(store: Store, capsys: pytest.CaptureFixture[str]) -> None:
    assert answer(capsys, "compact", "--store", store.root)["files_merged"] == 0  # just written
    told = answer(capsys, "compact", "--store", store.root, "--min-age", "0s", "--grace", "0")
    assert (told["files_merged"], told["files_made"], told["rows"]) == (4, 1, 4)
    assert told["files_deleted"] == 4
    (path,) = store.files("spans")
    assert run("compact", "--store", store.root) == 0
    assert "files merged" in capsys.readouterr().out
    store.write("spans", SPANS.arrow().empty_table(), name=f"{OLD_NS}-1")
    path.write_bytes(path.read_bytes()[:-40])
    with pytest.raises(PartialInputError, match=f"1 damaged files.*{path.name}"):
        run("compact", "--store", store.root, "--min-age", "0")


def test_retain(store: Store, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(UsageError, match="retain what"):
        run("retain", "--store", store.root)
    dry = answer(capsys, "retain", "--store", store.root, "--max-age", "2d", "--dry-run")
    assert dry["hours"] and len(store.files("spans")) == 4
    assert run("retain", "--store", store.root, "--max-size", "1KB", "--table", "spans") == 0
    out = capsys.readouterr().out
    assert "dropped" in out and max(map(len, out.splitlines()[1:])) <= 80
    assert store.files("spans") == []
    told = answer(capsys, "retain", "--store", store.root, "--max-age", "1d", "--grace", "0")
    assert (told["hours"], told["files_deleted"]) == ([], 4)


def test_verify(store: Store, capsys: pytest.CaptureFixture[str]) -> None:
    told = answer(capsys, "verify", "--store", store.root)
    assert told["problems"] == []
    path = store.files("spans")[1]
    path.write_bytes(path.read_bytes()[:-40])
    with pytest.raises(GateError, match=f"1 problem in.*{path.name}"):
        run("verify", "--store", store.root)
    assert str(path) in capsys.readouterr().out


@pytest.mark.parametrize(
    "arguments",
    [
        ("stats", "--table", "nothing"),
        ("verify", "--log-folder", "/not/there"),
        ("stats", "--store", "ftp://x"),
    ],
)
def test_what_cannot_be_is_refused(arguments: tuple[str, ...], tmp_path: Path) -> None:
    with pytest.raises(UsageError):
        run(*arguments[:1], "--store", tmp_path, *arguments[1:])


@pytest.mark.parametrize(
    ("flag", "value"), [("--max-age", "3 weeks"), ("--max-size", "10 apples"), ("--grace", "-1")]
)
def test_a_bad_quantity_is_refused(
    flag: str, value: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        run("retain", f"{flag}={value}")
    assert value in capsys.readouterr().err
