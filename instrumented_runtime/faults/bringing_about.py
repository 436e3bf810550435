"""How a fault of the catalogue is brought about around one of our commands, and ended with it."""

import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from urllib.parse import urlsplit

from perfledger.instrumented_runtime.faults import catalogue, process_load
from perfledger.instrumented_runtime.faults.catalogue import Fault
from perfledger.instrumented_runtime.faults.namespace import crossing, thin_namespace
from perfledger.schema.errors import UsageError

_SPIN = "x = 1\nwhile True: x = (x * 31 + 7) % 1000003"
_PERIOD_US = 100_000
_OTLP_PORTS = (4317, 4318)  # OTLP over gRPC and HTTP where no endpoint is named
_OTLP_ENDPOINTS = tuple(
    f"OTEL_EXPORTER_OTLP_{signal}ENDPOINT" for signal in ("", "TRACES_", "METRICS_", "LOGS_")
)


@dataclass(frozen=True, slots=True)
class Prepared:
    """A command of ours as it will be run: its arguments, environment and what stands before it."""

    arguments: tuple[str, ...]
    environment: dict[str, str]
    before: tuple[str, ...] = ()

    @property
    def command(self) -> list[str]:
        """The whole command line."""
        return [*self.before, sys.executable, "-P", "-m", "perfledger", *self.arguments]


def can_have(fault: Fault, arguments: Sequence[str]) -> bool:
    """Return whether this command, on this machine, may be drawn to have a fault."""
    if fault.name in ("thin_link", "cpu_quota") and os.geteuid() != 0:
        return False
    if fault.means == catalogue.NETWORK and not (shutil.which("ip") and shutil.which("tc")):
        return False
    if fault.name == "skewed_experts":
        return arguments[0] == "serve" and "-moe" in (value_of("--model", arguments) or "")
    everywhere = (catalogue.NEIGHBOUR, catalogue.PLACEMENT, catalogue.NETWORK)
    return arguments[0] == "serve" or fault.means in everywhere


@contextmanager
def brought_about(
    fault: Fault, amount: float, prepared: Prepared, folder: Path
) -> Iterator[Prepared]:
    """Bring a fault about for the block; give the command to run in it.

    `folder` is empty and the caller's to remove. Raises UsageError for a fault that this command
    or this machine cannot have.
    """
    with ExitStack() as stack:
        yield _MEANS[fault.means](fault, amount, prepared, folder, stack)


def _with_flags(
    fault: Fault, amount: float, prepared: Prepared, folder: Path, stack: ExitStack
) -> Prepared:
    flags = tuple(flag.format(amount=amount) for flag in fault.flags)
    return replace(prepared, arguments=prepared.arguments + flags)


def _with_checkpoint(
    fault: Fault, amount: float, prepared: Prepared, folder: Path, stack: ExitStack
) -> Prepared:
    from perfledger.instrumented_runtime.checkpoints.resolve import resolve
    from perfledger.instrumented_runtime.faults.checkpoint_variants import make_variant
    from perfledger.instrumented_runtime.options import RuntimeOptions

    model = value_of("--model", prepared.arguments) or RuntimeOptions().model
    name = Path(model).resolve().name if Path(model).is_dir() else model
    variant = make_variant(fault.name, amount, resolve(model), folder / name)
    return replace(prepared, arguments=(*prepared.arguments, "--model", str(variant)))


def _with_neighbours(
    fault: Fault, amount: float, prepared: Prepared, folder: Path, stack: ExitStack
) -> Prepared:
    for _ in range(round(amount)):
        # Of a session of its own: a Ctrl-C of the terminal is not for it.
        neighbour = subprocess.Popen([sys.executable, "-c", _SPIN], start_new_session=True)
        stack.callback(neighbour.wait)
        stack.callback(neighbour.kill)
    return prepared


def _with_placement(
    fault: Fault, amount: float, prepared: Prepared, folder: Path, stack: ExitStack
) -> Prepared:
    """Children inherit both: so this process has them too, until the block ends."""
    if fault.name == "cpu_quota":
        _limit_cpu(amount, stack)
        return prepared
    if not hasattr(os, "sched_setaffinity"):
        raise UsageError(f"{fault.name} needs {fault.needs}")
    before = os.sched_getaffinity(0)
    stack.callback(os.sched_setaffinity, 0, before)
    os.sched_setaffinity(0, sorted(before)[: max(1, round(amount))])
    return prepared


