"""Virtual time of whole experiments: in a simulation's records, of a finished run, in plots and on the command line."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from decentnode.cli import main
from decentnode.errors import ConfigError
from decentnode.experiment import load
from decentnode.formatting import duration
from decentnode.report.reading.runs import axes_of, lines
from decentnode.simulate.links_file import read_links
from decentnode.simulate.virtual import VirtualTime, make_clock, measured_step_seconds, time_line_of

ROOT = Path(__file__).parents[2]
QUICKSTART = str(ROOT / "configs" / "quickstart.yaml")
SMALL = ["graph={name: ring, nodes: 4}", "mapping={name: linear, machines: 1, nodes_per_machine: 4}",
         "node={rounds: 4, evaluate_every: 2}", "training.local_steps=5"]  # fmt: skip
WORLD = ["simulate.compute={step_seconds: 0.1, stragglers: [{nodes: [2], factor: 3}]}",
         "simulate.links={same_machine: {latency_seconds: 0.25}}"]  # fmt: skip


def sets(overrides: list[str]) -> list[str]:
    return [word for each in overrides for word in ("--set", each)]


def records(run: Path, uid: int) -> list[dict[str, object]]:
    return [json.loads(line) for line in (run / "nodes" / f"{uid:03d}" / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.slow
def test_a_simulation_records_virtual_seconds(tmp_path: Path) -> None:
    result = CliRunner().invoke(main, ["simulate", QUICKSTART, "--plain", "--run-dir", str(tmp_path),
                                       *sets([*SMALL, *WORLD])])  # fmt: skip
    assert result.exit_code == 0, result.output
    (run,) = tmp_path.glob("*/latest")
    line = time_line_of(load(QUICKSTART, [*SMALL, *WORLD]), 4)[0]
    assert line.end[0].tolist() == [0.75, 1.75, 1.5, 1.75]  # 0.5 s of steps; node 2 takes 1.5, its payload 0.25
    for uid in range(4):
        told = {(r["kind"], r["round"]): r["virtual_seconds"] for r in records(run, uid)
                if r["kind"] in ("round", "evaluation")}  # fmt: skip
        assert told["round", 2] == line.end[2, uid]
        assert told["evaluation", 0] == 0 and told["evaluation", 2] == line.finished()[1]
    assert json.loads((run / "summary.json").read_text())["virtual_seconds"] == line.end[3].max()
    told, = [text for text in result.output.splitlines() if text.startswith("virtual  ")]
    assert f"{duration(line.end[3].max())} with the speeds" in told and f"{duration(line.end[3].max() / 4)} per" in told
    drawn, _ = lines([run.resolve()])
    assert "virtual_seconds" in axes_of(drawn)
    assert drawn[0].series("accuracy", "virtual_seconds").x == [0.0, line.finished()[1], line.finished()[3]]
    out = tmp_path / "x.csv"
    assert CliRunner().invoke(main, ["plot", str(run), "-o", str(out)]).exit_code == 0
    rows = [row for row in csv.DictReader(io.StringIO(out.read_text())) if row["figure"] == "accuracy"]
    assert [float(row["virtual_seconds"]) for row in rows] == drawn[0].series("accuracy", "virtual_seconds").x
    picture = CliRunner().invoke(main, ["plot", str(run), "--x", "virtual_seconds"])
    assert picture.exit_code == 0 and Path(picture.output.strip()).stat().st_size > 10_000


@pytest.mark.slow
def test_a_finished_run_gets_virtual_time_afterwards(tmp_path: Path) -> None:
    result = CliRunner().invoke(main, ["simulate", QUICKSTART, "--plain", "--run-dir", str(tmp_path), *sets(SMALL)])
    assert result.exit_code == 0, result.output
    (run,) = tmp_path.glob("*/latest")
    assert not any("virtual_seconds" in record for record in records(run, 0)) and "\nvirtual " not in result.output
    drawn, _ = lines([run.resolve()])
    assert "virtual_seconds" not in axes_of(drawn)
    told = CliRunner().invoke(main, ["timeline", str(run), "--json", *sets(WORLD)])
    assert told.exit_code == 0, told.output
    found = json.loads(told.output)
    assert found["rounds"] == 4 and found["nodes"] == 4 and found["waits"][0]["waits_for"] == 2
    assert drawn[0].series("accuracy", "virtual_seconds").x[-1] == found["total_seconds"]
    of_run = CliRunner().invoke(main, ["timeline", str(run), "--json"])  # with the run's own seconds
    assert 0 < json.loads(of_run.output)["compute_seconds"] < 5


def test_decentnode_timeline_writes_tables_and_pictures(tmp_path: Path) -> None:
    for name in ("times.csv", "new/times.csv", "times.png"):
        result = CliRunner().invoke(main, ["timeline", QUICKSTART, "-o", str(tmp_path / name), *sets([*SMALL, *WORLD])])
        assert result.exit_code == 0, result.output
        assert "node 1 waits for node 2 in 4 rounds" in result.output
    rows = list(csv.DictReader(io.StringIO((tmp_path / "times.csv").read_text())))
    assert len(rows) == 16 and rows[1]["waits_for"] == "2" and rows[2]["waits_for"] == ""
    assert (tmp_path / "times.png").stat().st_size > 5_000
    refused = CliRunner().invoke(main, ["timeline", QUICKSTART, "-o", "x.txt"])
    assert refused.exit_code == 2 and "must end in" in refused.output


@pytest.mark.slow
def test_link_files_are_merged_and_invalid_ones_are_refused(tmp_path: Path) -> None:
    first, second = tmp_path / "a.yaml", tmp_path / "b.yaml"
    first.write_text("links: {jitter: 0.1, machines: [{machines: [0, 1], mbit_per_second: 100}]}")
    second.write_text("jitter: 0.2\nmachines: [{machines: [1, 2], mbit_per_second: 50, interface: eth1}]\n")
    found = read_links(first, second)
    assert found.jitter == 0.2 and [each.machines for each in found.machines] == [(0, 1), (1, 2)]
    result = CliRunner().invoke(main, ["timeline", QUICKSTART, "--links", str(first), *sets([*SMALL, *WORLD])])
    assert result.exit_code == 2 and "links.machines must name numbers from 0 to 0, got 1" in result.output
    first.write_text("node_mbit_per_second: 10")
    told = CliRunner().invoke(main, ["timeline", QUICKSTART, "--links", str(first), *sets([*SMALL, *WORLD])])
    assert told.exit_code == 0 and "without bounds" not in told.output
    for content in (b"\xff\xfe", b"[" * 3000):
        first.write_bytes(content)
        refused = CliRunner().invoke(main, ["timeline", QUICKSTART, "--links", str(first)])
        assert refused.exit_code == 2 and "a.yaml: cannot be read" in refused.output
    second.write_text("machine: 3")
    refused = CliRunner().invoke(main, ["timeline", QUICKSTART, "--links", str(second)])
    assert refused.exit_code == 2 and "machine" in refused.output


def test_step_seconds_are_measured_if_they_are_not_given() -> None:
    experiment = load(QUICKSTART, SMALL)
    assert 0 < measured_step_seconds(experiment) < 5
    virtual = VirtualTime(make_clock(experiment, step_seconds=0.5))
    assert virtual.finished(0) == 0 and virtual.finished(3) == pytest.approx(7.5)
    assert virtual.finished(1, uid=2) == pytest.approx(2.5)


def test_step_seconds_are_measured_on_a_client_if_node_0_is_a_server() -> None:
    served = load(QUICKSTART, [*SMALL, "graph={name: star, nodes: 4}", "sharing=fedavg"])
    assert served.servers() == (0,) and 0 < measured_step_seconds(served) < 5


def test_rounds_that_go_on_with_a_quorum_have_no_virtual_time() -> None:
    with pytest.raises(ConfigError, match="not known of rounds that go on with a quorum"):
        load(QUICKSTART, ["node.missing=return_weight", "simulate.links={node_mbit_per_second: 100}",
                          "node.quorum={share: 0.5, grace_seconds: 0.1}"])  # fmt: skip
