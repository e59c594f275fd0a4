"""The answers of the dashboard's server, and which requests it refuses."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("starlette")
pytest.importorskip("httpx2")

from starlette.testclient import TestClient

from decentnode.dashboard import server
from decentnode.dashboard.catalog import Catalog
from decentnode.dashboard.server import application
from decentnode.errors import UsageError
from tests.dashboard.folder import append_records, round_record, write_run_folder

TOKEN = "0123456789abcdef"
OWN = {"authorization": f"Bearer {TOKEN}"}
BASE = "http://127.0.0.1:8765"


def client(root: Path, named: list[Path] | None = None, **options: Any) -> TestClient:
    return TestClient(application(Catalog(named or [], [root]), TOKEN, **options), base_url=BASE)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return write_run_folder(tmp_path)


@pytest.mark.parametrize("path", ["/api/runs", "/api/stream?runs=ring/2026-01-01", "/api/frames", "/api/config",
                                  "/api/nothing", "/api"])  # fmt: skip
def test_the_api_refuses_requests_without_the_token(run: Path, path: str) -> None:
    api = client(run.parents[1])
    assert api.get(path).status_code == 401
    for wrong in ("", "x", TOKEN[:-1], TOKEN + "0", "\xff"):
        assert api.get(path, headers={"authorization": f"Bearer {wrong}".encode("latin-1")}).status_code == 401
    assert api.get(path, params={"token": "wrong"}).status_code == 401


def test_runs_are_listed(run: Path) -> None:
    write_run_folder(run.parents[1], name="other")
    api = client(run.parents[1], [run])
    found = api.get("/api/runs", headers=OWN).json()["runs"]
    assert [(each["id"], each["state"], each["named"]) for each in found] == [
        ("ring/2026-01-01", "finished", True), ("other/2026-01-01", "finished", False)]  # fmt: skip
    assert api.get(f"/api/runs?token={TOKEN}").json()["runs"] == found


@pytest.mark.parametrize(
    "id", ["../ring/2026-01-01", "/etc", "ring", "", "ring/2026-01-01/../2026-01-01", "ring/latest"])  # fmt: skip
def test_only_ids_from_the_list_of_runs_are_found(run: Path, id: str) -> None:
    (run.parent / "latest").symlink_to(run.name)
    api = client(run.parents[1])
    for path in ("/api/config", "/api/frames"):
        assert api.get(path, params={"run": id}, headers=OWN).status_code == 404
    assert api.get("/api/stream", params={"runs": id}, headers=OWN).status_code == 404
    assert api.post("/api/control", json={"run": id, "action": "stop"}, headers=OWN).status_code == 404


def test_the_page_its_script_and_style_need_no_other_server(run: Path) -> None:
    api = client(run.parents[1])
    page = api.get("/")
    assert page.status_code == 200
    assert "default-src 'none'" in page.headers["content-security-policy"]
    assert page.headers["referrer-policy"] == "no-referrer"
    script = api.get("/main.js")
    assert script.headers["content-type"].startswith("text/javascript")
    for text in (page.text, script.text, api.get("/style.css").text):
        assert "http://" not in text and "https://" not in text
    assert api.get("/../server.py").status_code == 404
    assert api.get("/server.py").status_code == 404


def test_the_style_of_a_run_that_is_still_read_applies_only_to_panes() -> None:
    """The state of a run is a CSS class of the chip with its name, and `reading` is also the class of a progress bar. A
    rule for `.reading` alone, without `.pane >`, once drew the chip's state over the name."""
    text = (Path(server.__file__).parent / "static" / "style.css").read_text()
    assert re.search(r"\.pane > \.reading\b", text) and not re.search(r"(^|[,}])\s*\.reading\b", text, re.MULTILINE)