def _limit_cpu(cores: float, stack: ExitStack) -> None:
    """Put this process into a control group of its own. Raises UsageError without the rights."""
    v1, v2 = Path("/sys/fs/cgroup/cpu"), Path("/sys/fs/cgroup")
    parent = v1 if (v1 / "cpu.cfs_quota_us").exists() else v2
    group, quota = parent / f"work-{os.getpid()}", round(cores * _PERIOD_US)
    try:
        group.mkdir()
        stack.callback(group.rmdir)
        if parent == v1:
            (group / "cpu.cfs_period_us").write_text(str(_PERIOD_US))
            (group / "cpu.cfs_quota_us").write_text(str(quota))
        else:
            (group / "cpu.max").write_text(f"{quota} {_PERIOD_US}")
        stack.callback((parent / "cgroup.procs").write_text, str(os.getpid()))
        (group / "cgroup.procs").write_text(str(os.getpid()))
    except OSError as error:
        what = f"cannot limit the CPU: {error.strerror}"
        raise UsageError(what, where=str(group), fix="root and the cgroup controller cpu") from None


def _with_process_load(
    fault: Fault, amount: float, prepared: Prepared, folder: Path, stack: ExitStack
) -> Prepared:
    (folder / "sitecustomize.py").write_text(process_load.SITECUSTOMIZE)
    environment = dict(prepared.environment)
    paths = [str(folder), environment.get("PYTHONPATH", "")]
    environment["PYTHONPATH"] = os.pathsep.join(path for path in paths if path)
    environment[process_load.VARIABLE] = f"{fault.unit.split()[0]}:{amount:g}"
    return replace(prepared, environment=environment)


def _with_thin_link(
    fault: Fault, amount: float, prepared: Prepared, folder: Path, stack: ExitStack
) -> Prepared:
    name = stack.enter_context(thin_namespace(amount))
    inward = [_port(prepared)] if prepared.arguments[:1] == ("serve",) else []
    stack.enter_context(crossing(name, folder, inward, telemetry_ports(prepared.environment)))
    return replace(prepared, before=("ip", "netns", "exec", name))


def telemetry_ports(environment: Mapping[str, str]) -> list[int]:
    """Return the ports that a command sends telemetry to by its OTEL_* variables, sorted."""
    ports = set(_OTLP_PORTS)
    for endpoint in (environment.get(name, "") for name in _OTLP_ENDPOINTS):
        with suppress(ValueError):  # what is no port the command refuses by itself
            ports.add(urlsplit(endpoint if "//" in endpoint else f"//{endpoint}").port or 4317)
    return sorted(ports)


def _with_proxy(
    fault: Fault, amount: float, prepared: Prepared, folder: Path, stack: ExitStack
) -> Prepared:
    from perfledger.instrumented_runtime.faults.slow_proxy import Path as Between

    between = Between(delay_s=amount / 1000)
    if fault.name == "slow_reader":
        between = Between(bytes_per_s=amount)
    public, own = _port(prepared), _free_port()
    stack.enter_context(_proxy(between, public, own))
    return replace(prepared, arguments=(*prepared.arguments, "--port", str(own)))


@contextmanager
def _proxy(between: object, public: int, own: int) -> Iterator[None]:
    import asyncio

    from perfledger.instrumented_runtime.faults import slow_proxy

    assert isinstance(between, slow_proxy.Path)
    loop = asyncio.new_event_loop()
    proxy = slow_proxy.SlowProxy(between, ("127.0.0.1", own))
    try:
        server = loop.run_until_complete(proxy.listen(port=public))
    except OSError as error:
        loop.close()
        raise UsageError(f"port {public} cannot be listened on: {error.strerror}") from None
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    try:
        yield
    finally:
        loop.call_soon_threadsafe(server.close)
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


def _port(prepared: Prepared) -> int:
    if prepared.arguments[:1] != ("serve",):
        raise UsageError("this fault stands before a server: give it `serve`")
    return int(value_of("--port", prepared.arguments) or 8000)


def value_of(flag: str, arguments: Sequence[str]) -> str | None:
    """Return what a flag was given last, as `--flag value` or `--flag=value`."""
    found = None
    for index, argument in enumerate(arguments):
        if argument == flag and index + 1 < len(arguments):
            found = arguments[index + 1]
        elif argument.startswith(f"{flag}="):
            found = argument.partition("=")[2]
    return found


def _free_port() -> int:
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


_Means = Callable[[Fault, float, Prepared, Path, ExitStack], Prepared]
_MEANS: dict[str, _Means] = {
    catalogue.FLAGS: _with_flags,
    catalogue.CHECKPOINT: _with_checkpoint,
    catalogue.NEIGHBOUR: _with_neighbours,
    catalogue.PLACEMENT: _with_placement,
    catalogue.PROCESS: _with_process_load,
    catalogue.NETWORK: _with_thin_link,
    catalogue.CLIENT: _with_proxy,
}
