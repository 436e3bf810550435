"""Which spans came lately: never wrong about a new one, sure within the window, over restarts."""

import tempfile
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from otlp_client import span, traces

from perfledger.collectors.wire.keys import hash_of
from perfledger.collectors.wire.recent_spans import RecentSpans, _hashes_of, _slot_of
from perfledger.collectors.wire.span_batch import SpanBatch, SpanReader

READER = SpanReader(2048)


@cache
def one_span(number: int) -> object:
    return span(number + 1, start_time_unix_nano=1, end_time_unix_nano=2)


def batch(numbers: list[int]) -> SpanBatch:
    taken = SpanBatch(READER)
    taken.add(traces(*(one_span(number) for number in numbers)), 1)
    return taken


def take(recent: RecentSpans, numbers: list[int], segment: str | None = None) -> list[bool]:
    """Return which spans are new; as a segment of that name, remember them."""
    is_new, hashes = recent.take_new(batch(numbers))
    if segment is not None:
        recent.remember(segment, hashes[:, is_new])
    return [bool(one) for one in is_new]


class Model:
    """What must be answered: of each span, how many new ones came after it was last new."""

    def __init__(self, sure: int) -> None:
        self.sure = sure
        self.new_at: dict[int, int] = {}
        self.new = 0

    def check(self, numbers: list[int], is_new: list[bool]) -> None:
        before, seen_here = self.new, set()
        for number, new in zip(numbers, is_new, strict=True):
            if number not in self.new_at:
                assert new, "a span that never came was dropped"
            elif number in seen_here or before - self.new_at[number] < self.sure:
                assert not new, "a span of the window was let through"
            if new:
                self.new_at[number] = self.new
                self.new += 1
            seen_here.add(number)


batches = st.lists(st.lists(st.integers(0, 120), min_size=1, max_size=10), max_size=40)


def test_what_came_again_after_it_was_forgotten_is_known_after_a_restart(tmp_path: Path) -> None:
    """Though the first time is read before the second, into the generation that goes first."""
    recent = RecentSpans(tmp_path / "recent", 60)
    assert all(take(recent, list(range(30)), "1-a") + take(recent, [30], "2-a"))
    assert not any(take(recent, [30] * 30, "3-a"))  # makes room for as many: 0 is forgotten
    assert take(recent, [0], "4-a") == [True]
    again = RecentSpans(tmp_path / "recent", 60)
    again.load()
    assert all(take(again, list(range(100, 129))))
    assert take(again, [0]) == [False]


@settings(max_examples=60, deadline=None)
@given(batches, st.sets(st.integers(0, 39), max_size=4))
def test_it_agrees_with_a_set_of_everything(arriving: list[list[int]], restarts: set[int]) -> None:
    """A window of 60 in halves of 30; a batch of up to 10 may begin a new half."""
    model = Model(30 - 10)
    with tempfile.TemporaryDirectory() as folder:
        recent = RecentSpans(Path(folder) / "recent", 60)
        for at, numbers in enumerate(arriving):
            if at in restarts:
                recent = RecentSpans(Path(folder) / "recent", 60)
                recent.load()
            model.check(numbers, take(recent, numbers, f"{at:03d}-0000000a"))
        kept = [int(path.stat().st_size) for path in (Path(folder) / "recent").glob("*")]
    assert sum(size - 28 for size in kept) <= 60 * 16


@settings(max_examples=20, deadline=None)
@given(st.lists(st.integers(0, 300), min_size=1, max_size=300))
def test_a_batch_larger_than_the_window_is_taken_in_parts(numbers: list[int]) -> None:
    recent = RecentSpans(Path("/nonexistent"), 60)
    seen: set[int] = set()
    for number, new in zip(numbers, take(recent, numbers), strict=True):
        assert new or number in seen
        seen.add(number)


def test_it_forgets_what_is_long_gone(tmp_path: Path) -> None:
    recent = RecentSpans(tmp_path / "recent", 40)
    assert take(recent, [0]) == [True]
    for first in range(1, 101, 10):
        take(recent, list(range(first, first + 10)))
    assert take(recent, [0, 100]) == [True, False]


def test_tables_grow_and_hold_what_they_held() -> None:
    recent = RecentSpans(Path("/nonexistent"), 100_000)
    for first in range(0, 30_000, 5_000):
        assert all(take(recent, list(range(first, first + 5_000))))
    assert not any(take(recent, list(range(0, 30_000, 7))))
    assert take(recent, [29_999, 30_000]) == [False, True]


# --- Its files ----------------------------------------------------------------------------


def filled(folder: Path, segments: int = 3) -> list[Path]:
    recent = RecentSpans(folder, 1000)
    recent.load()
    for at in range(segments):
        take(recent, [2 * at, 2 * at + 1], f"{at + 1:04d}-0000000a")
    return sorted(folder.iterdir())


