"""The engine `batched`: computes the rounds of all nodes at once, with their models as the rows of one tensor."""

from __future__ import annotations

import abc
import statistics
import threading
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from decentnode import clock
from decentnode.errors import Diverged
from decentnode.node.measuring.early_stopping import EarlyStopping
from decentnode.node.schedules.schedules import SCHEDULES
from decentnode.simulate.engines.evaluation import EvaluationResult, Evaluator
from decentnode.simulate.engines.exchange import PopulationExchange, RoundTraffic, make_exchange
from decentnode.simulate.engines.forward import Unsuitable
from decentnode.simulate.engines.population import Population
from decentnode.simulate.engines.stacked_steps import StackedSteps
from decentnode.simulate.engines.steps import Local, LocalSteps
from decentnode.tensors import sum_dtype
from decentnode.training.supervised import Supervised
from decentnode.wire.control_tree import ControlTree
from decentnode.wire.orders import Action

HOLD_SECONDS = 0.2
"""Interval at which a paused run calls its sink and checks for orders; orders also wake it up at once."""


@dataclass(frozen=True)
class PopulationRound:
    """The round records of all nodes. The seconds of a node are its share of the time of all nodes together."""

    round: int
    time: float
    seconds: float
    train_seconds: float
    mix_seconds: float
    local: Local
    edges: list[str]
    """JSON per node."""
    data: np.ndarray  # [N] int64, bytes sent since the start
    metadata: np.ndarray  # [N] int64
    evaluation: np.ndarray  # [N] int64


class Sink(abc.ABC):
    """Receives what a run reports while it runs."""

    @abc.abstractmethod
    def take_round(self, found: PopulationRound) -> None:
        """Is called after each round, with the round of all nodes. The sink owns the arrays."""

    @abc.abstractmethod
    def take_record(self, uid: int, record: dict[str, Any]) -> None:
        """Is called with a node's record of another kind: an evaluation, an early stop, an order."""

    def hold(self) -> None:  # noqa: B027
        """Is called when the run pauses because of an order."""

    @abc.abstractmethod
    def tick(self) -> None:
        """Is called after every round, and repeatedly while the run is paused."""


