"""`decentnode status` of runs that are in progress, hang or have ended."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from rich.console import Console

from decentnode.cli import main
from decentnode.report.reading.run_status import in_progress, state_of, table, waiting_summary
from tests.cli.terminal import wait_until
from tests.commands import ROOT, started


def node_status(uid: int, **more: Any) -> dict[str, Any]:
    edge = {"sent": 1000, "received": 2000, "chunks": 4, "resends": 1, "wait_seconds": 0.5}
    now = {"pid": os.getpid(), "time": time.time(), "round": 3, "rounds": 9, "doing": "exchange"}
    waits = {"waiting_for": [], "waiting_seconds": 0.0}
    return {"uid": uid, **now, **waits, "edges": {"9": edge}, "faults": {"stranger": 2}, **more}


def table_text(statuses: dict[int, dict[str, Any]], edges: bool = False) -> str:
    console = Console(width=140, record=True, file=open(os.devnull, "w"))  # noqa: SIM115
    console.print(table(statuses, edges))
    return console.export_text()


def test_the_summary_names_the_node_that_all_others_wait_for() -> None:
    chain = {0: node_status(0, waiting_for=[1], waiting_seconds=12.0),
             1: node_status(1, waiting_for=[2], waiting_seconds=12.0),
             2: node_status(2, doing="local steps")}  # fmt: skip
    assert "node 2 (local steps; 1 wait for it)" in waiting_summary(chain)
    text = table_text(chain, edges=True)
    assert "12" in text and "to 9" in text and "3/9" in text and "waited" in text and "since" not in text
    assert "since" in table_text(chain)
    assert "node 2 (without a status here; 1 wait for it)" in waiting_summary({uid: chain[uid] for uid in (0, 1)})
    chain[2] = node_status(2, doing="local steps", pid=2**22 + 5, time=time.time() - 60)
    assert state_of(chain[2]) == "gone" and "node 2 (gone" in waiting_summary(chain)
    assert in_progress(chain) and not in_progress({0: node_status(0, doing="finished")})


def test_nodes_that_ended_or_died_are_not_counted_as_waiting() -> None:
    for over in ({"doing": "finished"}, {"doing": "exchange", "time": 0, "pid": 1 << 30}):
        found = {0: node_status(0), 1: {**node_status(1), "waiting_for": [0], **over}}
        assert waiting_summary(found) == "2 nodes have written a status"
        assert waiting_summary({0: found[0]}) == "1 node has written a status"
        found |= {1: {**found[1], "waiting_for": [2]}, 0: {**node_status(0), "waiting_for": [1]}}
        assert "everything waits for node 1 (" in waiting_summary(found)  # though its last status says that it waits


def test_the_summary_names_the_node_that_has_not_entered_a_collective_call() -> None:
    """Members that have entered wait for all others, because the library does not tell them who has."""
    clique = {uid: node_status(uid, waiting_for=sorted({0, 1, 2, 3} - {uid}), waiting_seconds=12.0)
              for uid in (0, 1, 3)}  # fmt: skip
    clique[2] = node_status(2, doing="local steps")
    assert waiting_summary(clique) == "everything waits for node 2 (local steps; 3 wait for it)"


@pytest.mark.parametrize("edges", [False, True])
def test_the_table_fits_80_columns_with_one_line_per_node_or_edge(edges: bool) -> None:
    edge = {"sent": 123_456_789_000, "received": 999_900_000, "chunks": 1_234_567, "resends": 123_456,
            "wait_seconds": 4000.0}  # fmt: skip
    each = {"round": 99_999, "rounds": 100_000, "waiting_for": [*range(900, 920)], "waiting_seconds": 7199.0,
            "doing": "agreeing on the next generation", "edges": {"900": edge}, "faults": {"stranger": 12_345}}
    console = Console(width=80, record=True, file=open(os.devnull, "w"))  # noqa: SIM115
    console.print(table({uid: node_status(uid, **each) for uid in (7, 900)}, edges))
    head, *rows = [line.rstrip() for line in console.export_text().splitlines()][: 5 if edges else 3]
    assert max(map(len, (head, *rows))) <= 80 and all("99999/100000" in row for row in rows[:: 1 + edges])
    for number in ("123.5 GB", "999.9 MB", "123456", "12345", "1 h 59 min", "900"):
        assert number in rows[0], (number, rows[0])
    assert not edges or all(text in rows[1] for text in ("to 900", "1234567", "123.5 GB"))


@pytest.mark.parametrize("edges", [False, True])
def test_simulated_nodes_without_connections_show_no_traffic(edges: bool) -> None:
    assert "1.0 kB" in table_text({1: node_status(1)}, edges)
    assert "0 B" not in table_text({1: node_status(1, edges={})}, edges)


def test_a_missing_run_is_refused(tmp_path: Path) -> None:
    result = CliRunner().invoke(main, ["status", str(tmp_path / "nowhere")])
    assert result.exit_code == 2


@pytest.mark.slow
def test_a_frozen_node_is_named_by_status_and_ends_the_run(tmp_path: Path) -> None:
    """After SIGSTOP of node 2, status shows that the others wait for it, and the run ends in time with its name."""
    command = ["run", str(ROOT / "configs" / "quickstart.yaml"), "--plain", "--run-dir", str(tmp_path),
               "--set", "graph={name: complete, nodes: 4}", "--set", "mapping={name: linear, nodes_per_machine: 4}",
               "--set", "node.rounds=100000", "--set", "node.evaluate_every=0", "--set",
               "communication={name: auto, timeout_seconds: 5}"]  # fmt: skip
    with contextlib.ExitStack() as stack:
        shorten_grace = "from decentnode.launch.supervising import early_end; early_end.GRACE_SECONDS = 2.0"
        process = stack.enter_context(started(ROOT, *command, merged=True, before=shorten_grace))
        def read_status() -> dict[str, Any]:
            result = CliRunner().invoke(main, ["status", str(tmp_path / "quickstart"), "--json"])
            return json.loads(result.output) if result.exit_code == 0 else {}

        def all_have_made_a_round() -> bool:
            return len(now := read_status()) == 4 and bool(min(s["round"] for s in now.values()))

        def all_wait_for_node_2() -> bool:
            return len(now := read_status()) == 4 and all(2 in s["waiting_for"] for u, s in now.items() if u != "2")

        wait_until(all_have_made_a_round, "rounds of all four nodes")
        frozen = read_status()["2"]["pid"]
        os.kill(frozen, signal.SIGSTOP)
        stack.callback(resume_process, frozen)
        wait_until(all_wait_for_node_2, "the others' wait for node 2")
        output, _ = process.communicate(timeout=200)
        assert process.returncode == 5 and "node 2" in output, output
        (run,) = (tmp_path / "quickstart").glob("latest")
        texts = [(run / "nodes" / uid / "events.jsonl").read_text() for uid in ("000", "001", "003")]
        events_of_nodes = [[json.loads(line) for line in text.splitlines()] for text in texts]
        assert all(events[0]["kind"] == "joined" for events in events_of_nodes)
        lost = [event["peer"] for events in events_of_nodes for event in events if event["kind"] == "peer_lost"]
        assert 2 in lost, events_of_nodes
        text = CliRunner().invoke(main, ["status", str(tmp_path / "quickstart"), "--edges"])
        assert text.exit_code == 0 and "failed" in text.output


def resume_process(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGCONT)
