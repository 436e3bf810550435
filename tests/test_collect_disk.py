"""`perfledger collect` on a disk that fills up and is freed: it refuses, and loses nothing."""

import contextlib
import os
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path

import grpc
import pytest
from collect_pipeline import rows_in_files, same_spans, span_numbers
from otlp_client import call, grpc_refusal, post, printed_counts, wait_until
from small_disks import disk_in_memory

from perfledger.schema.store import Store

Start = Callable[..., AbstractContextManager[object]]
QUICK = ("--settle", "1")

MIB = 2**20
DISK_BYTES = 48 * MIB


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 48 MiB in memory; only root may mount one."""
    with disk_in_memory(tmp_path / "disk", DISK_BYTES) as disk:
        yield disk


def fill(path: Path, leave_bytes: int) -> None:
    """Write a file until its disk has only so much left."""
    stat = os.statvfs(path.parent)
    with open(path, "wb", buffering=0) as file, contextlib.suppress(OSError):
        file.write(bytes(max(0, stat.f_bavail * stat.f_frsize - leave_bytes)))


class Sender(threading.Thread):
    """Sends requests one after another, each again and again until it is acknowledged."""

    def __init__(self, collector: object, client: int) -> None:
        super().__init__()
        self._collector, self._client = collector, client
        self.stopping = threading.Event()
        self.acknowledged: list[int] = []
        self.refusals: list[tuple[object, object]] = []

    def run(self) -> None:
        first = self._client * 1_000_000 + 1
        while not self.stopping.is_set():
            numbers = range(first, first + 100)
            if self._is_taken(same_spans(*numbers, name="x" * 300)):
                self.acknowledged += numbers
                first += 100
            self.stopping.wait(0.05)

    def _is_taken(self, request: bytes) -> bool:
        if self._client % 2:
            try:
                return call(self._collector.grpc_port, request) == b""
            except grpc.RpcError as error:
                code, _, delay_s = grpc_refusal(error)
                self.refusals.append((code, delay_s))
                return False
        status, headers, _ = post(self._collector.http_port, request)
        if status != 200:
            self.refusals.append((status, headers.get("retry-after")))
        return status == 200


@pytest.mark.parametrize("low_water_mib", [12, 0])
def test_a_disk_that_fills_up_and_is_freed_costs_nothing_acknowledged(
    small_disk: Path, start_collector: Start, low_water_mib: int
) -> None:
    """With a low-water mark it refuses in time; without, the disk itself refuses."""
    ballast = small_disk / "ballast"
    flags = (*QUICK, "--low-water-mib", str(low_water_mib))
    with start_collector(small_disk, *flags) as collector:
        senders = [Sender(collector, client) for client in (1, 2)]
        for sender in senders:
            sender.start()
        try:
            wait_until(lambda: all(len(one.acknowledged) > 500 for one in senders))
            fill(ballast, 1 * MIB if low_water_mib else 0)
            wait_until(lambda: all(one.refusals for one in senders), 40)
            taken = [len(one.acknowledged) for one in senders]
            ballast.unlink()
            wait_until(
                lambda: all(
                    len(one.acknowledged) > before + 500
                    for one, before in zip(senders, taken, strict=True)
                )
            )
        finally:
            for sender in senders:
                sender.stopping.set()
            for sender in senders:
                sender.join()
    assert collector.process.returncode == 0
    assert set(senders[0].refusals) == {(grpc.StatusCode.UNAVAILABLE, 1.0)}
    assert set(senders[1].refusals) == {(503, "1")}
    found = span_numbers(Store.at(str(collector.store)))
    expected = {number for one in senders for number in one.acknowledged}
    assert expected <= set(found) and len(found) == len(set(found))
    assert rows_in_files(Store.at(str(collector.store))) == len(found)
    assert set(found) - expected <= {
        number for one in senders for number in range(one.acknowledged[-1] + 1, 3_000_000)
    }
    received, written, rejected, waiting = printed_counts(collector.log)["spans"]
    assert (rejected, waiting) == (0, 0) and written == len(found) <= received


def test_it_starts_on_a_full_disk_with_a_log_and_stores_it_once_there_is_room(
    small_disk: Path, start_collector: Start
) -> None:
    ballast, flags = small_disk / "ballast", (*QUICK, "--low-water-mib", "8")
    with start_collector(small_disk, *flags) as collector:
        for first in (1, 51):
            assert post(collector.http_port, same_spans(*range(first, first + 50)))[0] == 200
        collector.process.kill()
        collector.process.wait()
    fill(ballast, 0)
    with start_collector(small_disk, *flags) as collector:
        status, headers, _ = post(collector.http_port, same_spans(101))
        assert (status, headers["retry-after"]) == (503, "1")
        ballast.unlink()
        wait_until(lambda: post(collector.http_port, same_spans(101))[0] == 200)
    assert span_numbers(Store.at(str(collector.store))) == list(range(1, 102))
    lines = [line for line in collector.log.read_text().splitlines() if "requests are" in line]
    disk = rf"the disk of {re.escape(str(collector.store))}/default/wal has \d+ MiB free"
    assert len(lines) == 2
    assert re.search(rf"requests are refused: {disk}, --low-water-mib is 8$", lines[0])
    assert re.search(rf"requests are taken again: {disk} \(--low-water-mib 8\)$", lines[1])
