"""End to end: real processes die and freeze, the others go on, and who comes back is let in."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
from pathlib import Path
from typing import Any

import pytest

from decentnode.communication.parts import SILENCE_SECONDS
from decentnode.launch.reporting.outcome import Outcome
from decentnode.metrics.reader import read_kind
from tests.conftest import free_ports, scale
from tests.launch.faults import experiment
from tests.launch.test_supervisor import Witness, run

COMMUNICATION = {"name": "auto", "timeout_seconds": 30, "start_timeout_seconds": 60}
FREEZES = {"suspect_seconds": 6}
"""Of the tests that wait until a frozen node is suspected; a busy machine keeps nobody from answering for so long."""


class Listener(Witness):
    """Keeps what the user is told; wakes a node that froze once the others go on without it."""

    def __init__(self, pid_file: Path) -> None:
        super().__init__()
        self.notices: list[str] = []
        self._pid_file = pid_file

    def notice(self, text: str) -> None:
        self.notices.append(text)
        if text.startswith("generation 1") and self._pid_file.exists():
            os.kill(int(self._pid_file.read_text()), signal.SIGCONT)


class Stopper(Listener):
    """Asks the run to stop as soon as the user is told something that has `text` in it."""

    def __init__(self, pid_file: Path, text: str) -> None:
        super().__init__(pid_file)
        self._text = text

    def notice(self, text: str) -> None:
        super().notice(text)
        if self._text in text:
            self._text = "never again"
            os.kill(os.getpid(), signal.SIGINT)


def go_on(
    folder: Path, training: str, *, nodes: int = 5, rounds: int = 40, keys: dict[str, str] | None = None,
    listener: Listener | None = None, **sections: Any,
) -> tuple[Outcome, Listener]:
    """keys: of the training's own config."""
    listener = listener or Listener(folder / "pid")
    node = {"rounds": rounds, "evaluate_every": 10, "missing": "regroup", **sections.pop("node", {})}
    outcome = run(
        folder, listener, node=node, graph=sections.pop("graph", {"name": "complete", "nodes": nodes}),
        training={**experiment()["training"], "name": f"tests.launch.faults:{training}", **(keys or {})},
        communication={**COMMUNICATION, **sections.pop("communication", {})}, **sections,
    )
    return outcome, listener


def generations(outcome: Outcome, uid: int) -> list[dict[str, Any]]:
    assert outcome.run_dir is not None
    return list(read_kind(outcome.run_dir / "nodes" / f"{uid:03d}" / "metrics.jsonl", "generation"))


@pytest.mark.parametrize("way", ["auto", "zeromq", "collective"])
@pytest.mark.slow
def test_the_others_finish_without_a_node_that_dies(tmp_path: Path, way: str) -> None:
    outcome, listener = go_on(tmp_path, "Dies", communication={"name": way})
    assert outcome.exit_code == 0, listener.failures
    assert outcome.summary["members"] == [0, 1, 3, 4]
    assert "killed by SIGKILL" in outcome.summary["lost"]["2"]
    assert outcome.summary["rounds"] == 40
    assert outcome.summary["accuracy_merged"] > 0.5
    for uid in (0, 1, 3, 4):
        (told,) = generations(outcome, uid)
        assert (told["generation"], told["left"], told["members"]) == (1, [2], [0, 1, 3, 4])
        assert 3 <= told["round"] <= 7, "3 where its machine's word comes before the others have begun that round"
    assert any("generation 1: 4 of 5 nodes continue" in text for text in listener.notices)


