"""Settings: flag, then variable, then file, then default; mistakes are named with their place."""

import argparse
from pathlib import Path

import pytest

from perfledger.config import apply_settings, read_settings
from perfledger.schema.errors import UsageError


def parser() -> argparse.ArgumentParser:
    root = argparse.ArgumentParser()
    commands = root.add_subparsers(required=True)
    serve = commands.add_parser("serve")
    serve.add_argument("--max-num-seqs", type=int, default=16)
    serve.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    serve.add_argument("--insecure", action="store_true")
    collect = commands.add_parser("collect")
    collect.add_argument("--store", default="./perfledger-data")
    return root


def parse(arguments: list[str], environment: dict[str, str]) -> dict[str, object]:
    root = parser()
    apply_settings(root, read_settings(environment))
    return vars(root.parse_args(arguments))


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "perfledger.toml"
    path.write_text('store = "/data"\n[serve]\nmax_num_seqs = 4\ninsecure = true\n')
    return path


def test_the_file_gives_defaults(file: Path) -> None:
    environment = {"PERFLEDGER_CONFIG": str(file)}
    assert parse(["serve"], environment) == {
        "max_num_seqs": 4,
        "device": "cpu",
        "insecure": True,
    }
    assert parse(["collect"], environment) == {"store": "/data"}


def test_a_variable_beats_the_file_and_a_flag_beats_both(file: Path) -> None:
    environment = {"PERFLEDGER_CONFIG": str(file), "PERFLEDGER_MAX_NUM_SEQS": "8"}
    assert parse(["serve"], environment)["max_num_seqs"] == 8
    assert parse(["serve", "--max-num-seqs", "2"], environment)["max_num_seqs"] == 2


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[serve]\nmax_num_seqz = 4\n", r"unknown setting: max_num_seqz .*\[serve\]"),
        ("[sreve]\nmax_num_seqs = 4\n", "unknown setting: sreve"),
        ("storr = 4\n", "unknown setting: storr"),
        ('[serve]\nmax_num_seqs = "many"\n', r"bad value 'many'.*serve.max_num_seqs"),
        ('[serve]\ndevice = "tpu"\n', "(?s)bad value 'tpu'.*one of cpu, cuda"),
        ('[serve]\ninsecure = "perhaps"\n', "(?s)bad value 'perhaps'.*true or false"),
        ("[serve\n", "not TOML"),
    ],
)
def test_a_mistake_in_the_file_is_named(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "perfledger.toml"
    path.write_text(text)
    with pytest.raises(UsageError, match=message):
        parse(["serve"], {"PERFLEDGER_CONFIG": str(path)})


def test_a_named_file_must_exist() -> None:
    with pytest.raises(UsageError, match="no such file: nowhere.toml"):
        read_settings({"PERFLEDGER_CONFIG": "nowhere.toml"})


def test_a_bad_variable_is_named() -> None:
    with pytest.raises(UsageError, match="bad value 'x'.*PERFLEDGER_MAX_NUM_SEQS"):
        parse(["serve"], {"PERFLEDGER_MAX_NUM_SEQS": "x"})


def test_a_variable_that_means_nothing_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    assert parse(["collect"], {"PERFLEDGER_STROE": "x"}) == {"store": "./perfledger-data"}
    said = capsys.readouterr().err
    assert said == "perfledger: PERFLEDGER_STROE is no setting and means nothing\n"
