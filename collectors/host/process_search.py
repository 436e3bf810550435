"""Which processes a pattern, a port or a parent stands for."""

import re
from collections.abc import Iterable, Mapping
from pathlib import Path

from perfledger.collectors.host.thread_state import parse_stat

_LISTENING = "0A"  # TCP_LISTEN in /proc/net/tcp
_LONGEST_COMMAND = 4096


def find_by_command(proc: Path, pattern: re.Pattern[str], but: int) -> list[int]:
    """Return the processes whose command line or name has the pattern, sorted, without `but`."""
    found = []
    for pid in process_ids(proc):
        if pid != but and pattern.search(_command(proc, pid)):
            found.append(pid)
    return found


def find_by_port(proc: Path, port: int) -> list[int]:
    """Return the processes that listen on a TCP port, sorted.

    Of another user's processes the sockets are not shown: they are not found.
    """
    inodes: set[str] = set()
    for table in ("net/tcp", "net/tcp6"):
        try:
            inodes |= listening_inodes((proc / table).read_text("ascii", "replace"), port)
        except OSError:
            continue
    wanted = {f"socket:[{inode}]" for inode in inodes}
    return [pid for pid in process_ids(proc) if wanted and _holds(proc / str(pid) / "fd", wanted)]


def listening_inodes(table: str, port: int) -> set[str]:
    """Return the sockets that listen on a port, from /proc/net/tcp or tcp6."""
    found = set()
    for line in table.splitlines()[1:]:
        fields = line.split()
        local_port = int(fields[1].rpartition(":")[2], 16)
        if fields[3] == _LISTENING and local_port == port:
            found.add(fields[9])
    return found


def parents(proc: Path) -> dict[int, int]:
    """Return each process's parent."""
    found = {}
    for pid in process_ids(proc):
        try:
            found[pid] = parse_stat((proc / str(pid) / "stat").read_bytes()).parent
        except (OSError, ValueError):
            continue
    return found


def with_descendants(roots: Iterable[int], parent_of: Mapping[int, int]) -> list[int]:
    """Return processes with all that they started, parents first."""
    children: dict[int, list[int]] = {}
    for pid, parent in sorted(parent_of.items()):
        children.setdefault(parent, []).append(pid)
    found = list(dict.fromkeys(roots))
    known = set(found)
    for pid in found:  # grows
        new = [child for child in children.get(pid, ()) if child not in known]
        known.update(new)
        found += new
    return found


def process_ids(proc: Path) -> list[int]:
    """Return the ids of all processes, sorted."""
    return sorted(int(path.name) for path in proc.iterdir() if path.name.isdigit())


def _command(proc: Path, pid: int) -> str:
    try:
        with open(proc / str(pid) / "cmdline", "rb") as file:
            command = file.read(_LONGEST_COMMAND)
        if command:
            return command.replace(b"\0", b" ").decode("utf-8", "replace").strip()
        return parse_stat((proc / str(pid) / "stat").read_bytes()).name
    except (OSError, ValueError):
        return ""


def _holds(folder: Path, wanted: set[str]) -> bool:
    try:
        return any(str(link.readlink()) in wanted for link in folder.iterdir())
    except OSError:
        return False
