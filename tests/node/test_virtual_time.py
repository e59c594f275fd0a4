"""On a virtual clock, the records of whole nodes are the same bytes in every run."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from decentnode import clock, logs
from decentnode.build import build_in_process
from decentnode.communication.inproc import Inproc
from decentnode.experiment import load
from decentnode.launch.children.messages import ChildMessage
from decentnode.launch.files.node_files import Reporter
from decentnode.launch.files.node_status import snapshot
from decentnode.metrics.events import EventLog
from decentnode.metrics.reader import read
from decentnode.metrics.writer import encode
from decentnode.node.node import Node

QUICKSTART = Path(__file__).parents[2] / "configs" / "quickstart.yaml"
NODES, ROUNDS, BEGAN = 4, 6, 1_000_000_000.0
PROCESS_FIELDS = {"pid"}
"""Fields of status.json that depend on the process. Metrics and events have none."""


class Run:
    """A run in this process; the local steps of its nodes take 1/4 s, 1/2 s, ... of virtual time."""

    def __init__(self, folder: Path, schedule: str, sharing: str) -> None:
        self.folder = folder
        folder.mkdir()
        self.sent: list[ChildMessage] = []
        self.statuses: list[bytes] = []
        self.reporters = [Reporter(uid, folder / f"metrics{uid}.jsonl", self.sent.append, 1.0) for uid in range(NODES)]
        self.nodes = build_in_process(load(QUICKSTART, [
            f"graph={{name: ring, nodes: {NODES}}}", f"mapping.nodes_per_machine={NODES}", f"sharing={sharing}",
            f"node={{rounds: {ROUNDS}, schedule: {schedule}, evaluate_every: 2, missing: regroup}}",
            "training.local_steps=2",
        ]), lambda uid, record: self.reporters[uid].record(record))  # fmt: skip
        self.events = [EventLog(folder / f"events{node.uid}.jsonl", node.uid) for node in self.nodes]
        for node, log in zip(self.nodes, self.events, strict=True):
            node.communication.counters.on_event = log
            node.training.local_update = self._slow_update(node)  # type: ignore[method-assign]

    @staticmethod
    def _slow_update(node: Node) -> Callable[..., Any]:
        update = node.training.local_update

        def sleep_and_update(*arguments: Any) -> Any:
            clock.sleep(0.25 * 2**node.uid)
            return update(*arguments)

        return sleep_and_update

    def run_to_end(self) -> None:
        """Runs all nodes. A payload of node 0 is made malformed, and later the last node is lost."""
        running: dict[int, Iterator[None]] = {node.uid: node.steps() for node in self.nodes}
        lost = False
        for _ in range(1000):
            for uid, steps in list(running.items()):
                if next(steps, self) is self:
                    del running[uid]
                    self.events[uid]("finished", None, f"{self.nodes[uid].round} rounds")
            self._damage_payload()
            if not lost and self.nodes[-1].round == 4:
                lost = True
                del running[NODES - 1]
                hub_of(self.nodes[0]).lose(NODES - 1)
            for node in self.nodes:
                found = snapshot(node)
                self.statuses.append(encode({key: found[key] for key in found.keys() - PROCESS_FIELDS}))
            if not running:
                break
        assert not running and lost
        for reporter, events in zip(self.reporters, self.events, strict=True):
            reporter.close()
            events.close()

    def _damage_payload(self) -> None:
        for (round, _, source, destination), payload in hub_of(self.nodes[0]).payloads.items():
            if (round, source, destination) == (1, 0, 1) and "indices" in payload.tensors:
                payload.tensors["indices"].fill_(-1)

    def records(self) -> dict[str, bytes]:
        return {path.name: path.read_bytes() for path in sorted(self.folder.iterdir())}


def hub_of(node: Node) -> Any:
    assert isinstance(node.communication, Inproc)
    return node.communication.hub


def run(folder: Path, schedule: str, sharing: str) -> Run:
    with clock.use(clock.VirtualClock(wall=BEGAN)):
        made = Run(folder, schedule, sharing)
        made.run_to_end()
        assert clock.wall() > BEGAN
    return made


@pytest.mark.sampled
@pytest.mark.parametrize("schedule", ["sequential", "overlapped"])
@pytest.mark.parametrize("sharing", ["{name: full}", "{name: topk, fraction: 0.2}"])
def test_two_runs_write_the_same_bytes_including_timestamps(tmp_path: Path, schedule: str, sharing: str) -> None:
    one, two = (run(tmp_path / name, schedule, sharing) for name in ("one", "two"))
    assert one.records() == two.records()
    assert one.statuses == two.statuses
    assert one.sent == two.sent
    assert [node.figures() for node in one.nodes] == [node.figures() for node in two.nodes]
    models = [torch.stack([node.training.model.parameters for node in made.nodes]) for made in (one, two)]
    assert torch.equal(*models)
    kinds = {event["kind"] for log in one.events for event in read(log._writer.path)}
    assert kinds == {"finished", *(["malformed_payload"] if "topk" in sharing else [])}
    assert {record["kind"] for record in metrics(one, 0)} == {"round", "evaluation", "generation"}


def metrics(run: Run, uid: int) -> list[dict[str, Any]]:
    return list(read(run.folder / f"metrics{uid}.jsonl"))


def test_recorded_times_are_those_of_the_virtual_clock(tmp_path: Path) -> None:
    made = run(tmp_path / "run", "sequential", "{name: full}")
    per_round = sum(0.25 * 2**uid for uid in range(NODES))
    for uid in range(NODES):
        records = metrics(made, uid)
        rounds = [record for record in records if record["kind"] == "round"]
        assert [record["train_seconds"] for record in rounds] == [0.25 * 2**uid] * len(rounds)
        assert all(record["wait_seconds"] == record["mix_seconds"] == record["send_seconds"] == 0 for record in rounds)
        # Nodes are stepped in turn: between begin and end of a node's round, every node makes its local steps once
        assert (rounds[0]["seconds"], rounds[0]["time"]) == (per_round, BEGAN + per_round + 0.25 * (2**uid - 1))
        assert all(BEGAN <= record["time"] < BEGAN + per_round * (ROUNDS + 1) for record in records)


def test_log_lines_have_the_time_of_the_virtual_clock(tmp_path: Path) -> None:
    root = logging.getLogger("decentnode")
    before = root.handlers[:], root.level, root.propagate
    try:
        with clock.use(clock.VirtualClock(wall=BEGAN)):
            logs.set_up("node 000", tmp_path / "log.txt")
            clock.sleep(1.25)
            logging.getLogger("decentnode.node").warning("late")
    finally:
        for handler in root.handlers[:]:
            root.removeHandler(handler)
            handler.close()
        root.handlers[:], root.level, root.propagate = before
    line = (tmp_path / "log.txt").read_text()
    assert line == "2001-09-09T01:46:41.250Z WARNING node 000 decentnode.node: late\n"
