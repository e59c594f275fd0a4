"""From an experiment and the records of its run to the replay."""

from __future__ import annotations

from collections.abc import Callable

from decentnode.build import build, limits_of
from decentnode.communication.parts import Schema
from decentnode.communication.zeromq.config import ZeroMQConfig
from decentnode.experiment import Experiment
from decentnode.node.node import Node
from decentnode.simulate.world.records import Lives
from decentnode.simulate.world.replay import Outcome, ReplayWorld, setting_of
from decentnode.simulate.world.transport import Simulated

PLAIN = ZeroMQConfig.model_validate({"name": "zeromq"})


def run_again(experiment: Experiment, lives: Lives) -> tuple[ReplayWorld, Outcome]:
    """Repeat a run on the CPU from what its nodes recorded. Blocking. Raises Difference, and what building nodes
    raises."""
    config = experiment.communication
    limits = limits_of(experiment) if experiment.node.missing == "regroup" else None

    def make_node(uid: int, make_communication: Callable[[tuple[Schema, ...]], Simulated]) -> Node:
        return build(experiment, uid, make_communication, device="cpu")

    kept = config if isinstance(config, ZeroMQConfig) else PLAIN
    world = ReplayWorld(setting_of(experiment.make_graph().num_nodes, kept, limits), make_node, lives)
    return world, world.replay()
