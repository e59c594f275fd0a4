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
"""A run must end within this much virtual time after FAULTY_SECONDS; far longer than any run needs."""
RULES: dict[str, dict[str, Any]] = {
    "full": {}, "full+int8": {"compression": {"name": "int8"}}, "full+float16": {"compression": {"name": "float16"}},
    "full+zstd": {"compression": {"name": "zstd"}}, "ac": {}, "push_sum": {}, "topk": {"fraction": 0.3},
    "local_sgd": {"every": 2}, "d2": {}, "gradient_tracking": {}, "choco": {"step_size": 0.3},
    "choco+int8": {"step_size": 0.3, "compression": {"name": "int8"}}, "deepsqueeze": {"step_size": 0.2},
    "powergossip": {},
}  # fmt: skip
MEAN_PRESERVING = ("full", "ac", "local_sgd", "d2", "choco", "choco+int8", "deepsqueeze", "powergossip")
STATIC = ("ring", "complete")
SYMMETRIC = (*STATIC, "regular", "random_matching")
ANY = (*SYMMETRIC, "exponential")
KILL_STAGES = ("preparing", "committing", "promised", "committed", "suspecting")
"""Stages of the membership protocol at which a process may be killed when it enters them."""


@dataclass(frozen=True)
class RandomWorld:
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
    has_short_timeout: bool = False
    """Whether rounds continue after a short time-out without a node that is dead."""
    kill_stage: str = ""
    """The stage of the membership protocol at which a process is killed when it enters it; "" for none."""
    sides: bool = False
    """With `regroup`: whether all sides of a partitioned network continue, and merge their models once it is
    restored."""

    def __str__(self) -> str:
        faults = ", ".join(fault.model_dump_json(exclude_none=True) for fault in self.faults.plan)
        return (f"seed {self.seed}: {self.rule} on {self.graph} of {self.nodes}, missing: {self.missing}, "
                f"{self.schedule}{f', killed when {self.kill_stage}' if self.kill_stage else ''}; "
                f"{faults}")  # fmt: skip


def draw_world(seed: int) -> RandomWorld:
    """Returns the world of this seed, which is always the same."""
    rng = random.Random(f"{seed} world")
    rule = rng.choice(list(RULES))
    requirements = make_rule(rule)().requirements
    graphs = STATIC if rule in ("d2", "choco", "choco+int8") else SYMMETRIC if rule == "powergossip" else ANY
    missing = rng.choice(("fail", "regroup", "regroup", "regroup", "return_weight"))
    if missing == "return_weight" and not requirements.tolerates_missing:
        missing = "regroup"
    nodes = rng.choice((4, 6)) if missing != "regroup" else rng.choice((3, 4, 5, 6, 8))
    graph = rng.choice([each for each in graphs if nodes % 2 == 0 or each not in ("random_matching", "regular")])
    if graph == "regular" and nodes < 4:
        graph = "ring"
    long = rng.random() < 0.15
    if long and rng.random() < 0.7:
        # models sent without a copy, to receivers that the sender never waits for
        rule, graph = rng.choice(("full", "ac")), rng.choice(("exponential", "ring"))
        requirements = make_rule(rule)().requirements
    schedule = rng.choice(("sequential", "overlapped")) if not requirements.sequential else "sequential"
    link = Link.model_validate({
        "latency_seconds": rng.choice((0.001, 0.05)), "jitter_seconds": rng.choice((0.0, 0.05)),
        "queue_messages": rng.choice((3, 50)), "bytes_per_second": rng.choice((2e5, 2e6)) if long else None,
        **{each: rng.choice((0.0, 0.0, 0.05)) for each in ("loss", "duplication", "reordering", "damage")},
    })  # fmt: skip
    plan: tuple[AnyFault, ...] = tuple(_plan(rng, nodes, missing))
    has_short_timeout = missing == "return_weight" and not long and rng.random() < 0.5
    if has_short_timeout:
        link = Link(latency_seconds=0.001, jitter_seconds=0.01, queue_messages=3)
        plan = (Kill(nodes=(rng.randrange(nodes),), at_round=2),)
    checksum = "none" if not link.damage and rng.random() < 0.5 else "xxh3"
    kill_stage = rng.choice(KILL_STAGES) if missing == "regroup" and rng.random() < 0.5 else ""
    if kill_stage:  # a suspicion has to start the agreement
        seconds = 1 + 3 * rng.random()
        plan = (*plan, Pause(nodes=(rng.randrange(nodes),), at_seconds=seconds, seconds=SUSPECT_SECONDS + 2))
    return RandomWorld(
        seed, rule, graph, nodes, missing, schedule, 6000 if long else 24,
        Faults(links=link, lossy_seconds=FAULTY_SECONDS, plan=plan), checksum, has_short_timeout, kill_stage,
    )


