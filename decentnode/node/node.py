"""One participant of a run: the loop over rounds, generations of members, evaluations and the closing report.

One file: it is the order in which a node does things; what it does lies in the files beside it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from decentnode import clock
from decentnode.checkpoint.agreement import gathered
from decentnode.communication.base import Communication
from decentnode.communication.counters import EVALUATION
from decentnode.communication.run_state import Quorum, Steps, without_waits
from decentnode.errors import Interrupted, PeerLost, Regrouping
from decentnode.graph.base import Graph, RoundView
from decentnode.metrics.dealt import packed
from decentnode.metrics.figures import overflowed
from decentnode.node.checkpoints.handover import deal_samples
from decentnode.node.config import NodeConfig
from decentnode.node.generations.beginning import NodeGenerations
from decentnode.node.measuring.course import Course
from decentnode.node.measuring.evaluation import Evaluator, mean_of
from decentnode.node.orders import NodeOrders
from decentnode.node.resumable import NodeCheckpoints
from decentnode.node.rounds import NodeRounds, Record
from decentnode.node.rules import NodeRules, Rules
from decentnode.node.sampling import Sampling
from decentnode.node.schedules.schedule import Schedule
from decentnode.sharing.base import Sharing
from decentnode.sharing.fragments import Fragment
from decentnode.training.base import Training, Update
from decentnode.wire.generation import Generation
from decentnode.wire.orders import Action

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class NodeParts:
    """What a node is made of."""

    graph: Graph
    training: Training
    sharing: Rules
    communication: Communication
    renew: Callable[[], Rules] | None = None
    """Makes the sharing rules as they are before their first round, for every further generation of members. Must be
    given with `node.missing: regroup`."""
    fragments: tuple[Fragment, ...] = ()
    """Of the parameters, from the first one on, without gaps; those behind the last one stay the node's own. Empty: all
    parameters are one, exchanged over `graph` in every round."""
    sampling: Sampling | None = None
    """Finds the neighbors of each round, in place of `graph`."""


class Node:
    """Runs the rounds of one uid: blocking by `run`, or step by step by `steps`. Only `ask_stop` may be called from
    another thread."""

    def __init__(
        self, uid: int, config: NodeConfig, parts: NodeParts, *, seed: int, record: Record = lambda _: None
    ) -> None:
        """record: called once per round and per evaluation with plain numbers, on the training thread.

        Raises ValueError where `parts.renew` is missing.
        """
        if config.missing == "regroup" and parts.renew is None:
            raise ValueError("node.missing: regroup needs renew, got None")
        self.uid = uid
        self.config = config
        self.graph = parts.graph
        self.training = parts.training
        self.communication = parts.communication
        self.communication.goes_on = config.missing == "return_weight"
        if config.quorum is not None:
            self.communication.quorum = Quorum(config.quorum.share, config.quorum.grace_seconds)
        self.record = record
        self.generation = Generation(0, tuple(range(self.graph.num_nodes)))
        whole = Fragment(0, self.training.model.num_parameters, self.graph)
        fragments = parts.fragments or (whole,)
        self.shared = fragments[-1].stop
        """How many parameters are shared; those behind them stay this node's own."""
        self._rules = NodeRules(
            uid, config, parts.sharing, self.training, self.communication, fragments, seed=seed, renew=parts.renew,
            buffers=whole if parts.fragments else None,  # over the run's graph, where fragments have their own
        )  # fmt: skip
        self._evaluator = Evaluator(
            self.training, self.communication, recompute=config.buffers == "recompute",
            phases=self.sharing.requirements.phases, shared=self.shared, weight=self._weight(),
        )  # fmt: skip
        self.course = Course(config, self.training)
        self.round = 0
        """How many rounds are finished."""
        self.merged: Tensor | None = None
        """[P + B] mean of all models (parameters, then float buffers) at the last evaluation. Parameters that are not
        shared are this node's own."""
        self.averages: tuple[Tensor, Tensor | None] | None = None
        """[P + B] of each: this node's moving average of its models, and the mean of all nodes', likewise; None where
        none is kept."""
        self.reports: dict[int, dict[str, float | int | str]] = {}
        """On the lowest uid after the run: every node's closing figures."""
        self.checkpoints: NodeCheckpoints | None = None
        """Set before the first step where the run has a folder."""
        self.evaluation: dict[str, float] = {}
        """The figures of the last evaluation."""
        self.evaluated = -1
        """After how many rounds it was; -1 before the first."""
        self.doing = "joining"
        """What the node does now, in a few words, for status.json."""
        self._ended = False
        self.rounds = NodeRounds(uid, config, self.training, self.communication, self._rules,
                                 sampling=parts.sampling, record=record)  # fmt: skip
        self.generations = NodeGenerations(self, self._rules, self.rounds.trained, parts.sampling)
        self._orders = NodeOrders(self, self.communication)

    @property
    def schedule(self) -> Schedule:
        """Of the rules in force."""
        return self._rules.schedule

    @property
    def sharing(self) -> Sharing:
        """The rule, of the first fragment; those of the others have the same requirements."""
        return self._rules.sharing

    @property
    def within_round(self) -> bool:
        """Whether a round is begun and not finished."""
        return self.rounds.within

    def _weight(self) -> float | None:
        """Returns what this node's model counts in the merged one; None where all count alike."""
        return float(self.uid in self.graph.servers) if self.sharing.requirements.star else None

    # -- running ----------------------------------------------------------------------------------------------

    def run(self) -> None:
        """Run all remaining rounds, the closing evaluation and the closing report. Blocking.

        Raises PeerLost, Diverged, Interrupted and what training and sharing raise.
        """
        without_waits(self.steps())

    def ask_stop(self) -> None:
        """Ask every node to finish the round under way, then close. Any thread or signal handler may call it."""
        self._orders.ask_stop()

    def order(self, action: Action) -> None:
        """Have all nodes of the run pause, go on or evaluate before the same round. Any thread may call it."""
        self._orders.order(action)

    def ask_leave(self) -> None:
        """Have this node alone end after the round under way. With `node.missing: regroup` the others, which hear of it
        when the communication is closed, go on at once without it. Any thread or signal handler may call it."""
        self._orders.ask_leave()

    def refusal_to_leave(self, others: Collection[int] = ()) -> str:
        """Any thread: returns why this node may not leave, or "". others: who leaves, too."""
        return self._orders.refusal_to_leave(others)

    @property
    def left(self) -> bool:
        """Whether this node ended before the others, because it was asked to."""
        return self._orders.left

    def steps(self) -> Steps[None]:
        """Run as `run` does, but yield wherever another node has to act before this one can go on.

        Stepping all nodes of a run in turn, one yield each, is how an in-process run works without threads. Over a
        transport that does not block, waits are yielded, too (`run_state.Steps`). Raises
        Interrupted only where a stop finds the node outside of the run and without a round of its own.
        """
        work = self._work()
        reason: Exception
        while True:
            try:
                yield from work
                return
            except Regrouping as over:
                reason = over
                logger.info("round %d: %s", self.round, over)
            except PeerLost as lost:
                if self.config.missing != "regroup" or not lost.missing:
                    raise
                reason = lost
                self.communication.suspect(lost.missing, str(lost))
            except Interrupted as stop:
                if self.round == 0:
                    raise
                logger.warning("%s: this node ends with its results so far, after round %d", stop, self.round)
                return
            self.rounds.abandon()
            if self.communication.history is not None:
                self.communication.history.left(self.round, str(reason))
            if self.schedule.trained == self.round:  # broken off after its local steps, which are not made again
                self.training.finish_round()
                self.round += 1
            work = self._work(first=self.generations.regroup())

    def _work(self, first: Steps[None] | None = None) -> Steps[None]:
        """The steps of all remaining rounds and the end of the run; `first` before them."""
        yield from first or ()
        yield from self._begin()
        while not self.makes_no_more():
            yield from self._orders.obey()
            if self.makes_no_more():
                break
            if self._orders.leaving:
                logger.info("leaves after round %d", self.round)
                if self.communication.history is not None:
                    self.communication.history.leaving(self.round)
                self.schedule.abandon()
                return
            if self.checkpoints is not None:
                yield from self.checkpoints.between_rounds()
            yield from self.make_round(self.generation)
            every = self.config.evaluate_every
            if every and self.round % every == 0 and self.round < self.config.rounds and not self._orders.stopping():
                yield from self.evaluate_between()
        yield from self._end()

    def _begin(self) -> Steps[None]:
        """What comes before the next round: the generation, its samples, a resumed checkpoint, the first evaluation."""
        generation = self.communication.generation
        if generation is not None and generation.name != self.generation.name:
            yield from self.generations.take_part(generation)
        if self.uid not in self.generation.members:  # a newcomer, which is in no generation yet
            self.communication.enter(self.round)
        if self.training.members is None:
            deal_samples(self, 0)
        if self.checkpoints is not None and self.checkpoints.resuming:
            yield from self.checkpoints.resume()
        if self.round == 0 < self.config.rounds and self.config.evaluate_every and not self._orders.stopping():
            yield from self.evaluate_between()
        self.communication.orders_apart = self.schedule.asynchronous

    def _end(self) -> Steps[None]:
        """What comes after the last round: nodes stop together, evaluate, and tell their closing figures."""
        if self.course.over:
            self.communication.ends_after(self.round)
        if self.schedule.asynchronous:
            yield from self._end_together()
        if self._orders.stopping():
            if self.communication.history is not None:
                self.communication.history.stopping(self.round)
            later = self._rules.neighbors_from(self.round, self.generation)
            self.communication.depart(self.round, later)
        if self.checkpoints is not None:
            self.checkpoints.after_the_last()
        # Always, and by everybody: whether an evaluation of this round was finished before a stop or given up because
        # of it differs from node to node, and who had one would leave the others waiting in the closing one.
        yield from self.evaluate(closing=True)
        if self.checkpoints is not None:
            self.checkpoints.finish()
        self.communication.report(self.figures())
        yield None
        self.reports = yield from self.communication.reports_steps(self.communication.config.timeout_seconds)

    @property
    def over(self) -> bool:
        """Whether this was the last round, on all nodes alike."""
        return self.round >= self.config.rounds or self.course.over or self._ended

    def _end_together(self) -> Steps[None]:
        """Where nodes do not wait for each other's rounds, the first that has made all of them ends the run: the others
        finish the round under way. Brings what is under way between nodes to its end, as steps."""
        over = self.over
        if over and not self.communication.stopping:
            self.communication.announce_stop()
        self.doing = "ending"
        self.communication.ask_after({})
        views, _ = self._rules.views(self.round, self.generation)
        cuts = self.schedule.cuts
        cuts.holds = False
        yield from self.schedule.drain(views[0][0])
        timeout_seconds = self.communication.config.timeout_seconds
        number = cuts.number if self.uid == self.generation.members[0] else 0  # the lowest one's is the greatest
        told = torch.tensor([float(over), number], dtype=torch.float64)
        pending = self.communication.mean("end/rounds", told, closing=True)
        mean, contributors = yield from mean_of(pending, self.sharing.requirements.phases, timeout_seconds)
        (done, number), = gathered(mean.view(1, -1), contributors)
        self._ended = done > 0  # else somebody asked for a stop
        last = 1 + number if cuts.is_possible(number) else cuts.number
        cuts.meet(max(last, self.config.rounds) if self._ended else last)

    def makes_no_more(self) -> bool:
        """Whether no round begins any more, on all nodes alike or because of a stop."""
        return self.over or self._orders.stopping()

    # -- as generations of members begin ---------------------------------------------------------------------

    def renew_rules(self, without: frozenset[int] = frozenset()) -> list[tuple[Sharing, Tensor, RoundView]]:
        """Let the sharing rules begin anew, but for what outlives a generation of members. Returns them, each with its
        part of the model and its view of the first phase of the round that comes. without: further members of which
        nothing outlives it."""
        self._rules.lost |= without
        self._rules.renew(replace(self.generation, fresh=self.generation.fresh | without))
        return self._rules.at(self.round, self.generation)

    # -- one round --------------------------------------------------------------------------------------------

    def make_round(self, among: Generation) -> Steps[None]:
        """One whole round, exchanged with the members of `among`. Raises Regrouping where it may not begin."""
        self.communication.enter(self.round)
        yield from self._begin_round(self.round, among)
        yield None
        for phase in range(1, self.sharing.requirements.phases):
            yield from self._next_phase(phase)
            yield None
        yield from self._finish_round(self.round)
        self.round += 1

    def begin_round(self, round: int) -> Update:
        """Make the local steps, unless the rule has them later, and begin the exchange. Does not wait for a neighbor's
        payloads. Returns what the steps came to."""
        without_waits(self._begin_round(round, self.generation))
        return self.schedule.update

    def next_phase(self, phase: int) -> None:
        """Wait for the neighbors of the phase before, mix, and send the payloads of `phase` (1 or later). Blocking."""
        without_waits(self._next_phase(phase))

    def finish_round(self, round: int) -> None:
        """Wait for the neighbors of the last phase, mix, and record the round. Blocking."""
        without_waits(self._finish_round(round))

    def _begin_round(self, round: int, among: Generation) -> Steps[None]:
        self.doing = "local steps"
        return self.rounds.begin(round, among)

    def _next_phase(self, phase: int) -> Steps[None]:
        self.doing = f"exchange, phase {phase} of {self.sharing.requirements.phases}"
        return self.rounds.next_phase(self.round, phase)

    def _finish_round(self, round: int) -> Steps[None]:
        self.doing = "exchange"
        return self.rounds.finish(round)

    # -- evaluation -------------------------------------------------------------------------------------------

    def evaluate_between(self, ordered: bool = False) -> Steps[None]:
        """Evaluate before the run's end; a stop cuts it short. The evaluation before round 0 shows where curves begin.
        Where nodes are in different rounds, each evaluates its own model alone.

        ordered: because people want to know, so that the run's course (early stop, best checkpoint) is not to change.
        """
        if self.schedule.asynchronous and (self.round or ordered):
            self.doing = "evaluation"
            self.evaluation, self.evaluated = self._evaluator.alone(), self.round
            self._record_evaluation(merged=False)
            return
        try:
            yield from self.evaluate(ordered=ordered)
        except Interrupted:
            logger.info("evaluation after round %d abandoned: the run is stopping", self.round)

    def evaluate(self, closing: bool = False, ordered: bool = False) -> Steps[None]:
        """Evaluate the local and the merged model, as steps, and record the result. closing: the last time, which a
        stop does not cut short. ordered: as in `evaluate_between`."""
        self.doing, started = "evaluation", clock.now()
        members = self.generation.members
        key = EVALUATION + ("closing" if closing else f"round-{self.round}")
        found = yield from self._evaluator.evaluate(key, closing, (members.index(self.uid), len(members)))
        self.merged, self.evaluation, self.evaluated = found.merged, found.figures, self.round
        self.averages = None if found.average is None else (found.average, found.merged_average)
        self._record_evaluation(merged=self.uid == members[0])
        if self.rounds.trace is not None:
            self.rounds.trace.evaluated(self.round, started)
        if not ordered:
            self.course.take(self.evaluation, self.round)
        if self.course.over and not closing:
            self.record({"kind": "early_stop", "round": self.round, "time": clock.wall(), **self.course.figures()})

    def _record_evaluation(self, *, merged: bool) -> None:
        """merged: as `overflowed`."""
        self.record({"kind": "evaluation", "round": self.round, "time": clock.wall(), **self.evaluation})
        if told := overflowed(self.evaluation, merged=merged):
            logger.warning("evaluation after round %d: %s", self.round, told)
            self.communication.counters.on_event("loss_overflowed", None, f"after round {self.round}: {told}")

    def figures(self) -> dict[str, float | int | str]:
        """Returns the node's closing figures, by the names of summary.json."""
        counters = self.communication.counters
        return {
            "uid": self.uid, "rounds": self.round, "train_samples": self.training.num_samples, **self.evaluation,
            **({"evaluated_round": self.evaluated} if self.evaluation else {}), **self.course.figures(),
            **self.rounds.totals.figures(),
            **({"dealt": packed(self.training.dealt)} if self.config.orphans == "adopted" else {}),
            **{f"bytes_{purpose}": sent for purpose, sent in counters.bytes_sent().items()},
            "bytes_saved": counters.saved_bytes,
            **({"bytes_relayed": relayed} if (relayed := counters.relayed_bytes) else {}),
            **({"bytes_resent": resent} if (resent := counters.resent_bytes) else {}),
            "faults": sum(counters.faults.values()) + counters.earlier.get("faults", 0),
            **(self.checkpoints.closing_figures() if self.checkpoints is not None else {}),
        }

    # -- checkpoints ------------------------------------------------------------------------------------------

    def sharing_state(self) -> list[dict[str, Any]]:
        """Returns copies of all that the fragments' rules and exchanges keep between rounds."""
        return self._rules.state_dict()

    def load_sharing_state(self, state: Sequence[dict[str, Any]]) -> None:
        """Restores what `sharing_state` returned. Raises ValueError for the state of other rules or fragments."""
        self._rules.load_state_dict(state)

    def progress(self) -> dict[str, Any]:
        """Returns figures and counters of the rounds so far, which a resumed run goes on from."""
        sampling = self.rounds.sampling
        return {
            "round": self.round, **({} if sampling is None else {"sampling": sampling.state_dict()}),
            **self.rounds.totals.state_dict(), "evaluation": dict(self.evaluation), "evaluated": self.evaluated,
            "counters": self.communication.counters.totals(), "course": self.course.state_dict(),
        }

    def load_progress(self, state: Mapping[str, Any]) -> None:
        """Restores what `progress` returned."""
        self.rounds.totals.load_state_dict(state)
        if self.rounds.sampling is not None:
            self.rounds.sampling.load_state_dict(state["sampling"])
        self.evaluation, self.evaluated = dict(state["evaluation"]), state["evaluated"]
        self.course.load_state_dict(state.get("course"))
        self.communication.counters.earlier = dict(state["counters"])
