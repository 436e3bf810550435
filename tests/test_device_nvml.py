"""What is read of GPUs: synthetic sessions replayed, and the real binding on a stand-in library."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from nvml_sessions import (
    FIRST,
    FIRST_WALL_NS,
    NAMES,
    SECOND,
    SESSIONS,
    everything_said,
    of,
    replaying,
    run_counters,
    session,
)

from perfledger.collectors.device.device_metrics import DEVICE_METRICS
from perfledger.collectors.device.device_sampler import DeviceSampler
from perfledger.collectors.device.device_settings import DeviceSettings
from perfledger.collectors.device.nvml_calls import Instant, NvmlFailure
from perfledger.collectors.device.nvml_recording import Recorder, Replay, read_recording
from perfledger.collectors.device.nvml_sources import SOURCES
from perfledger.collectors.device.rising_counter import RisingCounter
from perfledger.schema.errors import UsageError

STAND_IN = SESSIONS / "stand_in.c"
MADE_UP = "GPU-00000000-0000-4000-8000-0000000000c0"
OLD = "GPU-00000000-0000-4000-8000-0000000000b0"


@pytest.mark.parametrize("name", NAMES)
def test_a_session_says_exactly_this(name: str) -> None:
    printed = run_counters("--replay", str(session(name)))
    assert printed.returncode == 0, printed.stderr
    assert printed.stdout == (SESSIONS / f"{name}.expected").read_text()
    assert max(map(len, printed.stdout.splitlines())) <= 80


@pytest.mark.parametrize("name", NAMES)
def test_every_metric_that_is_said_is_declared_with_its_attributes(name: str) -> None:
    declared = {metric.name: set(metric.attribute.split(", ")) for metric in DEVICE_METRICS}
    assert len(declared) == len(DEVICE_METRICS)
    points, _ = everything_said(replaying(name))
    for metric, series in points:
        assert {key for key, _ in series} <= declared[metric], metric


def test_counters_keep_their_recorded_times_and_exact_values() -> None:
    points, _ = everything_said(replaying("h100_pair"))
    energy = of(points, "hw.energy", hw_id=FIRST)
    assert energy == [(100.0 * k, 0.0, pytest.approx(5000 + 41.2 * k)) for k in range(13)]
    sent = of(
        points,
        "hw.gpu.io",
        hw_id=FIRST,
        network_io_direction="transmit",
        perfledger_edge="scale_up",
    )
    assert sent == [(100.0 * k, 0.0, 1024 * (1000 + 10240 * k)) for k in range(13)]
    # GPM tells of the time between two samples: the first has none.
    over_pcie = {"hw_id": FIRST, "perfledger_edge": "host_device"}
    received = of(points, "hw.gpu.io", network_io_direction="receive", **over_pcie)
    assert received == [(100.0 * k, 0.0, 200 * 2**20 * k) for k in range(1, 13)]
    share = of(points, "perfledger.gpu.memory.bandwidth.share", hw_id=FIRST)
    assert share == [(100.0 * k, None, pytest.approx((60 + k) / 100)) for k in range(1, 13)]


def test_slow_sources_are_read_once_a_second() -> None:
    points, _ = everything_said(replaying("h100_pair"))
    reason = {"hw_id": FIRST, "perfledger_gpu_reason": "power_cap"}
    assert of(points, "perfledger.gpu.throttled", **reason) == [(0.0, None, 0), (1000.0, None, 1)]
    held = of(points, "perfledger.gpu.throttle.time", **reason)
    assert held == [(0.0, 0.0, 0), (1000.0, 0.0, 250_000_000)]


def test_processes_on_a_device_are_told_with_their_memory_and_use() -> None:
    points, _ = everything_said(replaying("h100_pair"))
    held = {
        dict(series)["process.pid"]: {value for _, _, value in found}
        for (name, series), found in points.items()
        if name == "perfledger.gpu.process.memory"
    }
    assert held == {4242: {64 * 2**30}, 4243: {512 * 2**20}}
    use = of(points, "perfledger.gpu.process.utilization", **{"process_pid": 4242})
    assert [value for _, _, value in use] == pytest.approx([0.92, 0.99])


def test_a_counter_that_wraps_goes_on_and_one_that_falls_starts_anew() -> None:
    points, _ = everything_said(replaying("a100_half_working"))
    sent = of(points, "hw.gpu.io", hw_id=OLD, network_io_direction="transmit")
    assert sent == [(100.0 * k, 0.0, 2**32 - 1000 + 2000 * k) for k in range(4)]
    received = of(points, "hw.gpu.io", hw_id=OLD, network_io_direction="receive")
    assert received == [(100.0 * k, 0.0, 5000 + 100 * k) for k in range(3)]


def test_what_cannot_be_read_is_absent_with_its_reason_and_never_zero() -> None:
    sampler = replaying("a100_half_working")
    points, _ = everything_said(sampler)
    said = {name for name, _ in points}
    assert not said & {
        "hw.gpu.utilization",
        "perfledger.gpu.process.memory",
        "perfledger.gpu.activity",
    }
    why = {
        dict(series)["perfledger.device.source"]: dict(series)["error.type"]
        for (name, series), found in points.items()
        if name == "perfledger.device.source.present" and found[-1][2] == 0
    }
    assert why["gpm"] == "NOT_SUPPORTED" and why["processes"] == "NO_PERMISSION"
    assert why["utilization"] == "not understood: use is 65535 %"
    assert why["energy"] == "NOT_SUPPORTED" and "energy_call" not in why
    assert sampler.counts["answers_not_understood"] == 2
    assert of(points, "hw.energy", hw_id=OLD)[-1] == (300.0, 0.0, 4.0)


def test_a_lost_device_is_told_and_the_others_go_on() -> None:
    points, _ = everything_said(replaying("lost_and_found", slow_interval_s=1.0))
    assert [at for at, _, _ in of(points, "hw.energy", hw_id=FIRST)] == [
        1000.0 * k for k in range(22)
    ]
    failed = of(points, "hw.status", hw_id=SECOND)
    assert [value for _, _, value in failed] == [0, 0, 0] + [1] * 17 + [0, 0]
    energy = of(points, "hw.energy", hw_id=SECOND)
    # It counts from 0 again: the sample in which that is seen has no value, and the start is new.
    assert energy == [
        (0.0, 0.0, 2000.0),
        (1000.0, 0.0, 2100.0),
        (2000.0, 0.0, 2200.0),
        (21000.0, 20000.0, 505.0),
    ]


def test_a_driver_that_is_loaded_late_is_found() -> None:
    points, _ = everything_said(replaying("driver_late"))
    use = of(points, "hw.gpu.utilization", hw_id=FIRST)
    assert use == [(6000.0, None, 0.1)]
    states = {
        dict(series).get("error.type", ""): [value for _, _, value in found]
        for (name, series), found in points.items()
        if name == "perfledger.device.source.present"
        and dict(series)["perfledger.device.source"] == "nvml"
    }
    assert states == {"DRIVER_NOT_LOADED": [0], "": [1]}


def test_what_fails_once_is_read_again_a_second_later(tmp_path: Path) -> None:
    """At 1 s the reading of all fields at once fails, and that of energy alone too."""
    lines = session("lost_and_found").read_text().splitlines()[:1]
    lines += ['{"call": "nvmlInit", "args": [], "value": null}']
    lines += ['{"call": "nvmlSystemGetDriverVersion", "args": [], "value": "580"}']
    lines += ['{"call": "nvmlDeviceGetCount", "args": [], "value": 1}']
    for call, value in (("HandleByIndex", None), ("UUID", FIRST), ("Name", "A")):
        question = {"call": f"nvmlDeviceGet{call}", "args": [0], "value": value}
        lines.append(json.dumps(question))
    fields = {"call": "nvmlDeviceGetFieldValues", "args": [0, [[83, 0]]]}
    for second in range(4):
        at = {"monotonic_ns": second * 10**9, "wall_ns": FIRST_WALL_NS + second * 10**9}
        answer = {"error": 999} if second == 1 else {"value": [[0, 3, 1000 * second]]}
        lines += [json.dumps({"sample": at}), json.dumps(fields | answer)]
    path = tmp_path / "once.jsonl"
    path.write_text("\n".join(lines) + "\n")
    points, _ = everything_said(DeviceSampler(DeviceSettings(replay=path)))
    # The gap ends the count: what was used in it would be a guess where the device was reset.
    assert of(points, "hw.energy", hw_id=FIRST) == [
        (0.0, 0.0, 0.0),
        (2000.0, 1000.0, 2.0),
        (3000.0, 1000.0, 3.0),
    ]


def test_what_stands_in_comes_after_what_it_stands_in_for() -> None:
    names = [source.name for source in SOURCES]
    assert len(set(names)) == len(names)
    for at, source in enumerate(SOURCES):
        assert not source.instead_of or source.instead_of in names[:at]


@pytest.mark.parametrize("name", NAMES)
def test_a_recording_of_a_replay_says_the_same(name: str, tmp_path: Path) -> None:
    recording, copy = read_recording(session(name)), tmp_path / "copy.jsonl"
    sampler = replaying(name)
    with copy.open("w") as file:
        sampler._calls = sampler.gpus._calls = Recorder(Replay(recording), file)
        points, events = everything_said(sampler)
    again = read_recording(copy)
    assert not again.synthetic and len(again.samples) == len(recording.samples)
    sampler = replaying(name)
    sampler._calls = sampler.gpus._calls = Replay(again)
    again_points, again_events = everything_said(sampler)
    assert again_points == points
    assert len(again_events) == len(events)


HEAD = '{"recording": "perfledger nvml 1", "synthetic": true}\n'


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "no whole line"),
        ("{}\n", "not a recording of the format"),
        (
            '{"recording": "perfledger nvml 2", "synthetic": true}\n',
            "not a recording of the format",
        ),
        ('{"recording": "perfledger nvml 1"}\n', "not a recording of the format"),
        (HEAD + "nonsense\n", "not JSON"),
        (HEAD + "[" * 100_000 + "\n", "not JSON"),
        (HEAD + "[]\n", "not a JSON object"),
        (HEAD + '{"sample": {"monotonic_ns": -1, "wall_ns": 0}}\n', "neither a sample nor a call"),
        (HEAD + '{"sample": 3}\n', "neither a sample nor a call"),
        (HEAD + '{"call": 1, "args": [], "value": 0}\n', "neither a sample nor a call"),
        (HEAD + '{"call": "f", "args": []}\n', "neither a sample nor a call"),
        (HEAD + '{"call": "f", "args": [], "error": "x"}\n', "neither a sample nor a call"),
    ],
)
def test_a_file_that_is_no_recording_is_refused_with_its_line(
    text: str, said: str, tmp_path: Path
) -> None:
    path = tmp_path / "file.jsonl"
    path.write_text(text)
    with pytest.raises(UsageError, match=said):
        read_recording(path)


def test_a_recording_whose_writer_was_stopped_is_read_to_its_last_whole_line(
    tmp_path: Path,
) -> None:
    path = tmp_path / "cut.jsonl"
    path.write_bytes(session("h100_pair").read_bytes()[:-20])
    recording = read_recording(path)
    assert recording.cut and len(recording.samples) == 13
    printed = run_counters("--replay", str(path))
    assert printed.returncode == 0 and "and cut short" in printed.stdout


def test_a_recording_without_samples_is_no_data(tmp_path: Path) -> None:
    path = tmp_path / "empty.jsonl"
    path.write_text(HEAD)
    printed = run_counters("--replay", str(path), "--json")
    assert (printed.returncode, printed.stdout) == (4, "")
    assert "the recording has no samples" in printed.stderr


def test_a_question_that_was_never_asked_is_a_function_that_is_not_there() -> None:
    replay = Replay(read_recording(session("driver_late")))
    at = replay.start_sample(Instant(1, 2))
    assert at.monotonic_ns == 1_000_000_000_000
    with pytest.raises(NvmlFailure, match="FUNCTION_NOT_FOUND"):
        replay.call("nvmlDeviceGetName", 7)
    with pytest.raises(NvmlFailure, match="DRIVER_NOT_LOADED"):
        replay.call("nvmlInit")


# --- Counters that wrap and fall -----------------------------------------------------------


@given(
    st.integers(2, 2**33),
    st.integers(0, 2**40),
    st.lists(st.tuples(st.integers(1, 10**9), st.floats(0, 1)), max_size=30),
)
def test_a_register_that_wraps_is_unfolded_exactly(
    modulus: int, start: int, steps: list[tuple[int, float]]
) -> None:
    """Steps are gaps in ns, and which part of what is possible in them was counted."""
    most_per_s = (modulus - 1) * 1.0  # within a second it cannot go round
    counter, true, at_ns = RisingCounter(modulus, most_per_s), start, 0
    first = counter.total(true % modulus, at_ns)
    assert first == start % modulus
    for gap_ns, part in steps:
        at_ns += gap_ns
        true += int(part * most_per_s * gap_ns / 1e9)
        total = counter.total(true % modulus, at_ns)
        assert total is not None and total - first == true - start
    assert counter.restarts == 0


@given(
    st.one_of(st.none(), st.integers(2, 2**20)),
    st.lists(st.tuples(st.integers(0, 2**20), st.integers(0, 10**10)), max_size=40),
)
def test_whatever_a_register_says_a_count_never_falls(
    modulus: int | None, said: list[tuple[int, int]]
) -> None:
    counter = RisingCounter(modulus, 1000.0)
    before, at_ns, restarts = None, 0, 0
    for raw, gap_ns in said:
        at_ns += gap_ns
        total = counter.total(raw % modulus if modulus else raw, at_ns)
        restarts += total is None
        if total is not None and before is not None:
            assert total >= before
            assert modulus is None or total - before <= 1000 * gap_ns / 1e9
        before = total
    assert counter.restarts == restarts


# --- The real binding, on a library of ours in the place of the driver's ----------------------


@pytest.fixture(scope="module")
def stand_in(tmp_path_factory: pytest.TempPathFactory) -> Path:
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("no C compiler")
    folder = tmp_path_factory.mktemp("nvml")
    library = folder / "libnvidia-ml.so.1"
    subprocess.run([compiler, "-shared", "-fPIC", "-o", library, STAND_IN], check=True)
    return folder


def counters(stand_in: Path, *flags: str, **environment: str) -> dict[str, object]:
    run = run_counters("--json", *flags, LD_LIBRARY_PATH=str(stand_in), **environment)
    assert run.returncode == 0, run.stderr
    found: dict[str, object] = json.loads(run.stdout)
    return found


def by_name(found: dict[str, object]) -> dict[str, object]:
    (device,) = found["devices"]  # type: ignore[misc]
    assert (device["id"], device["model"]) == (MADE_UP, "Made-up GPU")
    return {
        " ".join([one["metric"], *map(str, list(one["attributes"].values())[1:])]): one["value"]
        for one in device["counters"]
    }


def test_the_binding_and_our_calls_fit_together(stand_in: Path) -> None:
    found = counters(stand_in, "--seconds", "0.5", "--period", "0.05")
    said = by_name(found)
    assert found["driver"] == "580.00.00"
    energy = said.pop("hw.energy gpu Made-up GPU")
    assert isinstance(energy, float) and energy > 1000 and energy % 30 == 10
    activity = {
        2: "sm",
        3: "occupancy",
        4: "integer",
        5: "tensor",
        11: "fp64",
        12: "fp32",
        13: "fp16",
    }
    assert said == {
        "hw.power gpu": 300.0,
        "hw.gpu.utilization general": 0.9,
        "perfledger.gpu.memory.busy": 0.4,
        "hw.gpu.memory.usage": 600,
        "hw.gpu.memory.limit": 1000,
        "hw.gpu.io transmit scale_up counter": 4096 * 1024,
        "hw.gpu.io receive scale_up counter": 4096 * 1024,
        "perfledger.gpu.clock sm": 1_500_000_000,
        "perfledger.gpu.clock memory": 2_000_000_000,
        "perfledger.gpu.clock.limit sm": 1_600_000_000,
        "perfledger.gpu.clock.limit memory": 2_000_000_000,
        "perfledger.gpu.memory.bandwidth.limit": 2_048_000_000_000,
        "perfledger.gpu.throttled power_cap": 1,
        "perfledger.gpu.throttled hardware_slowdown": 0,
        "perfledger.gpu.throttled sync_boost": 0,
        "perfledger.gpu.throttled software_thermal": 0,
        "perfledger.gpu.throttled hardware_thermal": 1,
        "perfledger.gpu.throttled power_brake": 0,
        "perfledger.gpu.throttle.time power_cap": 5,
        "perfledger.gpu.pcie.generation": 5,
        "perfledger.gpu.pcie.width": 16,
        "hw.temperature gpu gpu": 50,
        "hw.temperature gpu memory": 61,
        "perfledger.gpu.power.limit": 700.0,
        "hw.errors gpu ecc_corrected": 2,
        "hw.errors gpu ecc_uncorrected": 0,
        "perfledger.gpu.memory.remapped_rows ecc_corrected": 3,
        "perfledger.gpu.memory.remapped_rows ecc_uncorrected": 0,
        "perfledger.gpu.processes": 2,
        "perfledger.gpu.process.memory 77": 4096,
        "perfledger.gpu.process.utilization 77": 0.8,
        "hw.status gpu failed": 0,
        "perfledger.gpu.memory.bandwidth.share": 0.1,
        **{f"perfledger.gpu.activity {unit}": n / 100 for n, unit in activity.items()},
    }
    assert found["events"] == [
        {"name": "perfledger.device.error", "device": MADE_UP, "error": "XID_79"}
    ]
    absent = {one["source"]: one["reason"] for one in found["absent"] if one["device"] == MADE_UP}  # type: ignore[index, attr-defined]
    assert absent["gpm_pcie"] == "NOT_SUPPORTED"
    assert absent["pcie_replays"] == "FUNCTION_NOT_FOUND"


ASK = """
import json, sys
from perfledger.collectors.device.nvml_calls import NvmlLibrary
calls = NvmlLibrary()
calls.call("nvmlInit")
for index in range(2):
    calls.call("nvmlDeviceGetHandleByIndex", index)
