"""The write-ahead log gives back what was appended, whole and once, whatever happened to its files.

What only a failing disk shows is in test_log_disk_faults.py.
"""

import os
import random
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import threading
import tracemalloc
import zlib
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from perfledger.collectors.wal.log_quarantine import MAX_FILES
from perfledger.collectors.wal.log_segments import (
    HEADER_BYTES,
    RECORD_BYTES,
    Body,
    FileHeader,
    encode,
)
from perfledger.collectors.wal.write_ahead_log import (
    LogFull,
    LogRecord,
    Segment,
    SegmentName,
    WriteAheadLog,
)
from perfledger.schema.errors import UsageError

# Real files in memory, where thousands of syncs cost nothing.
IN_MEMORY = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
BODIES = (b"", b"a", b"perfwal\n", bytes(40), b"last but one", b"\xff" * 17)
RECORDS = [LogRecord(n % 3, 10**18 + n, body) for n, body in enumerate(BODIES)]
NAME = SegmentName("1764515000000000000-0a1b2c3d")
MARKER = b"\x01\x80MARKER"


@pytest.fixture
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(dir=IN_MEMORY) as path:
        yield Path(path)


def packed(records: list[LogRecord], part: int = 0, earlier_bytes: int = 0) -> bytes:
    header = FileHeader(NAME, part, earlier_bytes, MARKER).pack()
    return header + b"".join(encode(records, MARKER, HEADER_BYTES))


def size_bytes(*records: LogRecord) -> int:
    return sum(RECORD_BYTES + len(record.body) for record in records)


def write_log(folder: Path, content: bytes, file_name: str = f"{NAME}.0.wal") -> None:
    folder.mkdir(exist_ok=True)
    (folder / file_name).write_bytes(content)


def read_log(folder: Path) -> tuple[list[LogRecord], int, int]:
    """Return what a log gives back after a crash, and its quarantined and torn bytes."""
    with closing(WriteAheadLog.open(folder)) as log:
        records = [record for segment in log.leftover() for record in segment.records()]
        return records, log.quarantined_bytes, log.torn_bytes


def in_quarantine(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in (folder / "quarantine").glob("*")}


def test_what_was_appended_comes_back_until_it_is_dropped(folder: Path) -> None:
    folder = folder / "made" / "durably"
    with closing(WriteAheadLog.open(folder)) as log:
        assert (log.cut(), log.leftover(), log.bytes, log.segments) == (None, [], 0, 0)
        log.append([])
        log.append(RECORDS[:2])
        log.append(RECORDS[2:4])
        first = log.cut()
        assert first is not None
        assert log.cut() is None
        log.append(RECORDS[4:])
        assert (list(first.records()), log.segments) == (RECORDS[:4], 2)
        assert first.bytes == HEADER_BYTES + size_bytes(*RECORDS[:4])
        assert log.bytes == 2 * HEADER_BYTES + size_bytes(*RECORDS)
        log.drop(first)
        log.drop(first)
        assert (log.segments, log.bytes) == (1, HEADER_BYTES + size_bytes(*RECORDS[4:]))
    with closing(WriteAheadLog.open(folder)) as log:
        (second,) = log.leftover()
        assert (list(second.records()), second.name > first.name) == (RECORDS[4:], True)
        assert log.cut() is None
        log.drop(second)
        assert (log.leftover(), log.bytes, log.segments, log.quarantined_bytes) == ([], 0, 0, 0)
    assert [path.name for path in folder.iterdir()] == ["lock"]


def test_bodies_of_every_kind_of_buffer_and_more_than_one_writev_takes(folder: Path) -> None:
    bodies: list[Body] = [
        b"bytes",
        bytearray(b"bytearray"),
        memoryview(b"--view")[2:],
        np.arange(9, dtype="u1"),
    ]
    many: list[Body] = [bytes([n % 251]) * (n % 7) for n in range(5000)]
    with closing(WriteAheadLog.open(folder)) as log:
        log.append([LogRecord(0, n, body) for n, body in enumerate(bodies + many)])
    expected = [b"bytes", b"bytearray", b"view", bytes(range(9)), *many]
    assert read_log(folder)[0] == [LogRecord(0, n, body) for n, body in enumerate(expected)]


