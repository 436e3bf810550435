"""/admin over a real server: who reaches it, what it says, and what it refuses."""

import asyncio
import json
import socket
import urllib.error
import urllib.request
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import pytest
from played_engine import HOLD, Spawner
from starlette.responses import PlainTextResponse

from perfledger.instrumented_runtime.admin import Admin
from perfledger.instrumented_runtime.engine_link import LOADING
from perfledger.instrumented_runtime.http_server import build_server
from perfledger.instrumented_runtime.messages import SamplingParams, Submit
from perfledger.instrumented_runtime.options import RuntimeOptions
from perfledger.instrumented_runtime.routing.replicas import Replicas
from perfledger.instrumented_runtime.runtime_version import runtime_version

pytestmark = pytest.mark.anyio
OPTIONS = RuntimeOptions(model="reference-small", replicas=2, route="round-robin")
BEHIND = PlainTextResponse("not for admin", 404)


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@dataclass(frozen=True)
class Reply:
    status_code: int
    text: str
    challenge: str | None

    def json(self) -> Any:
        return json.loads(self.text)


@dataclass
class Client:
    """Asks in a thread: the server under test has the event loop."""

    url: str
    authorization: str = ""

    async def get(self, path: str) -> Reply:
        return await asyncio.to_thread(self._ask, "GET", path)

    async def post(self, path: str) -> Reply:
        return await asyncio.to_thread(self._ask, "POST", path)

    def _ask(self, method: str, path: str) -> Reply:
        headers = {"Authorization": self.authorization} if self.authorization else {}
        request = urllib.request.Request(self.url + path, None, headers, method=method)
        try:
            with urllib.request.urlopen(request, timeout=30) as answer:
                return Reply(answer.status, answer.read().decode(), None)
        except urllib.error.HTTPError as error:
            return Reply(error.code, error.read().decode(), error.headers["www-authenticate"])


async def with_server(token: str, use: Callable[[Replicas, Client], Awaitable[None]]) -> None:
    """Run `use(replicas, client)` against a server with played engines behind it."""
    replicas = Replicas(OPTIONS, Spawner(), lambda _: None)
    replicas.start()
    listener = socket.create_server(("127.0.0.1", 0))
    server = build_server(Admin(BEHIND, token, replicas, OPTIONS))
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    try:
        async with asyncio.timeout(60):
            while replicas.state == LOADING or not server.started:
                await asyncio.sleep(0.01)
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        await use(replicas, Client(url))
    finally:
        server.should_exit = True
        await serving
        await replicas.stop()


async def test_what_it_says_and_does_with_the_token() -> None:
    async def use(replicas: Replicas, client: Client) -> None:
        client.authorization = "Bearer s3cret"
        version = runtime_version()
        assert (await client.get("/admin/version")).json() == {
            "runtime_version": version,
            "replicas": {"0": version, "1": version},
        }
        configuration = (await client.get("/admin/configuration")).json()
        assert (configuration["replicas"], configuration["layout"]) == (2, "single")
        assert "s3cret" not in json.dumps(configuration)

        choice = replicas.choose([5] * 20, "")
        submit = Submit(1, [5] * 20, SamplingParams(HOLD), 1, 1, 0)
        replicas.submit(submit, choice, lambda _: None)
        assert (await client.get("/admin/replicas/0/kv")).json() == {
            "replica": "0",
            "block_size": 16,
            "blocks_total": 64,
            "blocks_used": 1,
            "blocks_cached": 2,
            "blocks_free": 61,
            "requests": [{"request": 1, "blocks": 1, "tokens": 16}],
        }
        report = (await client.get("/admin/replicas")).json()
        assert report["restart"] == "never asked for"
        assert report["replicas"][0] == {
            "replica": "0",
            "state": "ok",
            "starts": 1,
            "in_flight": 1,
            "running": 0,
            "queue_tokens": 20,
            "estimated_queue_ns": None,
            "kv_blocks_used": 0,
            "kv_blocks": 64,
            "weights_hash": "weights",
            "runtime_version": version,
            "layout": "single",
        }

        assert (await client.get("/admin/replicas/7/kv")).status_code == 404
        drained = await client.post("/admin/replicas/1/drain")
        assert (drained.status_code, drained.json()["state"]) == (200, "draining")
        refused = await client.post("/admin/restart")
        assert (refused.status_code, refused.json()) == (
            409,
            {"error": {"message": "requests would be lost: no two replicas take requests now"}},
        )
        last = await client.post("/admin/replicas/0/drain")
        assert (last.status_code, last.json()) == (
            409,
            {"error": {"message": "no other replica takes requests now: all would be refused"}},
        )
        forced = await client.post("/admin/replicas/0/drain?force=true")
        assert (forced.status_code, forced.json()["state"]) == (200, "draining")
        assert (await client.post("/admin/replicas/0/resume")).json()["state"] == "ok"
        assert (await client.post("/admin/replicas/1/resume")).json()["state"] == "ok"
        assert (await client.get("/admin/replicas/1/drain")).status_code == 405
        assert (await client.get("/admin/nothing")).status_code == 404

    await with_server("s3cret", use)


async def test_without_the_token_there_is_nothing_to_see() -> None:
    async def use(replicas: Replicas, client: Client) -> None:
        for client.authorization in ("", "Bearer S3cret", "Bearer", "s3cret", "Basic s3cret"):
            answer = await client.post("/admin/replicas/0/drain")
            assert (answer.status_code, answer.challenge) == (401, "Bearer")
        assert [replica.state for replica in replicas] == ["ok", "ok"]
        assert (await client.get("/administration")).text == "not for admin"

    await with_server("s3cret", use)


@pytest.mark.parametrize(
    ("token", "client"),
    [
        ("", ("127.0.0.1", 5)),
        ("s3cret", ("10.0.0.7", 5)),
        ("s3cret", ("::ffff:10.0.0.7", 5)),
        ("s3cret", ("unix-socket", 0)),
        ("s3cret", None),
    ],
)
async def test_no_token_or_another_host_is_no_such_path(
    token: str, client: tuple[str, int] | None
) -> None:
    replicas = Replicas(OPTIONS, Spawner(), lambda _: None)  # never started: never asked
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    headers = [(b"authorization", f"Bearer {token or 's3cret'}".encode())]
    scope = {"type": "http", "path": "/admin/version", "method": "GET", "headers": headers}
    await Admin(BEHIND, token, replicas, OPTIONS)(scope | {"client": client}, None, send)  # type: ignore[arg-type]
    assert (sent[0]["status"], sent[1]["body"]) == (404, b"not for admin")
