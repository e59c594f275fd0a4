"""The page in a real browser: what it draws, what changes, the replay, who is refused."""

from __future__ import annotations

import json
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("playwright", reason="the extra e2e is not installed")
pytest.importorskip("uvicorn")

import uvicorn
from playwright import sync_api

from decentnode.dashboard.catalog import Catalog
from decentnode.dashboard.serve import listen, new_token
from decentnode.dashboard.server import application
from tests.dashboard.folder import BEGAN, evaluation, line, round_record, run_folder
from tests.dashboard.test_live import write_status

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
pytestmark = [pytest.mark.slow, pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine")]

Served = tuple[str, str, Path, list[tuple[str, str]]]
"""(address, token, folder of runs, what was asked of runs)."""


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with sync_api.sync_playwright() as playwright:
        found = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield found
        found.close()


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Served]:
    """A run that goes on, and one that is over."""
    run = run_folder(tmp_path, nodes=8, rounds=20)
    (run / "summary.json").unlink()
    (run / "supervisor.json").write_text("{}")
    run_folder(tmp_path, nodes=5, rounds=12, name="over")
    asked: list[tuple[str, str]] = []

    def ask(path: Path, action: str) -> str:
        asked.append((path.parent.name, action))
        return f"told to {action}"

    token = new_token()
    with listen("127.0.0.1", 0) as listening:
        told = application(Catalog([run], [tmp_path]), token, ask=ask)
        server = uvicorn.Server(uvicorn.Config(told, log_level="critical", lifespan="off", timeout_graceful_shutdown=1))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]})
        thread.start()
        yield f"http://127.0.0.1:{listening.getsockname()[1]}/", token, tmp_path, asked
        server.should_exit = True
        thread.join(30)
    assert not thread.is_alive()


class Page:
    """A page of its own, with what went wrong in it."""

    def __init__(self, browser: Any, address: str, **options: Any) -> None:
        self.context = browser.new_context(viewport={"width": 1300, "height": 850}, **options)
        self.problems: list[str] = []
        self.elsewhere: list[str] = []
        self.page = self.context.new_page()
        self.page.on("pageerror", lambda error: self.problems.append(str(error)))
        self.page.on("console", lambda said: said.type == "error" and self.problems.append(said.text))
        self.page.on("request", lambda request: request.url.startswith(address.partition("#")[0])
                     or self.elsewhere.append(request.url))  # fmt: skip
        self.page.goto(address)

    def wait(self, selector: str, **options: Any) -> Any:
        return self.page.wait_for_selector(selector, timeout=60_000, **options)

    def figure(self, name: str) -> str:
        return str(self.page.text_content(f"[data-figure='{name}'] b"))

    def __enter__(self) -> Page:
        return self

    def __exit__(self, *_: object) -> None:
        self.context.close()


COLORS = """(canvas) => {
  const data = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height).data, found = new Set();
  for (let i = 0; i < data.length; i += 4)
    if (data[i + 3] === 255) found.add((data[i] << 16) | (data[i + 1] << 8) | data[i + 2]);
  return found.size;
}"""


def test_the_graph_is_drawn_and_values_change(browser: Any, served: Served) -> None:
    address, token, root, _ = served
    with Page(browser, f"{address}#token={token}") as shown:
        canvas = shown.wait("canvas[data-nodes='8'][data-edges='8'][data-rounds='20']")
        assert canvas.evaluate(COLORS) > 10
        assert token not in shown.page.url
        assert shown.figure("round") == "20 of 20"
        points = "(all) => all.map((each) => Number(each.dataset.points))"
        assert shown.page.locator(".chart canvas").evaluate_all(points) == [11, 20, 11, 20]
        for uid in range(8):
            write_status(root / "ring" / "2026-01-01", uid, doing="exchange", waiting_for=[] if uid == 3 else [3])
            line(root / "ring" / "2026-01-01" / "nodes" / f"{uid:03d}" / "metrics.jsonl", round_record(uid, 20, 8),
                 evaluation(uid, 21))  # fmt: skip
        shown.wait("canvas[data-rounds='21']")
        assert shown.figure("round") == "21 of 20"
        assert shown.wait("#panel .blame:has-text('node 3')").text_content() == (
            "everything waits for node 3 (exchange; 7 wait for it)")  # fmt: skip
        assert shown.problems == [] and shown.elsewhere == []


def test_figures_of_now_are_those_of_all_nodes_whichever_round_they_are_in(browser: Any, served: Served) -> None:
    address, token, root, _ = served
    run = root / "over" / "2026-01-01"
    summary = {"name": "over", "status": "failed", "failure": {"node": 4, "title": "node 4 was killed"}}
    (run / "summary.json").write_text(json.dumps(summary))
    ahead = evaluation(0, 13) | {"accuracy": 0.4}
    line(run / "nodes" / "000" / "metrics.jsonl", round_record(0, 12, 5, loss=1.0), ahead)
    with Page(browser, f"{address}#token={token}&runs=over/2026-01-01") as shown:
        shown.wait("canvas[data-nodes='5'][data-rounds='13']")
        assert shown.figure("accuracy") == "80 (40 to 90)" and shown.figure("nodes") == "5"
        assert shown.figure("because") == "node 4 was killed"
        assert shown.problems == []