class AnyUse(RuleBasedStateMachine):
    """Appends, cuts, drops, restarts and crashes in any order, beside a model of plain lists."""

    def __init__(self) -> None:
        super().__init__()
        self.scratch = tempfile.TemporaryDirectory(dir=IN_MEMORY)
        self.folder = Path(self.scratch.name) / "0"
        self.restarts = 0
        self.log = WriteAheadLog.open(self.folder)
        self.current: list[LogRecord] = []
        self.segments: dict[str, tuple[Segment, list[LogRecord]]] = {}

    @rule(
        bodies=st.lists(st.binary(max_size=50), max_size=5),
        kind=st.integers(0, 2),
        received_ns=st.integers(-(2**63), 2**63 - 1),
    )
    def append(self, bodies: list[bytes], kind: int, received_ns: int) -> None:
        records = [LogRecord(kind, received_ns, body) for body in bodies]
        self.log.append(records)
        self.current += records

    @rule()
    def cut(self) -> None:
        segment = self.log.cut()
        assert (segment is None) == (not self.current)
        if segment is not None:
            assert all(segment.name > name for name in self.segments)
            self.segments[segment.name] = (segment, self.current)
            self.current = []

    @precondition(lambda self: self.segments)
    @rule(data=st.data())
    def drop(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.segments)))
        self.log.drop(self.segments.pop(name)[0])

    @rule()
    def restart(self) -> None:
        self.log.close()
        self.open_again(self.folder)

    @rule()
    def crash(self) -> None:
        """A copy of the folder is what a killed process leaves."""
        self.restarts += 1
        copy = self.folder.with_name(str(self.restarts))
        shutil.copytree(self.folder, copy)
        self.log.close()
        self.open_again(copy)

    def open_again(self, folder: Path) -> None:
        self.folder = folder
        self.log = WriteAheadLog.open(folder)
        leftover = self.log.leftover()
        expected = [records for _, records in self.segments.values()]
        expected += [self.current] if self.current else []
        assert [list(segment.records()) for segment in leftover] == expected
        self.segments = {item.name: (item, list(item.records())) for item in leftover}
        self.current = []

    @invariant()
    def counts_are_right(self) -> None:
        for segment, records in self.segments.values():
            assert list(segment.records()) == records
        assert self.log.segments == len(self.segments) + bool(self.current)
        files = self.folder.glob("*.wal")
        assert self.log.bytes == sum(path.stat().st_size for path in files)
        assert self.log.quarantined_bytes == 0

    def teardown(self) -> None:
        self.log.close()
        self.scratch.cleanup()


AnyUse.TestCase.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
TestAnyUse = AnyUse.TestCase


def test_cut_short_at_any_byte_the_whole_records_before_it_come_back(folder: Path) -> None:
    content = packed(RECORDS)
    ends = [HEADER_BYTES + size_bytes(*RECORDS[:n]) for n in range(len(RECORDS) + 1)]
    for length in range(len(content) + 1):
        write_log(folder / str(length), content[:length])
        whole = sum(length >= end for end in ends[1:])
        torn = length - ends[whole] if length >= HEADER_BYTES else length
        assert read_log(folder / str(length)) == (RECORDS[:whole], torn, torn)
        if torn:
            (kept,) = in_quarantine(folder / str(length)).values()
            assert kept == content[length - torn : length]


def test_any_flipped_bit_costs_only_the_record_that_it_is_in(folder: Path) -> None:
    content = packed(RECORDS)
    ends = [HEADER_BYTES + size_bytes(*RECORDS[:n]) for n in range(len(RECORDS) + 1)]
    for bit in range(8 * len(content)):
        place = bit // 8
        damaged = bytearray(content)
        damaged[place] ^= 1 << bit % 8
        write_log(folder / str(bit), bytes(damaged))
        result = read_log(folder / str(bit))
        if place < HEADER_BYTES:
            assert result == ([], len(content), 0)
            assert in_quarantine(folder / str(bit)) == {f"{NAME}.0.wal-0.damaged": bytes(damaged)}
            continue
        hit = sum(place >= end for end in ends) - 1
        lost = size_bytes(RECORDS[hit])
        is_last = hit == len(RECORDS) - 1
        assert result == (RECORDS[:hit] + RECORDS[hit + 1 :], lost, lost if is_last else 0)
        name = f"{NAME}.0-{ends[hit]}.{'torn' if is_last else 'damaged'}"
        assert in_quarantine(folder / str(bit)) == {name: damaged[ends[hit] : ends[hit + 1]]}