@pytest.mark.slow
@pytest.mark.sampled(one=["rule"])
@pytest.mark.parametrize("rule", ["push_sum", "full"])
def test_those_who_wait_for_nobody_are_told_of_a_process_that_ended(tmp_path: Path, rule: str) -> None:
    """By its machine, at once: not by its silence."""
    outcome, listener = go_on(tmp_path, "Dies", rounds=200, sharing={"name": rule}, node={"schedule": "gossip_async"},
                              communication={"timeout_seconds": 300, "suspect_seconds": 100})  # fmt: skip
    assert outcome.exit_code == 0, listener.failures
    assert outcome.summary["members"] == [0, 1, 3, 4] and outcome.run_dir is not None
    for uid in (0, 1, 3, 4):
        (told,) = generations(outcome, uid)
        assert told["left"] == [2] and told["round"] < 200
    events = (outcome.run_dir / "nodes" / "000" / "events.jsonl").read_text().splitlines()
    (over,) = [json.loads(each) for each in events if "generation_over" in each]
    *_, last = (outcome.run_dir / "nodes" / "002" / "metrics.jsonl").read_text().splitlines()
    assert over["time"] - json.loads(last)["time"] < SILENCE_SECONDS, "from its machine, or from who had it from there"


@pytest.mark.slow
def test_a_node_whose_port_was_taken_meanwhile_does_not_end_the_run(tmp_path: Path) -> None:
    """Node 2 dies, somebody takes its port, and it is started again in vain."""
    first = free_ports(10)
    with socket.socket() as taken:
        taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)

        class Thief(Listener):
            def notice(self, text: str) -> None:
                super().notice(text)
                if "is started again" in text:
                    taken.bind(("127.0.0.1", first + 4))
                    taken.listen()

        listener = Thief(tmp_path / "pid")
        outcome = run(
            tmp_path, listener, node={"rounds": 30, "evaluate_every": 10, "missing": "regroup", "restarts": 1},
            graph={"name": "complete", "nodes": 5}, mapping={"nodes_per_machine": 5, "base_port": first},
            training={**experiment()["training"], "name": "tests.launch.faults:Dies"}, communication=COMMUNICATION,
        )  # fmt: skip
    assert outcome.exit_code == 0, listener.failures
    assert "cannot listen on" in outcome.summary["lost"]["2"] and outcome.summary["rounds"] == 30


@pytest.mark.slow
def test_a_node_that_raises_is_left_behind(tmp_path: Path) -> None:
    outcome, _ = go_on(tmp_path, "Raises")
    assert outcome.exit_code == 0
    assert "a bug in my model" in outcome.summary["lost"]["2"]


@pytest.mark.parametrize("way", ["auto", "collective"])
@pytest.mark.slow
def test_a_node_that_is_started_again_joins_the_next_generation(tmp_path: Path, way: str) -> None:
    outcome, listener = go_on(tmp_path, "DiesOnce", rounds=150, node={"restarts": 1}, communication={"name": way},
                              keys={"pid_file": str(tmp_path / "pid")})  # fmt: skip
    assert outcome.exit_code == 0, listener.failures
    assert outcome.summary["members"] == [0, 1, 2, 3, 4]
    assert outcome.summary["restarts"] == {"2": 1}
    assert outcome.summary["lost"] == {}
    assert outcome.summary["nodes"]["2"]["accuracy"] == pytest.approx(outcome.summary["accuracy_mean"], abs=0.05)
    assert generations(outcome, 2)[0]["joined"] == [2]


@pytest.mark.slow
def test_a_node_that_freezes_is_left_behind_and_comes_back(tmp_path: Path) -> None:
    outcome, listener = go_on(tmp_path, "Freezes", rounds=250, keys={"pid_file": str(tmp_path / "pid")},
                              communication=FREEZES)  # fmt: skip
    assert outcome.exit_code == 0, listener.failures
    assert outcome.summary["members"] == [0, 1, 2, 3, 4]
    assert [told["left"] for told in generations(outcome, 0)] == [[2], []]
    assert outcome.run_dir is not None
    events = (outcome.run_dir / "nodes" / "002" / "events.jsonl").read_text()
    assert '"outside"' in events


