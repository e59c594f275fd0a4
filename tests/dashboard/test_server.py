"""What the server of the dashboard answers, and to whom."""

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
from tests.dashboard.folder import line, round_record, run_folder

TOKEN = "0123456789abcdef"
OWN = {"authorization": f"Bearer {TOKEN}"}
BASE = "http://127.0.0.1:8765"


def client(root: Path, named: list[Path] | None = None, **options: Any) -> TestClient:
    return TestClient(application(Catalog(named or [], [root]), TOKEN, **options), base_url=BASE)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return run_folder(tmp_path)


@pytest.mark.parametrize("path", ["/api/runs", "/api/stream?runs=ring/2026-01-01", "/api/frames", "/api/config",
                                  "/api/nothing", "/api"])  # fmt: skip
def test_nothing_is_told_without_the_token(run: Path, path: str) -> None:
    asking = client(run.parents[1])
    assert asking.get(path).status_code == 401
    for wrong in ("", "x", TOKEN[:-1], TOKEN + "0", "\xff"):
        assert asking.get(path, headers={"authorization": f"Bearer {wrong}".encode("latin-1")}).status_code == 401
    assert asking.get(path, params={"token": "wrong"}).status_code == 401


def test_runs_are_listed(run: Path) -> None:
    run_folder(run.parents[1], name="other")
    asking = client(run.parents[1], [run])
    found = asking.get("/api/runs", headers=OWN).json()["runs"]
    assert [(each["id"], each["state"], each["named"]) for each in found] == [
        ("ring/2026-01-01", "finished", True), ("other/2026-01-01", "finished", False)]  # fmt: skip
    assert asking.get(f"/api/runs?token={TOKEN}").json()["runs"] == found


@pytest.mark.parametrize(
    "id", ["../ring/2026-01-01", "/etc", "ring", "", "ring/2026-01-01/../2026-01-01", "ring/latest"])  # fmt: skip
def test_only_names_from_the_list_are_runs(run: Path, id: str) -> None:
    (run.parent / "latest").symlink_to(run.name)
    asking = client(run.parents[1])
    for path in ("/api/config", "/api/frames"):
        assert asking.get(path, params={"run": id}, headers=OWN).status_code == 404
    assert asking.get("/api/stream", params={"runs": id}, headers=OWN).status_code == 404
    assert asking.post("/api/control", json={"run": id, "action": "stop"}, headers=OWN).status_code == 404


def test_the_page_and_what_it_needs_come_without_a_network(run: Path) -> None:
    asking = client(run.parents[1])
    page = asking.get("/")
    assert page.status_code == 200
    assert "default-src 'none'" in page.headers["content-security-policy"]
    assert page.headers["referrer-policy"] == "no-referrer"
    script = asking.get("/main.js")
    assert script.headers["content-type"].startswith("text/javascript")
    for text in (page.text, script.text, asking.get("/style.css").text):
        assert "http://" not in text and "https://" not in text
    assert asking.get("/../server.py").status_code == 404
    assert asking.get("/server.py").status_code == 404


def test_a_run_that_is_still_read_has_its_state_beside_its_name() -> None:
    """The state is a class of the chip: a rule for that word alone, which is the bar's too, laid it over the name."""
    text = (Path(server.__file__).parent / "static" / "style.css").read_text()
    assert re.search(r"\.pane > \.reading\b", text) and not re.search(r"(^|[,}])\s*\.reading\b", text, re.MULTILINE)


def test_a_page_under_a_strangers_name_is_told_nothing(run: Path) -> None:
    asking = client(run.parents[1])
    assert asking.get("/api/runs", headers={**OWN, "host": "evil.example:8765"}).status_code == 421
    assert asking.get("/", headers={"host": "evil.example"}).status_code == 421
    assert asking.get("/api/runs", headers={**OWN, "host": "localhost:8765"}).status_code == 200
    open_to_all = client(run.parents[1], host="0.0.0.0")
    assert open_to_all.get("/api/runs", headers={**OWN, "host": "gpu7:8765"}).status_code == 200


def test_the_config_is_text(run: Path) -> None:
    (run / "config.yaml").write_text("name: <script>alert(1)</script>\n")
    found = client(run.parents[1]).get("/api/config", params={"run": "ring/2026-01-01"}, headers=OWN)
    assert found.headers["content-type"] == "application/json"
    assert found.json()["text"].startswith("name: <script>")


def test_frames_come_as_numbers(run: Path) -> None:
    asking = client(run.parents[1])
    found = asking.get("/api/frames", params={"run": "ring/2026-01-01", "first": 5, "count": 9}, headers=OWN)
    values = np.frombuffer(found.content, "<f4")
    assert [*values[:4]] == [2, 4, 8, 5]
    assert asking.get("/api/frames", params={"run": "ring/2026-01-01", "first": "x"}, headers=OWN).status_code == 400


