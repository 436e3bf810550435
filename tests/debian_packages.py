"""Programs that a test needs and pip cannot install; .ci/run installs their Debian packages."""

import os
import shutil

import pytest


def program(name: str) -> str:
    """Return the path of a program; without it the test is skipped, and fails where CI=true."""
    found = shutil.which(name)
    if found is None:
        assert os.environ.get("CI") != "true", f"{name} is missing; .ci/run installs it"
        pytest.skip(f"no {name} here")
    return found
