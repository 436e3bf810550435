"""Settings from perfledger.toml and PERFLEDGER_* become the parser's defaults; flags win.

A flag `--max-num-seqs` of `perfledger serve` is `max_num_seqs` under `[serve]` in the file (or at
its top, for all commands) and PERFLEDGER_MAX_NUM_SEQS in the environment. Tables that are no flags,
such as `[scrape]`, belong to the command whose parser has a default `tables` that names them.
"""

import argparse
import sys
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from perfledger.schema.errors import UsageError

CONFIG_FILE = "perfledger.toml"
# Read by other parts, not flags of a command.
OTHER_VARIABLES = frozenset({"PERFLEDGER_CONFIG", "PERFLEDGER_CACHE"})


@dataclass(frozen=True)
class Settings:
    """What the file and the environment say, before any command is known."""

    file: Path | None
    values: Mapping[str, object]
    environment: Mapping[str, str]


def read_settings(environment: Mapping[str, str], arguments: Sequence[str] = ()) -> Settings:
    """Read the TOML file (--config, PERFLEDGER_CONFIG or ./perfledger.toml) and the variables.

    Raises UsageError where a named file is missing or the file is not TOML.
    """
    flagged = _config_flag(arguments)
    named = flagged or environment.get("PERFLEDGER_CONFIG")
    file = Path(named or CONFIG_FILE)
    variables = {k: v for k, v in environment.items() if k.startswith("PERFLEDGER_")}
    if not file.is_file():
        if named:
            where = "--config" if flagged else "PERFLEDGER_CONFIG"
            raise UsageError(f"no such file: {named}", where=where)
        return Settings(None, {}, variables)
    try:
        return Settings(file, tomllib.loads(file.read_text("utf-8")), variables)
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UsageError(f"not TOML: {error}", where=str(file)) from error


def _config_flag(arguments: Sequence[str]) -> str:
    """Return what --config names, before any parser is there; "" where it is not given."""
    for at, argument in enumerate(arguments):
        flag, _, value = argument.partition("=")
        if flag == "--config":
            return value or "".join(arguments[at + 1 : at + 2])
    return ""


def apply_settings(parser: argparse.ArgumentParser, settings: Settings) -> None:
    """Set defaults on every command's parser. Raises UsageError on an unknown name or bad value."""
    commands = _commands(parser)
    shared = {k: v for k, v in settings.values.items() if not isinstance(v, dict)}
    known: set[str] = set()
    tables: set[str] = set()
    for name, command in commands.items():
        options = {action.dest: action for action in command._actions if action.option_strings}
        known |= options.keys()
        tables |= _fill_tables(command, settings)
        section = settings.values.get(name, {})
        section = section if isinstance(section, dict) else {}
        for key, value in {**shared, **section}.items():
            if key in options:
                _set_default(command, options[key], value, f"{settings.file}, {name}.{key}")
            elif key in section:
                raise UsageError(f"unknown setting: {key}", where=f"{settings.file}, [{name}]")
        for key, action in options.items():
            variable = f"PERFLEDGER_{key.upper()}"
            if variable in settings.environment:
                _set_default(command, action, settings.environment[variable], variable)
    _refuse_unknown(settings, shared.keys() - known - tables, commands.keys() | tables)
    _name_unknown(settings, known)


def _fill_tables(command: argparse.ArgumentParser, settings: Settings) -> set[str]:
    """Hand a command its tables as they are in the file; return their names."""
    tables: dict[str, object] = command.get_default("tables") or {}
    found = {name: settings.values.get(name, default) for name, default in tables.items()}
    for name, table in found.items():
        # A list, `[[name]]`, only where there may be several.
        if not isinstance(table, (dict, type(tables[name]))):
            raise UsageError(f"{name} is not a table", where=str(settings.file), fix=f"[{name}]")
    if tables:
        command.set_defaults(tables=found)
    return set(tables)


def _refuse_unknown(settings: Settings, stray: set[str], sections: set[str]) -> None:
    stray |= {k for k, v in settings.values.items() if isinstance(v, dict)} - sections
    if stray:
        raise UsageError(f"unknown setting: {', '.join(sorted(stray))}", where=str(settings.file))


def _name_unknown(settings: Settings, known: set[str]) -> None:
    """Say which variables mean nothing: a warning, as they may be another program's."""
    wanted = {f"PERFLEDGER_{key.upper()}" for key in known} | OTHER_VARIABLES
    for variable in sorted(settings.environment.keys() - wanted):
        print(f"perfledger: {variable} is no setting and means nothing", file=sys.stderr)


def _commands(parser: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            return dict(action.choices)
    return {}


def _set_default(
    command: argparse.ArgumentParser, action: argparse.Action, value: object, where: str
) -> None:
    """Convert and check a value as if it had been given as the flag."""
    if isinstance(action, argparse._StoreTrueAction):
        converted: object = _truth(value, where)
    else:
        if isinstance(value, list):
            value = ",".join(str(item) for item in value)
        try:
            converted = action.type(str(value)) if callable(action.type) else str(value)
        except (ValueError, TypeError, argparse.ArgumentTypeError) as error:
            raise UsageError(f"bad value {value!r}: {error}", where=where) from error
        if action.choices is not None and converted not in action.choices:
            choices = ", ".join(map(str, action.choices))
            raise UsageError(f"bad value {value!r}", where=where, fix=f"one of {choices}")
    command.set_defaults(**{action.dest: converted})


def _truth(value: object, where: str) -> bool:
    words = {"1": True, "true": True, "yes": True, "0": False, "false": False, "no": False}
    if isinstance(value, bool):
        return value
    if str(value).lower() not in words:
        raise UsageError(f"bad value {value!r}", where=where, fix="true or false")
    return words[str(value).lower()]