def _plan(rng: random.Random, nodes: int, missing: str) -> list[AnyFault]:
    """Returns a few faults, within FAULTY_SECONDS unless they are given by round; the kills leave a majority alive
    (with `regroup`) or kill at most one node. Restarts come up to 20 s later."""
    found: list[AnyFault] = []
    killed: list[int] = []
    max_killed = (nodes - 1) // 2 if missing == "regroup" else 1
    for _ in range(rng.randrange(5)):
        at, uid = rng.random() * FAULTY_SECONDS, rng.randrange(nodes)
        other = (uid + 1 + rng.randrange(nodes - 1)) % nodes
        kind = rng.choice(("kill", "kill", "pause", "slow", "cut", "break", "half_open"))
        if kind == "kill" and len(killed) < max_killed and uid not in killed:
            killed.append(uid)
            found.append(Kill(nodes=(uid,), at_round=1 + rng.randrange(ROUNDS - 2)))
            if missing == "regroup" and rng.random() < 0.4:
                found.append(Restart(nodes=(uid,), at_seconds=FAULTY_SECONDS + rng.random() * 20))
        elif kind == "pause":
            found.append(Pause(nodes=(uid,), at_seconds=at, seconds=rng.choice((0.5, 5.0, 8.0))))
        elif kind == "slow":
            found.append(Slow(nodes=(uid,), at_seconds=at, factor=rng.choice((3.0, 10.0)), seconds=2.0))
        elif kind == "cut":
            sides = ((uid,), tuple(each for each in range(nodes) if each != uid)) if rng.random() < 0.5 else (
                tuple(range(nodes // 2)), tuple(range(nodes // 2, nodes)))  # fmt: skip
            found.append(Cut(sides=sides, at_seconds=at, seconds=rng.choice((0.5, 4.0, 8.0))))
        elif kind in ("break", "half_open"):
            fault = Break if kind == "break" else HalfOpen
            found.append(fault(source=uid, to=other, plane=rng.choice(("control", "bulk")), at_seconds=at))
    return found


def make_rule(name: str) -> Callable[[], Sharing]:
    """Returns a function that makes the rule `name` of RULES."""
    base = name.partition("+")[0]
    config = load_class(base, SHARINGS, "sharing").Config.model_validate({"name": base, **RULES[name]})
    return lambda: make_sharing(config)


def make_graph(drawn: RandomWorld) -> Topology:
    """Returns the graph of a drawn world."""
    found = load_class(drawn.graph, GRAPHS, "graph")
    options = {"degree": 3} if drawn.graph == "regular" else {}
    config = found.Config.model_validate({"name": drawn.graph, "nodes": drawn.nodes, **options})
    graph: Topology = found(config, seed=drawn.seed, weights=None)
    return graph


@dataclass
class Run:
    """The run of a drawn world; `execute` runs it."""

    drawn_world: RandomWorld
    history: History = field(default_factory=History)

    def __post_init__(self) -> None:
        drawn = self.drawn_world
        self.graph = make_graph(drawn)
        self.trainings: dict[int, Quadratic] = {}
        self.rounds = MANY_ROUNDS if drawn.has_short_timeout else ROUNDS
        self.config = NodeConfig.model_validate({
            "rounds": self.rounds, "evaluate_every": 0 if drawn.has_short_timeout else 4, "missing": drawn.missing,
            "schedule": drawn.schedule, "on_partition": "both" if drawn.sides else "majority",
        })  # fmt: skip
        self.limits = None
        if drawn.missing == "regroup":
            least = 1 if drawn.sides else drawn.nodes // 2 + 1
            self.limits = Limits(SUSPECT_SECONDS, TIMEOUT_SECONDS, least, ROUNDS, merges=drawn.sides)
        self.communication = ZeroMQConfig.model_validate({
            "name": "zeromq", "checksum": drawn.checksum,
            "timeout_seconds": SHORT_SECONDS if drawn.has_short_timeout else TIMEOUT_SECONDS,
            "suspect_seconds": SUSPECT_SECONDS, "start_timeout_seconds": START_SECONDS,
        })  # fmt: skip
        pace = 0.05 if drawn.has_short_timeout else random.Random(f"{drawn.seed} pace").choice((0.05, 0.3, 1.0))
        self.world = World(Setting(
            num_nodes=drawn.nodes, config=self.communication, limits=self.limits, faults=drawn.faults, seed=drawn.seed,
            compute_seconds=lambda uid, round: pace * (1 + (7 * uid + 3 * round) % 5 / 10), starts_within_seconds=0.5,
        ), self._make_node, self.history)  # fmt: skip
        self.history.watch(self.world)
        self.history.on_stage = self._kill_at_stage
        self._has_killed = not drawn.kill_stage
        self.killed = {uid for fault in drawn.faults.plan if isinstance(fault, Kill) for uid in fault.nodes}

    def _make_node(self, uid: int, make_communication: Callable[[tuple[Schema, ...]], Simulated]) -> Node:
        return self.make_node(uid, make_communication, lambda each: self.history.recorded(uid, each))

    def make_node(
        self, uid: int, make_communication: Callable[[tuple[Schema, ...]], Simulated], record: Record = lambda _: None
    ) -> Node:
        """Returns a node of the drawn world."""
        training = self.trainings[uid] = Quadratic(uid, self.drawn_world.elements, LR)
        new = make_rule(self.drawn_world.rule)

        def make_rules() -> Sharing:
            made = new()
            made.set_parameter_shapes(training.model.shapes)
            return made

        rules = make_rules()
        communication = make_communication(schemas_of(rules, training.model, schedule=self.config.schedule))
        parts = NodeParts(self.graph, training, rules, communication, make_rules)
        return Node(uid, self.config, parts, seed=self.drawn_world.seed, record=record)

    def _kill_at_stage(self, process: Process, stage: str) -> None:
        """Kills the first process that enters the drawn `kill_stage` and without which a majority stays alive."""
        keeps_majority = len(self.killed | {process.uid}) <= (self.drawn_world.nodes - 1) // 2
        if stage == self.drawn_world.kill_stage and not self._has_killed and keeps_majority:
            self._has_killed = True
            self.killed.add(process.uid)
            self.history.events[f"killed when {stage}"] += 1
            self.world.heap.after(0.0, process.kill)

    def execute(self) -> Counter[str]:
        """Runs the world to its end. Returns how often each event and branch occurred. Raises Violation, and errors of
        the code under test."""
        has_ended = self.world.run(FAULTY_SECONDS + SETTLE_SECONDS)
        processes = self.world.processes.values()
        waits = {p.uid: (type(p.wait).__name__, p.node.doing, p.node.round) for p in processes if p.alive}
        must(has_ended, f"the run does not come to an end: {waits}")
        self._check_ends()
        rounds, sent, rule = self.history.rounds, self.history.sent, self.drawn_world.rule
        counts = self.history.events + self.world.network.happened + self.world.happened
        if rule == "full":
            targets = {uid: training.target for uid, training in self.trainings.items()}
            overlapped = self.drawn_world.schedule == "overlapped"
            counts["replayed"] += check_product(rounds, sent, targets, LR, overlapped=overlapped)
        if rule in MEAN_PRESERVING and self.drawn_world.schedule == "sequential":
            counts["mean kept"] += check_mean(rounds, sent)
        return counts

    def _check_ends(self) -> None:
        """Checks that the processes that are alive reached the end of the run, or failed for an expected reason."""
        drawn = self.drawn_world
        ended = [process for process in self.world.processes.values() if not process.dead]
        failed = {process.uid: process.error for process in ended if process.error is not None}
        for uid, error in failed.items():
            must(isinstance(error, PeerLost | AssemblyError | Interrupted), f"node {uid} fails: {error!r}")
        succeeded = [process for process in ended if process.error is None]
        must(all(process.node.round == self.rounds for process in succeeded), "a node ends early")
        if drawn.missing == "regroup":
            # nodes that finish leave, and the others may then be too few to continue
            must(len(succeeded) > 0 or self._lost_all_models(), f"nobody comes to the end: {failed}")
        elif not self.killed:
            must(not failed, f"nodes fail although everybody lives: {failed}")
        else:
            if drawn.has_short_timeout:  # only the closing evaluation, which needs all nodes, may fail
                must(all(process.node.round == self.rounds for process in ended), "rounds do not go on without a node")
            must(all(isinstance(error, PeerLost) for error in failed.values()), f"nodes fail otherwise: {failed}")
        self._check_rounds(succeeded)
        for process in succeeded:
            must(bool(torch.isfinite(process.node.training.model.parameters).all()), f"node {process.uid} diverges")

    def _check_rounds(self, succeeded: Iterable[Process]) -> None:
        """Checks that each node that was a member throughout made every round once, whichever others came and went. If
        sides of a partition merged, it may have skipped the rounds that are already part of the merged model."""
        joined_late = {uid for generation in self.history.generations.values() for uid in generation.fresh}
        for uid in sorted({process.uid for process in succeeded} - joined_late):
            made = self.trainings[uid].made
            is_complete = self.drawn_world.sides or len(made) == self.rounds
            must(is_complete and made == sorted({*made}), f"node {uid} makes rounds {made}")

    def _lost_all_models(self) -> bool:
        return 2 * len(self.killed) >= self.drawn_world.nodes


def run_world(seed: int) -> Counter[str]:
    """Runs the world of this seed. Returns how often each event and branch occurred. Raises Violation, and errors of
    the code under test."""
    return Run(draw_world(seed)).execute()