def test_requests_for_an_unknown_host_name_are_refused(run: Path) -> None:
    api = client(run.parents[1])
    assert api.get("/api/runs", headers={**OWN, "host": "evil.example:8765"}).status_code == 421
    assert api.get("/", headers={"host": "evil.example"}).status_code == 421
    assert api.get("/api/runs", headers={**OWN, "host": "localhost:8765"}).status_code == 200
    open_to_all = client(run.parents[1], host="0.0.0.0")
    assert open_to_all.get("/api/runs", headers={**OWN, "host": "gpu7:8765"}).status_code == 200


def test_the_config_is_served_as_json_text(run: Path) -> None:
    (run / "config.yaml").write_text("name: <script>alert(1)</script>\n")
    found = client(run.parents[1]).get("/api/config", params={"run": "ring/2026-01-01"}, headers=OWN)
    assert found.headers["content-type"] == "application/json"
    assert found.json()["text"].startswith("name: <script>")


def test_frames_are_served_as_float32(run: Path) -> None:
    api = client(run.parents[1])
    found = api.get("/api/frames", params={"run": "ring/2026-01-01", "first": 5, "count": 9}, headers=OWN)
    values = np.frombuffer(found.content, "<f4")
    assert [*values[:4]] == [2, 4, 8, 5]
    assert api.get("/api/frames", params={"run": "ring/2026-01-01", "first": "x"}, headers=OWN).status_code == 400


def read_stream_lines(app: Any, path: str, count: int, after_line: Any = lambda at: None) -> list[dict[str, Any]]:
    """Returns the first `count` lines of a stream, read as an ASGI server does, one at a time; then disconnects.

    after_line: called with the number of lines read so far after each of them.
    """
    import anyio

    found: list[dict[str, Any]] = []

    async def take() -> None:
        over = anyio.Event()
        scope = {"type": "http", "method": "GET", "path": path.partition("?")[0], "http_version": "1.1",
                 "query_string": path.partition("?")[2].encode(), "scheme": "http", "asgi": {"version": "3.0"},
                 "headers": [(b"host", b"127.0.0.1:8765"), (b"authorization", f"Bearer {TOKEN}".encode())],
                 "raw_path": b"", "root_path": "", "client": ("127.0.0.1", 1),
                 "server": ("127.0.0.1", 8765)}  # fmt: skip
        request_sent = False

        async def receive() -> dict[str, Any]:
            nonlocal request_sent
            if not request_sent:
                request_sent = True
                return {"type": "http.request", "body": b"", "more_body": False}
            await over.wait()
            return {"type": "http.disconnect"}

        async def send(message: Any) -> None:
            for text in message.get("body", b"").split(b"\n"):
                if text and len(found) < count:
                    found.append(json.loads(text))
                    after_line(len(found))
            if len(found) >= count:
                over.set()

        with anyio.fail_after(20):
            await app(scope, receive, send)

    anyio.run(take)
    return found


def test_a_stream_sends_the_whole_run_and_then_changes(run: Path) -> None:
    (run / "summary.json").unlink()
    app = application(Catalog([run], []), TOKEN)

    def append_a_round(at: int) -> None:
        if at == 1:
            append_records(run / "nodes" / "001" / "metrics.jsonl", round_record(1, 6, 4))

    first, second = read_stream_lines(app, "/api/stream?runs=ring/2026-01-01", 2, append_a_round)
    assert first["anew"] and first["about"]["name"] == "ring" and first["about"]["seed"] == 3
    assert first["about"]["rounds"] == 6 and len(first["nodes"]) == 4
    assert [each["machine"] for each in first["machines"]] == [0, 1]
    assert not second["anew"]
    assert [each[:2] for each in second["nodes"]] == [[1, 7]]
    assert len(json.dumps(second)) < len(json.dumps(first)) / 2


