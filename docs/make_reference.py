"""Write the reference pages that are made from the declarations in schema/."""

from pathlib import Path

from perfledger.schema import attributes, manifest, metrics, tables

PAGES = {
    "tables.md": tables.reference,
    "attributes.md": attributes.reference,
    "manifest.md": manifest.reference,
    "metrics.md": metrics.reference,
}

if __name__ == "__main__":
    for name, make in PAGES.items():
        (Path(__file__).parent / name).write_text(make())
        print(f"wrote docs/{name}")
