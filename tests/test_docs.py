"""Documents say what is: dependencies, folders, commands and flags are compared with the code."""

import argparse
import re
import runpy
import tomllib
from pathlib import Path

import pytest

from perfledger.cli import COMMANDS, build_parser

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", ROOT / "ARCHITECTURE.md", *sorted((ROOT / "docs").rglob("*.md"))]
PAGE_MAKERS = runpy.run_path(str(ROOT / "docs" / "make_reference.py"))["PAGES"]
PARTS = ("schema", "collectors", "analyzers", "instrumented_runtime", "dashboards", "cli")


def commands() -> dict[str, argparse.ArgumentParser]:
    return subcommands(build_parser())


def subcommands(parser: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    found: dict[str, argparse.ArgumentParser] = {}
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            found |= action.choices
    return found


def unknown_flags(words: list[str]) -> set[str]:
    """Return the flags of a command line that its command, or one behind `--`, does not have."""
    parser, inner = commands()[words[0]], words.index("--") if "--" in words else len(words)
    for word in words[1:inner]:
        parser = subcommands(parser).get(word, parser)
    flags = {flag for action in parser._actions for flag in action.option_strings}
    used = {word.split("=")[0] for word in words[1:inner] if word.startswith("--")}
    return used - flags | (unknown_flags(words[inner + 1 :]) if words[inner:] else set())


def test_every_dependency_has_its_line() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"].values()
    asked = [*project["dependencies"], *(name for group in extras for name in group)]
    names = {re.split(r"[<>=\[]", requirement)[0] for requirement in asked}
    page = (ROOT / "docs" / "dependencies.md").read_text()
    suffixes = page.replace("opentelemetry-exporter-otlp-proto-grpc, -http", " ".join(names))
    assert [name for name in sorted(names) if name not in suffixes] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_and_flags_in_the_pages_exist(page: Path) -> None:
    known = commands()
    for line in re.findall(r"perfledger ((?:[a-z]+)\b[^\n`|#]*)", page.read_text()):
        words = line.split()
        if words[0] not in known:
            continue
        assert unknown_flags(words) == set(), f"{page.name}: perfledger {line}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_in_the_pages_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)\)", page.read_text()):
        if "://" not in target:
            assert (page.parent / target).exists(), f"{page.name} -> {target}"


def test_the_collectors_page_names_every_flag_and_metric() -> None:
    from perfledger.collectors.transport import collector_metrics

    page = (ROOT / "docs" / "collector.md").read_text()
    actions = [a for name in ("collect", "store") for a in commands()[name]._actions]
    flags = {flag for action in actions for flag in action.option_strings if flag[:2] == "--"}
    assert {flag for flag in flags if f"{flag}`" not in page and f"{flag} " not in page} == {
        "--help",
        "--cors-max-age",
    }
    for family in collector_metrics._ORDER:
        name = family.name + ("_total" if family.kind == "counter" else "")
        assert f"`{name}`" in page, name


@pytest.mark.parametrize("name", sorted(PAGE_MAKERS))
def test_reference_pages_are_as_made(name: str) -> None:
    made = PAGE_MAKERS[name]()
    assert (ROOT / "docs" / name).read_text() == made, "run: python docs/make_reference.py"


def test_every_command_has_help_with_examples() -> None:
    found = commands()
    assert tuple(found) == COMMANDS
    for name, parser in found.items():
        text = parser.format_help()
        assert "example" in text.lower(), name
        assert f"perfledger {name}" in text, name


def test_architecture_names_every_folder() -> None:
    page = (ROOT / "ARCHITECTURE.md").read_text()
    for part in PARTS:
        assert f"| {part}/ |" in page
    for folder in ("cli/", "benchmarks/", "docs/", "examples/"):
        assert folder in page


def test_files_that_architecture_names_exist() -> None:
    page = (ROOT / "ARCHITECTURE.md").read_text()
    names = set(re.findall(r"`([a-z_/]+\.py)`", page))
    present = {path.name for part in PARTS for path in (ROOT / part).rglob("*.py")}
    present |= {path.name for path in (ROOT / "tests").glob("*.py")}
    assert {name for name in names if Path(name).name not in present} == set()


def test_modules_stay_readable() -> None:
    """One topic a file: 400 lines and a little, never a place where everything goes."""
    nameless = re.compile(r"(utils?|helpers?|common|base|misc|manager)s?\.py")
    for part in PARTS:
        for path in (ROOT / part).rglob("*.py"):
            assert len(path.read_text().splitlines()) <= 450, path
            assert not nameless.fullmatch(path.name), path


def test_help_loads_nothing_heavy() -> None:
    """`perfledger --help` answers at once: no torch, no polars, no gRPC."""
    import subprocess
    import sys

    script = (
        "import sys, perfledger.cli as c; c.build_parser(); "
        "print(sorted(m for m in ('torch','polars','grpc','transformers') if m in sys.modules))"
    )
    run = subprocess.run([sys.executable, "-P", "-c", script], capture_output=True, text=True)
    assert (run.stdout, run.returncode) == ("[]\n", 0), run.stderr
