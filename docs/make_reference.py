"""Write the reference pages that are made from the declarations in the code."""

import argparse
import inspect
from collections.abc import Iterator
from pathlib import Path

from perfledger.cli import build_parser
from perfledger.collectors.device import device_metrics
from perfledger.collectors.host import host_metrics, wait_metrics
from perfledger.schema import attributes, manifest, metrics, tables


def sampler_metrics() -> str:
    """Return docs/sampler_metrics.md."""
    lines = ["# Metrics of the samplers of the host, of waits and of devices", ""]
    lines += ["Made from collectors/host/host_metrics.py and wait_metrics.py, and from"]
    lines += ["collectors/device/device_metrics.py. They are rows of the table `points`, of the"]
    lines += ["services `perfledger.host`, `perfledger.waits` and `perfledger.device`."]
    for title, module, declared in (
        ("Host", host_metrics, host_metrics.HOST_METRICS),
        ("Wait states", wait_metrics, wait_metrics.WAIT_METRICS),
        ("Devices", device_metrics, device_metrics.DEVICE_METRICS),
    ):
        _, _, about = (inspect.getdoc(module) or "").partition("\n\n")
        lines += ["", f"## {title}", "", about, "", *metrics.metric_rows(declared)]
    return "\n".join(lines) + "\n"


def flags() -> str:
    """Return docs/flags.md."""
    lines = [
        "# Commands and flags",
        "",
        "Made from the command line's own help. Every flag is also",
    ]
    lines += [
        "a variable (`--max-num-seqs` of `serve`: `PERFLEDGER_MAX_NUM_SEQS`) and a setting in"
    ]
    lines += ["`perfledger.toml` (`[serve]`, `max_num_seqs`)."]
    for name, parser in _parsers("perfledger", build_parser()):
        rows = [row for action in parser._actions if (row := _flag_row(action))]
        if rows:
            lines += ["", f"## {name}", "", "| flag | |", "|---|---|", *rows]
    return "\n".join(lines) + "\n"


def _parsers(
    name: str, parser: argparse.ArgumentParser
) -> Iterator[tuple[str, argparse.ArgumentParser]]:
    yield name, parser
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for word, one in action.choices.items():
                yield from _parsers(f"{name} {word}", one)


def _flag_row(action: argparse.Action) -> str:
    if not action.option_strings or "--help" in action.option_strings:
        return ""
    values = "|".join(map(str, action.choices)) if action.choices else action.metavar
    takes = "" if action.nargs == 0 else f" {values or action.dest.upper()}"
    help_text = (action.help or "") % {**vars(action), "prog": "perfledger"}
    cells = (f"`{', '.join(action.option_strings)}{takes}`", help_text)
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


PAGES = {
    "flags.md": flags,
    "tables.md": tables.reference,
    "attributes.md": attributes.reference,
    "manifest.md": manifest.reference,
    "metrics.md": metrics.reference,
    "sampler_metrics.md": sampler_metrics,
}

if __name__ == "__main__":
    for name, make in PAGES.items():
        (Path(__file__).parent / name).write_text(make())
        print(f"wrote docs/{name}")
