"""A run in one process whose nodes write checkpoints and can be resumed from them."""

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

SPEED_DEPENDENT = ("seconds", "overlap", "waited", "control", "checkpoint")
"""Parts of the names of figures that depend on the speed of the machine."""


class Fleet:
    """The nodes of a run in one process. They have all kinds of state: dropout, running statistics, a learning rate
    schedule, data sets of different sizes."""

    def __init__(
        self, folder: Path, rule: Callable[[], Sharing] = RULES["full"], *, fragments: bool = False,
        training: Mapping[str, Any] = TRAINING, **node: Any,
    ) -> None:
        """fragments: exchange two parts of the model in rounds of their own, and keep the rest local. node: keys of the
        config section `node`."""
        self.fragments, self.training = fragments, training
        defaults = {"rounds": ROUNDS, "evaluate_every": 4, "checkpoint": {"every": 3}}
        self.config = NodeConfig.model_validate({**defaults, **node})
        self.folder, self.rule = folder, rule
        self.graph: Topology = suitable_graph(rule(), NODES)
        self.hub = Hub(NODES)
        self.hub.run_id = b"\x07" * 8
        self.records: list[dict[str, Any]] = []
        self.nodes = [self.make(uid) for uid in range(NODES)]

    def make(self, uid: int) -> Node:
        training = small.make(uid, small.batch_norm_net, small.make_samples(20 + uid, uid), **self.training)

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

    def records_of_kind(self, kind: str) -> list[dict[str, Any]]:
        return [record for record in self.records if record["kind"] == kind]

    def states(self, besides: str = "seconds") -> list[Any]:
        """Returns the whole state of each node, without figures that depend on the machine's speed and those with
        `besides` in their names."""
        states = []
        for node in self.nodes:
            figures = {key: value for key, value in node.figures().items()
                       if not any(word in key for word in (*SPEED_DEPENDENT, besides))}  # fmt: skip
            states.append([module_state(node.training.model.module), node.training.state_dict(),
                           node.sharing_state(), figures])  # fmt: skip
        return states

    def records_after(self, round: int) -> list[dict[str, Any]]:
        """Returns what was recorded after so many rounds, without times."""
        kept = ("uid", "kind", "round", "loss", "lr", "accuracy", "accuracy_merged", "consensus_distance",
                "data_bytes_sent")  # fmt: skip
        later = [record for record in self.records if record["kind"] in ("round", "evaluation")
                 and record["round"] >= round + (record["kind"] == "evaluation")]  # fmt: skip
        return [{key: record[key] for key in kept if key in record} for record in later]


def remove_checkpoints_after(folder: Path, round: int) -> None:
    """Leaves the checkpoints of a run that was killed after so many rounds."""
    for place in folder.glob("0*"):
        if int(place.name.partition("-")[0]) > round:
            shutil.rmtree(place)


def check_resumed(straight: Fleet, resumed: Fleet, round: int, besides: str = "seconds") -> None:
    """The run was resumed after `round` rounds, and has the records and the final states of the uninterrupted run.
    besides: as in `Fleet.states`."""
    assert {record["round"] for record in resumed.records_of_kind("resumed")} == {round}
    assert resumed.records_after(round) == straight.records_after(round) and resumed.records_after(round)
    for uid, (expected, found) in enumerate(zip(straight.states(besides), resumed.states(besides), strict=True)):
        for part, one, other in zip(("model", "training", "rule", "figures"), expected, found, strict=True):
            assert states_equal(one, other), f"{part} of node {uid} differs"


def checkpoint_rounds(folder: Path) -> list[int]:
    """Returns after how many rounds the checkpoints in a folder were taken."""
    return sorted(int(place.name.partition("-")[0]) for place in folder.glob("0*"))
