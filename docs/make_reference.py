"""Write the reference pages that are made from the declarations in the code."""

import inspect
from pathlib import Path

from perfledger.collectors.host import host_metrics, wait_metrics
from perfledger.schema import attributes, manifest, metrics, tables


def sampler_metrics() -> str:
    """Return docs/sampler_metrics.md."""
    lines = ["# Metrics of the host sampler and the wait-state sampler", ""]
    lines += ["Made from collectors/host/host_metrics.py and wait_metrics.py. They are rows of the"]
    lines += ["table `points`, of the services `perfledger.host` and `perfledger.waits`."]
    for title, module, declared in (
        ("Host", host_metrics, host_metrics.HOST_METRICS),
        ("Wait states", wait_metrics, wait_metrics.WAIT_METRICS),
    ):
        _, _, about = (inspect.getdoc(module) or "").partition("\n\n")
        lines += ["", f"## {title}", "", about, "", *metrics.metric_rows(declared)]
    return "\n".join(lines) + "\n"


PAGES = {
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
