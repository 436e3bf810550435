"""Text of /proc/net -> readings: interfaces, TCP, ECN marks, the CPUs' packet backlog."""

import re
from collections.abc import Iterator
from functools import lru_cache

from perfledger.collectors.host.host_metrics import (
    ECN,
    NETWORK_DROPPED,
    NETWORK_ERRORS,
    NETWORK_IO,
    NETWORK_OVERRUNS,
    NETWORK_PACKETS,
    SOFTNET,
    TCP,
    TCP_SEGMENTS,
)
from perfledger.collectors.host.readings import Attributes, Reading
from perfledger.schema.metrics import Metric

# Columns of /proc/net/dev: the first five of each direction.
_COLUMNS = (NETWORK_IO, NETWORK_PACKETS, NETWORK_ERRORS, NETWORK_DROPPED, NETWORK_OVERRUNS)
_FIRST_COLUMN = {"receive": 0, "transmit": 8}
# The kernel's names (SNMP and linux/snmp.h), kept so that nstat(8) shows the same.
TCP_EVENTS = {
    "Tcp": ("ActiveOpens", "PassiveOpens", "AttemptFails", "EstabResets", "RetransSegs", "InErrs"),
    "TcpExt": (
        "ListenOverflows",
        "ListenDrops",
        "TCPLostRetransmit",
        "TCPFastRetrans",
        "TCPSlowStartRetrans",
        "TCPSynRetrans",
        "TCPTimeouts",
        "TCPSpuriousRTOs",
        "TCPOFOQueue",
        "TCPOFODrop",
        "TCPRcvQDrop",
        "TCPBacklogDrop",
        "TCPZeroWindowDrop",
        "TCPToZeroWindowAdv",
        "TCPReqQFullDrop",
        "TCPMemoryPressures",
        "TCPAbortOnMemory",
        "TCPDeliveredCE",
        "PruneCalled",
    ),
}
_MARKS = {
    "InCEPkts": "ce",
    "InECT0Pkts": "ect0",
    "InECT1Pkts": "ect1",
    "InNoECTPkts": "not_ect",
}
_SEGMENTS = {"InSegs": "receive", "OutSegs": "transmit"}
_Wanted = tuple[str, Metric, Attributes]
_WANTED: dict[str, list[_Wanted]] = {
    protocol: [(name, TCP, (("perfledger.host.event", name),)) for name in names]
    for protocol, names in TCP_EVENTS.items()
}
_WANTED["Tcp"] += [
    (name, TCP_SEGMENTS, (("network.io.direction", way),)) for name, way in _SEGMENTS.items()
]
_WANTED["IpExt"] = [(name, ECN, (("perfledger.host.mark", mark),)) for name, mark in _MARKS.items()]


def interface_readings(dev: str, exclude: re.Pattern[str]) -> Iterator[Reading]:
    """Yield traffic, errors and drops of each interface, from /proc/net/dev."""
    for line in dev.splitlines()[2:]:
        name, _, rest = line.rpartition(":")
        name, numbers = name.strip(), [int(word) for word in rest.split()]
        if exclude.fullmatch(name):
            continue
        for direction, first in _FIRST_COLUMN.items():
            where = (("network.interface.name", name), ("network.io.direction", direction))
            for at, metric in enumerate(_COLUMNS):
                yield Reading(metric, numbers[first + at], where)


@lru_cache(maxsize=64)
def _columns(names: str) -> tuple[tuple[Metric, Attributes, int], ...]:
    """Return what a line of names has for us, and in which column; it is the same every time."""
    protocol, _, columns = names.partition(":")
    at = {name: column for column, name in enumerate(columns.split())}
    return tuple(
        (metric, attributes, at[name])
        for name, metric, attributes in _WANTED.get(protocol, ())
        if name in at
    )


def protocol_readings(text: str) -> Iterator[Reading]:
    """Yield TCP's events and segments, and ECN marks, from /proc/net/snmp or /proc/net/netstat.

    A line of names is followed by a line of numbers that starts with the same word.
    """
    lines = text.splitlines()
    for names, numbers in zip(lines[::2], lines[1::2], strict=False):
        if columns := _columns(names):
            values = numbers.partition(":")[2].split()
            for metric, attributes, column in columns:
                yield Reading(metric, int(values[column]), attributes)


def backlog_readings(softnet: str) -> Iterator[Reading]:
    """Yield events of the packet backlog, all CPUs added up, from /proc/net/softnet_stat (hex)."""
    rows = [line.split() for line in softnet.splitlines() if line.strip()]
    for at, event in ((1, "dropped"), (2, "squeezed")):
        total = sum(int(row[at], 16) for row in rows)
        yield Reading(SOFTNET, total, (("perfledger.host.event", event),))
