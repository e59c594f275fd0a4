"""Access control of the dashboard: a request needs the token and the server's own address; one that changes a run must
also come from the dashboard's page."""

from __future__ import annotations

import hmac
from urllib.parse import parse_qs

from starlette.datastructures import Headers
from starlette.responses import JSONResponse, PlainTextResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

HEADERS = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "x-frame-options": "DENY",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-store",
}  # fmt: skip
"""Headers of every response."""


class Guard:
    """Middleware that refuses requests without access, and passes on the others.

    Everything under /api/ needs the token: in the header `Authorization: Bearer`, or, for reading, in the query. The
    header Host must name this server, against DNS rebinding. Requests that change a run are accepted only with the
    token in the header, which no form or link of another page can set, and not from another origin.
    """

    def __init__(self, app: ASGIApp, token: str, host: str) -> None:
        """host: the address at which the server listens."""
        self._app, self._token = app, token.encode()
        self._names = {"127.0.0.1", "localhost", "[::1]", f"[{host}]" if ":" in host else host}
        self._any_name = host in ("0.0.0.0", "::")  # then the names by which clients reach this machine are unknown

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def sending(message: Message) -> None:
            if message["type"] == "http.response.start":
                given = {name.lower() for name, _ in message["headers"]}
                message["headers"] = [*message["headers"], *((name.encode(), value.encode())
                                      for name, value in HEADERS.items() if name.encode() not in given)]  # fmt: skip
            await send(message)

        answer = self._refusal(scope)
        await (answer or self._app)(scope, receive, sending)

    def _refusal(self, scope: Scope) -> JSONResponse | PlainTextResponse | None:
        headers = Headers(scope=scope)
        if not self._any_name and _without_port(headers.get("host", "")) not in self._names:
            return PlainTextResponse("this server has another name", 421)
        if not f"{scope['path']}/".startswith("/api/"):
            return None if scope["method"] in ("GET", "HEAD") else PlainTextResponse("only to read", 405)
        reads = scope["method"] in ("GET", "HEAD")
        given = headers.get("authorization", "")
        token = given[7:] if given[:7].lower() == "bearer " else ""
        if reads and not token:
            token = parse_qs(scope["query_string"].decode("latin-1")).get("token", [""])[0]
        if not hmac.compare_digest(token.encode("utf-8", "replace"), self._token):
            return JSONResponse({"error": "the token is missing or wrong"}, 401, {"www-authenticate": "Bearer"})
        origin = headers.get("origin")
        if not reads and origin is not None and origin != f"http://{headers.get('host', '')}":
            return JSONResponse({"error": "from another page"}, 403)
        return None


def _without_port(host: str) -> str:
    name, colon, port = host.rpartition(":")
    return name if colon and port.isdecimal() else host
