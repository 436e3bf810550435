"""The write-ahead log on disks that are full, that fail a sync, and that lose power.

The disks are real: a small tmpfs, and file systems on loop devices, which root may mount.
"""

import errno
import os
import resource
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from small_disks import disk_in_memory, mounted

from perfledger.collectors.wal.log_segments import HEADER_BYTES, RECORD_BYTES
from perfledger.collectors.wal.write_ahead_log import LogRecord, WriteAheadLog

BODY_BYTES = 100_000
MIB = 1 << 20


def record(number: int) -> LogRecord:
    return LogRecord(0, number, bytes([number % 251]) * BODY_BYTES)


def leftover_of(folder: Path) -> list[LogRecord]:
    with closing(WriteAheadLog.open(folder)) as log:
        return [item for segment in log.leftover() for item in segment.records()]


def cut_records(log: WriteAheadLog) -> list[LogRecord]:
    segment = log.cut()
    assert segment is not None
    return list(segment.records())


def append_until_refused(log: WriteAheadLog, number: int) -> tuple[list[LogRecord], OSError]:
    """Append groups of two from a number on; return what was taken and why no more was."""
    taken: list[LogRecord] = []
    while True:
        group = [record(number + len(taken)), record(number + len(taken) + 1)]
        size_bytes = log.bytes
        try:
            log.append(group)
        except OSError as error:
            assert log.bytes == size_bytes
            return taken, error
        taken += group


def fill(path: Path) -> None:
    """Write a file until its disk has not one page left."""
    with open(path, "wb", buffering=0) as file, pytest.raises(OSError, match="No space left"):
        while file.write(bytes(4096)):
            pass


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 8 MiB in memory."""
    with disk_in_memory(tmp_path / "small", 8 * MIB) as disk:
        yield disk


def make_image(path: Path, size_bytes: int) -> Path:
    """Make an ext4 file system in a sparse file; its journal makes it crash-safe."""
    path.touch()
    os.truncate(path, size_bytes)
    subprocess.run(["mkfs.ext4", "-q", "-E", "nodiscard", str(path)], check=True)
    return path


def test_a_full_disk_refuses_and_takes_appends_again_once_it_is_freed(small_disk: Path) -> None:
    filler = small_disk / "filler"
    filler.write_bytes(bytes(4 * MIB))
    with closing(WriteAheadLog.open(small_disk / "log")) as log:
        taken, error = append_until_refused(log, 0)
        assert (error.errno, len(taken) > 20) == (errno.ENOSPC, True)
        assert append_until_refused(log, 1000)[0] == []
        shutil.copytree(small_disk / "log", small_disk.parent / "as a crash would leave it")
        log.append([LogRecord(1, 7, b"small enough for what is left")])
        filler.unlink()
        more, _ = append_until_refused(log, 2000)
        assert len(more) > 20
        expected = [*taken, LogRecord(1, 7, b"small enough for what is left"), *more]
        assert cut_records(log) == expected
        assert (log.quarantined_bytes, len(list((small_disk / "log").glob("*.wal")))) == (0, 1)
    assert leftover_of(small_disk.parent / "as a crash would leave it") == taken
    assert leftover_of(small_disk / "log") == expected


def test_a_disk_too_full_for_a_new_segment_keeps_no_trace_of_the_append(small_disk: Path) -> None:
    with closing(WriteAheadLog.open(small_disk / "log")) as log:
        taken, _ = append_until_refused(log, 0)
        full = log.cut()
        assert full is not None
        with pytest.raises(OSError, match="No space left"):
            log.append([record(1000), record(1001)])
        assert (log.cut(), log.segments) == (None, 1)
        assert len(list((small_disk / "log").glob("*.wal"))) == 1
        log.drop(full)
        log.append([record(2000)])
    assert leftover_of(small_disk / "log") == [record(2000)]


def test_a_log_opens_on_a_full_disk_and_counts_damage_it_cannot_keep(small_disk: Path) -> None:
    with closing(WriteAheadLog.open(small_disk / "log")) as log:
        taken, _ = append_until_refused(log, 0)
    (file,) = (small_disk / "log").glob("*.wal")
    with open(file, "r+b") as sink:
        sink.seek(HEADER_BYTES + RECORD_BYTES)
        sink.write(b"damage")
    fill(small_disk / "filler")
    for _ in range(2):
        with closing(WriteAheadLog.open(small_disk / "log")) as log:
            (segment,) = log.leftover()
            assert list(segment.records()) == taken[1:]
            assert log.quarantined_bytes == RECORD_BYTES + BODY_BYTES
            assert not list((small_disk / "log" / "quarantine").glob("*"))
            with pytest.raises(OSError, match="No space left"):
                log.append([record(1)])
    (small_disk / "filler").unlink()
    assert leftover_of(small_disk / "log") == taken[1:]
    (kept,) = (small_disk / "log" / "quarantine").glob("*")
    assert (kept.suffix, kept.stat().st_size) == (".damaged", RECORD_BYTES + BODY_BYTES)


def test_a_write_that_goes_through_in_part_is_taken_back(tmp_path: Path) -> None:
    """A limit on file sizes cuts writes short at a byte, without root."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    with closing(WriteAheadLog.open(tmp_path / "log")) as log:
        resource.setrlimit(resource.RLIMIT_FSIZE, (10 * BODY_BYTES + 12_345, hard))
        try:
            taken, error = append_until_refused(log, 0)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        assert (error.errno, len(taken)) == (errno.EFBIG, 10)
        (file,) = (tmp_path / "log").glob("*.wal")
        assert file.stat().st_size == log.bytes == HEADER_BYTES + 10 * (RECORD_BYTES + BODY_BYTES)
        log.append([record(11)])
    assert leftover_of(tmp_path / "log") == [*taken, record(11)]


