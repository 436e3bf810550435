"""`perfledger serve`: starts the runtime's processes, watches them, and ends them in order."""

import asyncio
import contextlib
import os
import signal
import socket
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from perfledger.instrumented_runtime.checkpoints.resolve import resolve
from perfledger.instrumented_runtime.child_processes import end, spawn_engine
from perfledger.instrumented_runtime.engine_link import FAILED, EngineLink
from perfledger.instrumented_runtime.exporter_link import ExporterLink, NoTelemetry, Telemetry
from perfledger.instrumented_runtime.http_server import (
    build_server,
    listen,
    raise_file_limit,
    url_of,
)
from perfledger.instrumented_runtime.messages import Ready
from perfledger.instrumented_runtime.options import RuntimeOptions
from perfledger.instrumented_runtime.otel_environment import destination
from perfledger.instrumented_runtime.scheduler import limits_of
from perfledger.instrumented_runtime.telemetry import AttributeValue, EngineRecord
from perfledger.instrumented_runtime.tokenizer import Tokenizer
from perfledger.schema.errors import PerfledgerError, UsageError

if TYPE_CHECKING:
    from perfledger.instrumented_runtime.api import Service

FINISH_S = 3.0  # for requests in flight after a signal, before they are aborted
ENGINE_STOP_S = 5.0


def serve(options: RuntimeOptions, api_key: str = "") -> int:
    """Serve until SIGINT or SIGTERM; return 0.

    Raises UsageError before any process is started where the options, the model or the address
    cannot be, and PerfledgerError where the engine could not load or has died.
    """
    limits_of(options, max_model_len=1, kv_blocks=1)
    raise_file_limit()
    with listen(options.host, options.port) as listener:
        say(f"loading {options.model}")
        checkpoint = resolve(options.model)
        runtime = Runtime(options, checkpoint, listener, api_key)
        return asyncio.run(runtime.run())


class Runtime:
    """The API process, with the engine and the exporter as its children."""

    def __init__(
        self, options: RuntimeOptions, checkpoint: Path, listener: socket.socket, api_key: str
    ) -> None:
        self._options = options
        self._checkpoint = checkpoint
        self._listener = listener
        self._api_key = api_key
        self._tokenizer = Tokenizer.load(checkpoint)
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
        if self._link.misused:
            raise UsageError(self._link.failure)
        if self._link.state == FAILED:
            ended = f"{self._link.failure} (exit code {self._engine.exitcode})"
            raise PerfledgerError(ended, fix="the lines above may say more")
        say("stopped")
        return 0

    def _say_lost(self, report: Mapping[str, object]) -> None:
        """Say at the end what /health can say no more."""
        if report["dropped"] or report["export_failed"]:
            lost = f"{report['dropped']} records and {report['export_failed']} spans"
            say(f"telemetry lost: {lost} ({destination(os.environ)})", sys.stderr)

    async def _serve(self) -> None:
        """Run the engine and the server until a signal, or until loading fails."""
        self._engine, connection = spawn_engine(
            self._options, self._checkpoint, self._telemetry.ring_name
        )
        # FastAPI takes most of a second to import: meanwhile the engine is loading.
        from perfledger.instrumented_runtime.api import build_app

        self._link = EngineLink(connection, self._engine_changed)
        try:
            self._link.start()
            self._server = build_server(build_app(self._service()))
            await self._server.serve(sockets=[self._listener])
        finally:
            if self._link.ready is None:
                self._engine.kill()  # it would not listen before it has loaded
            self._link.shut_down()
            await asyncio.to_thread(end, self._engine, ENGINE_STOP_S)

    def _service(self) -> "Service":
        from perfledger.instrumented_runtime.api import Service

        name = model_name(self._options.model)
        return Service(
            model=name,
            aliases=frozenset({"", name, self._options.model}),
            created_s=int(time.time()),
            options=self._options,
            tokenizer=self._tokenizer,
            link=self._link,
            send_record=self._telemetry.send,
            telemetry_report=self._telemetry.report,
            api_key=self._api_key,
        )

    def _engine_changed(self) -> None:
        ready = self._link.ready
        if self._link.state == FAILED:
            if ready is not None:
                say(f"perfledger: {self._link.failure}: no request can be served", sys.stderr)
            self._server.should_exit |= ready is None
        elif ready is not None:
            self._telemetry.send(EngineRecord(engine_attributes(ready)))
            for line in introduction(self._options, ready, url_of(self._listener)):
                say(line)

    def _stop(self) -> None:
        """A first signal lets requests finish for a while, a second one aborts them."""
        if self._stopping:
            self._link.abort_all("shutdown", "the server is stopping")
            self._server.force_exit = True
            return
        self._stopping = True
        say("stopping")
        self._link.refuse_new()
        self._server.should_exit = True
        loop = asyncio.get_running_loop()
        loop.call_later(FINISH_S, self._link.abort_all, "shutdown", "the server is stopping")


def model_name(model: str) -> str:
    """Return the name that clients ask for: the model's, or its folder's last part."""
    return Path(model).resolve().name if Path(model).is_dir() else model


def engine_attributes(ready: Ready) -> dict[str, AttributeValue]:
    """Return what every step of this engine carries in its span."""
    return {
        "perfledger.device": ready.device,
        "perfledger.dtype": ready.dtype,
        "perfledger.kernel_path": ready.kernel_path,
        "perfledger.replica": "0",
        "perfledger.rank": 0,
    }


def introduction(options: RuntimeOptions, ready: Ready, url: str) -> list[str]:
    """Return the lines that say what runs, once the model is loaded."""
    telemetry = destination(os.environ) if options.telemetry else "off"
    run = f", run {options.run_id}" if options.run_id and not telemetry.startswith("off") else ""
    return [
        f"model      {model_name(options.model)}, {ready.parameters:,} parameters",
        f"engine     {ready.dtype} on {ready.device}, threads: {ready.threads}",
        f"attention  {ready.kernel_path}",
        f"KV cache   {ready.kv_blocks:,} blocks of {options.block_size} tokens,"
        f" {ready.max_model_len:,} tokens a request, {options.max_num_seqs} requests a batch",
        f"telemetry  {telemetry}{run}",
        f"API        {url}/v1",
    ]


def say(line: str, out: TextIO | None = None) -> None:
    """Print for the person who started this, at once; if nobody reads it, go on."""
    with contextlib.suppress(OSError):
        print(line, file=out or sys.stdout, flush=True)
