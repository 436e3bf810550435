"""Names in folders that outlive a power cut: a new name is durable once its folder is synced."""

import os
from pathlib import Path


def make_durably(folder: Path) -> None:
    """Make a folder and those above it, and sync what each new one is an entry of."""
    new = [path for path in (folder, *folder.parents) if not path.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    for path in new:
        sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Make the names in a folder durable. Raises OSError."""
    handle = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