def known(folder: Path, numbers: range = range(6)) -> list[bool]:
    recent = RecentSpans(folder, 1000)
    recent.load()
    return [not new for new in take(recent, list(numbers))]


DAMAGES = {
    "cut short": lambda content: content[:-1],
    "cut in its head": lambda content: content[:10],
    "empty": lambda _: b"",
    "longer": lambda content: content + b"\0",
    "other magic": lambda content: b"X" + content[1:],
    "a flipped bit": lambda content: content[:-5] + bytes([content[-5] ^ 4]) + content[-4:],
    "a wild count": lambda content: content[:16] + b"\xff" * 8 + content[24:],
    "something else": lambda _: b"not one of these files at all, but long enough to be read",
}


@pytest.mark.parametrize("at", [0, 1, 2])
@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_file_costs_its_own_spans_and_is_removed(
    tmp_path: Path, damage: str, at: int
) -> None:
    folder = tmp_path / "recent"
    paths = filled(folder)
    paths[at].write_bytes(DAMAGES[damage](paths[at].read_bytes()))
    assert known(folder) == [n // 2 != at for n in range(6)]
    assert sorted(folder.iterdir()) == [path for path in paths if path != paths[at]]


def test_hashes_made_with_another_seed_are_of_no_use_and_removed(tmp_path: Path) -> None:
    paths = filled(tmp_path / "recent")
    (other,) = filled(tmp_path / "other", 1)
    stray = paths[0].with_name("9999-0000000a.ids")
    stray.write_bytes(other.read_bytes())
    assert known(tmp_path / "recent") == [True] * 6
    assert not stray.exists()


def test_what_is_no_file_of_ours_does_not_keep_it_from_starting(tmp_path: Path) -> None:
    folder = tmp_path / "recent"
    filled(folder)
    (folder / "0002-0000000b.ids").mkdir()
    (folder / "0005-0000000a.writing").write_bytes(b"half")
    assert known(folder) == [True] * 6
    assert not (folder / "0005-0000000a.writing").exists()


def test_without_its_folder_it_knows_nothing(tmp_path: Path) -> None:
    assert known(tmp_path / "recent") == [False] * 6


def test_files_that_cannot_be_written_leave_no_trace(tmp_path: Path) -> None:
    folder = tmp_path / "recent"
    filled(folder, 1)
    recent = RecentSpans(folder, 1000)
    recent.load()
    (folder / "0007-0000000a.ids").mkdir()  # in the way of the rename
    with pytest.raises(OSError):
        take(recent, [77], "0007-0000000a")
    assert take(recent, [77]) == [False]
    assert sorted(path.name for path in folder.iterdir()) == [
        "0001-0000000a.ids",
        "0007-0000000a.ids",
    ]


def test_many_small_segments_do_not_fill_the_folder(tmp_path: Path) -> None:
    folder = tmp_path / "recent"
    recent = RecentSpans(folder, 1_000_000)
    for at in range(4_110):
        take(recent, [at], f"{at:05d}-0000000a")
    files = sorted(folder.iterdir())
    assert (len(files), files[0].name) == (4096, "00014-0000000a.ids")
    for at in range(20):
        (folder / f"00000-{at:08x}.ids").write_bytes(files[0].read_bytes())
    again = RecentSpans(folder, 1_000_000)
    again.load()
    assert len(list(folder.iterdir())) == 4096
    assert take(again, [13, 4_109]) == [True, False]


@pytest.mark.parametrize("shift", [29, 32])
@pytest.mark.parametrize("seed", [1, 2**62 + 12345, 0x3C6EF372FE94F82B])
def test_texts_made_to_collide_do_not(seed: int, shift: int) -> None:
    """Two words each, whose top bits cancel each other where a word is xored and multiplied."""
    count = 2**14
    words = np.arange(28, dtype=np.uint64) * np.uint64(0x0123456789ABCDEF) + np.zeros(
        (count, 1), np.uint64
    )
    flips = (np.arange(count)[:, None] >> np.arange(14)) & 1
    words[:, 0::2] ^= flips.astype(np.uint64) << np.uint64(63)
    words[:, 1::2] ^= flips.astype(np.uint64) * np.uint64(2**63 | 2 ** (63 - shift))
    data = np.ascontiguousarray(words).view(np.uint8).ravel()
    starts = np.arange(count, dtype=np.int32) * 224
    hashes = _hashes_of(data, starts, np.full(count, 224, np.int32), seed)
    empty = np.zeros((2 * count, 2), np.uint64)
    slots = {int(_slot_of(*pair, empty)) for pair in hashes.T}
    of_keys = {hash_of(data.ctypes.data + int(at), 224, np.uint64(seed)) for at in starts}
    # By chance 12,890 of 32,768 slots are in use.
    assert len(slots) > 12_500
    assert len({of & (2 * count - 1) for of in of_keys}) > 12_500
    assert len(of_keys) == len(set(map(tuple, hashes.T.tolist()))) == count