print(json.dumps([calls.call(*question) for question in json.loads(sys.argv[1])]))
calls.close()
"""


def test_what_is_asked_for_the_topology_is_plain_too(stand_in: Path) -> None:
    questions = [["nvmlDeviceGetPciInfo", 1], ["nvmlDeviceGetTopologyCommonAncestor", 0, 1]]
    command = [sys.executable, "-P", "-c", ASK, json.dumps(questions)]
    variables = os.environ | {"LD_LIBRARY_PATH": str(stand_in), "STAND_IN_GPUS": "2"}
    run = subprocess.run(command, capture_output=True, text=True, env=variables, timeout=120)
    assert json.loads(run.stdout) == ["00000000:1B:00.0", 50], run.stderr


def test_a_device_that_is_lost_under_the_binding_is_an_event(stand_in: Path) -> None:
    flags = ("--seconds", "1", "--period", "0.02")
    found = counters(stand_in, *flags, STAND_IN_LOST_AFTER="16")
    lost = {"name": "perfledger.device.lost", "device": MADE_UP, "error": "GPU_IS_LOST"}
    assert lost in found["events"]  # type: ignore[operator]
    assert by_name(found)["hw.status gpu failed"] == 1


def test_what_was_recorded_is_replayed_anywhere(stand_in: Path, tmp_path: Path) -> None:
    path = tmp_path / "session.jsonl"
    recorded = counters(stand_in, "--seconds", "0.3", "--record", str(path))
    printed = run_counters("--replay", str(path), "--json")
    replayed = json.loads(printed.stdout)
    assert replayed["replay"] == {"synthetic": False, "cut": False}
    for part in ("samples", "seconds", "driver", "devices", "events"):
        assert replayed[part] == recorded[part]
    again = run_counters("--record", str(path))
    assert again.returncode == 2 and "cannot write" in again.stderr


def test_on_a_real_device_energy_rises_and_what_is_said_makes_sense() -> None:
    from perfledger.collectors.device.nvml_calls import NvmlLibrary
    from perfledger.collectors.device.nvml_devices import NvmlDevices

    devices = NvmlDevices(NvmlLibrary())
    devices.look(0)
    if not devices.gpus:
        pytest.skip(f"no device here: {devices.why_not}")
    devices.close()
    printed = run_counters("--seconds", "3", "--json")
    for device in json.loads(printed.stdout)["devices"]:
        said = {one["metric"]: one for one in device["counters"]}
        assert said["hw.gpu.memory.usage"]["value"] <= said["hw.gpu.memory.limit"]["value"]
        if "hw.energy" in said:
            assert said["hw.energy"]["gained"] > 0
