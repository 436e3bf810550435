"""Checkpoints that we make ourselves: once per recipe, into a cache folder, atomically."""

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from perfledger.schema.errors import UsageError


def cache_folder() -> Path:
    """Return $PERFLEDGER_CACHE, or perfledger in the user's cache folder."""
    named = os.environ.get("PERFLEDGER_CACHE")
    if named:
        return Path(named)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "perfledger"


def made_once(name: str, recipe: Mapping[str, Any], make: Callable[[Path], None]) -> Path:
    """Return the folder `NAME-<hash of recipe>` in the cache, calling `make` to fill it if absent.

    It is filled under another name and renamed, so no process sees half of it; of two processes
    that race, one is kept. Raises UsageError if the cache cannot be written.
    """
    from safetensors import SafetensorError  # also of a full disk

    key = hashlib.sha256(json.dumps(recipe, sort_keys=True).encode()).hexdigest()[:12]
    folder = cache_folder() / f"{name}-{key}"
    if folder.is_dir():
        return folder
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        unfinished = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
    except OSError as error:
        raise UsageError(
            f"cannot write the checkpoint cache: {error.strerror}",
            where=str(folder.parent),
            fix="set PERFLEDGER_CACHE to a folder that can be written",
        ) from None
    try:
        make(unfinished)
        unfinished.chmod(0o755)
        unfinished.rename(folder)
    except (OSError, SafetensorError) as error:
        if not folder.is_dir():  # else another process was faster, with the same content
            raise UsageError(
                f"cannot make the checkpoint {name}: {error}",
                where=str(folder.parent),
                fix="make room there, or set PERFLEDGER_CACHE to another folder",
            ) from error
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    return folder
