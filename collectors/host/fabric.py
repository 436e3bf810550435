"""Counters of RDMA ports and of network drivers -> readings: congestion and pauses.

RDMA: /sys/class/infiniband/DEVICE/ports/N/{counters,hw_counters}/NAME. Drivers: what
`ethtool -S` shows. Names differ from driver to driver and are kept as they are.
"""

import re
from collections.abc import Iterator, Mapping

from perfledger.collectors.host.host_metrics import DEVICE_COUNTER, PFC, RDMA_COUNTER, RDMA_IO
from perfledger.collectors.host.readings import Reading

MOST_COUNTERS_PER_PORT = 128
# InfiniBand counts data in units of four octets (kernel ABI, sysfs-class-infiniband).
_DATA_UNIT_BYTES = 4
_DATA = {"port_rcv_data": "receive", "port_xmit_data": "transmit"}
# Files beside the counters that are none: how long the device's values are cached, in ms.
_NO_COUNTERS = frozenset({"lifespan"})

_TELLING = re.compile(
    r"pause|pfc|xoff|xon|ecn|cnp|discard|drop|out_of_buffer|buffer_full|no_buffer|congest|"
    r"timeout|retrans",
    re.IGNORECASE,
)
# mlx5: rx_prio3_pause; ice: rx_priority_3_xoff.nic; bnxt: rx_pfc_ena_frames_pri3.
_PFC_FRAMES = (
    re.compile(r"(?P<way>rx|tx)_prio(?P<priority>\d)_pause"),
    re.compile(r"(?P<way>rx|tx)_priority_(?P<priority>\d)_xoff(\.nic)?"),
    re.compile(r"(?P<way>rx|tx)_pfc_ena_frames_pri(?P<priority>\d)"),
)
# One queue or ring's own counter: thousands on a big machine, and the totals are there too.
_PER_QUEUE = re.compile(r"((rx|tx|ch|xdp)_?(queue_?)?\d+_|\[\d+\]|(rx|tx)-\d+[._]).*")


def rdma_readings(device: str, port: int, counters: Mapping[str, str]) -> Iterator[Reading]:
    """Yield the counters of one port; a counter that the device does not keep is absent."""
    where = (("perfledger.host.rdma_device", device), ("perfledger.host.rdma_port", port))
    for name, text in sorted(counters.items())[:MOST_COUNTERS_PER_PORT]:
        if name in _NO_COUNTERS or not text.strip().isdigit():
            continue  # "N/A (no PMA)"
        if name in _DATA:
            way = ("network.io.direction", _DATA[name])
            yield Reading(RDMA_IO, int(text) * _DATA_UNIT_BYTES, (*where, way))
        else:
            counter = ("perfledger.host.counter", name)
            yield Reading(RDMA_COUNTER, int(text), (*where, counter))


def driver_readings(interface: str, counters: Mapping[str, int]) -> Iterator[Reading]:
    """Yield a driver's counters that tell of pauses, congestion or loss."""
    where = ("network.interface.name", interface)
    for name, count in counters.items():
        if not _TELLING.search(name) or _PER_QUEUE.match(name):
            continue
        yield Reading(DEVICE_COUNTER, count, (where, ("perfledger.host.counter", name)))
        for pattern in _PFC_FRAMES:
            if match := pattern.fullmatch(name):
                way = "receive" if match["way"] == "rx" else "transmit"
                priority = ("perfledger.host.priority", int(match["priority"]))
                yield Reading(PFC, count, (where, ("network.io.direction", way), priority))