def test_a_slow_reader_gets_all_changes_in_one_line(run: Path) -> None:
    """All rounds that were written while the reader did not read come in the next line: no queue of lines grows."""
    (run / "summary.json").unlink()
    app = application(Catalog([run], []), TOKEN)

    def append_many_rounds(at: int) -> None:
        if at == 1:
            for uid in range(4):
                path = run / "nodes" / f"{uid:03d}" / "metrics.jsonl"
                append_records(path, *(round_record(uid, round, 4) for round in range(6, 40)))

    _, second = read_stream_lines(app, "/api/stream?runs=ring/2026-01-01", 2, append_many_rounds)
    assert [point[0] for point in second["points"]] == [*range(7, 41)]
    assert [each[1] for each in second["nodes"]] == [40] * 4


def test_a_stream_starts_over_when_a_file_is_rewritten(run: Path) -> None:
    (run / "summary.json").unlink()
    app = application(Catalog([run], []), TOKEN)

    def truncate_metrics(at: int) -> None:
        if at == 1:
            (run / "nodes" / "000" / "metrics.jsonl").write_text("")

    _, second = read_stream_lines(app, "/api/stream?runs=ring/2026-01-01", 2, truncate_metrics)
    assert second["anew"]


# -- control


def client_that_records_actions(run: Path, actions: list[tuple[Path, str]]) -> TestClient:
    """Returns a client of a server whose control handler appends (folder, action) to `actions`."""
    def ask(path: Path, action: str) -> str:
        actions.append((path, action))
        if action not in ("pause", "resume", "stop", "evaluate"):
            raise UsageError(f"no such action: {action}")
        return f"asked to {action}"

    return client(run.parents[1], ask=ask)


def test_a_run_is_controlled_with_the_token_in_the_header(run: Path) -> None:
    actions: list[tuple[Path, str]] = []
    api = client_that_records_actions(run, actions)
    answer = api.post("/api/control", json={"run": "ring/2026-01-01", "action": "pause"}, headers=OWN)
    assert answer.json() == {"said": "asked to pause"}
    assert actions == [(run.resolve(), "pause")]
    wrong = api.post("/api/control", json={"run": "ring/2026-01-01", "action": "explode"}, headers=OWN)
    assert (wrong.status_code, wrong.json()) == (409, {"error": "no such action: explode"})


def test_requests_of_other_pages_cannot_control_a_run(run: Path) -> None:
    actions: list[tuple[Path, str]] = []
    api = client_that_records_actions(run, actions)
    body = {"run": "ring/2026-01-01", "action": "stop"}
    assert api.post("/api/control", json=body).status_code == 401
    form = api.post("/api/control", json=body, params={"token": TOKEN})
    assert form.status_code == 401, "an HTML form of another page can send this"
    assert api.post("/api/control", json=body, headers={"cookie": f"token={TOKEN}"}).status_code == 401
    assert api.post("/api/control", json=body, headers={**OWN, "origin": "http://evil.example"}).status_code == 403
    assert api.post("/api/control", json=body, headers={**OWN, "origin": "null"}).status_code == 403
    assert api.get("/api/control", headers=OWN).status_code == 405
    assert api.post("/", headers=OWN).status_code == 405
    assert actions == []
    assert api.post("/api/control", json=body, headers={**OWN, "origin": BASE}).status_code == 200


@pytest.mark.parametrize("body", [b"", b"[]", b"{}", b'{"run": 1, "action": "stop"}', b'{"run": [], "action": "stop"}',
                                  b'{"run": "ring/2026-01-01", "action": 5}', b"x" * 10_000, b"\xff\xfe",
                                  b"[" * 4000])  # fmt: skip
def test_malformed_control_requests_are_refused(run: Path, body: bytes) -> None:
    actions: list[tuple[Path, str]] = []
    api = client_that_records_actions(run, actions)
    assert api.post("/api/control", content=body, headers=OWN).status_code in (400, 404, 413)
    assert actions == []


def test_control_without_a_handler_is_answered_with_conflict(run: Path) -> None:
    answer = client(run.parents[1]).post("/api/control", json={"run": "ring/2026-01-01", "action": "stop"}, headers=OWN)
    assert answer.status_code == 409
