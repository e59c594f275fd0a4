"""A run in one process that takes checkpoints and is resumed from them."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from decentnode.build import schemas_of, step_all
from decentnode.communication.inproc import Hub, Inproc
from decentnode.communication.parts import CommunicationConfig
from decentnode.graph.topology import Topology
from decentnode.node.checkpoints.manager import Checkpoints
from decentnode.node.checkpoints.resume_agreement import ResumeFrom
from decentnode.node.checkpoints.snapshot import module_state
from decentnode.node.config import NodeConfig
from decentnode.node.node import Node, NodeParts
from decentnode.sharing.base import Sharing
from decentnode.sharing.fragments import Fragment
from tests.checkpoint.test_state import states_equal
from tests.sharing.contract import RULES, suitable_graph
from tests.training import small

NODES, ROUNDS = 4, 7
TRAINING = {"local_steps": 2, "batch_size": 5, "optimizer": {"name": "adam", "lr": 0.01},
            "lr_schedule": {"name": "cosine", "T_max": 20, "every": "step", "warmup": 3}}  # fmt: skip

OF_THE_MACHINE = ("seconds", "overlap", "waited", "control", "checkpoint")
"""In names of figures that depend on its speed."""


class Fleet:
    """The nodes of a run in one process: dropout, statistics, a schedule of the learning rate, unequal data."""

    def __init__(
        self, folder: Path, rule: Callable[[], Sharing] = RULES["full"], *, fragments: bool = False,
        training: Mapping[str, Any] = TRAINING, **node: Any,
    ) -> None:
        """fragments: exchange two parts of the model in rounds of their own, and leave the rest to every node. node:
        keys of the section."""
        self.fragments, self.training = fragments, training
        every = {"rounds": ROUNDS, "evaluate_every": 4, "checkpoint": {"every": 3}}
        self.config = NodeConfig.model_validate({**every, **node})
        self.folder, self.rule = folder, rule
        self.graph: Topology = suitable_graph(rule(), NODES)
        self.hub = Hub(NODES)
        self.hub.run_id = b"\x07" * 8
        self.records: list[dict[str, Any]] = []
        self.nodes = [self.make(uid) for uid in range(NODES)]

    def make(self, uid: int) -> Node:
        training = small.make(uid, small.noisy, small.samples(20 + uid, uid), **self.training)

        def make_rule() -> Sharing:
            made = self.rule()
            made.set_machines([range(NODES // 2), range(NODES // 2, NODES)])
            made.set_parameter_shapes(training.model.shapes if not self.fragments else [(30,)])
            return made

        parts = (Fragment(0, 30, self.graph, 3, 1, 0), Fragment(30, 60, self.graph, 2, 0, 1)) if self.fragments else ()

        def make_rules() -> list[Sharing]:
            return [make_rule() for _ in parts or (None,)]

        rules = make_rules()
        schemas = schemas_of(rules, training.model, parts)
        transport = Inproc(CommunicationConfig(name="inproc"), uid=uid, hub=self.hub, schemas=schemas)
        made = NodeParts(self.graph, training, rules, transport, make_rules, parts)
        node = Node(uid, self.config, made, seed=1, record=lambda record: self.records.append({"uid": uid, **record}))
        node.checkpoints = Checkpoints(node, self.folder, {})
        return node

    def resume(self, *folders: Path, runs: Iterable[str] | None = None) -> Fleet:
        chosen = ResumeFrom(folders, None if runs is None else frozenset(runs))
        for node in self.nodes:
            node.checkpoints = Checkpoints(node, self.folder, {}, chosen)
        return self

    def run(self) -> Fleet:
        step_all(self.nodes)
        return self

    def of_kind(self, kind: str) -> list[dict[str, Any]]:
        return [record for record in self.records if record["kind"] == kind]

    def states(self, besides: str = "seconds") -> list[Any]:
        """All that a node is, but for what depends on the machine's speed, and figures named by `besides`."""
        found = []
        for node in self.nodes:
            figures = {key: value for key, value in node.figures().items()
                       if not any(word in key for word in (*OF_THE_MACHINE, besides))}  # fmt: skip
            found.append([module_state(node.training.model.module), node.training.state_dict(),
                          node.sharing_state(), figures])  # fmt: skip
        return found

    def later(self, round: int) -> list[dict[str, Any]]:
        """Records of what came after a round, without times."""
        kept = ("uid", "kind", "round", "loss", "lr", "accuracy", "accuracy_merged", "consensus_distance",
                "data_bytes_sent")  # fmt: skip
        found = [record for record in self.records if record["kind"] in ("round", "evaluation")]
        found = [each for each in found if each["round"] >= round + (each["kind"] == "evaluation")]
        return [{key: record[key] for key in kept if key in record} for record in found]


def whole_until(folder: Path, round: int) -> None:
    """Remove the checkpoints after a round, as a run leaves them that is killed then."""
    for place in folder.glob("0*"):
        if int(place.name.partition("-")[0]) > round:
            shutil.rmtree(place)


def check_resumed(straight: Fleet, resumed: Fleet, round: int, besides: str = "seconds") -> None:
    """besides: as in `Fleet.states`."""
    assert {record["round"] for record in resumed.of_kind("resumed")} == {round}
    assert resumed.later(round) == straight.later(round) and resumed.later(round)
    for uid, (one, other) in enumerate(zip(straight.states(besides), resumed.states(besides), strict=True)):
        for part, before, after in zip(("model", "training", "rule", "figures"), one, other, strict=True):
            assert states_equal(before, after), f"{part} of node {uid} differs"


def on_disk(folder: Path) -> list[int]:
    """After how many rounds the checkpoints in a folder were taken."""
    return sorted(int(place.name.partition("-")[0]) for place in folder.glob("0*"))
