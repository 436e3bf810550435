"""The ring between processes: nothing lost uncounted, nothing torn, nothing left behind."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perfledger.instrumented_runtime.records import (
    CHUNK,
    KINDS,
    LEAVE,
    STEP,
    WORDS,
    Chunk,
    Leave,
    Record,
)
from perfledger.instrumented_runtime.ring import (
    Counts,
    Gap,
    Reader,
    Ring,
    Writer,
    to_signed,
    to_unsigned,
)
from perfledger.schema.errors import PerfledgerError

WORD = st.integers(-(2**63), 2**63 - 1)
RECORD = st.sampled_from(sorted(KINDS)).flatmap(
    lambda kind: st.tuples(
        st.just(kind), st.tuples(*[WORD] * len(KINDS[kind]._fields)).map(KINDS[kind]._make)
    )
)
# A write is (kind, record), a read is its limit, None asks for a gap at the end.
TURN = RECORD | st.integers(1, 9) | st.none()


def test_every_kind_fits_a_slot_beside_its_kind_and_the_drop_count() -> None:
    assert {kind: len(fields._fields) + 2 <= WORDS for kind, fields in KINDS.items()} == {
        kind: True for kind in KINDS
    }


@given(slots=st.integers(1, 6), turns=st.lists(TURN, max_size=60))
def test_what_is_read_is_what_was_written_less_the_counted_drops(
    slots: int, turns: list[tuple[int, Record] | int | None]
) -> None:
    ring = Ring.create(slots)
    writer, reader = Writer.attach(ring.name), Reader.attach(ring.name)
    queued: list[Record | Gap] = []  # what a reader must see next, gaps where they are
    pending = dropped = 0
    for turn in turns:
        if turn is None:
            seen = pending if not queued else 0
            assert reader.gap_at_end() == ([Gap(seen)] if seen else [])
            pending -= seen
        elif isinstance(turn, int):
            expected = take(queued, turn)
            assert reader.read(turn) == expected
        else:
            writer.write(*turn)
            if sum(not isinstance(record, Gap) for record in queued) == slots:
                pending, dropped = pending + 1, dropped + 1
            else:
                queued += [Gap(pending), turn[1]] if pending else [turn[1]]
                pending = 0
    assert reader.read(10_000) == queued
    assert reader.gap_at_end() == ([Gap(pending)] if pending else [])
    assert ring.counts() == Counts(dropped, 0, 0)
    ring.close()


def take(queued: list[Record | Gap], limit: int) -> list[Record | Gap]:
    """Remove up to `limit` records from the front, each with the gap before it."""
    end = records = 0
    for position, record in enumerate(queued, 1):
        records += not isinstance(record, Gap)
        if records > limit:
            break
        if not isinstance(record, Gap):
            end = position
    taken = queued[:end]
    del queued[:end]
    return taken


def test_a_record_not_of_its_kind_is_dropped_and_counted() -> None:
    ring = Ring.create(8)
    writer, reader = Writer.attach(ring.name), Reader.attach(ring.name)
    writer.write(LEAVE, Leave(*range(12)))
    writer.write(STEP, (1, 2))  # fields missing
    writer.write(CHUNK, (2**63, 0, 0, 0, 0))  # beyond 64 bits
    writer.write(99, (1,))  # no such kind
    writer.write(CHUNK, Chunk(*range(7)))
    assert reader.read(10) == [Leave(*range(12)), Gap(3), Chunk(*range(7))]
    ring.close()


def test_counters_that_the_exporter_publishes_are_seen_by_the_owner() -> None:
    ring = Ring.create(1)
    writer, reader = Writer.attach(ring.name), Reader.attach(ring.name)
    for _ in range(3):
        writer.write(CHUNK, Chunk(*range(7)))
    reader.publish(exported=70, export_failed=5)
    assert (ring.counts(), reader.dropped) == (Counts(2, 70, 5), 2)
    ring.close()


def test_a_second_writer_continues_where_the_first_stopped() -> None:
    ring = Ring.create(4)
    reader = Reader.attach(ring.name)
    for number in range(3):
        Writer.attach(ring.name).write(CHUNK, Chunk(number, *[0] * 6))
    assert reader.read(9) == [Chunk(number, *[0] * 6) for number in range(3)]
    ring.close()


@given(st.integers(0, 2**64 - 1))
def test_ids_survive_the_way_through_signed_words(unsigned: int) -> None:
    signed = to_signed(unsigned)
    assert -(2**63) <= signed < 2**63
    assert to_unsigned(signed) == unsigned


def test_attaching_to_what_is_no_ring_says_so(tmp_path: Path) -> None:
    with pytest.raises(PerfledgerError, match="cannot attach the telemetry ring: No such file"):
        Writer.attach(str(tmp_path / "missing"))
    other = tmp_path / "other"
    other.write_bytes(bytes(4096))
    with pytest.raises(PerfledgerError, match="not a telemetry ring of this version"):
        Reader.attach(str(other))


def test_where_there_is_no_memfd_a_file_serves_and_is_removed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delattr(os, "memfd_create", raising=False)
    ring = Ring.create(2)
    Writer.attach(ring.name).write(CHUNK, Chunk(*range(7)))
    assert Reader.attach(ring.name).read(5) == [Chunk(*range(7))]
    ring.close()
    assert not os.path.exists(ring.name)


# --- across processes ---

SCRIPT = '''
import multiprocessing, os, signal, sys, time
from perfledger.instrumented_runtime.records import STEP, ADMIT
from perfledger.instrumented_runtime.ring import Gap, Reader, Ring, Writer

def write(name, count):
    writer = Writer.attach(name)
    for number in range(count):
        writer.write(STEP, (number,) * 14)

def write_for_ever(name):
    writer = Writer.attach(name)
    number = 0
    while True:
        writer.write(STEP, (number,) * 14)
        number += 1

def check(records, following):
    """Every record whole and in its place; return the number that must follow."""
    for record in records:
        if isinstance(record, Gap):
            following += record.dropped
        else:
            assert tuple(record) == (following,) * 14, (record, following)
            following += 1
    return following

def start(target, *arguments):
    process = multiprocessing.get_context("spawn").Process(target=target, args=arguments)
    process.start()
    return process
'''

SMALL_RING = """
if __name__ == "__main__":
    ring = Ring.create(64)
    reader = Reader.attach(ring.name)
    writer = start(write, ring.name, 100_000)
    seen = following = 0
    while writer.is_alive() or seen:
        records = reader.read(7)
        seen = len(records)
        following = check(records, following)
    writer.join()
    following = check(reader.gap_at_end(), following)
    ring.close()
    print(following, writer.exitcode)