@pytest.mark.slow
@pytest.mark.slow
def test_too_few_end_the_run_and_say_what_it_takes(tmp_path: Path) -> None:
    outcome, _ = go_on(tmp_path, "Dies", nodes=3, node={"min_nodes": 3}, communication={"start_timeout_seconds": 10})
    assert outcome.exit_code == 8
    assert outcome.failure is not None and outcome.failure.uid == 2
    assert outcome.run_dir is not None
    assert "needs 3 of 3 nodes (node.min_nodes)" in (outcome.run_dir / "nodes" / "000" / "log.txt").read_text()


@pytest.mark.parametrize("way", ["auto", "collective"])
@pytest.mark.parametrize("when", ["the others continue", "is started again", "generation 1", "generation 2"])
@pytest.mark.slow
def test_a_stop_costs_nobody_what_the_others_have_wherever_a_node_on_its_way_back_is(
    tmp_path: Path, when: str, way: str
) -> None:
    outcome, listener = go_on(
        tmp_path, "DiesOnce", rounds=100_000, node={"restarts": 1}, communication={"name": way},
        keys={"pid_file": str(tmp_path / "pid")}, listener=Stopper(tmp_path / "pid", when),
    )  # fmt: skip
    assert (outcome.exit_code, outcome.summary["status"]) == (130, "interrupted"), listener.failures
    assert outcome.failure is None
    assert outcome.run_dir is not None and (outcome.run_dir / "summary.json").exists()
    assert outcome.summary["accuracy_merged"] is not None
    finished = {uid for uid in ("0", "1", "3", "4") if outcome.summary["nodes"][uid]["rounds"] >= 3}
    assert finished == {"0", "1", "3", "4"}


@pytest.mark.slow
def test_a_stop_while_a_node_on_its_way_back_never_gets_ready(tmp_path: Path) -> None:
    """It hangs where it loads its data; the others do not wait for it."""
    outcome, listener = go_on(
        tmp_path, "HangsAfterRestart", rounds=100_000, node={"restarts": 1}, keys={"pid_file": str(tmp_path / "pid")},
        listener=Stopper(tmp_path / "pid", "generation 1"),
    )  # fmt: skip
    assert (outcome.exit_code, outcome.summary["status"]) == (130, "interrupted"), listener.failures
    assert outcome.summary["accuracy_merged"] is not None
    assert outcome.summary["members"] == [0, 1, 3, 4]


@pytest.mark.slow
def test_a_run_that_is_over_does_not_wait_for_a_node_on_its_way_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not for as long as a neighbor would be waited for, which is longer than this test may last."""
    monkeypatch.setattr("decentnode.launch.supervising.deadlines.REJOIN_SECONDS", 0.5)
    outcome, listener = go_on(
        tmp_path, "HangsAfterRestart", node={"restarts": 1}, keys={"pid_file": str(tmp_path / "pid")},
        communication={"timeout_seconds": 600},
    )  # fmt: skip
    assert (outcome.exit_code, outcome.summary["status"]) == (0, "finished"), listener.failures
    assert outcome.summary["members"] == [0, 1, 3, 4] and outcome.summary["rounds"] == 40
    assert outcome.summary["restarts"] == {"2": 1}
    told = outcome.summary["lost"]["2"]
    assert told.startswith("node 2 was killed by SIGKILL") and told in listener.notices
    assert told.endswith("; started again, it did not rejoin before the run ended")


@pytest.mark.slow
def test_a_run_that_is_over_does_not_wait_for_a_node_that_it_left_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Node 2 froze, the others went on without it, and nobody wakes it."""
    monkeypatch.setattr("decentnode.launch.supervising.deadlines.REJOIN_SECONDS", 0.5)
    listener = Listener(tmp_path / "elsewhere")
    outcome, _ = go_on(
        tmp_path, "Freezes", keys={"pid_file": str(tmp_path / "pid")}, listener=listener,
        communication={"timeout_seconds": 600},
    )  # fmt: skip
    assert outcome.exit_code == 0, listener.failures
    assert outcome.summary["members"] == [0, 1, 3, 4]
    assert outcome.summary["lost"] == {"2": "node 2: left behind, it did not rejoin before the run ended"}