@settings(max_examples=300, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_bytes_overwritten_anywhere_cost_the_records_they_are_in(data: st.DataObject) -> None:
    content = packed(RECORDS * 3)
    start = data.draw(st.integers(HEADER_BYTES, len(content) - 1))
    # Stale bytes of the same file, an intact record in the wrong place, or anything.
    junk = st.binary(min_size=1) | st.just(content[:-1]) | st.just(content[HEADER_BYTES:])
    new = data.draw(junk)[: len(content) - start]
    expected = []
    offset = HEADER_BYTES
    damaged = content[:start] + new + content[start + len(new) :]
    for record in RECORDS * 3:
        end = offset + size_bytes(record)
        expected += [record] if content[offset:end] == damaged[offset:end] else []
        offset = end
    with tempfile.TemporaryDirectory(dir=IN_MEMORY) as path:
        write_log(Path(path), damaged)
        records, quarantined, _ = read_log(Path(path))
        assert records == expected
        assert quarantined == sum(map(len, in_quarantine(Path(path)).values()))
        assert size_bytes(*records) + quarantined == len(content) - HEADER_BYTES


@settings(max_examples=300, deadline=None, suppress_health_check=list(HealthCheck))
@given(content=st.binary(max_size=200) | st.binary().map(lambda tail: packed([]) + tail))
def test_files_of_anything_are_no_records_and_no_error(content: bytes) -> None:
    with tempfile.TemporaryDirectory(dir=IN_MEMORY) as path:
        write_log(Path(path), content)
        records, quarantined, _ = read_log(Path(path))
        kept = b"".join(in_quarantine(Path(path)).values())
        assert (records, len(kept)) == ([], quarantined)
        assert content.endswith(kept)


def version_2() -> bytes:
    """Return a file whose checksums are right, of a version that is not known yet."""
    content = packed(RECORDS)
    fields = content[:8] + struct.pack("<I", 2) + content[12 : HEADER_BYTES - 4]
    return fields + struct.pack("<I", zlib.crc32(fields)) + content[HEADER_BYTES:]


@pytest.mark.parametrize(
    ("file_name", "content"),
    [
        (f"{NAME}.0.wal", b""),
        (f"{NAME}.0.wal", bytes(1000)),
        (f"{NAME}.0.wal", version_2()),
        (f"{NAME}.1.wal", packed(RECORDS)),
        ("1764515000000000000-0a1b2c3e.0.wal", packed(RECORDS)),
        (f"{NAME}.wal", packed(RECORDS)),
        ("copy of a segment.wal", packed(RECORDS)),
        ("x" * 251 + ".wal", b"no room for a longer name"),
    ],
)
def test_a_file_that_is_no_segment_is_set_aside_whole(
    folder: Path, file_name: str, content: bytes
) -> None:
    write_log(folder, content, file_name)
    (folder / "notes.txt").write_text("somebody else's")
    (folder / "folder.wal").mkdir()
    for _ in range(2):
        with closing(WriteAheadLog.open(folder)) as log:
            assert log.leftover() == []
            log.append(RECORDS)
            segment = log.cut()
            assert segment is not None
            log.drop(segment)
    everything = {path.name: path for path in folder.rglob("*") if path.is_file()}
    assert sorted(len(path.read_bytes()) for path in everything.values()) == sorted(
        [len(content), len("somebody else's"), 10]
    )
    assert (folder / "notes.txt").exists()


def test_a_segment_goes_on_in_the_next_part_and_what_was_refused_stays_out(folder: Path) -> None:
    write_log(folder, packed(RECORDS))
    write_log(
        folder, packed(RECORDS[4:], 2, HEADER_BYTES + size_bytes(*RECORDS[:3])), f"{NAME}.2.wal"
    )
    with closing(WriteAheadLog.open(folder)) as log:
        (segment,) = log.leftover()
        assert (segment.name, segment.name.created_ns) == (NAME, 1764515000000000000)
        assert list(segment.records()) == RECORDS[:3] + RECORDS[4:]
        assert log.quarantined_bytes == 0
        os.truncate(folder / f"{NAME}.0.wal", HEADER_BYTES + 10)
        assert list(segment.records()) == RECORDS[4:]
        assert log.quarantined_bytes == size_bytes(*RECORDS[:3])
        assert log.torn_bytes == 0
        log.drop(segment)
    assert list(folder.glob("*.wal")) == []


def test_damage_is_counted_once_and_kept_within_bounds(folder: Path) -> None:
    records = [LogRecord(0, n, bytes(100)) for n in range(2 * MAX_FILES + 20)]
    content = bytearray(packed(records))
    for n in range(0, len(records), 2):
        content[HEADER_BYTES + n * size_bytes(records[0]) + RECORD_BYTES] = 1
    write_log(folder, bytes(content))
    with closing(WriteAheadLog.open(folder)) as log:
        (segment,) = log.leftover()
        for _ in range(2):
            assert list(segment.records()) == records[1::2]
            assert log.quarantined_bytes == size_bytes(*records[::2])
    assert len(in_quarantine(folder)) == MAX_FILES
    assert read_log(folder)[0] == records[1::2]
    assert len(in_quarantine(folder)) == MAX_FILES


def test_a_length_beyond_the_file_allocates_nothing(folder: Path) -> None:
    fields = struct.pack("<8sIIqI", MARKER, 2**32 - 1, 0, 0, 0)
    place = (HEADER_BYTES + size_bytes(*RECORDS)).to_bytes(8, "little")
    huge = fields + struct.pack("<I", zlib.crc32(fields, zlib.crc32(place)))
    write_log(folder, packed(RECORDS) + huge)
    tracemalloc.start()
    try:
        assert read_log(folder) == (RECORDS, len(huge), len(huge))
        assert tracemalloc.get_traced_memory()[1] < 3 << 20
    finally:
        tracemalloc.stop()


def test_reading_holds_one_record_in_memory(folder: Path) -> None:
    body = bytes(4 << 20)
    with closing(WriteAheadLog.open(folder)) as log:
        for n in range(12):
            log.append([LogRecord(0, n, body)])
        segment = log.cut()
        assert segment is not None
        tracemalloc.start()
        try:
            assert sum(record.received_ns for record in segment.records()) == sum(range(12))
            assert tracemalloc.get_traced_memory()[1] < 3 * len(body)
        finally:
            tracemalloc.stop()


APPENDER = """
import random, sys, time
from pathlib import Path
from perfledger.collectors.wal.write_ahead_log import LogRecord, WriteAheadLog

log = WriteAheadLog.open(Path(sys.argv[1]))
number = int(sys.argv[2])
while True:
    group = range(number, number + random.randint(1, 8))
    log.append([LogRecord(n % 3, n, bytes([n % 256]) * (n * 7919 % 300_000)) for n in group])
    number = group[-1] + 1
    print(number, flush=True)
    if random.random() < 0.1:
        log.cut()
"""


def test_whatever_was_acknowledged_survives_sigkill(tmp_path: Path) -> None:
    number = 0
    for seed in range(6):
        arguments = [sys.executable, "-P", "-c", APPENDER, str(tmp_path / "log"), str(number)]
        with subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            acknowledged = int(process.stdout.readline())
            timer = threading.Timer(random.Random(seed).uniform(0, 0.4), process.kill)
            timer.start()
            for line in process.stdout:
                acknowledged = int(line) if line.endswith("\n") else acknowledged
            assert process.wait(30) == -signal.SIGKILL
        records, quarantined, torn = read_log(tmp_path / "log")
        assert [record.received_ns for record in records] == list(range(len(records)))
        assert acknowledged <= len(records) <= acknowledged + 8
        for n, record in enumerate(records):
            assert record == LogRecord(n % 3, n, bytes([n % 256]) * (n * 7919 % 300_000))
        assert quarantined == torn
        number = len(records)


def test_a_second_opener_is_told_who_has_the_log(tmp_path: Path) -> None:
    folder = tmp_path / "log"
    with closing(WriteAheadLog.open(folder)):
        with pytest.raises(UsageError) as refusal:
            WriteAheadLog.open(folder)
        assert str(refusal.value) == (
            f"process {os.getpid()} already writes this log ({folder})\n"
            "  try: stop that collector, or give this one another --store"
        )
        code = (
            "import sys, pathlib;"
            "from perfledger.collectors.wal.write_ahead_log import WriteAheadLog;"
            "WriteAheadLog.open(pathlib.Path(sys.argv[1]))"
        )
        other = subprocess.run(
            [sys.executable, "-P", "-c", code, str(folder)], capture_output=True, text=True
        )
        assert f"process {os.getpid()} already writes this log" in other.stderr
    WriteAheadLog.open(folder).close()


def test_a_folder_that_cannot_be_used_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError) as refusal:
        WriteAheadLog.open(tmp_path / "file")
    assert str(refusal.value) == (
        f"cannot keep a write-ahead log: File exists ({tmp_path / 'file'})\n"
        "  try: give a folder on a local disk that you may write to with --store"
    )


