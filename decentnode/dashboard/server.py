"""The web application of the dashboard: serves the page, and its data as JSON under /api/."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

import anyio
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from decentnode.dashboard.access import Guard
from decentnode.dashboard.catalog import Catalog
from decentnode.errors import DecentnodeError

if TYPE_CHECKING:
    # imports libraries that are needed only once a page is open
    from decentnode.dashboard.run_view import RunView, Since

TICK_SECONDS = 0.2
"""Time between two reads of the files of watched runs. Files of runs that no page shows are not read."""
MAX_SHOWN = 8
"""How many runs are kept in memory, and may be shown by one page."""
NOTHING_SENT: Since = (0, 0, 0, "")
"""State of a new client, which has received nothing yet."""
MAX_STREAMS = 32
MAX_FRAMES = 64
"""The most frames in one response."""
MAX_BODY_BYTES = 4096
HEARTBEAT_SECONDS = 10.0
"""Longest silence of a stream; a write is needed to notice that the client is gone."""

TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}

Ask = Callable[[Path, str], str]
"""ask(run, action): makes the run pause, resume, stop or evaluate, and returns the result as a sentence. Blocking for
some seconds at most; raises DecentnodeError."""


def refuse(run: Path, action: str) -> str:  # noqa: ARG001
    """Refuses every order; the default for a dashboard that cannot control runs."""
    raise DecentnodeError("this dashboard only shows runs")


def application(catalog: Catalog, token: str, host: str = "127.0.0.1", ask: Ask = refuse) -> Starlette:
    """Returns the application. host: the address at which it is served."""
    pages = _Handlers(catalog, ask)
    routes = [
        Route("/api/runs", pages.runs),
        Route("/api/stream", pages.stream),
        Route("/api/frames", pages.frames),
        Route("/api/config", pages.config),
        Route("/api/control", pages.control, methods=["POST"]),
        Route("/", _static("index.html")),
        *(Route(f"/{each.name}", _static(each.name)) for each in resources.files(__package__).joinpath("static")
          .iterdir() if Path(each.name).suffix in TYPES),
        Route("/favicon.ico", _static("icon.svg")),
    ]  # fmt: skip
    return Starlette(routes=routes, middleware=[Middleware(Guard, token=token, host=host)])


def _static(name: str) -> Callable[[Request], Awaitable[Response]]:
    data = resources.files(__package__).joinpath("static", name).read_bytes()

    async def answer(request: Request) -> Response:  # noqa: ARG001
        return Response(data, media_type=TYPES[Path(name).suffix])

    return answer


class _Handlers:
    """The request handlers. They run in one event loop; files are read in threads, one thread at a time."""

    def __init__(self, catalog: Catalog, ask: Ask) -> None:
        self._catalog, self._ask = catalog, ask
        self._shown: dict[str, RunView] = {}
        self._streams = 0
        self._reading = asyncio.Lock()

    async def runs(self, request: Request) -> Response:  # noqa: ARG002
        """Responds with all runs: id, name, state, time, and whether the user named the run."""
        async with self._reading:
            listed = await run_in_threadpool(self._listed)
        return JSONResponse({"runs": listed})

    def _listed(self) -> list[dict[str, Any]]:
        from decentnode.dashboard.live import state_of_run

        named = {*self._catalog.named}
        return [{"id": run.id, "name": run.name, "time": run.changed, "named": run.path in named,
                 "state": state_of_run(run.path)["state"]} for run in self._catalog.runs()]  # fmt: skip

    async def _get(self, id: str) -> RunView | None:
        """Returns a run for display; None for an unknown id. Runs without watchers beyond MAX_SHOWN are dropped from
        memory, the least recently used first."""
        if id in self._shown:
            self._shown[id] = self._shown.pop(id)
            return self._shown[id]
        path = await run_in_threadpool(self._catalog.get, id)
        if path is None:
            return None
        shown = self._shown[id] = await run_in_threadpool(_open, id, path)
        for other in [each for each, kept in self._shown.items() if not kept.watchers][: len(self._shown) - MAX_SHOWN]:
            if other != id:
                del self._shown[other]
        return shown

    async def frames(self, request: Request) -> Response:
        """Responds with frames of one run as `Frames.packed` returns them: ?run=ID&first=ROUNDS&count=N."""
        try:
            first = int(request.query_params.get("first", "0"))
            count = max(1, min(MAX_FRAMES, int(request.query_params.get("count", "16"))))
        except ValueError:
            return JSONResponse({"error": "first and count must be numbers"}, 400)
        async with self._reading:
            shown = await self._get(request.query_params.get("run", ""))
            if shown is None:
                return _unknown_run()
            data = await run_in_threadpool(shown.packed, first, count)
        return Response(data, media_type="application/octet-stream")

    async def config(self, request: Request) -> Response:
        """Responds with the experiment's config as the user wrote it: ?run=ID."""
        async with self._reading:
            shown = await self._get(request.query_params.get("run", ""))
            if shown is None:
                return _unknown_run()
            return JSONResponse({"text": await run_in_threadpool(shown.config)})

    async def control(self, request: Request) -> Response:
        """Passes an order to a run: {"run": ID, "action": pause | resume | stop | evaluate}."""
        body = b""
        async for piece in request.stream():
            body += piece
            if len(body) > MAX_BODY_BYTES:
                return JSONResponse({"error": "too long"}, 413)
        try:
            asked = json.loads(body)
            id, action = asked["run"], asked["action"]
        except (ValueError, TypeError, KeyError, RecursionError):
            return JSONResponse({"error": "run and action must be given"}, 400)
        path = await run_in_threadpool(self._catalog.get, id) if isinstance(id, str) else None
        if path is None:
            return _unknown_run()
        if not isinstance(action, str):
            return JSONResponse({"error": "action must be a word"}, 400)
        try:
            return JSONResponse({"said": await run_in_threadpool(self._ask, path, action)})
        except DecentnodeError as error:
            return JSONResponse({"error": str(error)[:400]}, 409)

    async def stream(self, request: Request) -> Response:
        """Streams lines of JSON until the client disconnects, each with the changes of one run since its line before:
        ?runs=ID&runs=ID. A slow client gets fewer lines with more changes in each, so that nothing queues up."""
        ids = list(dict.fromkeys(request.query_params.getlist("runs")))[:MAX_SHOWN]
        async with self._reading:
            shown = [each for id in ids if (each := await self._get(id)) is not None]
        if not shown:
            return _unknown_run()
        if self._streams >= MAX_STREAMS:
            return JSONResponse({"error": "too many pages are open"}, 503)
        return StreamingResponse(self._lines(shown), media_type="application/x-ndjson")

    async def _lines(self, shown: list[RunView]) -> AsyncIterator[bytes]:
        loop = asyncio.get_running_loop()
        since = dict.fromkeys((each.id for each in shown), NOTHING_SENT)
        last_write = loop.time()
        self._streams += 1
        for each in shown:
            each.watchers += 1
        try:
            while True:
                began, more = loop.time(), False
                for each in shown:
                    async with self._reading:
                        line, since[each.id], left = await run_in_threadpool(each.next_line, since[each.id])
                    more = more or left
                    if line is not None:
                        yield line
                        last_write = loop.time()
                if loop.time() - last_write > HEARTBEAT_SECONDS:
                    yield b"\n"
                    last_write = loop.time()
                pause = 0.0 if more else TICK_SECONDS - (loop.time() - began)
                await anyio.sleep(max(0.01, pause))
        finally:
            self._streams -= 1
            for each in shown:
                each.watchers -= 1


def _open(id: str, path: Path) -> RunView:
    from decentnode.dashboard.run_view import RunView

    return RunView(id, path)


def _unknown_run() -> JSONResponse:
    return JSONResponse({"error": "no such run"}, 404)
