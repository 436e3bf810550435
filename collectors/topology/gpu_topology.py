"""GPUs and the links between them, asked of NVML: the library, or a recording of it.

Written from NVML's API reference and tested by replay of sessions written by hand; not run on a
device. A question that is refused leaves its own answer unknown, not the others.
"""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import combinations
from typing import Any

from perfledger.collectors.device.nvml_calls import NOT_SUPPORTED, Calls, NvmlFailure
from perfledger.schema.topology import Gpu, Link

MOST_GPUS = 64
MOST_LINKS = 36  # NVML_NVLINK_MAX_LINKS
# nvmlGpuTopologyLevel_t
_LEVELS = {0: "SOC", 10: "PIX", 20: "PXB", 30: "PHB", 40: "NODE", 50: "SYS"}
_SWITCH = 2  # NVML_NVLINK_DEVICE_TYPE_SWITCH
# What NVML says where there is no link of that number, or no NVLink at all.
_NO_LINK = (2, NOT_SUPPORTED)


@dataclass(frozen=True)
class GpuPlaces:
    """The GPUs, how each pair reaches each other (None: not known), and what was refused."""

    gpus: tuple[Gpu, ...]
    links: tuple[Link, ...] | None
    refused: dict[str, str]


def gpu_places(calls: Calls, numa_node_of: Callable[[str], int | None]) -> GpuPlaces:
    """Ask for all GPUs and links; `numa_node_of` knows the node of a PCI address.

    Raises NvmlFailure where NVML tells of no GPU at all.
    """
    calls.call("nvmlInit")
    count = min(int(calls.call("nvmlDeviceGetCount")), MOST_GPUS)
    for index in range(count):
        calls.call("nvmlDeviceGetHandleByIndex", index)
    questions = _Questions(calls)
    gpus = tuple(_gpu(questions, index, numa_node_of) for index in range(count))
    ends = [_ends(questions, index) for index in range(count)]
    links = []
    for a, b in combinations(range(count), 2):
        path = _path(questions, a, b, gpus[b].bus_id, ends)
        links.append(None if path is None else Link(f"gpu{a}", f"gpu{b}", path))
    known = tuple(link for link in links if link is not None)
    return GpuPlaces(gpus, known if len(known) == len(links) else None, questions.refused)


class _Questions:
    """Asks about devices; a refusal is noted with its reason and answered with None."""

    def __init__(self, calls: Calls) -> None:
        self.refused: dict[str, str] = {}
        self._calls = calls

    def __call__(self, function: str, index: int, *arguments: int) -> Any:
        try:
            return self._calls.call(function, index, *arguments)
        except NvmlFailure as failure:
            name = f"gpu{index} {function.removeprefix('nvmlDeviceGet')}"
            self.refused.setdefault(name, failure.name)
            return None

    def link_state(self, index: int, link: int) -> bool | None:
        """Return whether an NVLink is active; None where there is none of that number.

        Raises NvmlFailure where that is not said.
        """
        try:
            return bool(self._calls.call("nvmlDeviceGetNvLinkState", index, link))
        except NvmlFailure as failure:
            if failure.code in _NO_LINK:
                return None
            raise


@dataclass(frozen=True)
class _Ends:
    """Where a GPU's active NVLinks lead: to switches, or to other devices by PCI address."""

    switches: int
    peers: tuple[str, ...]


def _gpu(ask: _Questions, index: int, numa_node_of: Callable[[str], int | None]) -> Gpu:
    bus_id = _bus_id(ask("nvmlDeviceGetPciInfo", index))
    return Gpu(
        index=index,
        name=_text(ask("nvmlDeviceGetName", index)),
        uuid=_text(ask("nvmlDeviceGetUUID", index)),
        bus_id=bus_id,
        numa_node=numa_node_of(bus_id) if bus_id else None,
        pcie_generation=ask("nvmlDeviceGetMaxPcieLinkGeneration", index),
        pcie_width=ask("nvmlDeviceGetCurrPcieLinkWidth", index),
        pcie_max_width=ask("nvmlDeviceGetMaxPcieLinkWidth", index),
    )


def _ends(ask: _Questions, index: int) -> _Ends | None:
    """Return where a GPU's NVLinks lead, or None where NVML does not say."""
    switches, peers = 0, []
    for link in range(MOST_LINKS):
        try:
            state = ask.link_state(index, link)
        except NvmlFailure as failure:
            ask.refused[f"gpu{index} NvLinkState"] = failure.name
            return None
        if state is None:
            break
        if not state:
            continue
        if ask("nvmlDeviceGetNvLinkRemoteDeviceType", index, link) == _SWITCH:
            switches += 1
        else:
            peers.append(_bus_id(ask("nvmlDeviceGetNvLinkRemotePciInfo", index, link)))
    return _Ends(switches, tuple(peers))


def _path(ask: _Questions, a: int, b: int, bus_id: str, all_ends: list[_Ends | None]) -> str | None:
    """Return the path from one GPU to another: NVLinks where there are any, else over PCIe.

    Every link to a switch reaches every GPU on the switches, so the fewer of both ends count.
    """
    ends, other = all_ends[a], all_ends[b]
    if ends is None or other is None:
        return None
    direct = sum(peer == bus_id for peer in ends.peers)
    links = direct or min(ends.switches, other.switches)
    if links:
        return f"NV{links}"
    return _LEVELS.get(ask("nvmlDeviceGetTopologyCommonAncestor", a, b))


def _bus_id(answer: Any) -> str:
    """Return a PCI address as /sys writes it: 0000:1b:00.0, of NVML's 00000000:1B:00.0."""
    domain, _, rest = _text(answer).lower().partition(":")
    try:
        return f"{int(domain, 16):04x}:{rest}" if rest else ""
    except ValueError:
        return ""


def _text(value: Any) -> str:
    if isinstance(value, bytes):
        return value.decode("utf-8", "replace")
    return "" if value is None else str(value)
