"""The dashboard's page in a real browser: the graph, live updates, the replay, the token and the control buttons."""

from __future__ import annotations

import dataclasses
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
from decentnode.metrics.figures import ACCURACY, TaskMetrics
from tests.dashboard.folder import START_TIME, append_records, evaluation_record, round_record, write_run_folder
from tests.dashboard.test_live import write_status

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
pytestmark = [pytest.mark.slow, pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine")]

Served = tuple[str, str, Path, list[tuple[str, str]]]
"""(address, token, folder of runs, (run, action) of every control request)."""


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with sync_api.sync_playwright() as playwright:
        found = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield found
        found.close()


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Served]:
    """Serves a run in progress, and a finished one named "over"."""
    run = write_run_folder(tmp_path, nodes=8, rounds=20)
    (run / "summary.json").unlink()
    (run / "supervisor.json").write_text("{}")
    write_run_folder(tmp_path, nodes=5, rounds=12, name="over")
    actions: list[tuple[str, str]] = []

    def ask(path: Path, action: str) -> str:
        actions.append((path.parent.name, action))
        return f"told to {action}"

    token = new_token()
    with listen("127.0.0.1", 0) as listening:
        app = application(Catalog([run], [tmp_path]), token, ask=ask)
        server = uvicorn.Server(uvicorn.Config(app, log_level="critical", lifespan="off", timeout_graceful_shutdown=1))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]})
        thread.start()
        yield f"http://127.0.0.1:{listening.getsockname()[1]}/", token, tmp_path, actions
        server.should_exit = True
        thread.join(30)
    assert not thread.is_alive()


class Page:
    """A page in a browser context of its own; records errors in it and its requests to other servers."""

    def __init__(self, browser: Any, address: str, **options: Any) -> None:
        self.context = browser.new_context(viewport={"width": 1300, "height": 850}, **options)
        self.problems: list[str] = []
        self.elsewhere: list[str] = []
        self.page = self.context.new_page()
        self.page.on("pageerror", lambda error: self.problems.append(str(error)))
        self.page.on("console", lambda message: message.type == "error" and self.problems.append(message.text))
        self.page.on("request", lambda request: request.url.startswith(address.partition("#")[0])
                     or self.elsewhere.append(request.url))  # fmt: skip
        self.page.goto(address)

    def wait(self, selector: str, **options: Any) -> Any:
        return self.page.wait_for_selector(selector, timeout=60_000, **options)

    @property
    def url(self) -> str:
        """The address as the page itself has it; Playwright's `url` is told of a change later."""
        return str(self.page.evaluate("location.href"))

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


def test_the_page_draws_the_graph_and_updates_with_new_records(browser: Any, served: Served) -> None:
    address, token, root, _ = served
    with Page(browser, f"{address}#token={token}") as shown:
        canvas = shown.wait("canvas[data-nodes='8'][data-edges='8'][data-rounds='20']")
        assert canvas.evaluate(COLORS) > 10
        assert token not in shown.url
        assert shown.figure("round") == "20 of 20"
        points = "(all) => all.map((each) => Number(each.dataset.points))"
        assert shown.page.locator(".chart canvas").evaluate_all(points) == [11, 20, 11, 20]
        for uid in range(8):
            write_status(root / "ring" / "2026-01-01", uid, doing="exchange", waiting_for=[] if uid == 3 else [3])
            path = root / "ring" / "2026-01-01" / "nodes" / f"{uid:03d}" / "metrics.jsonl"
            append_records(path, round_record(uid, 20, 8), evaluation_record(uid, 21))
        shown.wait("canvas[data-rounds='21']")
        assert shown.figure("round") == "21 of 20"
        assert shown.wait("#panel .blame:has-text('node 3')").text_content() == (
            "everything waits for node 3 (exchange; 7 wait for it)")  # fmt: skip
        assert shown.problems == [] and shown.elsewhere == []


def test_a_curve_begins_where_its_logarithmic_axis_does(browser: Any, served: Served) -> None:
    """Before the first round all models are equal: no line rises from a distance that the axis does not reach."""
    address, token, root, _ = served
    for file in (root / "over" / "2026-01-01").glob("nodes/*/metrics.jsonl"):
        text = file.read_text()
        assert '"consensus_distance": 0.5}' in text
        file.write_text(text.replace('"consensus_distance": 0.5}', '"consensus_distance": 1e-9}'))
    blue_columns = """(canvas) => {
      const width = canvas.width, pixels = canvas.getContext("2d").getImageData(0, 0, width, canvas.height).data;
      const found = [];
      for (let i = 0; i < pixels.length; i += 4)
        if ([0, 114, 178, 255].every((value, part) => pixels[i + part] === value)) found.push((i / 4) % width);
      return [Math.min(...found) / width, Math.max(...found) / width];
    }"""
    with Page(browser, f"{address}#token={token}&runs=over/2026-01-01") as shown:
        shown.wait("canvas[data-nodes='5'][data-rounds='12']")
        shown.page.wait_for_timeout(300)
        first, last = shown.page.locator(".chart canvas").nth(2).evaluate(blue_columns)
        assert first > 0.2 and last > 0.9
        assert shown.page.locator(".chart canvas").nth(0).evaluate(blue_columns)[0] < 0.2
        assert shown.problems == []


