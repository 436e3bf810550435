"""Real processes that wait in a known way are told apart, on this kernel."""

import asyncio
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from conftest import wait_until
from metrics_sink import MemorySink, attributes, values
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import (
    ExportMetricsServiceRequest,
)

from perfledger.collectors.host.process_files import KeptFiles, ProcessFiles
from perfledger.collectors.host.process_waits import ProcessWaits
from perfledger.collectors.host.python_runtime import find_py_spy, runtime_addresses
from perfledger.collectors.host.sampling_loop import run_sampler
from perfledger.collectors.host.system_calls import calls_of_this_machine
from perfledger.collectors.host.wait_sampler import WaitSampler, boottime_ns, run, watch_for
from perfledger.collectors.host.wait_settings import WaitSettings

CHILD = Path(__file__).with_name("wait_child.py")
PROC = Path("/proc")

pytestmark = pytest.mark.skipif(
    not calls_of_this_machine() or not Path("/proc/self/syscall").exists(),
    reason="this kernel does not show what its threads wait for",
)


@contextmanager
def child(how: str, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, str(CHILD), how, *arguments]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True)
    try:
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
        yield process
    finally:
        os.killpg(process.pid, signal.SIGKILL)  # and what it has started
        process.wait()
        if process.stdout is not None:
            process.stdout.close()


def sampled(pid: int, samples: int = 40) -> Counter[tuple[str, str]]:
    """Return what all threads of a process were seen in, and for how long."""
    process = ProcessWaits(PROC, pid, boottime_ns(), KeptFiles(100))
    process.learn_runtime()
    for _ in range(samples):
        process.sample(boottime_ns())
        time.sleep(0.02)
    list(process.report(boottime_ns()))
    process.close()
    totals: Counter[tuple[str, str]] = Counter()
    for group in process.groups.values():
        totals.update(group)
    return totals


def share(totals: Counter[tuple[str, str]], what: str, *states: str) -> float:
    whole = sum(count for (kind, _), count in totals.items() if kind == what)
    return sum(totals[what, state] for state in states) / whole


@pytest.mark.parametrize(
    ("how", "state"),
    [
        ("lock", "lock"),
        ("condition", "lock"),
        ("sleep", "sleep"),
        ("recv", "socket"),
        ("accept", "socket"),
        ("epoll", "socket"),
        ("poll", "socket"),
        ("select", "socket"),
        ("pipe", "pipe"),
        ("stopped", "stopped"),
        ("parent", "other"),
    ],
)
def test_a_process_that_waits_is_told_what_for(how: str, state: str) -> None:
    with child(how) as process:
        wait_until(lambda: sampled(process.pid, 1)["samples", state] > 0, 20, how)
        totals = sampled(process.pid)
    assert share(totals, "samples", state) > 0.9, totals
    assert share(totals, "ns", state) > 0.9, totals


def test_a_process_that_computes_runs_or_waits_for_a_cpu() -> None:
    with child("burn") as process:
        totals = sampled(process.pid)
    assert share(totals, "samples", "running", "runnable") > 0.9, totals
    assert totals["ns", "running"] > 0
    assert share(totals, "ns", "running", "runnable") > 0.9, totals


def test_threads_that_fight_for_the_gil_are_told_from_those_at_a_lock() -> None:
    with child("gil") as process:
        totals = sampled(process.pid, 80)
    assert totals["samples", "gil"] > 0, totals
    assert totals["ns", "gil"] > 0, totals
    # One of two has the GIL at any time; with an idle machine the other is in `gil` throughout.
    assert share(totals, "samples", "gil", "running", "runnable") > 0.8, totals
    assert totals["samples", "gil"] > totals["samples", "lock"]


def test_a_process_that_syncs_to_disk_waits_for_it(tmp_path: Path) -> None:
    if os.statvfs(tmp_path).f_fsid == os.statvfs("/dev/shm").f_fsid:
        pytest.skip("a file in memory is not synced to anything")
    with child("fsync", str(tmp_path / "file")) as process:
        totals = sampled(process.pid, 80)
    blocked = {
        state: count
        for (what, state), count in totals.items()
        if what == "samples" and state not in ("running", "runnable")
    }
    assert blocked.get("disk", 0) > 0.8 * sum(blocked.values()) > 0, totals


def test_the_runtime_state_lies_where_python_says() -> None:
    with child("address") as process:
        assert process.stdout is not None
        said = int(process.stdout.readline())
        files = ProcessFiles(PROC, process.pid, KeptFiles(0))
        found = runtime_addresses(files)
        files.close()
    assert found is not None and found.start == said and len(found) > 1000


def test_a_program_that_is_no_python_has_no_runtime() -> None:
    process = subprocess.Popen(["sleep", "1000"])
    try:
        files = ProcessFiles(PROC, process.pid, KeptFiles(0))
        wait_until(lambda: files.link("exe") != os.readlink("/proc/self/exe"), 10, "exec")
        assert runtime_addresses(files) is None
        files.close()
    finally:
        process.kill()
        process.wait()


def test_exact_times_agree_with_the_kernels_own_sum() -> None:
    with child("burn") as process:
        files = ProcessFiles(PROC, process.pid, KeptFiles(0))
        before = int(files.schedule(process.pid).split()[0])
        totals = sampled(process.pid, 30)
        after = int(files.schedule(process.pid).split()[0])
        files.close()
    assert 0 < totals["ns", "running"] <= after - before


