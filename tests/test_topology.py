"""Topology: trees written by hand, NVML replayed (both synthetic), and real processes."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from topology_trees import ENGINE, GIB, SERVER, gpus, process, replay, session, two_sockets, write

from perfledger.collectors.topology.host_topology import path_between
from perfledger.collectors.topology.placement import NO_CONTAINER, container, placements
from perfledger.collectors.topology.reading import read_topology
from perfledger.schema.host_facts import host_facts, ranges
from perfledger.schema.manifest import FIELDS, Manifest, Value, compare
from perfledger.schema.topology import (
    Gpu,
    Link,
    Nic,
    NumaNode,
    Placement,
    Topology,
    edge_lines,
    numbers,
)
from perfledger.topology_summary import print_topology

INVALID_ARGUMENT, NOT_SUPPORTED, NO_PERMISSION, LIBRARY_NOT_FOUND = 2, 3, 4, 12
A, B = "0000:18:00.0", "0000:9a:00.0"


def switched(links: int) -> dict[tuple[str | int, ...], object]:
    """Return two GPUs with links to switches; the second has one link less that is active."""
    answers = gpus(A, B)
    for gpu in (0, 1):
        for number in range(links):
            answers["nvmlDeviceGetNvLinkState", gpu, number] = int(number < links - gpu)
            answers["nvmlDeviceGetNvLinkRemoteDeviceType", gpu, number] = 2
    return answers


def no_more_links(links: int) -> dict[tuple[str | int, ...], int]:
    return {("nvmlDeviceGetNvLinkState", gpu, links): INVALID_ARGUMENT for gpu in (0, 1)}


def test_a_machine_of_two_sockets_is_read_whole(tmp_path: Path) -> None:
    root = two_sockets(tmp_path / "root")
    nvml = replay(tmp_path, switched(4), no_more_links(4))
    assert read_topology(root, pid=SERVER, nvml=nvml) == Topology(
        numa=(
            NumaNode(0, "0-31,64-95", 252 * GIB, (10, 21)),
            NumaNode(1, "32-63,96-127", 252 * GIB, (21, 10)),
        ),
        gpus=(
            Gpu(0, "NVIDIA H100 80GB HBM3", "GPU-0", A, 0, 5, 16, 16),
            Gpu(1, "NVIDIA H100 80GB HBM3", "GPU-1", B, 1, 5, 16, 16),
        ),
        links=(
            Link("gpu0", "gpu1", "NV3"),
            Link("gpu0", "eno1", "SYS"),
            Link("gpu0", "ib0", "PIX"),
            Link("gpu1", "eno1", "PHB"),
            Link("gpu1", "ib0", "SYS"),
        ),
        nics=(
            Nic("eno1", 25 * 10**9, 1, "ice"),
            Nic("ib0", 400 * 10**9, 0, "mlx5_core", ("mlx5_0",)),
        ),
        placement=(Placement("0-15,32-47", "0-1", "0-1"), Placement("0-31", "0-1", "0")),
        container="kubernetes",
    )


REPLAYED = "GPUs are replayed (synthetic: written by hand, no device said this): by hand"
FACTS = {
    "topology.numa": [
        "node 0: cpus 0-31,64-95, 252 GiB, distances 10,21",
        "node 1: cpus 32-63,96-127, 252 GiB, distances 21,10",
    ],
    "topology.gpus": ["gpu0: NUMA node 0, PCIe 5 x16", "gpu1: NUMA node 1, PCIe 5 x16"],
    "topology.links": [
        "gpu0-gpu1 NV3",
        "gpu0-eno1 SYS",
        "gpu0-ib0 PIX",
        "gpu1-eno1 PHB",
        "gpu1-ib0 SYS",
    ],
    "topology.nics": [
        "eno1: 25 Gb/s, NUMA node 1, ice",
        "ib0: 400 Gb/s, NUMA node 0, mlx5_core, mlx5_0",
    ],
    "topology.placement": [
        "cpus 0-15,32-47 (nodes 0-1), memory of nodes 0-1",
        "cpus 0-31 (nodes 0), memory of nodes 0-1",
    ],
    "topology.container": "kubernetes",
}


def test_the_command_prints_tree_tables_and_remarks(tmp_path: Path) -> None:
    root = two_sockets(tmp_path / "root")
    answers = switched(4) | {("nvmlDeviceGetCurrPcieLinkWidth", 1): 8}
    recording = session(tmp_path, answers, no_more_links(4))
    flags = ["--root", str(root), "--pid", str(SERVER), "--replay", str(recording)]
    printed = perfledger("topology", *flags)
    assert printed.returncode == 0, printed.stderr
    assert printed.stdout == (
        f"{REPLAYED}\n"
        "machine, NUMA nodes: 2\n"
        "├─ NUMA node 0: cpus 0-31,64-95, 252.0 GiB\n"
        "│  ├─ gpu0  NVIDIA H100 80GB HBM3, PCIe 5 x16\n"
        "│  └─ ib0  400 Gb/s, mlx5_core, mlx5_0\n"
        "└─ NUMA node 1: cpus 32-63,96-127, 252.0 GiB\n"
        "   ├─ gpu1  NVIDIA H100 80GB HBM3, PCIe 5 x8 of x16\n"
        "   └─ eno1  25 Gb/s, ice\n"
        "\n"
        "NUMA distance  node 0  node 1\n"
        "─────────────  ──────  ──────\n"
        "node 0             10      21\n"
        "node 1             21      10\n"
        "\n"
        "link  gpu0  gpu1  eno1  ib0\n"
        "────  ────  ────  ────  ───\n"
        "gpu0     ·   NV3   SYS  PIX\n"
        "gpu1   NV3     ·   PHB  SYS\n"
        "eno1   SYS   PHB     ·\n"
        "ib0    PIX   SYS          ·\n"
        "  PIX: through one PCIe switch at most\n"
        "  PHB: through a PCIe host bridge, which mostly is the CPU\n"
        "  SYS: through the link between NUMA nodes\n"
        "  NV3: 3 NVLinks\n"
        "\n"
        "placement: CPUs  of NUMA nodes  memory of nodes  processes\n"
        "───────────────  ─────────────  ───────────────  ─────────\n"
        "0-15,32-47                 0-1              0-1          1\n"
        "0-31                         0              0-1          1\n"
        "\n"
        "container: kubernetes\n"
        "look: gpu1 uses 8 of 16 PCIe lanes\n"
        "look: CPUs 0-15,32-47 are of NUMA nodes 0-1: memory may be far from the thread\n"
        "  that uses it\n"
        "look: no CPU of 0-31 is of the NUMA node of gpu1\n"
    )
    told = json.loads(perfledger("topology", *flags, "--json").stdout)
    width = {"topology.gpus": [FACTS["topology.gpus"][0], "gpu1: NUMA node 1, PCIe 5 x8 of x16"]}
    assert told["manifest"] == FACTS | width
    assert told["gpus"][1]["pcie_width"] == 8 and told["note"] == REPLAYED


@pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")
def test_the_binding_and_our_questions_fit_together(tmp_path: Path) -> None:
    """Through nvidia-ml-py to a library that answers as made-up GPUs would: no device said this."""
    source = Path(__file__).parent / "data" / "nvml" / "stand_in.c"
    library = tmp_path / "libnvidia-ml.so.1"
    command = ["cc", "-shared", "-fPIC", "-w", "-o", str(library), str(source)]
    subprocess.run(command, check=True, timeout=60)
    write(tmp_path, "proc/driver/nvidia/version", "NVRM")
    environment = os.environ | {"LD_LIBRARY_PATH": str(tmp_path), "STAND_IN_GPUS": "2"}
    recording = tmp_path / "gpus.jsonl"
    flags = ["--root", str(tmp_path), "--json"]
    printed = perfledger("topology", *flags, "--record", str(recording), environment=environment)
    told = json.loads(printed.stdout)
    replayed = json.loads(perfledger("topology", *flags, "--replay", str(recording)).stdout)
    assert replayed == {**told, "note": "GPUs are replayed (recorded)"}
    assert told["gpus"] == [
        {
            "index": index,
            "name": "Made-up GPU",
            "uuid": f"GPU-00000000-0000-4000-8000-0000000000c{index}",
            "bus_id": "0000:1b:00.0",
            "numa_node": None,
            "pcie_generation": 5,
            "pcie_width": 16,
            "pcie_max_width": 16,
        }
        for index in (0, 1)
    ]
    # All made-up GPUs have one address, so that the second link leads to each of them.
    assert told["links"] == [{"a": "gpu0", "b": "gpu1", "path": "NV1"}]
    assert not any(name.startswith("gpu") for name in told["not_available"])


def test_a_process_or_a_recording_that_is_not_there_is_a_usage_error(tmp_path: Path) -> None:
    there = tmp_path / "there"
    there.touch()
    for flags in (
        ["--root", str(tmp_path), "--pid", "4711"],
        ["--replay", str(tmp_path / "no")],
        ["--replay", str(there)],
        ["--record", str(there)],
    ):
        refused = perfledger("topology", *flags)
        assert (refused.returncode, refused.stdout) == (2, "")
        assert "perfledger: " in refused.stderr and "Traceback" not in refused.stderr


def test_many_gpus_are_printed_as_groups_of_pairs(capsys: pytest.CaptureFixture[str]) -> None:
    names = [f"gpu{index}" for index in range(16)]
    links = tuple(
        Link(a, b, "NV18" if at // 8 == other // 8 else "SYS")
        for at, a in enumerate(names)
        for other, b in enumerate(names[at + 1 :], at + 1)
    )
    print_topology(Topology(numa=(), gpus=(), links=links, nics=()))
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80
    text = " ".join(line.strip() for line in lines)
    assert text.count("gpu0-") == 15 and "NV18: gpu0-gpu1 gpu0-gpu2" in text
    assert "SYS: gpu0-gpu8" in text


def test_gpus_without_nvlink_reach_each_other_over_pcie(tmp_path: Path) -> None:
    root = two_sockets(tmp_path / "root")
    answers = gpus(A, B) | {("nvmlDeviceGetTopologyCommonAncestor", 0, 1): 50}
    none = {("nvmlDeviceGetNvLinkState", gpu, 0): NOT_SUPPORTED for gpu in (0, 1)}
    found = read_topology(root, nvml=replay(tmp_path, answers, none))
    assert found.links is not None and found.links[0] == Link("gpu0", "gpu1", "SYS")
    assert found.not_available == {
        "placement": "no process was named",
        "container": "no process was named",
    }


def test_direct_links_are_counted_by_whom_they_lead_to(tmp_path: Path) -> None:
    root = two_sockets(tmp_path / "root")
    answers = gpus(A, B) | {
        ("nvmlDeviceGetNvLinkState", 0, 0): 1,
        ("nvmlDeviceGetNvLinkRemoteDeviceType", 0, 0): 0,
        ("nvmlDeviceGetNvLinkRemotePciInfo", 0, 0): "00000000:9A:00.0",
        ("nvmlDeviceGetNvLinkState", 0, 1): 1,
        ("nvmlDeviceGetNvLinkRemoteDeviceType", 0, 1): 0,
        ("nvmlDeviceGetNvLinkRemotePciInfo", 0, 1): "00000000:77:00.0",
        ("nvmlDeviceGetNvLinkState", 0, 2): 0,
    }
    ends = {
        ("nvmlDeviceGetNvLinkState", 0, 3): INVALID_ARGUMENT,
        ("nvmlDeviceGetNvLinkState", 1, 0): INVALID_ARGUMENT,
    }
    found = read_topology(root, nvml=replay(tmp_path, answers, ends))
    assert found.links is not None and found.links[0] == Link("gpu0", "gpu1", "NV1")


def test_a_link_that_nvml_does_not_tell_makes_links_unknown_and_no_more(tmp_path: Path) -> None:
    root = two_sockets(tmp_path / "root")
    answers = gpus(A, B)
    del answers["nvmlDeviceGetCurrPcieLinkWidth", 1]
    errors = {
        ("nvmlDeviceGetNvLinkState", 0, 0): NOT_SUPPORTED,
        ("nvmlDeviceGetNvLinkState", 1, 0): NO_PERMISSION,
    }
    found = read_topology(root, pid=SERVER, nvml=replay(tmp_path, answers, errors))
    assert found.links is None
    assert found.not_available == {
        "gpu1 CurrPcieLinkWidth": "FUNCTION_NOT_FOUND",
        "gpu1 NvLinkState": "NO_PERMISSION",
        "links": "NVML does not tell the path between some GPUs",
    }
    facts = found.facts()
    assert facts["topology.gpus"] == [FACTS["topology.gpus"][0], "gpu1: NUMA node 1, PCIe unknown"]
    assert facts["topology.links"] is None


def test_without_a_driver_there_are_no_gpus_and_a_silent_nvml_leaves_them_unknown(
    tmp_path: Path,
) -> None:
    bare = read_topology(two_sockets(tmp_path / "bare", driver=False), pid=SERVER)
    assert (bare.gpus, bare.links, bare.not_available) == ((), (), {})
    silent = replay(tmp_path, {}, {("nvmlInit",): LIBRARY_NOT_FOUND})
    found = read_topology(two_sockets(tmp_path / "root"), pid=SERVER, nvml=silent)
    assert (found.gpus, found.links) == (None, None)
    assert found.not_available == dict.fromkeys(("gpus", "links"), "NVML: LIBRARY_NOT_FOUND")


def test_an_unreadable_machine_is_unknown_with_reasons(tmp_path: Path) -> None:
    found = read_topology(tmp_path, pid=4711)
    assert found == Topology(
        gpus=(),
        links=(),
        container=NO_CONTAINER,
        not_available=dict.fromkeys(("numa", "nics", "placement"), "No such file or directory"),
    )
    write(tmp_path, "sys/devices/system/node/node0/cpulist", "a-b")
    write(tmp_path, "sys/devices/system/node/node0/distance", "10 x")
    write(tmp_path, "sys/devices/system/node/node0/meminfo", "Node 0 MemTotal: lots kB")
    process(tmp_path, 4711, parent=1, cpus="0-3", memory="0")
    odd = read_topology(tmp_path, pid=4711)
    assert odd.numa == (NumaNode(0, "a-b", None, (10,)),) and odd.placement is None
    assert odd.not_available["placement"].startswith("not understood: ")


def test_a_virtual_machine_tells_little(tmp_path: Path) -> None:
    device = "sys/devices/pci0000:00/0000:00:03.0/virtio2"
    write(tmp_path, f"{device}/net/eth0/operstate", "up")
    write(tmp_path, f"{device}/net/eth0/speed", "-1")
    write(tmp_path, "sys/devices/pci0000:00/0000:00:03.0/numa_node", "-1")
    (tmp_path / f"{device}/net/eth0/device").symlink_to("../..")
    (tmp_path / "sys/class").mkdir()
    (tmp_path / "sys/class/net").symlink_to(f"../../{device}/net")
    assert read_topology(tmp_path).facts()["topology.nics"] == [
        "eth0: speed unknown, no NUMA node, driver unknown"
    ]


def test_an_rdma_device_without_an_interface_stands_alone(tmp_path: Path) -> None:
    write(tmp_path, "sys/class/net/lo/operstate", "unknown")
    for name, state in (("mlx5_0", "4: ACTIVE"), ("mlx5_1", "1: DOWN")):
        write(tmp_path, f"sys/class/infiniband/{name}/ports/1/state", state)
        write(tmp_path, f"sys/class/infiniband/{name}/ports/1/rate", "200 Gb/sec (4X HDR)")
        write(tmp_path, f"sys/class/infiniband/{name}/device/numa_node", "1")
    assert read_topology(tmp_path).nics == (Nic("mlx5_0", 2 * 10**11, 1, "", ("mlx5_0",)),)


def chain(text: str) -> tuple[str, ...]:
    return tuple(text.split())


@pytest.mark.parametrize(
    ("a", "b", "same_node", "path"),
    [
        ("p:0 1:0 2:0", "p:0 1:0 2:1", True, "PIX"),  # two functions of one card
        ("p:0 1:0 2:0 3:0 4:0", "p:0 1:0 2:0 3:1 5:0", True, "PIX"),  # one switch
        ("p:0 1:0 2:0 3:0 4:0 5:0 6:0", "p:0 1:0 2:0 3:1 7:0", True, "PXB"),
        ("p:0 1:0", "p:0 2:0 3:0", None, "PHB"),
        ("p:0 1:0", "q:0 1:1", True, "NODE"),
        ("p:0 1:0", "q:0 1:1", False, "SYS"),
        ("p:0 1:0", "q:0 1:1", None, None),
        ("", "q:0 1:1", False, None),
    ],
)
def test_the_path_between_two_pci_devices(
    a: str, b: str, same_node: bool | None, path: str | None
) -> None:
    assert path_between(chain(a), chain(b), same_node) == path
    assert path_between(chain(b), chain(a), same_node) == path


@given(st.sets(st.integers(0, 4000), max_size=200))
def test_lists_of_numbers_read_back(wanted: set[int]) -> None:
    assert numbers(ranges(sorted(wanted))) == tuple(sorted(wanted))


@pytest.mark.parametrize("text", ["0-99999999999", "a", "1-", "3--4"])
def test_lists_that_are_none_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="invalid literal|no range"):
        numbers(text)


def test_a_real_process_is_found_where_it_was_put() -> None:
    allowed = sorted(os.sched_getaffinity(0))
    child = (
        "import os, sys; os.sched_setaffinity(0, {int(sys.argv[1])}); print(flush=True); input()"
    )
    command = [sys.executable, "-c", child, str(allowed[-1])]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(command, **pipes) as started:  # type: ignore[call-overload]
        assert started.stdout.readline()
        nodes = read_topology().numa or ()
        (placed,) = placements(Path("/"), started.pid, nodes)
        assert (placed.cpus, placed.processes) == (str(allowed[-1]), 1)
        family = placements(Path("/"), os.getpid(), nodes)
        assert placed in family
        started.communicate(b"\n")


def test_this_machine_fits_the_manifest() -> None:
    facts = read_topology().facts()
    assert facts.keys() == {f.name for f in FIELDS if f.name.startswith("topology.")}
    assert Manifest.of({**host_facts(), **facts}).values["topology.placement"] is not None


@pytest.mark.parametrize(
    ("groups", "marks", "kind"),
    [
        ("0::/system.slice/docker-ab.scope\n", (), "docker"),
        ("5:cpu:/kubepods/burstable/pod1/cri-2\n0::/\n", (), "kubernetes"),
        ("0::/machine.slice/libpod-12.scope\n", (), "podman"),
        ("0::/lxc.payload.web\n", (), "lxc"),
        ("0::/\n", (".dockerenv",), "docker"),
        ("0::/\n", ("run/.containerenv",), "podman"),
        ("0::/user.slice/session-2.scope\n", (), NO_CONTAINER),
    ],
)
def test_the_kind_of_container(
    tmp_path: Path, groups: str, marks: tuple[str, ...], kind: str
) -> None:
    write(tmp_path, f"proc/{ENGINE}/cgroup", groups)
    for mark in marks:
        write(tmp_path, f"proc/{ENGINE}/root/{mark}", "")
    assert container(tmp_path, ENGINE) == kind


# --- In the manifest ----------------------------------------------------------------------


def manifest(**changed: Value) -> Manifest:
    named = {f"topology.{name}": value for name, value in changed.items()}
    return Manifest.of({"model.name": "m", "host.cores": 128, **FACTS, **named})


def test_manifests_kept_before_there_was_topology_compare_with_each_other() -> None:
    fields = {f.name: None for f in FIELDS if not f.name.startswith("topology.")}
    kept = json.dumps({"version": 1, **fields, "model.name": "m", "host.cores": 128})
    old = Manifest.from_json(kept)
    alike = compare(old, Manifest.from_json(kept), None)
    assert alike.refusals == () and set(FACTS) <= set(alike.unknown)
    # Unknown on one side refuses, as for every field: the old run may have been placed elsewhere.
    refused = compare(old, manifest(), None)
    assert [difference.field for difference in refused.refusals] == list(FACTS)
    assert old.host_fingerprint() == manifest().host_fingerprint()


def test_a_run_that_was_placed_elsewhere_does_not_compare() -> None:
    elsewhere = manifest(placement=["cpus 32-63 (nodes 1), memory of nodes 0-1"])
    assert compare(manifest(), manifest(), None).refusals == ()
    (difference,) = compare(manifest(), elsewhere, None).refusals
    assert difference.field == "topology.placement"


def test_edges_have_a_line_each_where_the_manifest_tells() -> None:
    assert edge_lines(manifest().values) == {
        "device_memory": "2 GPUs, each with its own",
        "host_device": "gpu0: NUMA node 0, PCIe 5 x16; gpu1: NUMA node 1, PCIe 5 x16",
        "scale_up": "NV3 between 1 pair",
        "network": "eno1: 25 Gb/s, NUMA node 1, ice; ib0: 400 Gb/s, NUMA node 0, mlx5_core, mlx5_0",
    }
    on_cpu = manifest(gpus=[], links=[], nics=[], placement=["cpus 0-1, memory of nodes 0"])
    assert edge_lines(on_cpu.values) == {
        "device_memory": f"{'; '.join(FACTS['topology.numa'])}; "
        "placed on cpus 0-1, memory of nodes 0",
        "scale_up": "no second GPU",
        "network": "no network card seen",
    }
    assert edge_lines(Manifest.of({}).values) == {}


def perfledger(
    *arguments: str, environment: dict[str, str] | None = None
) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-P", "-m", "perfledger", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment)
