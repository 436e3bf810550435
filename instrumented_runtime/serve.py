"""`perfledger serve`: starts the runtime's processes, watches them, and ends them in order."""

import asyncio
import contextlib
import os
import signal
import socket
import sys
import time
from collections.abc import Mapping
from dataclasses import replace
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from perfledger.instrumented_runtime.checkpoints.config import read_config
from perfledger.instrumented_runtime.checkpoints.resolve import resolve
from perfledger.instrumented_runtime.child_processes import spawn_engine
from perfledger.instrumented_runtime.engine_link import FAILED, OK
from perfledger.instrumented_runtime.exporter_link import ExporterLink, NoTelemetry, Telemetry
from perfledger.instrumented_runtime.http_server import (
    build_server,
    listen,
    raise_file_limit,
    url_of,
)
from perfledger.instrumented_runtime.kv.capacity import capacity_lines
from perfledger.instrumented_runtime.messages import Ready
from perfledger.instrumented_runtime.options import RuntimeOptions
from perfledger.instrumented_runtime.otel_environment import destination
from perfledger.instrumented_runtime.parallel.layout import Layout, RankPlace
from perfledger.instrumented_runtime.parallel.splits import check_layout
from perfledger.instrumented_runtime.routing.replica import Replica
from perfledger.instrumented_runtime.routing.replicas import Replicas
from perfledger.instrumented_runtime.scheduling.limits import limits_of
from perfledger.instrumented_runtime.telemetry import AttributeValue, EngineRecord
from perfledger.instrumented_runtime.tokenizer import Tokenizer
from perfledger.schema.errors import PerfledgerError, UsageError
from perfledger.schema.metrics import CAPACITY, Metric

if TYPE_CHECKING:
    from perfledger.instrumented_runtime.completing import Service

FINISH_S = 3.0  # for requests in flight after a signal, before they are aborted


def serve(options: RuntimeOptions, api_key: str = "", admin_token: str = "") -> int:
    """Serve until SIGINT or SIGTERM; return 0.

    Raises UsageError before any process is started where the options, the model or the address
    cannot be, and PerfledgerError where the engine could not load or has died.
    """
    limits_of(options, max_model_len=1, kv_blocks=1)
    raise_file_limit()
    with listen(options.host, options.port) as listener:
        say(f"loading {options.model}")
        checkpoint = resolve(options.model)
        check_layout(read_config(checkpoint), options.layout, options.block_size)
        runtime = Runtime(options, checkpoint, listener, api_key, admin_token)
        return asyncio.run(runtime.run())


