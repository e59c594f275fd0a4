"""Randomized simulation tests: a seed draws an experiment (rule, graph, codec, reaction to missing nodes) and its
faults. Invariants are checked during the run and at its end."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch

from decentnode.build import schemas_of
from decentnode.communication.parts import Schema
from decentnode.communication.zeromq.config import ZeroMQConfig
from decentnode.config.component import load_class
from decentnode.errors import AssemblyError, Interrupted, PeerLost
from decentnode.faults import AnyFault, Break, Cut, Faults, HalfOpen, Kill, Link, Pause, Restart, Slow
from decentnode.graph import GRAPHS
from decentnode.graph.topology import Topology
from decentnode.node.config import NodeConfig
from decentnode.node.node import Node, NodeParts
from decentnode.node.rounds import Record
from decentnode.sharing import SHARINGS
from decentnode.sharing.base import Sharing
from decentnode.sharing.compressed import make_sharing
from decentnode.simulate.world.history import History, must
from decentnode.simulate.world.linear import check_mean, check_product
from decentnode.simulate.world.quadratic import Quadratic
from decentnode.simulate.world.transport import Simulated
from decentnode.simulate.world.world import Process, Setting, World
from decentnode.wire.generation import Limits

ROUNDS, LR, FAULTY_SECONDS = 8, 0.1, 6.0
TIMEOUT_SECONDS, SUSPECT_SECONDS, START_SECONDS = 20.0, 3.0, 60.0
# time-out and rounds of worlds that continue without a dead node, so that many payloads for it are queued
SHORT_SECONDS, MANY_ROUNDS = 0.5, 20
SETTLE_SECONDS = 600.0
"""A run must end within this much virtual time after the last fault; far longer than any run needs."""
RULES: dict[str, dict[str, Any]] = {
    "full": {}, "full+int8": {"compression": {"name": "int8"}}, "full+float16": {"compression": {"name": "float16"}},
    "full+zstd": {"compression": {"name": "zstd"}}, "ac": {}, "push_sum": {}, "topk": {"fraction": 0.3},
    "local_sgd": {"every": 2}, "d2": {}, "gradient_tracking": {}, "choco": {"step_size": 0.3},
    "choco+int8": {"step_size": 0.3, "compression": {"name": "int8"}}, "deepsqueeze": {"step_size": 0.2},
    "powergossip": {},
}  # fmt: skip
KEEP_THE_MEAN = ("full", "ac", "local_sgd", "d2", "choco", "choco+int8", "deepsqueeze", "powergossip")
STATIC = ("ring", "complete")
SYMMETRIC = (*STATIC, "regular", "random_matching")
ANY = (*SYMMETRIC, "exponential")
AMBUSHES = ("preparing", "committing", "promised", "committed", "suspecting")
"""Stages of the membership protocol at which a process may be killed when it enters them."""


@dataclass(frozen=True)
class Drawn:
    """The world that a seed draws."""

    seed: int
    rule: str
    graph: str
    nodes: int
    missing: str
    schedule: str
    elements: int
    faults: Faults
    checksum: str = "xxh3"
    impatient: bool = False
    """Whether rounds continue after a short time-out without a node that is dead."""
    ambush: str = ""
    """The stage of the membership protocol at which a process is killed when it enters it; "" for none."""
    sides: bool = False
    """With `regroup`: whether all sides of a partitioned network continue, and merge their models once it is
    restored."""

    def __str__(self) -> str:
        plan = ", ".join(fault.model_dump_json(exclude_none=True) for fault in self.faults.plan)
        return (f"seed {self.seed}: {self.rule} on {self.graph} of {self.nodes}, missing: {self.missing}, "
                f"{self.schedule}{f', killed when {self.ambush}' if self.ambush else ''}; {plan}")  # fmt: skip


def draw(seed: int) -> Drawn:
    """Returns the world of this seed, which is always the same."""
    of = random.Random(f"{seed} world")
    rule = of.choice(list(RULES))
    needs = make_rule(rule)().requirements
    graphs = STATIC if rule in ("d2", "choco", "choco+int8") else SYMMETRIC if rule == "powergossip" else ANY
    missing = of.choice(("fail", "regroup", "regroup", "regroup", "return_weight"))
    if missing == "return_weight" and not needs.tolerates_missing:
        missing = "regroup"
    nodes = of.choice((4, 6)) if missing != "regroup" else of.choice((3, 4, 5, 6, 8))
    graph = of.choice([each for each in graphs if nodes % 2 == 0 or each not in ("random_matching", "regular")])
    if graph == "regular" and nodes < 4:
        graph = "ring"
    long = of.random() < 0.15
    if long and of.random() < 0.7:  # models sent without a copy, to receivers that the sender never waits for
        rule, graph = of.choice(("full", "ac")), of.choice(("exponential", "ring"))
        needs = make_rule(rule)().requirements
    schedule = of.choice(("sequential", "overlapped")) if not needs.sequential else "sequential"
    link = Link.model_validate({
        "latency_seconds": of.choice((0.001, 0.05)), "jitter_seconds": of.choice((0.0, 0.05)),
        "queue_messages": of.choice((3, 50)), "bytes_per_second": of.choice((2e5, 2e6)) if long else None,
        **{each: of.choice((0.0, 0.0, 0.05)) for each in ("loss", "duplication", "reordering", "damage")},
    })  # fmt: skip
    plan: tuple[AnyFault, ...] = tuple(_plan(of, nodes, missing))
    impatient = missing == "return_weight" and not long and of.random() < 0.5
    if impatient:
        link = Link(latency_seconds=0.001, jitter_seconds=0.01, queue_messages=3)
        plan = (Kill(nodes=(of.randrange(nodes),), at_round=2),)
    checksum = "none" if not link.damage and of.random() < 0.5 else "xxh3"
    ambush = of.choice(AMBUSHES) if missing == "regroup" and of.random() < 0.5 else ""
    if ambush:  # a suspicion has to start the agreement
        at = 1 + 3 * of.random()
        plan = (*plan, Pause(nodes=(of.randrange(nodes),), at_seconds=at, seconds=SUSPECT_SECONDS + 2))
    return Drawn(
        seed, rule, graph, nodes, missing, schedule, 6000 if long else 24,
        Faults(links=link, lossy_seconds=FAULTY_SECONDS, plan=plan), checksum, impatient, ambush,
    )


def _plan(of: random.Random, nodes: int, missing: str) -> list[AnyFault]:
    """Returns a few faults within FAULTY_SECONDS, of which the kills leave a majority alive (with `regroup`) or kill at
    most one node."""
    found: list[AnyFault] = []
    killed: list[int] = []
    most = (nodes - 1) // 2 if missing == "regroup" else 1
    for _ in range(of.randrange(5)):
        at, uid = of.random() * FAULTY_SECONDS, of.randrange(nodes)
        other = (uid + 1 + of.randrange(nodes - 1)) % nodes
        kind = of.choice(("kill", "kill", "pause", "slow", "cut", "break", "half_open"))
        if kind == "kill" and len(killed) < most and uid not in killed:
            killed.append(uid)
            found.append(Kill(nodes=(uid,), at_round=1 + of.randrange(ROUNDS - 2)))
            if missing == "regroup" and of.random() < 0.4:
                found.append(Restart(nodes=(uid,), at_seconds=FAULTY_SECONDS + of.random() * 20))
        elif kind == "pause":
            found.append(Pause(nodes=(uid,), at_seconds=at, seconds=of.choice((0.5, 5.0, 8.0))))
        elif kind == "slow":
            found.append(Slow(nodes=(uid,), at_seconds=at, factor=of.choice((3.0, 10.0)), seconds=2.0))
        elif kind == "cut":
            sides = ((uid,), tuple(each for each in range(nodes) if each != uid)) if of.random() < 0.5 else (
                tuple(range(nodes // 2)), tuple(range(nodes // 2, nodes)))  # fmt: skip
            found.append(Cut(sides=sides, at_seconds=at, seconds=of.choice((0.5, 4.0, 8.0))))
        elif kind in ("break", "half_open"):
            fault = Break if kind == "break" else HalfOpen
            found.append(fault(source=uid, to=other, plane=of.choice(("control", "bulk")), at_seconds=at))
    return found


def make_rule(name: str) -> Callable[[], Sharing]:
    """Returns a function that makes the rule `name` of RULES."""
    base = name.partition("+")[0]
    config = load_class(base, SHARINGS, "sharing").Config.model_validate({"name": base, **RULES[name]})
    return lambda: make_sharing(config)


def make_graph(drawn: Drawn) -> Topology:
    """Returns the graph of a drawn world."""
    found = load_class(drawn.graph, GRAPHS, "graph")
    options = {"degree": 3} if drawn.graph == "regular" else {}
    config = found.Config.model_validate({"name": drawn.graph, "nodes": drawn.nodes, **options})
    graph: Topology = found(config, seed=drawn.seed, weights=None)
    return graph


@dataclass
class Run:
    """The run of a drawn world; `survive` executes it."""

    drawn: Drawn
    history: History = field(default_factory=History)

    def __post_init__(self) -> None:
        drawn = self.drawn
        self.graph = make_graph(drawn)
        self.trainings: dict[int, Quadratic] = {}
        self.rounds = MANY_ROUNDS if drawn.impatient else ROUNDS
        self.config = NodeConfig.model_validate({
            "rounds": self.rounds, "evaluate_every": 0 if drawn.impatient else 4, "missing": drawn.missing,
            "schedule": drawn.schedule, "on_partition": "both" if drawn.sides else "majority",
        })  # fmt: skip
        self.limits = None
        if drawn.missing == "regroup":
            least = 1 if drawn.sides else drawn.nodes // 2 + 1
            self.limits = Limits(SUSPECT_SECONDS, TIMEOUT_SECONDS, least, ROUNDS, merges=drawn.sides)
        self.communication = ZeroMQConfig.model_validate({
            "name": "zeromq", "checksum": drawn.checksum,
            "timeout_seconds": SHORT_SECONDS if drawn.impatient else TIMEOUT_SECONDS,
            "suspect_seconds": SUSPECT_SECONDS, "start_timeout_seconds": START_SECONDS,
        })  # fmt: skip
        pace = 0.05 if drawn.impatient else random.Random(f"{drawn.seed} pace").choice((0.05, 0.3, 1.0))
        self.world = World(Setting(
            num_nodes=drawn.nodes, config=self.communication, limits=self.limits, faults=drawn.faults, seed=drawn.seed,
            compute_seconds=lambda uid, round: pace * (1 + (7 * uid + 3 * round) % 5 / 10), starts_within_seconds=0.5,
        ), self._make_node, self.history)  # fmt: skip
        self.history.watch(self.world)
        self.history.struck = self._strike
        self._ambushed = not drawn.ambush
        self.killed = {uid for fault in drawn.faults.plan if isinstance(fault, Kill) for uid in fault.nodes}

    def _make_node(self, uid: int, make_communication: Callable[[tuple[Schema, ...]], Simulated]) -> Node:
        return self.make_node(uid, make_communication, lambda each: self.history.recorded(uid, each))

    def make_node(
        self, uid: int, make_communication: Callable[[tuple[Schema, ...]], Simulated], record: Record = lambda _: None
    ) -> Node:
        """Returns a node of the drawn world."""
        training = self.trainings[uid] = Quadratic(uid, self.drawn.elements, LR)
        new = make_rule(self.drawn.rule)

        def make_rules() -> Sharing:
            made = new()
            made.set_parameter_shapes(training.model.shapes)
            return made

        rules = make_rules()
        communication = make_communication(schemas_of(rules, training.model, schedule=self.config.schedule))
        parts = NodeParts(self.graph, training, rules, communication, make_rules)
        return Node(uid, self.config, parts, seed=self.drawn.seed, record=record)

    def _strike(self, process: Process, stage: str) -> None:
        """Kills a process that enters the stage of the ambush, once, provided that a majority stays alive."""
        few = len(self.killed | {process.uid}) <= (self.drawn.nodes - 1) // 2
        if stage == self.drawn.ambush and not self._ambushed and few:
            self._ambushed = True
            self.killed.add(process.uid)
            self.history.events[f"killed when {stage}"] += 1
            self.world.heap.after(0.0, process.kill)

    def survive(self) -> Counter[str]:
        """Runs the world to its end. Returns how often each event and branch occurred. Raises Violation, and errors of
        the code under test."""
        over = self.world.run(FAULTY_SECONDS + SETTLE_SECONDS)
        lives = self.world.processes.values()
        waits = {p.uid: (type(p.wait).__name__, p.node.doing, p.node.round) for p in lives if p.alive}
        must(over, f"the run does not come to an end: {waits}")
        self._check_ends()
        rounds, sent, rule = self.history.rounds, self.history.sent, self.drawn.rule
        events = self.history.events + self.world.network.happened + self.world.happened
        if rule == "full":
            targets = {uid: training.target for uid, training in self.trainings.items()}
            overlapped = self.drawn.schedule == "overlapped"
            events["replayed"] += check_product(rounds, sent, targets, LR, overlapped=overlapped)
        if rule in KEEP_THE_MEAN and self.drawn.schedule == "sequential":
            events["mean kept"] += check_mean(rounds, sent)
        return events

    def _check_ends(self) -> None:
        """Checks that the processes that are alive reached the end of the run, or failed for an expected reason."""
        drawn = self.drawn
        ended = [process for process in self.world.processes.values() if not process.dead]
        failed = {process.uid: process.error for process in ended if process.error is not None}
        for uid, error in failed.items():
            must(isinstance(error, PeerLost | AssemblyError | Interrupted), f"node {uid} fails: {error!r}")
        well = [process for process in ended if process.error is None]
        must(all(process.node.round == self.rounds for process in well), "a node ends early")
        if drawn.missing == "regroup":
            # nodes that finish leave, and the others may then be too few to continue
            must(len(well) > 0 or self._lost_all_models(), f"nobody comes to the end: {failed}")
        elif not self.killed:
            must(not failed, f"nodes fail although everybody lives: {failed}")
        else:
            if drawn.impatient:  # only the closing evaluation, which needs all nodes, may fail
                must(all(process.node.round == self.rounds for process in ended), "rounds do not go on without a node")
            must(all(isinstance(error, PeerLost) for error in failed.values()), f"nodes fail otherwise: {failed}")
        self._check_rounds(well)
        for process in well:
            must(bool(torch.isfinite(process.node.training.model.parameters).all()), f"node {process.uid} diverges")

    def _check_rounds(self, well: Iterable[Process]) -> None:
        """Checks that each node that was a member throughout made every round once, whichever others came and went. If
        sides of a partition merged, it may have skipped the rounds that are already part of the merged model."""
        came = {uid for generation in self.history.generations.values() for uid in generation.fresh}
        for uid in sorted({process.uid for process in well} - came):
            made = self.trainings[uid].made
            whole = self.drawn.sides or len(made) == self.rounds
            must(whole and made == sorted({*made}), f"node {uid} makes rounds {made}")

    def _lost_all_models(self) -> bool:
        return 2 * len(self.killed) >= self.drawn.nodes


def survive(seed: int) -> Counter[str]:
    """Runs the world of this seed. Returns how often each event and branch occurred. Raises Violation, and errors of
    the code under test."""
    return Run(draw(seed)).survive()