def lines(application_of: Any, path: str, wanted: int, between: Any = lambda at: None) -> list[dict[str, Any]]:
    """The first lines of a stream, as an ASGI server would take them: one at a time, and gone after the last."""
    import anyio

    found: list[dict[str, Any]] = []

    async def take() -> None:
        over = anyio.Event()
        scope = {"type": "http", "method": "GET", "path": path.partition("?")[0], "http_version": "1.1",
                 "query_string": path.partition("?")[2].encode(), "scheme": "http", "asgi": {"version": "3.0"},
                 "headers": [(b"host", b"127.0.0.1:8765"), (b"authorization", f"Bearer {TOKEN}".encode())],
                 "raw_path": b"", "root_path": "", "client": ("127.0.0.1", 1),
                 "server": ("127.0.0.1", 8765)}  # fmt: skip
        asked = False

        async def receive() -> dict[str, Any]:
            nonlocal asked
            if not asked:
                asked = True
                return {"type": "http.request", "body": b"", "more_body": False}
            await over.wait()
            return {"type": "http.disconnect"}

        async def send(message: Any) -> None:
            for text in message.get("body", b"").split(b"\n"):
                if text and len(found) < wanted:
                    found.append(json.loads(text))
                    between(len(found))
            if len(found) >= wanted:
                over.set()

        with anyio.fail_after(20):
            await application_of(scope, receive, send)

    anyio.run(take)
    return found


def test_a_stream_tells_all_and_then_what_changes(run: Path) -> None:
    (run / "summary.json").unlink()
    told = application(Catalog([run], []), TOKEN)

    def go_on(at: int) -> None:
        if at == 1:
            line(run / "nodes" / "001" / "metrics.jsonl", round_record(1, 6, 4))

    first, second = lines(told, "/api/stream?runs=ring/2026-01-01", 2, go_on)
    assert first["anew"] and first["about"]["name"] == "ring" and first["about"]["seed"] == 3
    assert first["about"]["rounds"] == 6 and len(first["nodes"]) == 4
    assert [each["machine"] for each in first["machines"]] == [0, 1]
    assert not second["anew"]
    assert [each[:2] for each in second["nodes"]] == [[1, 7]]
    assert len(json.dumps(second)) < len(json.dumps(first)) / 2


def test_a_slow_reader_gets_one_line_with_everything(run: Path) -> None:
    """Whatever was written while it did not read comes in the next line: nothing queues up."""
    (run / "summary.json").unlink()
    told = application(Catalog([run], []), TOKEN)

    def write_much(at: int) -> None:
        if at == 1:
            for uid in range(4):
                line(run / "nodes" / f"{uid:03d}" / "metrics.jsonl", *(round_record(uid, r, 4) for r in range(6, 40)))

    _, second = lines(told, "/api/stream?runs=ring/2026-01-01", 2, write_much)
    assert [point[0] for point in second["points"]] == [*range(7, 41)]
    assert [each[1] for each in second["nodes"]] == [40] * 4


def test_a_folder_that_is_written_anew_is_read_anew(run: Path) -> None:
    (run / "summary.json").unlink()
    told = application(Catalog([run], []), TOKEN)

    def replace(at: int) -> None:
        if at == 1:
            (run / "nodes" / "000" / "metrics.jsonl").write_text("")

    _, second = lines(told, "/api/stream?runs=ring/2026-01-01", 2, replace)
    assert second["anew"]


# -- control


def asking_to(run: Path, said: list[tuple[Path, str]]) -> TestClient:
    def ask(path: Path, action: str) -> str:
        said.append((path, action))
        if action not in ("pause", "resume", "stop", "evaluate"):
            raise UsageError(f"no such action: {action}")
        return f"asked to {action}"

    return client(run.parents[1], ask=ask)


def test_a_run_is_controlled_with_the_token_in_the_header(run: Path) -> None:
    said: list[tuple[Path, str]] = []
    asking = asking_to(run, said)
    answer = asking.post("/api/control", json={"run": "ring/2026-01-01", "action": "pause"}, headers=OWN)
    assert answer.json() == {"said": "asked to pause"}
    assert said == [(run.resolve(), "pause")]
    wrong = asking.post("/api/control", json={"run": "ring/2026-01-01", "action": "explode"}, headers=OWN)
    assert (wrong.status_code, wrong.json()) == (409, {"error": "no such action: explode"})


def test_other_pages_cannot_control_a_run(run: Path) -> None:
    said: list[tuple[Path, str]] = []
    asking = asking_to(run, said)
    body = {"run": "ring/2026-01-01", "action": "stop"}
    assert asking.post("/api/control", json=body).status_code == 401
    assert asking.post("/api/control", json=body, params={"token": TOKEN}).status_code == 401, "what a form could do"
    assert asking.post("/api/control", json=body, headers={"cookie": f"token={TOKEN}"}).status_code == 401
    assert asking.post("/api/control", json=body, headers={**OWN, "origin": "http://evil.example"}).status_code == 403
    assert asking.post("/api/control", json=body, headers={**OWN, "origin": "null"}).status_code == 403
    assert asking.get("/api/control", headers=OWN).status_code == 405
    assert asking.post("/", headers=OWN).status_code == 405
    assert said == []
    assert asking.post("/api/control", json=body, headers={**OWN, "origin": BASE}).status_code == 200


@pytest.mark.parametrize("body", [b"", b"[]", b"{}", b'{"run": 1, "action": "stop"}', b'{"run": [], "action": "stop"}',
                                  b'{"run": "ring/2026-01-01", "action": 5}', b"x" * 10_000, b"\xff\xfe",
                                  b"[" * 4000])  # fmt: skip
def test_what_is_no_request_is_refused(run: Path, body: bytes) -> None:
    said: list[tuple[Path, str]] = []
    assert asking_to(run, said).post("/api/control", content=body, headers=OWN).status_code in (400, 404, 413)
    assert said == []


def test_without_a_way_to_control_the_answer_says_so(run: Path) -> None:
    answer = client(run.parents[1]).post("/api/control", json={"run": "ring/2026-01-01", "action": "stop"}, headers=OWN)
    assert answer.status_code == 409