def test_a_process_that_ends_while_it_is_watched(caplog: pytest.LogCaptureFixture) -> None:
    with child("sleep") as process:
        sampler = WaitSampler(WaitSettings(pid=process.pid, report_interval_s=0))
        first = sampler.sample()
        assert first is not None and not sampler.ended()
        process.kill()
        wait_until(lambda: sampler.sample() is None and sampler.ended(), 10, "end")
        assert sampler.counts["processes_ended"] == 1
        assert sampler.processes == {}
        assert sampler.close() is None


def test_the_loop_ends_with_the_process_it_was_given() -> None:
    sink = MemorySink()
    with child("sleep") as process:
        settings = WaitSettings(pid=process.pid, report_interval_s=0.1)
        sampler = WaitSampler(settings)

        async def scenario() -> None:
            task = asyncio.create_task(run_sampler(sampler, sink, asyncio.Event()))
            while not sink.bodies:
                assert not task.done()
                await asyncio.sleep(0.02)
            process.kill()
            await task

        asyncio.run(asyncio.wait_for(scenario(), 30))
    assert sampler.counts["defects"] == 0
    resource = ExportMetricsServiceRequest.FromString(sink.bodies[0]).resource_metrics[0].resource
    said = attributes(resource.attributes)
    assert said["process.pid"] == process.pid
    assert re.fullmatch(rf"{process.pid}-\d+", str(said["service.instance.id"]))
    assert said["service.name"] == "perfledger.waits"


def test_no_such_process_is_said_and_the_end(caplog: pytest.LogCaptureFixture) -> None:
    sink = MemorySink()
    nobody = 2**22 - 1
    asyncio.run(asyncio.wait_for(run(sink, WaitSettings(pid=nobody), asyncio.Event()), 30))
    assert sink.bodies == []
    assert f"process {nobody}: no such process" in caplog.text
    assert watch_for(WaitSettings(pid=nobody), 0.1) == f"process {nobody}: no such process"


def test_threads_that_come_and_go_all_the_time_disturb_nothing() -> None:
    with child("churn") as process:
        sampler = WaitSampler(WaitSettings(pid=process.pid, report_interval_s=0))
        last: dict[object, float] = {}
        for _ in range(100):
            body = sampler.sample()
            assert body is not None
            now = values(body)
            for series, value in last.items():
                if series in now and series[0] == "perfledger.thread.run_time_ns":  # type: ignore[index]
                    assert now[series] >= value  # type: ignore[index]
            last = dict(now)
            time.sleep(0.005)
        assert sampler.processes[process.pid].threads_ended > 0
        sampler.close()


def test_children_are_followed_and_a_port_finds_its_process() -> None:
    with child("parent") as process:
        settings = WaitSettings(pid=process.pid, search_interval_s=0)
        sampler = WaitSampler(settings)
        wait_until(lambda: sampler.sample() or len(sampler.processes) == 2, 20, "its child")
        sampler.close()
    with child("accept") as process:
        assert process.stdout is not None
        port = int(process.stdout.readline())
        sampler = WaitSampler(WaitSettings(port=port))
        sampler.sample()
        assert list(sampler.processes) == [process.pid]
        sampler.close()


@pytest.mark.skipif(find_py_spy() is None, reason="py-spy is not installed")
def test_pythons_thread_names_are_learned_from_py_spy() -> None:
    with child("gil") as process:
        sampler = WaitSampler(WaitSettings(pid=process.pid, report_interval_s=0))

        def named() -> bool:
            sampler.sample()
            names = set(sampler.processes[process.pid].names.values())
            return names == {"MainThread", "spinner-2"}

        wait_until(named, 30, "names")
        body = sampler.sample()
        assert body is not None
        groups = {dict(series).get("thread.name") for _, series in values(body)}
        assert {"MainThread", "spinner-#"} <= groups
        assert "cannot be seen" not in sampler.summary()
        assert re.search(r"busiest thread (MainThread|spinner-2) ", sampler.summary())
        sampler.close()


def test_of_a_stranger_only_what_all_may_see_is_told() -> None:
    """As another user: states of blocked threads are unknown, and that is said."""
    if os.getuid() != 0:
        pytest.skip("only root can become another user")
    with child("lock") as process:
        read_end, write_end = os.pipe()
        other = os.fork()
        if other == 0:  # the child of a fork: only plain calls until _exit
            try:
                os.setgroups([])
                os.setgid(65_534)
                os.setuid(65_534)
                text = watch_for(WaitSettings(pid=process.pid, children=False), 0.5)
                os.write(write_end, text.encode())
            finally:
                os._exit(0)
        os.close(write_end)
        with os.fdopen(read_end) as answer:
            said = answer.read()
        os.waitpid(other, 0)
    assert "100% unknown" in said, said
    assert "cannot be seen: calls (not permitted" in said
    assert "cannot be seen: gil (not permitted" in said


def test_a_hostile_thread_name_reaches_the_sink_as_text(tmp_path: Path) -> None:
    program = tmp_path / "a) R 1 \n(\udcff"
    shutil.copy(shutil.which("sleep") or "/bin/sleep", os.fsencode(program))
    process = subprocess.Popen([os.fsencode(program), "1000"])
    try:
        sampler = WaitSampler(WaitSettings(pid=process.pid, report_interval_s=0))
        names = set()

        def seen() -> bool:
            body = sampler.sample()
            assert body is not None
            names.update(dict(series).get("thread.name") for _, series in values(body))
            return "a) R # ?(\ufffd" in names

        wait_until(seen, 10, f"the name, among {names}")
        sampler.close()
    finally:
        process.kill()
        process.wait()