def test_a_run_is_replayed_and_every_view_has_its_address(browser: Any, served: Served) -> None:
    address, token, root, _ = served
    line(root / "over" / "2026-01-01" / "nodes" / "000" / "events.jsonl",
         {"time": BEGAN + 6, "uid": 0, "kind": "suspected", "peer": 2, "detail": "<b>silent</b>"})  # fmt: skip
    with Page(browser, f"{address}#token={token}&runs=over/2026-01-01&color=wait&tab=events") as shown:
        shown.wait("canvas[data-nodes='5'][data-rounds='12']")
        assert "<b>silent</b>" in str(shown.wait("#panel td:has-text('silent')").text_content()), "text, never HTML"
        assert shown.page.locator("#marks canvas").get_attribute("data-events") == "1"
        shown.page.keyboard.press("Home")
        shown.wait("canvas[data-rounds='0']")
        shown.page.keyboard.press("ArrowRight")
        shown.wait("canvas[data-rounds='1']")
        assert "round=1" in shown.page.url and "color=wait" in shown.page.url and "tab=events" in shown.page.url
        first = shown.figure("loss")
        shown.page.keyboard.press("Space")
        shown.wait("canvas[data-rounds='12']")
        assert shown.figure("loss") != first
        shown.page.fill("#scrub", "5")
        shown.wait("canvas[data-rounds='5']")
        again = shown.page.url
        shown.page.goto("about:blank")
        shown.page.goto(again)
        shown.wait("canvas[data-nodes='5'][data-rounds='5']")
        assert shown.page.input_value("#color") == "wait"
        shown.page.keyboard.press("l")
        shown.wait("canvas[data-rounds='12']")
        assert shown.problems == []


def test_a_wrong_token_is_refused_and_the_right_one_taken(browser: Any, served: Served) -> None:
    address, token, *_ = served
    with Page(browser, f"{address}#token=wrong") as shown:
        shown.wait("#locked[open]")
        assert shown.page.query_selector(".pane") is None
        shown.page.fill("#token", token)
        shown.page.keyboard.press("Enter")
        shown.wait("canvas[data-nodes='8']")
        assert all("401" in each for each in shown.problems)


def test_a_run_is_controlled_from_the_page(browser: Any, served: Served) -> None:
    address, token, _, asked = served
    with Page(browser, f"{address}#token={token}") as shown:
        shown.wait("canvas[data-nodes='8']")
        shown.page.click("button[data-action='pause']")
        shown.wait(".said:has-text('told to pause')")
        shown.page.click("button[data-action='evaluate']")
        shown.wait(".said:has-text('told to evaluate')")
        shown.page.click("button[data-action='stop']")
        shown.page.click("#sure button[value='no']")
        shown.page.click("button[data-action='stop']")
        shown.page.click("#sure button[value='yes']")
        shown.wait(".said:has-text('told to stop')")
        assert asked == [("ring", "pause"), ("ring", "evaluate"), ("ring", "stop")]
        assert shown.problems == []


def test_runs_stand_side_by_side_and_the_theme_is_kept(browser: Any, served: Served) -> None:
    address, token, *_ = served
    with Page(browser, f"{address}#token={token}", color_scheme="dark") as shown:
        shown.wait("canvas[data-nodes='8']")
        background = "() => getComputedStyle(document.body).backgroundColor"
        assert shown.page.evaluate(background) == "rgb(18, 22, 27)"
        shown.page.keyboard.press("d")
        assert shown.page.evaluate(background) == "rgb(255, 255, 255)"
        shown.page.keyboard.press("r")
        shown.page.fill("#filter", "over")
        shown.page.check("#runs li:has-text('over') input")
        shown.wait("canvas[data-nodes='5']")
        assert shown.page.locator(".pane").count() == 2
        assert "theme=light" in shown.page.url and "over" in shown.page.url
        shown.page.keyboard.press("Escape")
        for key, row in (("n", "0"), ("n", "1"), ("g", None), ("g", None), ("Escape", None)):
            shown.page.keyboard.press(key)
            assert row is None or f"node={row}" in shown.page.url
        assert "node=" not in shown.page.url
        for tab in ("nodes", "machines", "events", "config", "waits"):
            shown.page.click(f"[data-tab={tab}]")
            shown.wait(f"[data-tab={tab}][aria-selected=true]")
        assert shown.problems == []


def test_names_stay_in_their_column_and_runs_of_one_name_are_told_apart(browser: Any, served: Served) -> None:
    address, token, root, _ = served
    shutil.copytree(root / "over" / "2026-01-01", root / "over" / "2026-01-02")
    (root / ("a" * 120)).mkdir()
    shutil.copytree(root / "over" / "2026-01-01", root / ("a" * 120) / "2026-01-01")
    with Page(browser, f"{address}#token={token}&runs=over/2026-01-01,over/2026-01-02") as shown:
        shown.page.wait_for_function("() => document.querySelectorAll('canvas[data-nodes=\"5\"]').length === 2")
        called = shown.page.locator(".pane .name").all_text_contents()
        assert [each.rpartition(" ")[2] for each in called] == ["2026-01-01", "2026-01-02"]
        shown.page.keyboard.press("r")
        shown.wait("#runs li:has-text('aaaa')")
        wide = "(all) => all.filter((each) => each.scrollWidth > each.clientWidth).length"
        assert shown.page.locator("#runs li").evaluate_all(wide) == 0
        assert shown.problems == []
