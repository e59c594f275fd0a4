"""One participant of a run: the loop over rounds, membership generations and evaluations, and the closing report.

This file fixes the order in which a node does things; the files beside it implement each of them.
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
from decentnode.communication.run_state import Quorum, Steps, run_without_waits
from decentnode.errors import Diverged, Interrupted, PeerLost, Regrouping
from decentnode.formatting import names
from decentnode.graph.base import Graph, RoundView
from decentnode.metrics.figures import non_finite_losses
from decentnode.metrics.generation_samples import packed
from decentnode.node.checkpoints.handover import deal_samples
from decentnode.node.config import NodeConfig
from decentnode.node.generations.transition import NodeGenerations
from decentnode.node.measuring.early_stopping import EarlyStopping
from decentnode.node.measuring.evaluation import Evaluator, mean_of
from decentnode.node.orders import OrderHandler
from decentnode.node.resumable import NodeCheckpoints
from decentnode.node.rounds import NodeRounds, Record
from decentnode.node.rules import NodeRules, Rules
from decentnode.node.sampling import Sampling
from decentnode.node.schedules.schedule import Schedule
from decentnode.sharing.attacks.attacked import Attacked
from decentnode.sharing.base import Sharing
from decentnode.sharing.fragments import Fragment
from decentnode.training.base import Training, Update
from decentnode.wire.generation import Generation
from decentnode.wire.orders import Action

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class NodeParts:
    """The components that a node is assembled from."""

    graph: Graph
    training: Training
    sharing: Rules
    communication: Communication
    renew: Callable[[], Rules] | None = None
    """Creates the sharing rules in their initial state; called for every later membership generation. Required with
    `node.missing: regroup`."""
    fragments: tuple[Fragment, ...] = ()
    """Contiguous slices of the flat parameters, starting with the first parameter; parameters behind the last fragment
    stay local to the node. Empty: all parameters are one fragment, exchanged over `graph` in every round."""
    sampling: Sampling | None = None
    """Finds the neighbors of each round, in place of `graph`."""
    attackers: frozenset[int] = frozenset()
    """Nodes that attack the others: their models are not evaluated and count in no mean over the nodes."""


class Node:
    """Runs the rounds of one uid: `run` blocks until the end, `steps` is a generator that yields instead of waiting.

    Any thread may call the `ask_*` methods, `order` and `refusal_to_leave`, and read `left`; everything else belongs to
    the training thread."""

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
        self.communication.continues_without_late = config.missing == "return_weight"
        if config.quorum is not None:
            self.communication.quorum = Quorum(config.quorum.share, config.quorum.grace_seconds)
        self.record = record
        self.generation = Generation(0, tuple(range(self.graph.num_nodes)))
        whole = Fragment(0, self.training.model.num_parameters, self.graph)
        fragments = parts.fragments or (whole,)
        self._attackers = parts.attackers
        self.shared = fragments[-1].stop
        """The number of shared parameters, which come first; the remaining ones stay local to this node."""
        self._rules = NodeRules(
            uid, config, parts.sharing, self.training, self.communication, fragments, seed=seed, renew=parts.renew,
            buffers=whole if parts.fragments else None,  # over the run's graph, where fragments have their own
        )  # fmt: skip
        self._evaluator = Evaluator(
            self.training, self.communication, recompute=config.buffers == "recompute",
            phases=self.sharing.requirements.phases, shared=self.shared, weight=self._weight(),
            counts=uid not in parts.attackers,
        )  # fmt: skip
        self.early_stopping = EarlyStopping(config, self.training)
        self.round = 0
        """The number of finished rounds."""
        self.merged: Tensor | None = None
        """[P + B] mean of all models (parameters, then float buffers) at the last evaluation. For parameters that are
        not shared, it contains this node's own values."""
        self.averages: tuple[Tensor, Tensor | None] | None = None
        """This node's moving average of its models, and the mean of all nodes' moving averages, [P + B] each; None if
        no moving average is kept."""
        self.reports: dict[int, dict[str, float | int | str]] = {}
        """On the node with the lowest uid, after the run: the closing figures of every node."""
        self.checkpoints: NodeCheckpoints | None = None
        """Set before the first step if the run has a folder."""
        self.evaluation: dict[str, float] = {}
        """The figures of the last evaluation."""
        self.evaluated = -1
        """The number of finished rounds at the last evaluation; -1 before the first one."""
        self.doing = "joining"
        """What the node is doing now, in a few words, for status.json."""
        self._ended = False
        self.rounds = NodeRounds(uid, config, self.training, self.communication, self._rules,
                                 sampling=parts.sampling, record=record)  # fmt: skip
        self.generations = NodeGenerations(self, self._rules, self.rounds.work, parts.sampling)
        self._orders = OrderHandler(self, self.communication)

    @property
    def schedule(self) -> Schedule:
        """The schedule that belongs to the sharing rules in force."""
        return self._rules.schedule

    @property
    def sharing(self) -> Sharing:
        """The sharing rule of the first fragment; the rules of the other fragments have the same requirements."""
        return self._rules.sharing

    @property
    def is_within_round(self) -> bool:
        """Whether a round has begun and is not finished."""
        return self.rounds.is_within_round

    def _weight(self) -> float | None:
        """Returns the weight of this node's model in the merged model; None if all models have the same weight."""
        if self.sharing.requirements.star:
            return float(self.uid in self.graph.servers)
        return float(self.uid not in self._attackers) if self._attackers else None

    # -- running ----------------------------------------------------------------------------------------------

    def run(self) -> None:
        """Run all remaining rounds, the closing evaluation and the closing report. Blocking.

        Raises PeerLost, Diverged, Interrupted and what training and sharing raise.
        """
        run_without_waits(self.steps())

    def ask_stop(self) -> None:
        """Ask all nodes to finish the current round and then end the run. Any thread or signal handler may call
        this."""
        self._orders.ask_stop()

    def order(self, action: Action) -> None:
        """Make all nodes of the run pause, resume or evaluate before the same round. Any thread may call this."""
        self._orders.order(action)

    def ask_leave(self) -> None:
        """Make only this node end after the current round. With `node.missing: regroup` the other nodes, which are told
        when the communication closes, continue without it at once. Any thread or signal handler may call this."""
        self._orders.ask_leave()

    def refusal_to_leave(self, others: Collection[int] = ()) -> str:
        """Returns the reason why this node may not leave the run, or "" if it may. others: nodes that leave as well.
        Any thread may call this."""
        return self._orders.refusal_to_leave(others)

    @property
    def left(self) -> bool:
        """Whether this node ended before the other nodes because it was asked to leave."""
        return self._orders.left

    def steps(self) -> Steps[None]:
        """Run as `run` does, but yield wherever another node has to act before this one can continue.

        Stepping all nodes of a run in turn, one yield each, is how an in-process run works without threads. With a
        transport that does not block, the generator also yields waits (`run_state.Steps`). Raises Interrupted only if
        the run is stopped while this node is not a member of it and has not finished a round.
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
            except Diverged as error:
                raise Diverged(f"{error}{self._possible_cause()}") from error
            except Interrupted as stop:
                if self.round == 0:
                    raise
                logger.warning("%s: this node ends with its results so far, after round %d", stop, self.round)
                return
            self.rounds.abandon()
            if self.communication.history is not None:
                self.communication.history.left(self.round, str(reason))
            if self.schedule.last_trained_round == self.round:  # interrupted after its local steps: do not repeat these
                self.training.finish_round()
                self.round += 1
            work = self._work(first=self.generations.regroup())

    def _possible_cause(self) -> str:
        """Returns the end of the sentence that a model diverged: it names the attackers if they may have sent models
        that were mixed before the local steps of this round."""
        rule = self.sharing
        if not isinstance(rule, Attacked) or self.round <= rule.attack.config.first_round:
            return ""
        who = f"node {names(sorted(self._attackers))} attacks" if len(self._attackers) == 1 \
            else f"nodes {names(sorted(self._attackers))} attack"  # fmt: skip
        return f"; {who}, which can be the cause: compare with attack: null, or use another sharing rule"

    def _work(self, first: Steps[None] | None = None) -> Steps[None]:
        """Make all remaining rounds and end the run, as steps; `first` is run before them."""
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
        """Prepare the next round, as steps: take part in the current generation, deal samples, resume from a checkpoint
        and make the first evaluation, as far as each is needed."""
        generation = self.communication.generation
        if generation is not None and generation.name != self.generation.name:
            yield from self.generations.take_part(generation)
        if self.uid not in self.generation.members:  # a newcomer, which is not yet a member of any generation
            self.communication.enter(self.round)
        if self.training.members is None:
            deal_samples(self, 0)
        if self.checkpoints is not None and self.checkpoints.resuming:
            yield from self.checkpoints.resume()
        if self.round == 0 < self.config.rounds and self.config.evaluate_every and not self._orders.stopping():
            yield from self.evaluate_between()
        self.communication.obeys_orders_alone = self.schedule.asynchronous

    def _end(self) -> Steps[None]:
        """End the run after the last round, as steps: nodes stop together, evaluate, and report their closing
        figures."""
        if self.early_stopping.over:
            self.communication.end_after(self.round)
        if self.schedule.asynchronous:
            yield from self._end_together()
        if self._orders.stopping():
            if self.communication.history is not None:
                self.communication.history.stopping(self.round)
            later = self._rules.neighbors_from(self.round, self.generation)
            self.communication.depart(self.round, later)
        if self.checkpoints is not None:
            self.checkpoints.after_the_last()
        # All nodes always make the closing evaluation: after a stop, some may have finished an evaluation of this round
        # while others abandoned it. If those that have one skipped this, the others would wait for them.
        yield from self.evaluate(closing=True)
        if self.checkpoints is not None:
            self.checkpoints.finish()
        self.communication.report(self.figures())
        yield None
        self.reports = yield from self.communication.reports_steps(self.communication.config.timeout_seconds)

    @property
    def over(self) -> bool:
        """Whether the last round is finished; the answer is the same on all nodes."""
        return self.round >= self.config.rounds or self.early_stopping.over or self._ended

    def _end_together(self) -> Steps[None]:
        """End an asynchronous run on all nodes, as steps. The first node that has made all its rounds announces the
        stop; the others finish their current round. Then messages in flight between nodes are settled, and all nodes
        take the same number for the last checkpoint."""
        over = self.over
        if over and not self.communication.stopping:
            self.communication.announce_stop()
        self.doing = "ending"
        self.communication.ping_silent({})
        views, _ = self._rules.views(self.round, self.generation)
        cuts = self.schedule.cuts
        cuts.holds_back = False
        yield from self.schedule.drain(views[0][0])
        timeout_seconds = self.communication.config.timeout_seconds
        # the lowest member has the greatest number
        number = cuts.number if self.uid == self.generation.members[0] else 0
        own = torch.tensor([float(over), number], dtype=torch.float64)
        pending = self.communication.mean("end/rounds", own, closing=True)
        mean, contributors = yield from mean_of(pending, self.sharing.requirements.phases, timeout_seconds)
        (done, number), = gathered(mean.view(1, -1), contributors)
        self._ended = done > 0  # otherwise a stop was requested
        last = 1 + number if cuts.is_possible(number) else cuts.number
        cuts.adopt(max(last, self.config.rounds) if self._ended else last)

    def makes_no_more(self) -> bool:
        """Whether no further round begins, because the run is over (the same on all nodes) or because of a stop."""
        return self.over or self._orders.stopping()

    # -- as generations of members begin ---------------------------------------------------------------------

    def renew_rules(self, without: frozenset[int] = frozenset()) -> list[tuple[Sharing, Tensor, RoundView]]:
        """Replace the sharing rules with new ones, which keep only the state that outlives a membership generation.
        Returns the new rules, each with its part of the model and its view of the first phase of the next round.
        without: further members whose state is lost, so that none of it is kept."""
        self._rules.lost |= without
        self._rules.renew(replace(self.generation, fresh=self.generation.fresh | without))
        return self._rules.rules_at(self.round, self.generation)

    def trains_in(self, round: int) -> bool:
        """Returns whether the node makes local steps in a round with the current members, if nothing is lost."""
        return self._rules.trains_in(round, self.generation)

    # -- one round --------------------------------------------------------------------------------------------

    def make_round(self, among: Generation) -> Steps[None]:
        """Make one whole round, as steps, and exchange with the members of `among`. Raises Regrouping if the round may
        not begin because the generation is over."""
        self.communication.enter(self.round)
        yield from self._begin_round(self.round, among)
        yield None
        for phase in range(1, self.sharing.requirements.phases):
            yield from self._next_phase(phase)
            yield None
        yield from self._finish_round(self.round)
        self.round += 1

    def begin_round(self, round: int) -> Update:
        """Make the local steps, unless the rule schedules them for a later phase, and begin the exchange. Does not wait
        for the neighbors' payloads. Returns the result of the local steps."""
        run_without_waits(self._begin_round(round, self.generation))
        return self.schedule.update

    def next_phase(self, phase: int) -> None:
        """Wait for the neighbors of the previous phase, mix their payloads, and send those of `phase` (1 or later).
        Blocking."""
        run_without_waits(self._next_phase(phase))

    def finish_round(self, round: int) -> None:
        """Wait for the neighbors of the last phase, mix their payloads, and record the round. Blocking."""
        run_without_waits(self._finish_round(round))

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
        """Evaluate during the run, as steps; a stop interrupts the evaluation. The evaluation before round 0 gives the
        first point of all curves. Under an asynchronous schedule, each node evaluates only its own model, except in
        that first evaluation.

        ordered: whether the evaluation was requested by a user, so that it must not affect early stopping or the best
        checkpoint.
        """
        if self.schedule.asynchronous and (self.round or ordered):
            self.doing = "evaluation"
            self.evaluation, self.evaluated = self._evaluator.evaluate_locally(), self.round
            self._record_evaluation(merged=False)
            return
        try:
            yield from self.evaluate(ordered=ordered)
        except Interrupted:
            logger.info("evaluation after round %d abandoned: the run is stopping", self.round)

    def evaluate(self, closing: bool = False, ordered: bool = False) -> Steps[None]:
        """Evaluate the local and the merged model, as steps, and record the result. closing: whether this is the last
        evaluation, which a stop does not interrupt. ordered: as in `evaluate_between`."""
        self.doing, started = "evaluation", clock.now()
        members = self.generation.members
        key = EVALUATION + ("closing" if closing else f"round-{self.round}")
        counted = [uid for uid in members if uid not in self._attackers]
        share = (counted.index(self.uid), len(counted)) if self.uid in counted else (0, 1)
        found = yield from self._evaluator.evaluate(key, closing, share)
        self.merged, self.evaluation, self.evaluated = found.merged, found.figures, self.round
        self.averages = None if found.average is None else (found.average, found.merged_average)
        self._record_evaluation(merged=self.uid == members[0])
        if self.rounds.trace is not None:
            self.rounds.trace.evaluated(self.round, started)
        if not ordered:
            self.early_stopping.take(self.evaluation, self.round)
        if self.early_stopping.over and not closing:
            figures = self.early_stopping.figures()
            self.record({"kind": "early_stop", "round": self.round, "time": clock.recorded(), **figures})

    def _record_evaluation(self, *, merged: bool) -> None:
        """merged: as for `non_finite_losses`."""
        self.record({"kind": "evaluation", "round": self.round, "time": clock.recorded(), **self.evaluation})
        if problem := non_finite_losses(self.evaluation, merged=merged):
            logger.warning("evaluation after round %d: %s", self.round, problem)
            self.communication.counters.on_event("loss_overflowed", None, f"after round {self.round}: {problem}")

    def figures(self) -> dict[str, float | int | str]:
        """Returns the node's closing figures, with the names that they have in summary.json."""
        counters = self.communication.counters
        return {
            "uid": self.uid, "rounds": self.round, "train_samples": self.training.num_samples, **self.evaluation,
            **({"evaluated_round": self.evaluated} if self.evaluation else {}), **self.early_stopping.figures(),
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
        """Returns copies of the state that the rules and exchanges of all fragments keep between rounds."""
        return self._rules.state_dict()

    def load_sharing_state(self, state: Sequence[dict[str, Any]]) -> None:
        """Restores what `sharing_state` returned. Raises ValueError if the state belongs to other rules or
        fragments."""
        self._rules.load_state_dict(state)

    def progress(self) -> dict[str, Any]:
        """Returns figures and counters of the rounds so far, from which a resumed run continues."""
        sampling = self.rounds.sampling
        return {
            "round": self.round, **({} if sampling is None else {"sampling": sampling.state_dict()}),
            **self.rounds.totals.state_dict(), "evaluation": dict(self.evaluation), "evaluated": self.evaluated,
            "counters": self.communication.counters.totals(), "course": self.early_stopping.state_dict(),
        }

    def load_progress(self, state: Mapping[str, Any]) -> None:
        """Restores what `progress` returned."""
        self.rounds.totals.load_state_dict(state)
        if self.rounds.sampling is not None:
            self.rounds.sampling.load_state_dict(state["sampling"])
        self.evaluation, self.evaluated = dict(state["evaluation"]), state["evaluated"]
        self.early_stopping.load_state_dict(state.get("course"))
        self.communication.counters.earlier = dict(state["counters"])
