"""Faults: sealed answers, what each means does to a command, and that nothing tells which is on."""

import asyncio
import json
import os
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file
from small_disks import disk_in_memory

from perfledger.instrumented_runtime.checkpoints.resolve import resolve
from perfledger.instrumented_runtime.faults import catalogue
from perfledger.instrumented_runtime.faults.bringing_about import (
    Prepared,
    brought_about,
    can_have,
    telemetry_ports,
    value_of,
)
from perfledger.instrumented_runtime.faults.catalogue import BY_NAME, FAULTS, strength
from perfledger.instrumented_runtime.faults.checkpoint_variants import make_variant
from perfledger.instrumented_runtime.faults.namespace import thin_namespace
from perfledger.instrumented_runtime.faults.sealing import Answer, seal, unseal
from perfledger.instrumented_runtime.faults.slow_proxy import Path as Between
from perfledger.instrumented_runtime.faults.slow_proxy import SlowProxy
from perfledger.instrumented_runtime.tokenizer import Tokenizer
from perfledger.schema.errors import PerfledgerError, UsageError
from perfledger.schema.stages import STAGES

CAUSES = {"network", "collective transfer"}
ANSWER = Answer("one_core", 1.0, ("decode",), 5, "salt")


def _namespaces() -> bool:
    """Whether this user and kernel can have a network namespace with a token bucket."""
    if os.geteuid() != 0 or not (shutil.which("ip") and shutil.which("tc")):
        return False
    try:
        with thin_namespace(100):
            return True
    except UsageError:  # a container without the right to
        return False


NAMESPACES = _namespaces()


def test_the_catalogue_blames_stages_that_there_are() -> None:
    known = {stage.name for stage in STAGES} | CAUSES
    assert {name for fault in FAULTS for name in fault.blamed} <= known
    assert len(BY_NAME) == len(FAULTS)


def test_a_strength_without_effect_is_refused() -> None:
    neighbour, quota = BY_NAME["busy_neighbour"], BY_NAME["cpu_quota"]
    assert [strength(neighbour, asked) for asked in (None, 3)] == [2, 3]
    assert strength(quota, 0.25) == 0.25
    for asked in (-3, 0, 0.4, 1.5, float("nan"), float("inf")):
        with pytest.raises(UsageError, match="is not a whole number above 0"):
            strength(neighbour, asked)
    with pytest.raises(UsageError, match="is not above 0"):
        strength(quota, 0)
    with pytest.raises(UsageError, match="volatile_template has no strength"):
        strength(BY_NAME["volatile_template"], 1)