def test_after_a_failed_sync_the_segment_goes_on_in_another_file(small_disk: Path) -> None:
    """A disk that takes writes into memory and cannot put them where they belong."""
    image = make_image(small_disk / "image", 32 * MIB)
    with mounted(small_disk.parent / "failing", "-o", "loop", str(image)) as disk:
        with closing(WriteAheadLog.open(disk / "log")) as log:
            log.append([record(0)])
            subprocess.run(["sync", "-f", str(disk)], check=True)
            fill(small_disk / "filler")
            refused = [record(n) for n in range(100, 140)]
            for _ in range(2):
                with pytest.raises(OSError):
                    log.append(refused)
            (small_disk / "filler").unlink()
            log.append([record(1), record(2)])
            assert (log.segments, len(list((disk / "log").glob("*.wal")))) == (1, 2)
            log.append([record(3)])
            assert cut_records(log) == [record(n) for n in range(4)]
        assert leftover_of(disk / "log") == [record(n) for n in range(4)]


def test_power_cut_after_an_acknowledgement_loses_nothing(tmp_path: Path) -> None:
    """A copy of a mounted image is what the disk had at that moment, no more."""
    image = make_image(tmp_path / "image", 16 * MIB)
    copies: list[list[LogRecord]] = []

    def cut_power() -> None:
        shutil.copyfile(image, tmp_path / f"image {len(copies)}")
        copies.append(list(expected))

    expected: list[LogRecord] = []
    # Without `commit`, the kernel itself might make all durable at any moment.
    with (
        mounted(tmp_path / "disk", "-o", "loop,commit=900", str(image)) as disk,
        closing(WriteAheadLog.open(disk / "made" / "log")) as log,
    ):
        for number in range(8):
            log.append([record(number)])
            expected.append(record(number))
            cut_power()
            if number == 2:
                segment = log.cut()
                assert segment is not None
                log.drop(segment)
                expected.clear()
                cut_power()
            elif number == 4:
                log.cut()
    for number, durable in enumerate(copies):
        copy = tmp_path / f"image {number}"
        with mounted(tmp_path / "disk", "-o", "loop", str(copy)) as disk:
            assert leftover_of(disk / "made" / "log") == durable
