"""The settings of `perfledger collect`: flags, variables, the file, and the example file."""

import argparse
import re
from dataclasses import replace
from pathlib import Path

import pytest

from perfledger.cli import build_parser
from perfledger.collect_flags import CollectOptions, options_of
from perfledger.config import OTHER_VARIABLES, apply_settings, read_settings
from perfledger.schema.errors import UsageError

EXAMPLE = Path(__file__).parent.parent / "collectors" / "collect.example.toml"
CONTAINERFILE = EXAMPLE.with_name("Containerfile")
DIGEST = "0" * 64


def parse(*arguments: str, **environment: str) -> argparse.Namespace:
    parser = build_parser()
    given = ["collect", *arguments]
    apply_settings(parser, read_settings(environment, given))
    return parser.parse_args(given)


def options(*arguments: str, **environment: str) -> CollectOptions:
    return options_of(parse(*arguments, **environment))


def test_the_example_file_names_every_setting_with_its_default() -> None:
    described = vars(parse("--config", str(EXAMPLE)))
    assert described.pop("config") == str(EXAMPLE)
    defaults = vars(parse())
    assert defaults.pop("config") == ""
    assert described == defaults
    text = EXAMPLE.read_text()
    others = {"run", "tables"}
    for name in defaults.keys() - others:
        assert f"\n{name} = " in text, name
    for name in defaults["tables"]:
        assert re.search(rf"\n(#   \[)?\[{name}\]", text), name


def test_the_example_files_options_are_those_of_no_file() -> None:
    # But for the folder in which the paths of its tables start.
    assert replace(options("--config", str(EXAMPLE)), folder=Path()) == options()


def test_the_limits_of_the_log_are_settings() -> None:
    read = options("--log-mib", "7", PERFLEDGER_LOW_WATER_MIB="0")
    assert (read.log_bytes, read.low_water_bytes) == (7 * 2**20, 0)
    assert (options().log_bytes, options().low_water_bytes) == (2**32, 2**28)
    with pytest.raises(UsageError, match="--low-water-mib must be 0 or more"):
        options("--low-water-mib", "-1")
    with pytest.raises(UsageError, match="--log-mib must be more than 0"):
        options("--log-mib", "0")


def test_several_scrapes_are_a_list_of_tables_and_nothing_else_is(tmp_path: Path) -> None:
    path = tmp_path / "collect.toml"
    path.write_text('[[scrape]]\njob = "a"\n[[scrape]]\njob = "b"\n')
    assert options("--config", str(path)).tables["scrape"] == [{"job": "a"}, {"job": "b"}]
    path.write_text("[[host]]\ninterval_s = 1\n")
    with pytest.raises(UsageError, match="host is not a table"):
        options("--config", str(path))


def test_the_containers_variables_are_settings() -> None:
    variables = set(re.findall(r"\bPERFLEDGER_[A-Z_]+", CONTAINERFILE.read_text()))
    known = {f"PERFLEDGER_{name.upper()}" for name in vars(parse())} | OTHER_VARIABLES
    assert "PERFLEDGER_STORE" in variables and variables <= known


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "collect.toml"
    path.write_text(
        '[collect]\notlp_http = "127.0.0.1:1"\nsettle = 2\ncors_origins = ["https://a", "*"]\n'
        "[scrape]\ninterval = 5\n[sampling]\nkeep = {errors = true}\n"
    )
    return path


def test_flags_win_over_variables_and_those_over_the_file(file: Path) -> None:
    read = options("--config", str(file))
    assert (read.endpoints.http.port, read.settle_s) == (1, 2.0)
    assert read.transport.cors.origins == ("https://a", "*")
    read = options(f"--config={file}", PERFLEDGER_OTLP_HTTP="127.0.0.1:2")
    assert (read.endpoints.http.port, read.settle_s) == (2, 2.0)
    read = options("--config", str(file), "--otlp-http", "[::1]:3", PERFLEDGER_SETTLE="4")
    assert (str(read.endpoints.http), read.settle_s) == ("[::1]:3", 4.0)


def test_tables_that_are_no_flags_are_handed_on(file: Path) -> None:
    assert options("--config", str(file)).tables == {
        "scrape": {"interval": 5},
        "host": {},
        "wait_states": {},
        "device": {},
        "sampling": {"keep": {"errors": True}},
        "forward": {},
    }
    assert set(options().tables) == {
        "scrape",
        "host",
        "wait_states",
        "device",
        "sampling",
        "forward",
    }


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[collect]\nsettel = 1\n", r"unknown setting: settel .*\[collect\]"),
        ("[scrap]\na = 1\n", "unknown setting: scrap"),
        ("scrape = 1\n", "scrape is not a table"),
        ('[collect]\nmax_connections = "many"\n', "bad value 'many'.*max_connections"),
    ],
)
def test_a_mistake_in_the_file_is_named(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "collect.toml"
    path.write_text(text)
    with pytest.raises(UsageError, match=message):
        parse("--config", str(path))


def test_a_file_that_is_missing_is_said() -> None:
    with pytest.raises(UsageError, match=r"no such file: none.toml \(--config\)"):
        parse("--config", "none.toml")


@pytest.mark.parametrize(
    "flag",
    ["--max-request-mib=0", "--read-timeout=0", "--head-timeout=nan", "--max-connections=-1"],
)
def test_limits_must_make_sense(flag: str) -> None:
    with pytest.raises(UsageError, match=f"{flag.partition('=')[0]} must be more than 0"):
        options(flag)


@pytest.fixture
def tokens(tmp_path: Path) -> str:
    path = tmp_path / "tokens.toml"
    entries = (f'[[token]]\nnamespace = "{name}"\nsha256 = "{DIGEST}"\n' for name in ("b", "a"))
    path.write_text("".join(entries))
    path.chmod(0o600)
    return str(path)


def test_tokens_say_the_namespaces(tokens: str) -> None:
    assert options("--tokens-file", tokens, "--namespace", "mine").namespaces == ["a", "b"]
    assert options("--namespace", "mine").namespaces == ["mine"]


@pytest.mark.parametrize("flag", ["--otlp-grpc", "--otlp-http", "--metrics"])
def test_every_address_beyond_loopback_is_checked(tokens: str, flag: str) -> None:
    wide = (flag, "0.0.0.0:0")
    with pytest.raises(UsageError, match=f"(?s)other hosts.*{flag}.*--insecure"):
        options(*wide)
    with pytest.raises(UsageError, match=f"(?s)other hosts.*{flag}.*--insecure"):
        options(*wide, "--tokens-file", tokens)
    assert options(*wide, "--insecure")


def test_metrics_may_be_off() -> None:
    assert options("--metrics", "off").endpoints.metrics is None


@pytest.mark.parametrize("flag", ["--tls-cert", "--tls-key", "--tls-client-ca"])
def test_a_certificate_needs_its_key(flag: str) -> None:
    with pytest.raises(UsageError, match="TLS needs both --tls-cert and --tls-key"):
        options(flag, "file.pem")
