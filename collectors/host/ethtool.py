"""A network driver's own counters, as `ethtool -S` asks for them (linux/ethtool.h)."""

import ctypes
import fcntl
import socket
import struct

SIOCETHTOOL = 0x8946
_GSSET_INFO, _GSTRINGS, _GSTATS = 0x37, 0x1B, 0x1D
_SET_STATS = 1
_NAME_BYTES = 32
MOST_COUNTERS = 16_384
# The kernel writes as many values as the driver has by then, whatever room was told: should a
# driver add some between two questions, they must still fit.
_SPARE_COUNTERS = 4096


class DriverCounters:
    """Asks interfaces for their counters; names are asked for again only when their number changes.

    Works on this process's network namespace. One of another machine's tree cannot be asked.
    """

    def __init__(self) -> None:
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self._names: dict[str, list[str]] = {}

    def read(self, interface: str) -> dict[str, int]:
        """Return an interface's counters by name. Raises OSError where its driver has none."""
        request = ctypes.create_string_buffer(
            struct.pack("=IIQI", _GSSET_INFO, 0, 1 << _SET_STATS, 0)
        )
        self._ask(interface, request)
        _, _, mask, count = struct.unpack_from("=IIQI", request.raw)
        if not mask or not 0 < count <= MOST_COUNTERS:
            return {}
        if len(self._names.get(interface, ())) != count:
            self._names[interface] = self._ask_names(interface, count)
        answer = ctypes.create_string_buffer(8 + 8 * (count + _SPARE_COUNTERS))
        struct.pack_into("=II", answer, 0, _GSTATS, count)
        self._ask(interface, answer)
        if struct.unpack_from("=II", answer.raw)[1] != count:
            return {}  # names and values are not of one moment
        values = struct.unpack_from(f"={count}Q", answer.raw, 8)
        return dict(zip(self._names[interface], values, strict=True))

    def close(self) -> None:
        """Close the socket."""
        self._socket.close()

    def _ask_names(self, interface: str, count: int) -> list[str]:
        answer = ctypes.create_string_buffer(12 + _NAME_BYTES * (count + _SPARE_COUNTERS))
        struct.pack_into("=III", answer, 0, _GSTRINGS, _SET_STATS, count)
        self._ask(interface, answer)
        starts = range(12, 12 + _NAME_BYTES * count, _NAME_BYTES)
        raw = (answer.raw[start : start + _NAME_BYTES] for start in starts)
        return [name.split(b"\0")[0].decode("ascii", "replace").strip() for name in raw]

    def _ask(self, interface: str, buffer: "ctypes.Array[ctypes.c_char]") -> None:
        name = interface.encode()[:15]
        request = struct.pack("16sP16x", name, ctypes.addressof(buffer))
        fcntl.ioctl(self._socket, SIOCETHTOOL, request)
