"""/admin: what runs, and how to change it while it runs. Only from this host, only with the token.

Without a token, and for anyone from elsewhere, there is no such path.

    GET  /admin/version                   version of the router and of each replica
    GET  /admin/configuration             options as they are in force
    GET  /admin/replicas                  state and load of each; the rolling restart
    GET  /admin/replicas/N/kv             what is in the KV cache of one, and who holds it
    POST /admin/replicas/N/drain, resume  no new requests for it, until resumed
    POST /admin/restart                   one replica after another, without losing a request
"""

import hmac
import ipaddress
from collections.abc import Awaitable, Callable
from dataclasses import asdict

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route, Router
from starlette.types import ASGIApp, Receive, Scope, Send

from perfledger.instrumented_runtime.engine_link import OK
from perfledger.instrumented_runtime.options import RuntimeOptions
from perfledger.instrumented_runtime.routing.replica import DRAINING, UNHEALTHY, Replica
from perfledger.instrumented_runtime.routing.replicas import Replicas
from perfledger.instrumented_runtime.routing.rolling import RollingError, RollingRestart
from perfledger.instrumented_runtime.runtime_version import runtime_version

Handler = Callable[[Request], Awaitable[Response]]


class Admin:
    """An ASGI application that answers /admin and passes all else on."""

    def __init__(
        self, app: ASGIApp, token: str, replicas: Replicas, options: RuntimeOptions
    ) -> None:
        """An empty token turns it off."""
        self._app = app
        self._expected = f"Bearer {token}".encode() if token else b""
        self._router = Router(_routes(replicas, options))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer or pass on."""
        if scope["type"] != "http" or not _is_admin(scope["path"]) or not self._reachable(scope):
            await self._app(scope, receive, send)
            return
        given = dict(scope["headers"]).get(b"authorization", b"")
        if not hmac.compare_digest(given, self._expected):
            response = _error(401, "the admin token is needed: Authorization: Bearer TOKEN")
            response.headers["www-authenticate"] = "Bearer"
            await response(scope, receive, send)
            return
        await self._router(scope, receive, send)

    def _reachable(self, scope: Scope) -> bool:
        client = scope.get("client")
        return bool(self._expected and client and _is_loopback(client[0]))


def _routes(replicas: Replicas, options: RuntimeOptions) -> list[Route]:
    rolling = RollingRestart(replicas)

    async def version(_: Request) -> Response:
        ready = {one.number: one.ready.runtime_version for one in replicas if one.ready}
        return JSONResponse({"runtime_version": runtime_version(), "replicas": ready})

    async def configuration(_: Request) -> Response:
        return JSONResponse({**asdict(options), "layout": str(options.layout)})

    async def report(_: Request) -> Response:
        states = [replica.report() for replica in replicas]
        return JSONResponse({"replicas": states, "restart": rolling.report})

    async def kv(replica: Replica, _: Request) -> Response:
        if replica.state not in (OK, DRAINING, UNHEALTHY):
            return _error(503, f"replica {replica.number} is {replica.state}")
        try:
            found = await replica.kv_map()
        except TimeoutError:
            return _error(504, f"replica {replica.number} does not answer")
        requests = [one._asdict() for one in found.requests]
        return JSONResponse({**asdict(found), "requests": requests, "replica": replica.number})

    async def drain(replica: Replica, request: Request) -> Response:
        others = [one for one in replicas if one is not replica and one.state == OK]
        if not others and request.query_params.get("force") != "true":
            return _error(409, "no other replica takes requests now: all would be refused")
        replica.draining = True
        return JSONResponse(replica.report())

    async def resume(replica: Replica, _: Request) -> Response:
        replica.draining = False
        return JSONResponse(replica.report())

    async def restart(_: Request) -> Response:
        try:
            rolling.begin()
        except RollingError as error:
            return _error(409, str(error))
        return JSONResponse({"restart": "begun"}, 202)

    def of_one(handler: Callable[[Replica, Request], Awaitable[Response]]) -> Handler:
        async def handle(request: Request) -> Response:
            number = request.path_params["number"]
            if number not in replicas:
                return _error(404, f"there is no replica {number!r}")
            return await handler(replicas[number], request)

        return handle

    return [
        Route("/admin/version", version),
        Route("/admin/configuration", configuration),
        Route("/admin/replicas", report),
        Route("/admin/replicas/{number}/kv", of_one(kv)),
        Route("/admin/replicas/{number}/drain", of_one(drain), methods=["POST"]),
        Route("/admin/replicas/{number}/resume", of_one(resume), methods=["POST"]),
        Route("/admin/restart", restart, methods=["POST"]),
    ]


def _is_admin(path: str) -> bool:
    return path == "/admin" or path.startswith("/admin/")


def _is_loopback(host: str) -> bool:
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return False
    mapped = getattr(address, "ipv4_mapped", None)
    return (mapped or address).is_loopback


def _error(status: int, what: str) -> JSONResponse:
    return JSONResponse({"error": {"message": what}}, status)