STEPS = [
    (1, "Suspect", "SIGKILL"), (0, "Prepare", "SIGSTOP"), (1, "Promise", "SIGKILL"), (0, "Commit", "SIGKILL"),
    (1, "Ready", "SIGSTOP"), (0, "Go", "SIGKILL"),
]
MORE = [(1, "Suspect", "SIGSTOP"), (0, "Prepare", "SIGKILL"), (3, "Promise", "SIGSTOP"), (0, "Commit", "SIGSTOP"),
        (3, "Ready", "SIGKILL"), (0, "Go", "SIGSTOP")]  # fmt: skip


@pytest.mark.parametrize(
    ("victim", "word", "fault"),
    [*STEPS[2:4], *(pytest.param(*step, marks=pytest.mark.skipif(not scale(0, 1), reason="--stress"))
                    for step in [*STEPS[:2], *STEPS[4:], *MORE])],
)  # fmt: skip
@pytest.mark.slow
def test_a_second_node_is_hit_at_a_step_of_the_agreement(
    tmp_path: Path, victim: int, word: str, fault: str
) -> None:
    """Over gloo: node 2 dies, and another one dies or freezes just after saying its word; three of five go on."""
    keys = {"victim": f"{victim} {word} {fault}", "received_marker": str(tmp_path / "received")}
    communication = {"name": "collective", "timeout_seconds": 8, **FREEZES}
    outcome, listener = go_on(tmp_path, "FaultOnMessage", communication=communication, keys=keys)
    assert outcome.exit_code == 0, listener.failures
    left = sorted({0, 1, 3, 4} - {victim})
    if word != "Suspect":  # the process of node 2 is missed at once, by the supervisor's word
        assert outcome.summary["members"] == left, listener.notices
    assert outcome.summary["rounds"] == 40
    for uid in left:
        models = generations(outcome, uid)
        assert models[-1]["members"] == generations(outcome, left[0])[-1]["members"]


STAR = {"graph": {"name": "star", "nodes": 5}, "sharing": {"name": "fedavg", "clients": 2}}


@pytest.mark.slow
def test_clients_wait_for_a_server_that_is_killed_and_comes_back_from_its_checkpoint(tmp_path: Path) -> None:
    outcome, listener = go_on(
        tmp_path, "ServerDiesOnce", rounds=12, node={"restarts": 1, "checkpoint": {"every": 2}, "evaluate_every": 4},
        keys={"pid_file": str(tmp_path / "pid")}, **STAR,
    )  # fmt: skip
    assert outcome.exit_code == 0, listener.failures
    assert outcome.summary["rounds"] == 12 and outcome.summary["restarts"] == {"0": 1}
    told = generations(outcome, 1)
    assert told and all(0 in each["members"] for each in told), "no client goes on without it"
    assert outcome.run_dir is not None
    text = (outcome.run_dir / "nodes" / "000" / "log.txt").read_text()
    assert re.search(r"continues from its own checkpoint after round [24]\b", text)
    assert outcome.summary["nodes"]["0"]["accuracy"] == outcome.summary["accuracy_merged"]


@pytest.mark.slow
def test_clients_wait_for_a_server_for_so_long_and_say_for_whom(tmp_path: Path) -> None:
    outcome, listener = go_on(
        tmp_path, "ServerDiesOnce", rounds=12, keys={"pid_file": str(tmp_path / "pid")},
        communication={"timeout_seconds": 3, "start_timeout_seconds": 12}, **STAR,
    )  # fmt: skip
    assert outcome.exit_code != 0
    assert [each.uid for each in listener.failures if not each.follower] == [0], listener.failures
    assert outcome.run_dir is not None
    told = (outcome.run_dir / "nodes" / "001" / "log.txt").read_text()
    assert "no round can begin without the server node 0" in told, told