class Batched:
    """A run whose nodes are computed together. Only `ask_stop` and `order` may be called from other threads."""

    def __init__(self, population: Population, steps: LocalSteps) -> None:
        """Raises Unsuitable if this engine cannot compute the run, and what the parts of nodes raise."""
        experiment = population.experiment
        if reason := unsupported_feature(experiment):
            raise Unsuitable(reason)
        if any(type(each) is not Supervised for each in population.trainings):
            raise Unsuitable(f"training {experiment.training.name} is a custom class")
        self.config = experiment.node
        self.population, self.steps = population, steps
        self.exchange: PopulationExchange
        self.exchange, self.rows_reason = make_exchange(population)
        forward = steps.forward if isinstance(steps, StackedSteps) else None
        self._evaluator = Evaluator(population, forward)
        self.early_stopping = EarlyStopping(self.config, population.trainings[0])
        self.round = 0
        """Number of finished rounds."""
        self.found: EvaluationResult | None = None
        """The last evaluation."""
        self.evaluated = -1
        count = population.num_nodes
        self._tree = np.array([len(ControlTree.of(uid, count).links) for uid in range(count)], np.int64)
        self._data, self._metadata, self._evaluation = (np.zeros(count, np.int64) for _ in range(3))
        self._seconds: list[float] = []
        self._train_seconds = 0.0
        self._stop_asked = self._paused = self._evaluate_asked = False
        self._order_event = threading.Event()

    @property
    def over(self) -> bool:
        """Whether all rounds are finished, or the run stopped early."""
        return self.round >= self.config.rounds or self.early_stopping.over

    def ask_stop(self) -> None:
        """Ends the run after the current round. Any thread or signal handler may call it."""
        self._stop_asked = True
        self._order_event.set()

    def order(self, action: Action) -> None:
        """Pauses the run (also for `meet`, which a stop follows), resumes it, or has it evaluate, before the next
        round. Any thread may call it."""
        if action == "evaluate":
            self._evaluate_asked = True
        else:
            self._paused = action != "resume"
        self._order_event.set()

    def _execute_orders(self, sink: Sink) -> None:
        """Executes orders, before a round. Blocking while the run is paused."""
        is_paused = False
        while not self._stop_asked and (self._paused or self._evaluate_asked):
            self._order_event.clear()
            if self._evaluate_asked:
                self._evaluate_asked = False
                if self.evaluated != self.round:
                    self._evaluate(sink, ordered=True)
                self._record_order(sink, "evaluated")
            elif not is_paused:
                is_paused = True
                self._record_order(sink, "paused")
                sink.hold()
            else:
                self._order_event.wait(HOLD_SECONDS)
                sink.tick()
        if is_paused:
            self._record_order(sink, "resumed")

    def _record_order(self, sink: Sink, what: str) -> None:
        record = {"kind": "control", "what": what, "round": self.round, "time": clock.recorded()}
        for uid in range(self.population.num_nodes):
            sink.take_record(uid, dict(record))

    def run(self, sink: Sink) -> None:
        """Runs all rounds and evaluations. Blocking. Raises Diverged, with the node's uid as an attribute, and what
        training and sharing raise."""
        every = self.config.evaluate_every
        if self.config.rounds and every and not self._stop_asked:
            self._evaluate(sink)
        while not self.over and not self._stop_asked:
            self._execute_orders(sink)
            if self._stop_asked:
                break
            sink.take_round(self.step())
            sink.tick()
            if every and self.round % every == 0 and self.round < self.config.rounds and not self._stop_asked:
                self._evaluate(sink)
        self._evaluate(sink, closing=True)

    def step(self) -> PopulationRound:
        """Computes one round of all nodes. Blocking."""
        population, exchange, started = self.population, self.exchange, clock.now()
        with torch.no_grad():
            exchange.begin(self.round, self.steps.learning_rate)
        training = clock.now()
        rounds = self.config.training_rounds
        trains = rounds is None or rounds.is_due(self.round)
        local = self.steps.run(self.round, exchange.directions()) if trains else self.steps.rest(self.round)
        trained = clock.now()
        with torch.no_grad():
            exchange.adjust(local.losses)
            self._check_finite()
            sent = exchange.mix()
        over, count = clock.now(), population.num_nodes
        self._count(sent)
        self._seconds.append(over - started)
        self._train_seconds += (trained - training) / count
        found = PopulationRound(
            self.round, clock.recorded(), over - started, (trained - training) / count,
            (over - trained + training - started) / count, local, sent.edges, self._data.copy(),
            self._metadata.copy(), self._evaluation.copy(),
        )  # fmt: skip
        self.round += 1
        return found

    def _count(self, sent: RoundTraffic) -> None:
        self._data += sent.data
        self._metadata += sent.metadata

    def _check_finite(self) -> None:
        if not self.config.check_finite:
            return
        rows = self.population.rows
        finite = rows.sum(1, dtype=sum_dtype(rows.dtype)).isfinite()
        if not bool(finite.all()):
            uid = int((~finite).nonzero()[0])
            error = Diverged(
                f"node {uid}: the model holds NaN or infinity after the local steps of round {self.round}"
            )
            error.__dict__["uid"] = uid
            raise error

    def _evaluate(self, sink: Sink, closing: bool = False, ordered: bool = False) -> None:
        found = self.found = self._evaluator.evaluate()
        self.evaluated = self.round
        self._evaluation += self._tree * found.sent
        now = clock.recorded()
        for uid, figures in enumerate(found.figures):
            sink.take_record(uid, {"kind": "evaluation", "round": self.round, "time": now, **figures})
        if not ordered:
            self.early_stopping.take(found.figures[0], self.round)
        if self.early_stopping.over and not closing:
            for uid in range(self.population.num_nodes):
                sink.take_record(uid, {"kind": "early_stop", "round": self.round, "time": now,
                                       **self.early_stopping.figures()})  # fmt: skip

    def figures(self, uid: int) -> dict[str, float | int | str]:
        """Returns a node's closing figures, by the names of summary.json."""
        return {
            "uid": uid, "rounds": self.round, "train_samples": self.population.trainings[uid].num_samples,
            **(self.found.figures[uid] | {"evaluated_round": self.evaluated} if self.found is not None else {}),
            **self.early_stopping.figures(),
            "round_seconds_median": statistics.median(self._seconds) if self._seconds else 0.0,
            "round_seconds_total": sum(self._seconds), "train_seconds": self._train_seconds, "wait_seconds": 0.0,
            "overlap": 1.0 if self._seconds else 0.0, "waited_for": -1, "waited_seconds": 0.0, "rounds_without": 0,
            "late_payloads": 0,
            "bytes_data": int(self._data[uid]), "bytes_metadata": int(self._metadata[uid]), "bytes_protocol": 0,
            "bytes_evaluation": int(self._evaluation[uid]), "bytes_control": 0, "bytes_saved": 0, "faults": 0,
        }  # fmt: skip


def unsupported_feature(experiment: Any) -> str:
    """Returns a feature of the experiment that only the engine `stepped` supports; "" if there is none."""
    if SCHEDULES[experiment.node.schedule].asynchronous:
        return f"schedule {experiment.node.schedule}, in which nodes are in different rounds"
    if getattr(experiment.training, "local_seconds", None) is not None:
        return "training.local_seconds"
    if experiment.node.training_rounds is not None and experiment.node.training_rounds.probability < 1:
        return "node.training_rounds.probability below 1"
    for key in ("privacy", "evaluate_membership"):
        if getattr(experiment.training, key, None) is not None:
            return f"training.{key}"
    if experiment.node.checkpoint is not None:
        return "node.checkpoint"
    if getattr(experiment.sharing, "dump", None) is not None:
        return "sharing.dump"
    if experiment.run.trace or experiment.run.profile is not None:
        return "run.trace and run.profile"
    if experiment.attack is not None:
        return "attack"
    if experiment.servers():
        return f"sharing {experiment.sharing.name}, whose clients train between two exchanges"
    return ""
