"""Runs of whole nodes in a simulated world, and of equal nodes in process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from decentnode.build import schemas_of, step_all
from decentnode.communication.base import Communication
from decentnode.communication.inproc import Hub, Inproc
from decentnode.communication.parts import CommunicationConfig, Schema
from decentnode.communication.zeromq.config import ZeroMQConfig
from decentnode.config.component import load_class
from decentnode.graph.base import Graph
from decentnode.node.config import NodeConfig
from decentnode.node.node import Node, NodeParts
from decentnode.node.sampling import Sampling, sampler_schema
from decentnode.samplers import SAMPLERS
from decentnode.samplers.base import Sampler, Surroundings
from decentnode.sharing.base import Sharing
from decentnode.simulate.world.quadratic import Quadratic
from decentnode.simulate.world.transport_observer import TransportObserver
from decentnode.simulate.world.world import Setting, World

CONFIG = ZeroMQConfig(name="zeromq", checksum="xxh3")


class NodeRun:
    """Nodes that train on quadratics, and what they record. They run in a simulated world (`world`) or step by step in
    this process (`in_process`), so that tests can compare both."""

    def __init__(
        self, graph: Graph, rule: Callable[[], Sharing], *, elements: int = 40, buffers: int = 0, lr: float = 0.1,
        **node: Any,
    ) -> None:
        """node: keys of the section `node`; default: 6 rounds, an evaluation every 3."""
        self.graph, self.rule, self.elements, self.buffers, self.lr = graph, rule, elements, buffers, lr
        self.config = NodeConfig.model_validate({"rounds": 6, "evaluate_every": 3, **node})
        self.records: list[dict[str, Any]] = []
        """The metric records of all nodes, each with the key uid."""
        self.nodes: dict[int, Node] = {}
        """By uid; of a node that was started again, the last one."""

    def make(self, uid: int, make_communication: Callable[[tuple[Schema, ...]], Communication]) -> Node:
        training = Quadratic(uid, self.elements, self.lr, buffers=self.buffers)
        half = self.graph.num_nodes // 2

        def make_rules() -> Sharing:
            rule = self.rule()
            rule.set_machines([range(half), range(half, self.graph.num_nodes)])
            rule.set_parameter_shapes(training.model.shapes)
            return rule

        rules = make_rules()
        schemas, sampler = schemas_of(rules, training.model, schedule=self.config.schedule), self._sampler(uid)
        communication = make_communication(schemas if sampler is None else (*schemas, sampler_schema(sampler)))
        sampling = None if sampler is None else Sampling(sampler, communication, len(schemas))
        parts = NodeParts(self.graph, training, rules, communication, make_rules, sampling=sampling)
        node = self.nodes[uid] = Node(uid, self.config, parts, seed=1,
                                      record=lambda record: self.records.append({"uid": uid, **record}))  # fmt: skip
        return node

    def _sampler(self, uid: int) -> Sampler | None:
        config = self.config.sampler
        if config is None:
            return None
        sampler_class: type[Sampler] = load_class(config.name, SAMPLERS, "sampler")
        return sampler_class(config, Surroundings(uid, self.graph.num_nodes, self.graph.neighbors(uid, 0), 1))

    def in_process(self) -> NodeRun:
        """Runs the nodes to their end in this process; returns self."""
        hub = Hub(self.graph.num_nodes)
        config = CommunicationConfig(name="inproc")
        for uid in range(hub.num_nodes):
            self.make(uid, lambda schemas, uid=uid: Inproc(config, uid=uid, hub=hub, schemas=schemas))  # type: ignore[misc]
        step_all(list(self.nodes.values()))
        return self

    def world(self, observer: TransportObserver | None = None, **setting: Any) -> World:
        """Returns a world with these nodes, which has not run yet. setting: fields of `Setting`."""
        return World(Setting(**{"num_nodes": self.graph.num_nodes, "config": CONFIG, **setting}), self.make, observer)
