"""Which processes of the runtime can work together: those of one version of what they exchange."""

import hashlib
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

# What both ends of the pipe and of a ring must understand alike.
SHARED_SOURCES = (
    *("messages.py", "options.py", "parallel/layout.py", "parallel/step_messages.py"),
    *("records.py", "ring.py"),
)


@cache
def runtime_version() -> str:
    """Return the package's version and a hash of the code that defines what processes exchange.

    Messages are pickled and records are packed by position: two processes that differ in these
    files would misunderstand each other without an error.
    """
    digest = hashlib.sha256()
    for name in SHARED_SOURCES:
        digest.update((Path(__file__).parent / name).read_bytes())
    try:
        released = version("perfledger")
    except PackageNotFoundError:
        released = "unreleased"
    return f"{released}+{digest.hexdigest()[:12]}"