class Runtime:
    """The API process, with the engines and the exporter as its children."""

    def __init__(
        self,
        options: RuntimeOptions,
        checkpoint: Path,
        listener: socket.socket,
        api_key: str,
        admin_token: str,
    ) -> None:
        self._options = options
        self._checkpoint = checkpoint
        self._listener = listener
        self._api_key, self._admin_token = api_key, admin_token
        self._tokenizer = Tokenizer.load(checkpoint)
        self._engine_options = shared_threads(options)
        self._introduced = False
        self._announced: dict[str, int] = {}  # which start of each replica is known to telemetry
        self._telemetry: Telemetry = ExporterLink(options) if options.telemetry else NoTelemetry()
        self._stopping = False

    async def run(self) -> int:
        """Run it all. Raises UsageError where the engine could never start as asked, and
        PerfledgerError where it failed."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._stop)
        self._telemetry.start()
        try:
            await self._serve()
        finally:
            self._say_lost(await asyncio.to_thread(self._telemetry.stop))
        if self._replicas.misused and not self._replicas.loaded:
            raise UsageError(self._replicas.failure)
        failed = [replica.state == FAILED for replica in self._replicas]
        if all(failed) or (any(failed) and not self._replicas.loaded):
            raise PerfledgerError(self._ended(), fix="the lines above may say more")
        say("stopped")
        return 0

    def _say_lost(self, report: Mapping[str, object]) -> None:
        """Say at the end what /health can say no more."""
        if report["dropped"] or report["export_failed"]:
            lost = f"{report['dropped']} records and {report['export_failed']} spans"
            say(f"telemetry lost: {lost} ({destination(os.environ)})", sys.stderr)

    async def _serve(self) -> None:
        """Run the engines and the server until a signal, or until loading fails."""
        self._replicas = Replicas(self._options, self._spawn, self._replica_changed)
        self._replicas.start()
        try:
            # FastAPI takes most of a second to import: meanwhile the engines are loading.
            from perfledger.instrumented_runtime.admin import Admin
            from perfledger.instrumented_runtime.api import build_app

            app = build_app(self._service())
            app = Admin(app, self._admin_token, self._replicas, self._options)
            self._server = build_server(app)
            await self._server.serve(sockets=[self._listener])
        finally:
            await self._replicas.stop()

    def _spawn(self, place: RankPlace) -> tuple[BaseProcess, Connection]:
        ring_name = self._telemetry.ring_name(place.replica, place.rank)
        return spawn_engine(self._engine_options, self._checkpoint, ring_name, place)

    def _service(self) -> "Service":
        from perfledger.instrumented_runtime.completing import Service

        name = model_name(self._options.model)
        return Service(
            model=name,
            aliases=frozenset({"", name, self._options.model}),
            created_s=int(time.time()),
            options=self._options,
            tokenizer=self._tokenizer,
            replicas=self._replicas,
            send_record=self._telemetry.send,
            telemetry_report=self._telemetry.report,
            api_key=self._api_key,
        )

    def _replica_changed(self, replica: Replica) -> None:
        ready = replica.ready
        if replica.state == FAILED:
            self._say_failed(replica)
            return
        if ready is not None and self._announced.get(replica.number) != replica.starts:
            self._announced[replica.number] = replica.starts
            for record in rank_records(ready, replica.number, self._options.layout):
                self._telemetry.send(record)
            if self._introduced:
                say(f"replica {replica.number} is ready")
            elif self._replicas.loaded:
                self._introduced = True
                for line in introduction(self._options, ready, url_of(self._listener)):
                    say(line)
        elif replica.link.in_flight and replica.unhealthy:
            silent_s = self._options.health_timeout_s
            say(f"replica {replica.number} has not answered for {silent_s:g} s", sys.stderr)
        elif replica.state == OK:
            say(f"replica {replica.number} answers again")

    def _say_failed(self, replica: Replica) -> None:
        """Say why a replica failed and what follows; one that cannot load ends the service."""
        if not self._replicas.loaded:
            self._server.should_exit = True
            return
        what = "no request can be served" if len(self._replicas) == 1 else "it is started again"
        if replica.refused:
            what = "it gets no requests"
        say(f"perfledger: {replica.link.failure}: {what}", sys.stderr)

    def _ended(self) -> str:
        """Return why there is no engine any more."""
        code = next(replica.exit_code for replica in self._replicas if replica.state == FAILED)
        if self._options.layout.world > 1:
            return self._replicas.failure  # it names the rank and its exit code
        return f"{self._replicas.failure} (exit code {code})"

    def _stop(self) -> None:
        """A first signal lets requests finish for a while, a second one aborts them."""
        if self._stopping:
            self._replicas.abort_all("shutdown", "the server is stopping")
            self._server.force_exit = True
            return
        self._stopping = True
        say("stopping")
        self._replicas.refuse_new()
        self._server.should_exit = True
        loop = asyncio.get_running_loop()
        loop.call_later(FINISH_S, self._replicas.abort_all, "shutdown", "the server is stopping")


def model_name(model: str) -> str:
    """Return the name that clients ask for: the model's, or its folder's last part."""
    return Path(model).resolve().name if Path(model).is_dir() else model


def rank_records(ready: Ready, replica: str, layout: Layout) -> list[EngineRecord]:
    """Return what every step of each rank of a replica carries in its span."""
    records = []
    for rank in range(layout.world):
        attributes: dict[str, AttributeValue] = {
            "perfledger.device": ready.device,
            "perfledger.dtype": ready.dtype,
            "perfledger.kernel_path": ready.kernel_path,
            "perfledger.replica": replica,
            "perfledger.rank": rank,
        }
        if layout.world > 1:
            attributes["perfledger.layout"] = str(layout)
        if ready.shapes:
            attributes["perfledger.model.shape"] = ready.shapes[rank]
        ledger = {metric.name: ready.capacity.get(_ledger_name(metric)) for metric in CAPACITY}
        attributes |= {name: size for name, size in ledger.items() if size is not None}
        records.append(EngineRecord(attributes, replica, rank))
    return records


def _ledger_name(metric: Metric) -> str:
    return metric.name.rpartition(".")[2] + "_bytes"


def shared_threads(options: RuntimeOptions) -> RuntimeOptions:
    """Return the options for each process: by default they share the cores among them."""
    processes = options.replicas * options.layout.world
    if options.threads or processes == 1:
        return options
    return replace(options, threads=max(1, len(os.sched_getaffinity(0)) // processes))


def introduction(options: RuntimeOptions, ready: Ready, url: str) -> list[str]:
    """Return the lines that say what runs, once the model is loaded."""
    telemetry = destination(os.environ) if options.telemetry else "off"
    run = f", run {options.run_id}" if options.run_id and not telemetry.startswith("off") else ""
    return [
        f"model      {model_name(options.model)}, {ready.parameters:,} parameters",
        f"engine     {ready.dtype} on {ready.device}, threads: {ready.threads}",
        *_layout_lines(options),
        f"attention  {ready.kernel_path}",
        f"KV cache   {ready.kv_blocks:,} blocks of {options.block_size} tokens,"
        f" {ready.max_model_len:,} tokens a request, {options.max_num_seqs} requests a batch",
        *capacity_lines(ready.capacity),
        f"telemetry  {telemetry}{run}",
        f"API        {url}/v1",
    ]


def _layout_lines(options: RuntimeOptions) -> list[str]:
    """Return what there is to say where the engine is more than one process."""
    lines, layout = [], options.layout
    if layout.world > 1:
        lines.append(f"ranks      {layout.world} an engine: {layout}")
    if options.replicas > 1:
        lines.append(f"replicas   {options.replicas}, routed by {options.route}")
    return lines


def say(line: str, out: TextIO | None = None) -> None:
    """Print for the person who started this, at once; if nobody reads it, go on."""
    with contextlib.suppress(OSError):
        print(line, file=out or sys.stdout, flush=True)
