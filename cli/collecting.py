"""A collector of our own, for the time of one command: `rerun` and `demo` write through it."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from perfledger.instrumented_runtime.targets.process import perfledger_command, running

READY_S = 60.0
READY_LINE = r"OTLP over gRPC on ([^\s,]+)"


@contextmanager
def collecting(store: str, namespace: str, logs: Path) -> Iterator[str]:
    """Run `perfledger collect` on free ports; yield its OTLP gRPC endpoint.

    On exit it has written all that it took. Raises UsageError or PerfledgerError where it does not
    start; what it prints is in `logs`.
    """
    command = perfledger_command("collect", "--store", store, "--namespace", namespace)
    command += ["--otlp-grpc", "127.0.0.1:0", "--otlp-http", "127.0.0.1:0", "--metrics", "off"]
    with running("collect", command, os.environ, logs / "collect.log") as child:
        yield f"http://{child.wait_for(READY_LINE, READY_S)[1]}"
