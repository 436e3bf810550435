"""Where CPython's runtime state lies in a process, and what its threads are called.

The GIL is a mutex and a condition within `_PyRuntime` (of the main interpreter; in the sources of
CPython 3.8 to 3.14, run on 3.11), and other locks of Python lie elsewhere: a thread in a futex
whose address is within that symbol waits for the GIL. py-spy finds the same symbol in the same
way; it need not run for this, only to learn the names that Python gave its threads.
"""

import json
import mmap
import os
import re
import shutil
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from perfledger.collectors.host.process_files import ProcessFiles
from perfledger.collectors.host.thread_state import clean_name

SYMBOL = b"_PyRuntime"
_PYTHON = re.compile(r"(libpython3[^/]*\.so[^/]*|python3?[\d.]*[a-z]*)$")
_SECTION_HEADER = struct.Struct("<IIQQQQIIQQ")
_PROGRAM_HEADER = struct.Struct("<IIQQQQQQ")
_SYMBOL = struct.Struct("<IBBHQQ")
# What reading a file raises that is no ELF file, is cut off, or was made to mislead.
NO_ELF_FILE = (ValueError, OverflowError, struct.error)
_LARGEST_TABLE_BYTES = 2**24  # 700,000 symbols
_SYMBOL_TABLES = (11, 2)  # SHT_DYNSYM, SHT_SYMTAB
_LOAD = 1
_PY_SPY_TIMEOUT_S = 20


def runtime_addresses(files: ProcessFiles) -> range | None:
    """Return the addresses of a process's Python runtime state, or None where it has none.

    Raises OSError where the process has ended or may not be looked at.
    """
    maps = files.read("maps").decode("utf-8", "replace")
    for start, path in python_images(maps, files.link("exe")):
        try:
            image = files.open(f"root{path}")
        except OSError:
            continue
        try:
            found = find_symbol(image, SYMBOL)
        except (OSError, *NO_ELF_FILE):
            found = None
        finally:
            os.close(image)
        if found is not None:
            value, size, first_address = found
            return range(start + value - first_address, start + value - first_address + size)
    return None


def python_images(maps: str, executable: str) -> Iterator[tuple[int, str]]:
    """Yield address and path of each mapped file that may hold Python, from /proc/PID/maps."""
    seen = set()
    for line in maps.splitlines():
        fields = line.split(maxsplit=5)
        if len(fields) < 6 or int(fields[2], 16) != 0 or fields[5] in seen:
            continue
        path = fields[5]
        if path == executable or _PYTHON.search(path):
            seen.add(path)
            yield int(fields[0].partition("-")[0], 16), path


def find_symbol(image: int, name: bytes) -> tuple[int, int, int] | None:
    """Return value and size of a symbol, and the first address that the file is linked for.

    `image` is the descriptor of a 64-bit little-endian ELF file. Raises one of NO_ELF_FILE.
    """
    with mmap.mmap(image, 0, prot=mmap.PROT_READ) as data:
        if data[:6] != b"\x7fELF\x02\x01":
            raise ValueError("not a 64-bit little-endian ELF file")
        sections = _sections(data)
        for kind, offset, size, link in sections:
            if kind not in _SYMBOL_TABLES or link >= len(sections):
                continue
            _, names_at, names_size, _ = sections[link]
            wanted = data.find(b"\0" + name + b"\0", names_at, names_at + names_size) + 1
            if not wanted:
                continue
            table = data[offset : offset + min(size, _LARGEST_TABLE_BYTES)]
            if (found := _symbol(table, wanted - names_at)) is not None:
                return (*found, _first_address(data))
    return None


def _sections(data: mmap.mmap) -> list[tuple[int, int, int, int]]:
    """Return kind, offset, size and linked section of each section."""
    (at,) = struct.unpack_from("<Q", data, 0x28)
    size, count = struct.unpack_from("<HH", data, 0x3A)
    headers = (_SECTION_HEADER.unpack_from(data, at + i * size) for i in range(count))
    return [(header[1], header[4], header[5], header[6]) for header in headers]


def _symbol(symbols: bytes, name_at: int) -> tuple[int, int] | None:
    """Return value and size of the symbol whose name is at an offset of its string table."""
    whole = len(symbols) - len(symbols) % _SYMBOL.size
    for at, _, _, section, value, size in _SYMBOL.iter_unpack(symbols[:whole]):
        if at == name_at and section != 0 and size > 0:
            return value, size
    return None


def _first_address(data: mmap.mmap) -> int:
    """Return the address that the start of the file is linked for: 0 unless it cannot move."""
    (at,) = struct.unpack_from("<Q", data, 0x20)
    size, count = struct.unpack_from("<HH", data, 0x36)
    for i in range(count):
        kind, _, offset, address, *_ = _PROGRAM_HEADER.unpack_from(data, at + i * size)
        if kind == _LOAD and offset == 0:
            return int(address)
    return 0


def find_py_spy() -> str | None:
    """Return the py-spy executable beside this Python or on the path, None where there is none."""
    beside = Path(sys.executable).with_name("py-spy")
    return str(beside) if beside.exists() else shutil.which("py-spy")


def python_thread_names(py_spy: str, pid: int) -> dict[int, str]:
    """Return the names of a process's Python threads by thread id.

    Nothing else of what py-spy tells is kept. It is asked not to stop the process. Raises OSError
    where it fails (no Python there, no permission, ended).
    """
    command = [py_spy, "dump", "--pid", str(pid), "--json", "--nonblocking"]
    try:
        answer = subprocess.run(
            command, capture_output=True, timeout=_PY_SPY_TIMEOUT_S, check=True, env={}
        )
    except subprocess.CalledProcessError as error:
        said = error.stderr.decode("utf-8", "replace").strip().splitlines()
        raise OSError(said[-1] if said else "py-spy failed") from error
    except subprocess.TimeoutExpired as error:
        raise OSError(f"py-spy did not answer within {_PY_SPY_TIMEOUT_S} s") from error
    return parse_thread_names(answer.stdout)


def parse_thread_names(answer: bytes) -> dict[int, str]:
    """Return names by thread id from `py-spy dump --json`; threads without either are left out."""
    try:
        threads = json.loads(answer)
    except ValueError as error:
        raise OSError("py-spy's answer is no JSON") from error
    return {
        thread["os_thread_id"]: clean_name(thread["thread_name"].encode("utf-8", "replace"))
        for thread in threads
        if thread.get("os_thread_id") and thread.get("thread_name")
    }