def test_names_increase_though_the_clock_is_set_back(folder: Path) -> None:
    clock = iter([1000, 400, 1000, 1002, 7, 2000])
    names = []
    for _ in range(2):
        log = WriteAheadLog.open(folder, clock_ns=lambda: next(clock))
        for _ in range(3):
            log.append(RECORDS)
            segment = log.cut()
            assert segment is not None
            names.append(segment.name)
        log.close()
    assert [name.created_ns for name in names] == [1000, 1001, 1002, 1003, 1004, 2000]
    with closing(WriteAheadLog.open(folder)) as log:
        assert [segment.name for segment in log.leftover()] == names


def test_a_full_log_refuses_until_a_segment_is_dropped(folder: Path) -> None:
    limit = HEADER_BYTES + size_bytes(*RECORDS)
    with closing(WriteAheadLog.open(folder, max_bytes=limit)) as log:
        with pytest.raises(LogFull):
            log.append([*RECORDS, RECORDS[0]])
        assert (log.bytes, log.segments, log.cut()) == (0, 0, None)
        log.append(RECORDS)
        with pytest.raises(LogFull, match=f"the write-ahead log has {limit} bytes at most"):
            log.append(RECORDS[:1])
        segment = log.cut()
        assert segment is not None
        assert list(segment.records()) == RECORDS
        with pytest.raises(LogFull):
            log.append(RECORDS[:1])
        log.drop(segment)
        log.append(RECORDS)
    with closing(WriteAheadLog.open(folder, max_bytes=limit)) as log:
        with pytest.raises(LogFull):
            log.append(RECORDS[:1])
        log.drop(log.leftover()[0])
        log.append(RECORDS[:1])
    with pytest.raises(ValueError, match="closed"):
        log.append(RECORDS)


def test_threads_append_while_another_cuts_reads_and_drops(folder: Path) -> None:
    seen: list[LogRecord] = []

    def send(sender: int) -> None:
        for n in range(200):
            log.append([LogRecord(sender, 2 * n + i, bytes(n)) for i in range(2)])

    with closing(WriteAheadLog.open(folder)) as log:
        senders = [threading.Thread(target=send, args=(n,)) for n in range(4)]
        for thread in senders:
            thread.start()
        while any(thread.is_alive() for thread in senders) or log.segments:
            if (segment := log.cut()) is not None:
                seen += segment.records()
                log.drop(segment)
        for thread in senders:
            thread.join()
        assert (log.bytes, log.quarantined_bytes) == (0, 0)
    for sender in range(4):
        mine = [record.received_ns for record in seen if record.kind == sender]
        assert mine == list(range(400))
    assert len(seen) == 1600
