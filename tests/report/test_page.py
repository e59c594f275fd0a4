"""The report of runs: one self-contained HTML file, also for runs whose records are incomplete."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest
from click.testing import CliRunner

from decentnode.cli import main
from decentnode.errors import EnvironmentFault, UsageError
from decentnode.report.page import _conclusion_line, _nodes, _recorded_graph, render, waited, write
from decentnode.report.reading.repeats import RunResult
from decentnode.report.reading.runs import load
from tests.report.test_progress import make_summary
from tests.report.test_runs import write_run

VOID = {"meta", "img", "br", "link"}


class CheckedHtml(HTMLParser):
    """Parses a page: fails on tags that are not closed in order, and collects texts, ids and addresses."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.ids: list[str] = []
        self.addresses: list[str] = []
        self.texts: list[str] = []
        self.without_alt = 0
        self.feed(text)
        self.close()
        assert not self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = dict(attrs)
        self.addresses += [value for key in ("src", "href") if (value := found.get(key))]
        self.ids += [value for key, value in attrs if key == "id" and value]
        self.without_alt += tag == "img" and not found.get("alt")
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] != "style":
            self.texts.append(data)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.texts).split())


def check_html(text: str) -> CheckedHtml:
    """Checks that a page refers to nothing outside itself and has no script, and returns it parsed."""
    found = CheckedHtml(text)
    for address in found.addresses:
        assert address.startswith(("data:image/svg+xml;base64,", "#")), f"the file refers to {address[:60]}"
        assert not address.startswith("#") or address[1:] in found.ids
    assert not re.search(r"@import|url\(|<script", text) and not found.without_alt
    return found


@pytest.mark.slow
def test_the_report_of_a_run_is_one_self_contained_html_file(tmp_path: Path) -> None:
    run = write_run(tmp_path / "exp" / "run")
    (run / "config.yaml").write_text("name: exp  # <b>bold</b>\n")
    (run / "command.txt").write_text("decentnode run exp.yaml\n")
    (run / "env.json").write_text(json.dumps({"host": "here", "versions": {"torch": "2.13.0"}}))
    (run / "faults.jsonl").write_text('{"at_seconds": 5.0, "do": "kill", "nodes": [2]}\n')
    with open(run / "nodes" / "000" / "metrics.jsonl", "a") as file:
        file.write(json.dumps({"kind": "round", "round": 6, "train_seconds": 1.0, "wait_seconds": 3.0,
                               "edges": {"2": [10, 10, 1, 0, 2.5], "1": [10, 10, 1, 0, 0.0]}}) + "\n")  # fmt: skip
    (run / "nodes" / "000" / "events.jsonl").write_text("".join(json.dumps(each) + "\n" for each in (
        {"time": 101.5, "uid": 0, "kind": "peer_lost", "peer": 2, "detail": "nothing came"},
        {"time": 102.0, "uid": 0, "kind": "checksum_mismatch", "peer": None, "detail": "", "count": 27},
        {"time": 102.0, "uid": 0, "kind": "sent", "round": 1},
    )))  # fmt: skip
    text, notes = render([run])
    found = check_html(text)
    assert not notes
    assert {"question", "results", "curves", "waits", "bytes", "events", "nodes", "again"} <= {*found.ids}
    assert "name: exp # <b>bold</b>" in found.text and "<b>" not in text
    for passage in ("decentnode run exp.yaml", "torch 2.13.0", "1 faults were planned", "checksum mismatch 27",
                 "node 2 nothing came", "wait 75.0 %", "node waited for seconds in all 0 2 2.50"):  # fmt: skip
        assert passage in found.text, passage
    assert "says checksum mismatch 27 bytes were damaged in transit; they are sent again peer lost 1" in found.text
    assert sum(address.startswith("data:") for address in found.addresses) >= 9 + 1
    assert waited(load(run)) == {(0, 2): 2.5}


@pytest.mark.slow
def test_the_report_compares_experiments_by_seed_and_by_differing_keys(tmp_path: Path) -> None:
    runs = [write_run(tmp_path / name / str(seed), seed=seed, better=0.1 * (name == "b") + 0.01 * seed * (name == "b"),
                     sharing={"name": "full", "every": 1 + (name == "b")}) for name in "ab" for seed in (1, 2, 3)]
    for run in runs:
        summary = json.loads((run / "summary.json").read_text())
        value = 0.5 + 0.1 * (run.parent.name == "b") + 0.01 * int(run.name)
        (run / "summary.json").write_text(json.dumps({**summary, "accuracy_mean": value, "nodes": {}}))
        config = json.loads((run / "config.resolved.yaml").read_text())
        (run / "config.resolved.yaml").write_text(json.dumps({**config, "name": "exp"}))
    text, _ = render(runs)
    found = check_html(text).text
    assert "experiment sharing.every sharing.every=1 (3 seeds) 1 sharing.every=2 (3 seeds) 2" in found
    assert "seeds 1, 2, 3" in found
    assert re.search(r"Against sharing.every=1 \(3 seeds\), seed by seed experiment seeds difference in accuracy % "
                     r".* 3 \+10.00 \S+ to \S+ <0.001 ", found), found
    assert "52.00 ±1.00 62.00 ±1.00" in found


