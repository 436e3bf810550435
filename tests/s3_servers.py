"""Real servers of the S3 protocol that obey If-None-Match: moto's, and SeaweedFS."""

import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

BUCKET = "ledger"
KINDS = ("moto", "seaweedfs")


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


@contextmanager
def s3_server(kind: str, folder: Path) -> Iterator[dict[str, str]]:
    """Run a server with one bucket; yield the AWS_* variables that lead to it."""
    process, url = _started(kind, folder)
    try:
        yield {
            "AWS_ENDPOINT_URL": url,
            "AWS_ACCESS_KEY_ID": "any",
            "AWS_SECRET_ACCESS_KEY": "any",
            "AWS_REGION": "us-east-1",
        }
    finally:
        process.kill()
        process.wait()


def _started(kind: str, folder: Path) -> tuple[subprocess.Popen[bytes], str]:
    """Start a server; again on other ports where somebody was faster to take one."""
    quiet = subprocess.DEVNULL
    for attempt in range(4):
        port = free_port()
        command = _command(kind, folder / str(attempt), port)
        process = subprocess.Popen(command, stdout=quiet, stderr=quiet)
        if _make_bucket(f"http://127.0.0.1:{port}/{BUCKET}", process):
            return process, f"http://127.0.0.1:{port}"
    raise AssertionError(f"{kind} does not start")


def _command(kind: str, folder: Path, port: int) -> list[str]:
    binaries = Path(sys.executable).parent
    if kind == "moto":
        return [str(binaries / "moto_server"), "-H", "127.0.0.1", "-p", str(port)]
    folder.mkdir()
    ports = [f"-{part}.port={free_port()}" for part in ("master", "volume", "filer")]
    ports += [f"-{part}.port.grpc={free_port()}" for part in ("master", "volume", "filer", "s3")]
    ports += ["-s3.port.iceberg=0", "-s3.port.lance=0", f"-s3.port={port}"]
    sizes = ["-volume.max=8", "-master.volumeSizeLimitMB=64"]
    return [
        str(binaries / "weed"),
        "server",
        f"-dir={folder}",
        "-ip=127.0.0.1",
        "-s3",
        *ports,
        *sizes,
    ]


def _make_bucket(url: str, process: subprocess.Popen[bytes]) -> bool:
    deadline_s = time.monotonic() + 20
    while process.poll() is None and time.monotonic() < deadline_s:
        try:
            with urllib.request.urlopen(urllib.request.Request(url, method="PUT"), timeout=5):
                return True
        except (urllib.error.URLError, OSError):
            time.sleep(0.2)
    process.kill()
    process.wait()
    return False