def test_a_refused_fault_leaves_no_answer(tmp_path: Path) -> None:
    answer = tmp_path / "answer.json"
    under = ("fault", "run", "--fault", "far_client", "--answer", str(answer), "--", "train")
    done = subprocess.run(
        [sys.executable, "-P", "-m", "perfledger", *under],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert (done.returncode, answer.exists()) == (2, False)
    assert "this fault stands before a server" in done.stderr


# --- The sealed answer ----------------------------------------------------------------------------


def test_an_answer_comes_back_and_only_its_owner_reads_it(tmp_path: Path) -> None:
    path = tmp_path / "answer.json"
    digest = seal(ANSWER, path, str(tmp_path / "store"))
    assert unseal(path, digest) == ANSWER
    assert path.stat().st_mode & 0o777 == 0o600


def test_an_answer_on_a_full_disk_is_refused_whole(tmp_path: Path) -> None:
    with disk_in_memory(tmp_path / "disk", 1 << 16) as disk:
        (disk / "fill").write_bytes(b"0" * (1 << 16))
        with pytest.raises(UsageError, match="cannot write the answer: No space left"):
            seal(ANSWER, disk / "answer.json", str(tmp_path / "store"))
        assert [file.name for file in disk.iterdir()] == ["fill"]


def test_an_answer_is_never_written_twice_nor_into_the_store(tmp_path: Path) -> None:
    path = tmp_path / "answer.json"
    seal(ANSWER, path, str(tmp_path / "store"))
    with pytest.raises(UsageError, match="cannot write the answer"):
        seal(ANSWER, path, str(tmp_path / "store"))
    for store in (str(tmp_path), f"file://{tmp_path}"):
        with pytest.raises(UsageError, match="outside the store"):
            seal(ANSWER, tmp_path / "spans" / "answer.json", store)


@given(place=st.integers(0, 400), byte=st.integers(0, 255))
def test_a_changed_answer_is_refused(
    tmp_path_factory: pytest.TempPathFactory, place: int, byte: int
) -> None:
    path = tmp_path_factory.mktemp("answer") / "answer.json"
    digest = seal(ANSWER, path, "elsewhere")
    content = bytearray(path.read_bytes())
    at = place % len(content)
    if content[at] == byte:
        return
    content[at] = byte
    path.write_bytes(content)
    with pytest.raises(PerfledgerError):
        unseal(path, digest)


# --- What a command becomes -----------------------------------------------------------------------

SERVE = ("serve", "--model", "reference-small", "--port", "8123")


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_neither_arguments_nor_environment_name_the_fault(
    fault: catalogue.Fault, tmp_path: Path
) -> None:
    if fault.means == catalogue.NETWORK and not NAMESPACES:
        pytest.skip("needs root, ip and tc")
    arguments = SERVE
    if fault.name == "skewed_experts":
        arguments = ("serve", "--model", "reference-moe-small", "--port", "8123")
    environment = {key: value for key, value in os.environ.items() if key[:7] != "PYTEST_"}
    before = Prepared(arguments, environment)
    affinity = os.sched_getaffinity(0)
    (folder := tmp_path / "x").mkdir()
    try:
        with brought_about(fault, fault.amount, before, folder) as prepared:
            assert prepared.arguments[:1] == ("serve",)
            told = [*prepared.command, *map(str, prepared.environment.items())]
            assert not [text for text in told if fault.name in text.replace("-", "_")]
            if fault.means == catalogue.CHECKPOINT:
                model = Path(value_of("--model", prepared.arguments) or "")
                assert model.name == value_of("--model", arguments)  # served under its own name
    except UsageError:
        assert fault.name == "cpu_quota"  # not every machine lets us
    assert os.sched_getaffinity(0) == affinity


@pytest.mark.parametrize(
    ("arguments", "value"),
    [
        (("serve", "--port", "1", "--port=2"), "2"),
        (("serve", "--port=1", "--port", "3"), "3"),
        (("serve", "--port"), None),
        (("serve", "--portal", "1"), None),
    ],
)
def test_the_last_value_of_a_flag_counts(arguments: tuple[str, ...], value: str | None) -> None:
    assert value_of("--port", arguments) == value


@pytest.mark.parametrize(
    ("arguments", "never"),
    [
        (("train", "--dp", "2"), {"slow_reader", "few_kv_blocks", "slow_tokenizer", "log_flood"}),
        (("serve", "--model", "smollm2"), {"skewed_experts"}),
        (("serve", "--model", "reference-moe"), set()),
    ],
)
def test_only_what_a_command_can_have_is_drawn(
    arguments: tuple[str, ...], never: set[str], tmp_path: Path
) -> None:
    drawn = {fault.name for fault in FAULTS if can_have(fault, arguments)}
    assert not drawn & never and {"busy_neighbour", "one_core"} <= drawn
    assert ("skewed_experts" in drawn) == (arguments[-1] == "reference-moe")


# --- The means ------------------------------------------------------------------------------------


def test_a_slow_tokenizer_makes_the_same_tokens(tmp_path: Path) -> None:
    original = resolve("reference-small")
    variant = make_variant("slow_tokenizer", 5, original, tmp_path / "reference-small")
    text = "The capital of France is Paris, isn't it?\n"
    slow, fast = Tokenizer.load(variant), Tokenizer.load(original)
    assert slow.encode(text) == fast.encode(text)
    assert slow.hash != fast.hash
    assert (
        len(json.loads((variant / "tokenizer.json").read_text())["normalizer"]["normalizers"]) >= 5
    )


def test_a_volatile_template_never_begins_the_same(tmp_path: Path) -> None:
    original = resolve("reference-small")
    variant = Tokenizer.load(make_variant("volatile_template", 0, original, tmp_path / "x"))
    chat = [{"role": "user", "content": "Hello"}]
    rendered = {variant.render_chat(chat) for _ in range(20)}
    assert len({text.partition("\n")[0] for text in rendered}) == 20
    plain = Tokenizer.load(original).render_chat(chat)
    assert {text.partition("\n")[2] for text in rendered} == {plain}


def test_skewed_experts_leave_everything_else_as_it_was(tmp_path: Path) -> None:
    original = resolve("reference-moe-small")
    variant = make_variant("skewed_experts", 32, original, tmp_path / "x")
    before = load_file(original / "model.safetensors")
    after = load_file(variant / "model.safetensors")
    changed = {name for name in before if not before[name].equal(after[name])}
    assert changed == {name for name in before if name.endswith(".gate.weight")}
    for name in changed:
        assert after[name][0].equal(-after[name][1]) and after[name][2].equal(-after[name][3])
        assert after[name][4:].equal(before[name][4:])


def test_a_model_without_experts_cannot_be_skewed(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no experts to skew"):
        make_variant("skewed_experts", 32, resolve("reference-small"), tmp_path / "x")


LOADED = """
import gc, logging, threading, time
time.sleep(0.3)
print(threading.active_count(), gc.get_threshold()[0], len(gc.get_objects()) > 400_000,
      logging.getLogger().level, flush=True)
"""


@pytest.mark.parametrize(
    ("name", "amount", "said"),
    [
        ("gil_contention", 2, "3 700 False 30"),
        ("gc_pressure", 500_000, "2 700 True 30"),
        ("log_flood", 50, "2 700 False 10"),
    ],
)
def test_a_process_takes_its_load_before_its_own_code(
    name: str, amount: float, said: str, tmp_path: Path
) -> None:
    prepared = Prepared(("serve",), dict(os.environ))
    with brought_about(BY_NAME[name], amount, prepared, tmp_path) as under:
        command = [sys.executable, "-P", "-c", LOADED]
        done = subprocess.run(
            command, env=under.environment, capture_output=True, text=True, timeout=120
        )
    assert done.stdout.strip() == said, done.stderr


def test_a_neighbour_works_as_long_as_the_block(tmp_path: Path) -> None:
    def children() -> list[int]:  # their process groups
        listed = subprocess.run(
            ["ps", "-o", "pgid=", "--ppid", str(os.getpid())], capture_output=True, text=True
        )
        return [int(group) for group in listed.stdout.split()]

    before = len(children())
    with brought_about(BY_NAME["busy_neighbour"], 2, Prepared(("serve",), {}), tmp_path):
        assert len(children()) == before + 2
        # A Ctrl-C of our terminal would not reach them.
        assert sum(group != os.getpgid(0) for group in children()) >= 2
    assert len(children()) == before


def test_telemetry_crosses_to_where_the_environment_sends_it() -> None:
    assert telemetry_ports({}) == [4317, 4318]
    named = {
        "OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:24317",
        "OTEL_EXPORTER_OTLP_METRICS_ENDPOINT": "localhost:5000",
        "OTEL_EXPORTER_OTLP_LOGS_ENDPOINT": "http://127.0.0.1:none",
    }
    assert telemetry_ports(named) == [4317, 4318, 5000, 24317]


def test_placement_is_inherited_and_given_back(tmp_path: Path) -> None:
    cores = "import os; print(len(os.sched_getaffinity(0)))"
    with brought_about(BY_NAME["one_core"], 1, Prepared(("serve",), {}), tmp_path):
        done = subprocess.run([sys.executable, "-c", cores], capture_output=True, text=True)
    assert done.stdout.strip() == "1"


async def through_proxy(between: Between, sent: bytes) -> tuple[bytes, float, float]:
    """Echo `sent` through a proxy; return what came back, and when the first and last byte did."""

    async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while piece := await reader.read(4096):
            writer.write(piece)
            await writer.drain()
        writer.close()

    server = await asyncio.start_server(echo, "127.0.0.1", 0)
    target = server.sockets[0].getsockname()
    proxy = await SlowProxy(between, target).listen()
    reader, writer = await asyncio.open_connection(*proxy.sockets[0].getsockname())
    started = time.monotonic()
    writer.write(sent)
    writer.write_eof()
    back = await reader.read(1)
    first = time.monotonic() - started
    back += await reader.read()
    last = time.monotonic() - started
    writer.close()
    proxy.close()
    server.close()
    return back, first, last


def test_a_far_peer_gets_every_byte_later() -> None:
    sent = os.urandom(200_000)
    back, first, _ = asyncio.run(through_proxy(Between(delay_s=0.1), sent))
    assert back == sent
    assert first >= 0.2


def test_a_slow_reader_gets_every_byte_slowly() -> None:
    sent = os.urandom(4_000)
    back, _, last = asyncio.run(through_proxy(Between(bytes_per_s=8_000), sent))
    assert back == sent
    assert last >= 0.4


TRANSFER = """
import socket, threading, time
server = socket.create_server(("127.0.0.1", 0))
def give():
    link, _ = server.accept()
    link.sendall(bytes(500_000)); link.close()
threading.Thread(target=give).start()
link, size, started = socket.create_connection(server.getsockname()), 0, time.monotonic()
while piece := link.recv(65536): size += len(piece)
print(size, time.monotonic() - started)
"""


@pytest.mark.skipif(not NAMESPACES, reason="needs root, ip, tc and a kernel with tbf")
def test_a_thin_link_carries_no_more_than_it_can_and_ports_cross(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as outside:
        (folder := tmp_path / "x").mkdir()
        port = outside.getsockname()[1]
        prepared = Prepared(("train",), dict(os.environ))
        with brought_about(BY_NAME["thin_link"], 20, prepared, folder) as under:
            command = [*under.before, sys.executable, "-c", TRANSFER]
            done = subprocess.run(command, capture_output=True, text=True, timeout=60)
            size, took_s = done.stdout.split()
            assert int(size) == 500_000
            assert float(took_s) > 0.1  # 4 Mbit at 20 Mbit/s are 200 ms; unbounded, 1 ms
            names = subprocess.run(["ip", "netns"], capture_output=True, text=True).stdout
            assert under.before[3] in names
        names = subprocess.run(["ip", "netns"], capture_output=True, text=True).stdout
        assert under.before[3] not in names
        assert port  # the listener out here was never disturbed