def test_tables_of_few_experiments_have_a_column_for_each_and_name_the_component_of_a_section(tmp_path: Path) -> None:
    attack, asynchronous = {"name": "ipm", "count": 2}, {"max_age": 3, "patience": 1}
    text, _ = render([write_run(tmp_path / "a" / "r", attack=None, node={"asynchronous": None}),
                      write_run(tmp_path / "b" / "r", attack=attack, node={"asynchronous": asynchronous})])
    found = check_html(text).text
    assert "all else is the same. experiment attack node.asynchronous a null null b ipm given" in found
    results = found.partition("Results")[2].partition("Of several runs")[0].split()
    assert "a b runs 1 1" in " ".join(results), results


def test_the_report_of_a_run_that_was_killed_at_once(tmp_path: Path) -> None:
    run = tmp_path / "killed"
    (run / "nodes" / "000").mkdir(parents=True)
    (run / "nodes" / "000" / "metrics.jsonl").write_text('{"kind": "evaluation", "round": 0, "accuracy": 0.1}\n{"kind')
    found = check_html(render([run])[0])
    assert "No run has a summary" in found.text and "not finished" in found.text
    (run / "nodes" / "000" / "metrics.jsonl").write_text("")
    with pytest.raises(UsageError, match="holds no metrics"):
        render([run])


@pytest.mark.slow
def test_names_are_escaped_in_the_report(tmp_path: Path) -> None:
    text, _ = render([write_run(tmp_path / "run")], ["<script>alert(1)</script>"])
    assert "<script>alert(1)</script>" in check_html(text).text


@pytest.mark.slow
def test_the_report_command_writes_into_the_run_or_to_the_given_file(tmp_path: Path) -> None:
    run, out = write_run(tmp_path / "exp" / "run"), tmp_path / "deep" / "it.html"
    result = CliRunner().invoke(main, ["report", str(run)])
    assert result.exit_code == 0 and Path(result.stdout.strip()) == run / "report.html", result.output
    result = CliRunner().invoke(main, ["report", str(run), "-o", str(out)])
    assert result.exit_code == 0 and check_html(out.read_text()).text
    labels = ["--label", "a", "--label", "b"]
    for wrong, message in ((["-o", "x.pdf"], "must end in .html"), (labels, "1 times at most")):
        result = CliRunner().invoke(main, ["report", str(run), *wrong])
        assert result.exit_code == 2 and message in result.output
    assert CliRunner().invoke(main, ["report", str(tmp_path / "none")]).exit_code == 2
    (tmp_path / "file").write_text("")
    with pytest.raises(EnvironmentFault, match="cannot write"):
        write([run], tmp_path / "file" / "x.html")


@pytest.mark.slow
def test_the_report_draws_the_graph_of_a_real_run(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "decentnode", "simulate", "--set", "node.rounds=2", "--quiet"]
    subprocess.run([*command, "--run-dir", str(tmp_path)], check=True, timeout=200, capture_output=True)
    (made,) = (tmp_path / "quickstart").glob("*-*")
    found = check_html(render([made])[0])
    assert "graph" in found.ids and "payloads: models" in found.text and "done in" in found.text


def test_a_custom_graph_is_loaded_from_the_copy_of_the_code_in_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path])
    run = write_run(tmp_path / "run", graph={"name": "graph_of_this_test:Mine", "nodes": 3})
    (run / "code").mkdir()
    (run / "code" / "graph_of_this_test.py").write_text("from decentnode.graph.families import Ring as Mine\n")
    assert _recorded_graph(run).neighbors(0, 0) == (1, 2)


def test_the_conclusion_of_a_failed_run_gives_the_reason(tmp_path: Path) -> None:
    failure = {"node": 1, "title": "node 1 was killed by SIGKILL\nTraceback ...", "exit_code": 8}
    failed = make_summary(status="failed", rounds=7, rounds_planned=10, failure=failure)
    conclusion = _conclusion_line([RunResult(tmp_path, "a", None, {}, "", failed)])
    assert conclusion.startswith("failed after round 7 of 10")
    assert conclusion.endswith(". It failed: node 1 was killed by SIGKILL")
    assert "It failed" not in _conclusion_line([RunResult(tmp_path, "a", None, {}, "", make_summary())])


def test_the_bytes_that_each_node_sent_include_metadata_as_in_the_totals() -> None:
    nodes = {"0": {"bytes_data": 1_000_000, "bytes_metadata": 500_000}, "1": {"bytes_data": 2_000_000}}
    table = _nodes(RunResult(Path(), "a", 1, {}, "finished", {"nodes": nodes}))
    sent = table["heads"].index("sent")
    assert [row[sent] for row in table["rows"]] == ["1.5 MB", "2.0 MB"]