"""

KILLED_WRITER = """
if __name__ == "__main__":
    ring = Ring.create(1024)
    reader = Reader.attach(ring.name)
    writer = start(write_for_ever, ring.name)
    following = 0
    while following < 5000:
        following = check(reader.read(100), following)
    os.kill(writer.pid, signal.SIGKILL)
    writer.join()
    following = check(reader.read(10_000), following)
    check(reader.gap_at_end(), following)
    last = ring.counts().dropped
    again = start(write, ring.name, 3)
    again.join()
    whole = [record for record in reader.read(10) if not isinstance(record, Gap)]
    ring.close()
    print([record.seq for record in whole], writer.exitcode, again.exitcode)
"""

KILLED_OWNER = """
if __name__ == "__main__":
    ring = Ring.create(1024)
    writer = start(write_for_ever, ring.name)
    reader = Reader.attach(ring.name)
    while not reader.read(10):
        time.sleep(0.01)
    print(writer.pid, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
"""


def run_script(tmp_path: Path, body: str) -> subprocess.CompletedProcess[str]:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT + body)
    command = [sys.executable, "-P", "-W", "error", str(script)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


def test_a_writer_in_another_process_loses_nothing_uncounted(tmp_path: Path) -> None:
    done = run_script(tmp_path, SMALL_RING)
    assert (done.stdout, done.stderr) == ("100000 0\n", "")


def test_a_writer_killed_at_any_point_leaves_whole_records_and_no_litter(tmp_path: Path) -> None:
    done = run_script(tmp_path, KILLED_WRITER)
    assert (done.stdout, done.stderr) == ("[0, 1, 2] -9 0\n", "")


def test_a_killed_owner_leaves_no_memory_behind(tmp_path: Path) -> None:
    before = shared_files()
    script = tmp_path / "script.py"
    script.write_text(SCRIPT + KILLED_OWNER)
    command = [sys.executable, "-P", "-W", "error", str(script)]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True) as owner:
        assert owner.stdout is not None
        writer_pid = int(owner.stdout.readline())
        owner.wait(60)
        os.kill(writer_pid, signal.SIGKILL)  # it wrote on into memory that only it holds
        _, errors = owner.communicate(timeout=60)
    assert (owner.returncode, errors) == (-signal.SIGKILL, "")
    assert shared_files() <= before


def shared_files() -> set[str]:
    return {path.name for path in Path("/dev/shm").glob("*perfledger*")}