def test_current_figures_include_all_nodes_when_one_is_a_round_ahead(browser: Any, served: Served) -> None:
    address, token, root, _ = served
    run = root / "over" / "2026-01-01"
    summary = {"name": "over", "status": "failed", "failure": {"node": 4, "title": "node 4 was killed"}}
    (run / "summary.json").write_text(json.dumps(summary))
    ahead = evaluation_record(0, 13) | {"accuracy": 0.4}
    append_records(run / "nodes" / "000" / "metrics.jsonl", round_record(0, 12, 5, loss=1.0), ahead)
    with Page(browser, f"{address}#token={token}&runs=over/2026-01-01") as shown:
        shown.wait("canvas[data-nodes='5'][data-rounds='13']")
        assert shown.figure("accuracy") == "80 (40 to 90)" and shown.figure("nodes") == "5"
        assert shown.figure("because") == "node 4 was killed"
        assert shown.problems == []


def test_the_current_mean_over_parts_of_the_test_set_is_that_of_all_samples(browser: Any, served: Served) -> None:
    """The line of figures had the mean of the nodes' values beside a curve that ends at that of all samples."""
    address, token, root, _ = served
    run = root / "over" / "2026-01-01"
    pooled = TaskMetrics("classification", (dataclasses.replace(ACCURACY, pooled=True),))
    (run / "task.json").write_text(json.dumps(pooled.plain()))
    append_records(run / "nodes" / "000" / "metrics.jsonl", evaluation_record(0, 12) | {"accuracy_mean": 0.55})
    with Page(browser, f"{address}#token={token}&runs=over/2026-01-01") as shown:
        shown.wait("canvas[data-nodes='5'][data-rounds='12']")
        assert shown.figure("accuracy").startswith("55 (")
        assert shown.problems == []


def test_the_replay_of_a_run_and_views_restored_from_their_url(browser: Any, served: Served) -> None:
    address, token, root, _ = served
    append_records(root / "over" / "2026-01-01" / "nodes" / "000" / "events.jsonl",
         {"time": START_TIME + 6, "uid": 0, "kind": "suspected", "peer": 2, "detail": "<b>silent</b>"})  # fmt: skip
    with Page(browser, f"{address}#token={token}&runs=over/2026-01-01&color=wait&tab=events") as shown:
        shown.wait("canvas[data-nodes='5'][data-rounds='12']")
        assert "<b>silent</b>" in str(shown.wait("#panel td:has-text('silent')").text_content()), "text, never HTML"
        assert shown.page.locator("#marks canvas").get_attribute("data-events") == "1"
        shown.page.keyboard.press("Home")
        shown.wait("canvas[data-rounds='0']")
        shown.page.keyboard.press("ArrowRight")
        shown.wait("canvas[data-rounds='1']")
        assert "round=1" in shown.url and "color=wait" in shown.url and "tab=events" in shown.url
        first = shown.figure("loss")
        shown.page.keyboard.press("Space")
        shown.wait("canvas[data-rounds='12']")
        assert shown.figure("loss") != first
        shown.page.fill("#scrub", "5")
        shown.wait("canvas[data-rounds='5']")
        again = shown.url
        shown.page.goto("about:blank")
        shown.page.goto(again)
        shown.wait("canvas[data-nodes='5'][data-rounds='5']")
        assert shown.page.input_value("#color") == "wait"
        shown.page.keyboard.press("l")
        shown.wait("canvas[data-rounds='12']")
        assert shown.problems == []


def test_the_page_refuses_a_wrong_token_and_accepts_the_right_one(browser: Any, served: Served) -> None:
    address, token, *_ = served
    with Page(browser, f"{address}#token=wrong") as shown:
        shown.wait("#locked[open]")
        assert shown.page.query_selector(".pane") is None
        shown.page.fill("#token", token)
        shown.page.keyboard.press("Enter")
        shown.wait("canvas[data-nodes='8']")
        assert all("401" in each for each in shown.problems)


def test_a_run_is_controlled_from_the_page(browser: Any, served: Served) -> None:
    address, token, _, actions = served
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
        assert actions == [("ring", "pause"), ("ring", "evaluate"), ("ring", "stop")]
        assert shown.problems == []


def test_two_runs_side_by_side_and_the_theme_in_the_url(browser: Any, served: Served) -> None:
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
        assert "theme=light" in shown.url and "over" in shown.url
        shown.page.keyboard.press("Escape")
        for key, row in (("n", "0"), ("n", "1"), ("g", None), ("g", None), ("Escape", None)):
            shown.page.keyboard.press(key)
            assert row is None or f"node={row}" in shown.url
        assert "node=" not in shown.url
        for tab in ("nodes", "machines", "events", "config", "waits"):
            shown.page.click(f"[data-tab={tab}]")
            shown.wait(f"[data-tab={tab}][aria-selected=true]")
        assert shown.problems == []


def test_long_names_fit_their_column_and_equal_names_get_their_folder_beside_them(browser: Any, served: Served) -> None:
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
