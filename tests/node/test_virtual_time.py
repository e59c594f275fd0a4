"""Whole nodes on virtual time: what they record is a function of the experiment and the clock alone, to the byte."""

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
NOT_OF_THE_CLOCK = {"pid"}
"""Fields of status.json that tell of the process, not of the run. Metrics and events have none."""


class Run:
    """A run of several nodes in this process whose local steps take 1/4 s, 1/2 s, ... of virtual time."""

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
            node.training.local_update = self._timed(node)  # type: ignore[method-assign]

    @staticmethod
    def _timed(node: Node) -> Callable[..., Any]:
        update = node.training.local_update

        def timed(*arguments: Any) -> Any:
            clock.sleep(0.25 * 2**node.uid)
            return update(*arguments)

        return timed

    def to_its_end(self) -> None:
        """The last node is lost on the way, and a payload of another is spoiled before."""
        left: dict[int, Iterator[None]] = {node.uid: node.steps() for node in self.nodes}
        lost = False
        for _ in range(1000):
            for uid, steps in list(left.items()):
                if next(steps, self) is self:
                    del left[uid]
                    self.events[uid]("finished", None, f"{self.nodes[uid].round} rounds")
            self._spoil()
            if not lost and self.nodes[-1].round == 4:
                lost = True
                del left[NODES - 1]
                hub_of(self.nodes[0]).lose(NODES - 1)
            for node in self.nodes:
                found = snapshot(node)
                self.statuses.append(encode({key: found[key] for key in found.keys() - NOT_OF_THE_CLOCK}))
            if not left:
                break
        assert not left and lost
        for reporter, events in zip(self.reporters, self.events, strict=True):
            reporter.close()
            events.close()

    def _spoil(self) -> None:
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
        made.to_its_end()
        assert clock.wall() > BEGAN
    return made


@pytest.mark.sampled
@pytest.mark.parametrize("schedule", ["sequential", "overlapped"])
@pytest.mark.parametrize("sharing", ["{name: full}", "{name: topk, fraction: 0.2}"])
def test_two_runs_leave_the_same_bytes_timestamps_included(tmp_path: Path, schedule: str, sharing: str) -> None:
    one, two = (run(tmp_path / name, schedule, sharing) for name in ("one", "two"))
    assert one.records() == two.records()
    assert one.statuses == two.statuses
    assert one.sent == two.sent
    assert [node.figures() for node in one.nodes] == [node.figures() for node in two.nodes]
    models = [torch.stack([node.training.model.parameters for node in each.nodes]) for each in (one, two)]
    assert torch.equal(*models)
    kinds = {each["kind"] for log in one.events for each in read(log._writer.path)}
    assert kinds == {"finished", *(["malformed_payload"] if "topk" in sharing else [])}
    assert {each["kind"] for each in metrics(one, 0)} == {"round", "evaluation", "generation"}


def metrics(run: Run, uid: int) -> list[dict[str, Any]]:
    return list(read(run.folder / f"metrics{uid}.jsonl"))


def test_recorded_times_are_those_of_the_virtual_clock(tmp_path: Path) -> None:
    made = run(tmp_path / "run", "sequential", "{name: full}")
    per_round = sum(0.25 * 2**uid for uid in range(NODES))
    for uid in range(NODES):
        found = metrics(made, uid)
        rounds = [each for each in found if each["kind"] == "round"]
        assert [each["train_seconds"] for each in rounds] == [0.25 * 2**uid] * len(rounds)
        assert all(each["wait_seconds"] == each["mix_seconds"] == each["send_seconds"] == 0 for each in rounds)
        # Nodes are stepped in turn: between its own begin and end of a round, every node has computed once.
        assert (rounds[0]["seconds"], rounds[0]["time"]) == (per_round, BEGAN + per_round + 0.25 * (2**uid - 1))
        assert all(BEGAN <= each["time"] < BEGAN + per_round * (ROUNDS + 1) for each in found)


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
