"""One participant of a run: the loop over rounds, generations of members, evaluations and the closing report.

One file: it is the order in which a node does things; what it does lies in the files beside it.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor

from decentnode import clock
from decentnode.communication.base import Communication
from decentnode.communication.counters import EVALUATION
from decentnode.communication.run_state import Quorum, Steps, without_waits
from decentnode.errors import Diverged, Interrupted, PeerLost, Regrouping
from decentnode.graph.base import Graph, RoundView
from decentnode.metrics.dealt import packed
from decentnode.node.apart import fallen_apart
from decentnode.node.buffers import BufferExchange
from decentnode.node.config import NodeConfig
from decentnode.node.course import Course
from decentnode.node.dumps import Dumps
from decentnode.node.evaluation import Evaluator, mean_of
from decentnode.node.faults import NodeFaults
from decentnode.node.fragment_exchange import FragmentExchange, Mixed
from decentnode.node.handover import agree_on_course, begin_rules_anew, give_models
from decentnode.node.merging import Work, merge_models
from decentnode.node.plan import Planners
from decentnode.node.resumable import NodeCheckpoints
from decentnode.node.sampling import Sampling
from decentnode.node.schedule import Schedule
from decentnode.node.schedules import schedule_of
from decentnode.node.totals import RoundTotals
from decentnode.node.trace import NodeTrace
from decentnode.sharing.base import Sharing
from decentnode.sharing.fragments import Fragment
from decentnode.training.base import Training, Update
from decentnode.wire.generation import Generation
from decentnode.wire.orders import Action

logger = logging.getLogger(__name__)

Record = Callable[[dict[str, Any]], None]
Rules = Sharing | Sequence[Sharing]
"""One sharing rule, or one per fragment."""


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
        self.seed = seed
        self.record = record
        self.generation = Generation(0, tuple(range(self.graph.num_nodes)))
        self._renew = parts.renew
        self._sampling = parts.sampling
        whole = Fragment(0, self.training.model.num_parameters, self.graph)
        self._fragments = parts.fragments or (whole,)
        self._buffers_apart = whole if parts.fragments else None
        """Where fragments have graphs of their own, float buffers are averaged over the run's, in every round."""
        self.shared = self._fragments[-1].stop
        """How many parameters are shared; those behind them stay this node's own."""
        self._take_rules(parts.sharing)
        self._buffers = BufferExchange(averaged=config.buffers == "average" and not self.schedule.asynchronous)
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
        self.dumps: Dumps | None = None
        """Likewise, where the rule's choices are to be written."""
        self.faults: NodeFaults | None = None
        """Likewise, where the experiment has faults."""
        self.trace: NodeTrace | None = None
        """Likewise, where the experiment asks for it."""
        self.evaluation: dict[str, float] = {}
        """The figures of the last evaluation."""
        self.evaluated = -1
        """After how many rounds it was; -1 before the first."""
        self.doing = "joining"
        """What the node does now, in a few words, for status.json."""
        self._trained = Work()
        self.within_round = False
        """Whether a round is begun and not finished."""
        self._stop_asked = self._ended = self._leave_asked = False
        self._totals = RoundTotals(self.communication.counters)

    @property
    def sharing(self) -> Sharing:
        """The rule, of the first fragment; those of the others have the same requirements."""
        return self.schedule.sharing

    def _weight(self) -> float | None:
        """Returns what this node's model counts in the merged one; None where all count alike."""
        return float(self.uid in self.graph.servers) if self.sharing.requirements.star else None

    def _take_rules(self, sharing: Rules) -> None:
        rules = (sharing,) if isinstance(sharing, Sharing) else tuple(sharing)
        for rule in rules:
            rule.set_samples(self.training.num_samples)
        count, groups = len(self._fragments), self.config.missing == "fail"
        pairs = list(zip(self._fragments, rules, strict=True))
        self._planners = Planners(self.uid, self.seed, pairs, buffers=self._buffers_apart, averaging_groups=groups)
        former: Schedule | None = getattr(self, "schedule", None)
        self.schedule = schedule_of(self.config.schedule, rules[0])(
            self.training, [FragmentExchange(*pair, self.communication, num_fragments=count, averaging_groups=groups)
                            for pair in pairs],
            self.communication, averaging_groups=groups, in_background=self.config.mix_in_background,
            averages_buffers=self.config.buffers == "average", asynchronous=self.config.asynchronous,
        )  # fmt: skip
        if former is not None:
            self.schedule.succeed(former, self.generation)

    # -- running ----------------------------------------------------------------------------------------------

    def run(self) -> None:
        """Run all remaining rounds, the closing evaluation and the closing report. Blocking.

        Raises PeerLost, Diverged, Interrupted and what training and sharing raise.
        """
        without_waits(self.steps())

    def ask_stop(self) -> None:
        """Ask every node to finish the round under way, then close. Any thread or signal handler may call it."""
        self._stop_asked = True
        self.communication.stop_asked()

    def order(self, action: Action) -> None:
        """Have all nodes of the run pause, go on or evaluate before the same round. Any thread may call it."""
        self.communication.order(action)

    def ask_leave(self) -> None:
        """Have this node alone end after the round under way. With `node.missing: regroup` the others, which hear of it
        when the communication is closed, go on at once without it. Any thread or signal handler may call it."""
        self._leave_asked = True

    def refusal_to_leave(self, others: Collection[int] = ()) -> str:
        """Any thread: returns why this node may not leave, or "". others: who leaves, too."""
        if self.over or self.communication.stopping:
            return "the run ends at this moment"
        return self.communication.refusal_to_leave(others)

    @property
    def left(self) -> bool:
        """Whether this node ended before the others, because it was asked to."""
        return self._leave_asked and not self.over and not self.communication.stopping

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
                logger.warning("%s: this node ends with what it has after round %d", stop, self.round)
                return
            self.within_round = False
            self.schedule.abandon()
            self._buffers.abandon()
            if self.communication.history is not None:
                self.communication.history.left(self.round, str(reason))
            if self.schedule.trained == self.round:  # broken off after its local steps, which are not made again
                self.training.finish_round()
                self.round += 1
            work = self._work(first=self._regroup())

    def _work(self, first: Steps[None] | None = None) -> Steps[None]:
        """The steps of all remaining rounds and the end of the run; `first` before them."""
        yield from first or ()
        generation = self.communication.generation
        if generation is not None and generation.name != self.generation.name:
            yield from self._take_part(generation)
        if self.uid not in self.generation.members:  # a newcomer, which is in no generation yet
            self.communication.enter(self.round)
        if self.training.members is None:
            self.deal_samples(0)
        if self.checkpoints is not None and self.checkpoints.resuming:
            yield from self.checkpoints.resume()
        if self.round == 0 < self.config.rounds and self.config.evaluate_every and not self._stopping():
            yield from self.evaluate_between()
        self.communication.orders_apart = self.schedule.asynchronous
        while not self._makes_no_more():
            yield from self._obey_orders()
            if self._makes_no_more():
                break
            if self._leave_asked or self.communication.leaving:
                logger.info("leaves after round %d", self.round)
                if self.communication.history is not None:
                    self.communication.history.leaving(self.round)
                self.schedule.abandon()
                return
            if self.checkpoints is not None:
                yield from self.checkpoints.between_rounds()
            yield from self._make_round(self.generation)
            every = self.config.evaluate_every
            if every and self.round % every == 0 and self.round < self.config.rounds and not self._stopping():
                yield from self.evaluate_between()
        if self.schedule.asynchronous:
            yield from self._end_together()
        if self._stopping():
            if self.communication.history is not None:
                self.communication.history.stopping(self.round)
            later = self._planners.neighbors_from(self.round, self.generation, self.training.learning_rate)
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

    def _obey_orders(self) -> Steps[None]:
        """Before a round: evaluate, or stand still, where people ordered it (wire/orders.py). A stop, and that this
        node is to leave, end it."""
        communication, since = self.communication, clock.now()
        until, held = since + communication.config.timeout_seconds, False
        while (what := communication.next_step(self.round)) != "begin":
            if self._stopping() or self._leave_asked or communication.leaving:
                break
            if what == "evaluate":
                if self.evaluated != self.round:
                    if communication.history is not None:
                        communication.history.ordered(self.round)
                    yield from self.evaluate_between(ordered=True)
                self._tell_order("evaluated")
                communication.order_obeyed(self.round)
                continue
            if what == "hold" and not held:
                held = True
                self._tell_order("paused")
            self.doing = "paused" if what == "hold" else "agreeing on an order"
            yield from communication.order_steps(self.round, until)
        if held:
            self._tell_order("resumed")

    def _tell_order(self, what: str) -> None:
        self.record({"kind": "control", "what": what, "round": self.round, "time": clock.wall()})

    @property
    def over(self) -> bool:
        """Whether this was the last round, on all nodes alike."""
        return self.round >= self.config.rounds or self.course.over or self._ended

    def _end_together(self) -> Steps[None]:
        """Where nodes do not wait for each other's rounds, the first that has made all of them ends the run: the others
        finish the round under way. Brings what is under way between nodes to its end, as steps."""
        done = self.over
        if done and not self.communication.stopping:
            self.communication.announce_stop()
        self.doing = "ending"
        views, _ = self._planners.views(self.round, self.generation, self.training.learning_rate)
        yield from self.schedule.drain(views[0][0])
        timeout_seconds = self.communication.config.timeout_seconds
        pending = self.communication.mean("end/rounds", torch.tensor([float(done)], dtype=torch.float64), closing=True)
        mean, _ = yield from mean_of(pending, self.sharing.requirements.phases, timeout_seconds)
        self._ended = float(mean) > 0  # else somebody asked for a stop

    def _stopping(self) -> bool:
        if self._stop_asked and not self.communication.stopping:
            self.communication.announce_stop()
        return self.communication.stopping

    # -- generations of members -------------------------------------------------------------------------------

    def _regroup(self) -> Steps[None]:
        """Yields until the next generation is in force and this node is a member of it."""
        self.doing = "agreeing on the next generation"
        model = self.training.model
        model.rebind(model.parameters.clone())  # it may lie in shared memory that the old generation releases
        pending = self.communication.regroup()
        yield None
        while not pending.ready:
            yield None
        generation = yield from pending.steps()
        yield from self._take_part(generation)

    def _take_part(self, generation: Generation) -> Steps[None]:
        """Go on as a member of `generation`, with the present model; fresh members get the mean of the others'
        first."""
        before, self.generation = self.generation, generation
        first_round = min(generation.first_round, self.config.rounds)
        if self.communication.history is not None:
            self.communication.history.entered(
                generation.name, generation.members, first_round, generation.fresh, generation.stopping,
                generation.merging,
            )  # fmt: skip
        then, now = {*before.members}, {*generation.members}
        self._trained.part(then - now)
        merged = {}
        if generation.merging:
            self.doing = "merging models"
            weight = self._trained.since_parted(now - generation.fresh, self.config.merge_weights)
            share = yield from merge_models(self, generation.fresh, weight, "generation/merge")
            merged = {"merged": {"weight": weight, "share": share}}
        elif generation.fresh:
            self.doing = "getting a model" if self.uid in generation.fresh else "giving a model"
            yield from give_models(self, generation.fresh, "generation/model")
        yield from agree_on_course(self, generation.fresh, "generation/course")
        self._trained.meet(now)
        self.communication.took_part(generation)
        if self.uid in generation.fresh:
            if self.checkpoints is not None:
                self.checkpoints.take_own(first_round)
            self.training.skip_to(first_round)
            self.communication.caught_up()
            self.round = first_round
        elif generation.merging and not generation.stopping:
            if self.round < first_round:
                self.training.skip_to(first_round)  # rounds of others, which are in the model
                self.round = first_round
        elif not (self.schedule.asynchronous or generation.stopping):
            yield from self._catch_up(first_round)
        if self.checkpoints is not None:
            self.checkpoints.begin_generation()
        self.deal_samples(self.round)
        yield from begin_rules_anew(self, "generation")
        if self._sampling is not None:
            self._sampling.forget(then - now)
        self.record({
            "kind": "generation", "generation": generation.number, "origin": generation.origin.hex(),
            "round": self.round, "time": clock.wall(),
            "members": sorted(now), "left": sorted(then - now), "joined": sorted(now - then | generation.fresh),
            **merged,
        })
        logger.info("generation %d of %d nodes from round %d", generation.number, len(generation.members), self.round)
        if self.uid == generation.members[0]:
            for apart in fallen_apart((each.graph for each in self._fragments), generation.members):
                self.record({"kind": "apart", "generation": generation.number, "round": self.round,
                             "time": clock.wall(), **asdict(apart)})  # fmt: skip
                self.communication.counters.on_event("apart", None, str(apart))
                logger.warning("%s", apart)

    def _catch_up(self, first_round: int) -> Steps[None]:
        """Make the rounds up to the first one of the generation, which is that of its furthest member. Others have made
        them in the generation before, so that this node has nobody to exchange payloads with: its row of W is that of
        the identity. What a rule promises holds from the first round on, in which all rules begin anew.

        A client that hears no server trains on nothing, and a server without answers takes no step."""
        if self.round >= first_round or self._makes_no_more():
            return
        if self.sharing.requirements.star:
            for round in range(self.round, first_round):
                self.training.rest(round)
            self.round = first_round
            return
        logger.info("makes rounds %d to %d alone, as others are ahead", self.round, first_round - 1)
        self._renew_rules()
        alone = replace(self.generation, members=(self.uid,))
        while self.round < first_round and not self._makes_no_more():
            yield from self._make_round(alone)

    def _makes_no_more(self) -> bool:
        """Whether no round begins any more, on all nodes alike or because of a stop."""
        return self.over or self._stopping()

    def deal_samples(self, first_round: int) -> None:
        """With `orphans: adopted`: deal the samples of nodes that are not members of the generation to those that are,
        for rounds from `first_round` on."""
        if self.config.orphans == "adopted":
            generation, training = self.generation, self.training
            training.deal_among(generation.members, generation.number, first_round)
            self.record({"kind": "dealt", "time": clock.wall(), **asdict(training.dealt[-1])})
            logger.info("trains on %d samples, %d of them of nodes that are not there", training.num_samples,
                        training.dealt[-1].adopted)  # fmt: skip

    def renew_rules(self) -> list[tuple[Sharing, Tensor, RoundView]]:
        """Let the sharing rules begin anew, but for what outlives a generation of members. Returns them, each with its
        part of the model and its view of the first phase of the round that comes."""
        self._renew_rules()
        views, _ = self._planners.views(self.round, self.generation, self.training.learning_rate)
        model = self.training.model.parameters
        return [(fragment.rule, fragment.part(model), view)
                for fragment, (view, *_) in zip(self.schedule.fragments, views, strict=True)]  # fmt: skip

    def _renew_rules(self) -> None:
        assert self._renew is not None
        former = self.schedule.fragments
        self._take_rules(self._renew())
        for fragment, before in zip(self.schedule.fragments, former, strict=True):
            fragment.rule.succeed(before.rule)

    # -- one round --------------------------------------------------------------------------------------------

    def _make_round(self, among: Generation) -> Steps[None]:
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
        if self.faults is not None:
            self.faults.enter(round)
        if self.trace is not None:
            self.schedule.make_times = self.trace.begin(round)
        self._started, self._idle = clock.now(), self.communication.idle_seconds or 0.0
        views, self._buffer_view = self._planners.views(round, among, self.training.learning_rate)
        if self._sampling is not None:
            yield from self._sampling.round(round)
            views = [[self._sampling.seen(view) for view in each] for each in views]
        self._missing: frozenset[int] = frozenset()
        self._lost: frozenset[int] = frozenset()
        yield from self.schedule.begin(round, views, lambda: self._after_steps(round))
        if self.sharing.requirements.phases == 1:
            yield from self._buffers.send(self._buffer_view, self.schedule)
        self.within_round = True

    def _next_phase(self, phase: int) -> Steps[None]:
        self.doing = f"exchange, phase {phase} of {self.sharing.requirements.phases}"
        mixed = yield from self.schedule.mix()
        self._account_missing(phase - 1, mixed)
        yield from self.schedule.send(phase)
        if phase == self.sharing.requirements.phases - 1:
            yield from self._buffers.send(self._buffer_view, self.schedule)

    def _finish_round(self, round: int) -> Steps[None]:
        self.doing = "exchange"
        mixed = yield from self.schedule.finish()
        yield from self._buffers.mix(self._buffer_view, self.schedule)
        self.within_round = False
        self.training.finish_round()
        if self.dumps is not None:
            self.schedule.dump(round, self.dumps)
        self._account_missing(self.sharing.requirements.phases - 1, mixed)
        times, update = self.schedule.times, self.schedule.update
        idle = self.communication.idle_seconds
        if idle is not None:  # while it waited, the thread stepped other nodes: no time was lost but what it slept
            times.wait = min(times.wait, idle - self._idle)
        seconds = clock.now() - self._started
        self._totals.add(seconds, times, self._lost)
        self.record({
            "kind": "round", "round": round, "time": clock.wall(), "seconds": seconds,
            "train_seconds": times.train, "send_seconds": times.send,
            "wait_seconds": times.wait, "mix_seconds": times.mix, "overlap": times.overlap,
            "loss": update.loss, "steps": update.steps, "samples": update.samples, **update.report,
            **{f"{purpose}_bytes_sent": sent for purpose, sent in self.communication.counters.bytes_sent().items()},
            "edges": self._totals.edge_deltas(), **self._totals.slowest(), **self._totals.late(),
            **({"missing": sorted(self._missing)} if self._missing else {}),
            **({"lost": sorted(self._lost)} if self._lost else {}),
            **({"fragments": self.schedule.due} if len(self._fragments) > 1 else {}), **self.schedule.report(),
        })
        logger.debug("round %d: loss %.4f, %.1f ms", round, update.loss, 1e3 * seconds)
        if self.trace is not None:
            self.trace.end(round)

    def _after_steps(self, round: int) -> None:
        self._trained.add(self.schedule.update.samples)
        if self.faults is not None:
            self.schedule.times.train += self.faults.slow_down(self.schedule.times.train)
        if self.config.check_finite and not math.isfinite(float(self.training.model.parameters.sum())):
            raise Diverged(f"node {self.uid}: the model holds NaN or infinity after the local steps of round {round}")

    def _account_missing(self, phase: int, mixed: Sequence[Mixed]) -> None:
        """Note the nodes of which nothing came in one phase. Raises PeerLost with `node.missing: fail`."""
        missing = frozenset(uid for each in mixed for uid in each.missing)
        lost = frozenset(uid for each in mixed for uid in each.missing - each.departed)
        self._missing |= missing
        self._lost |= lost
        if lost and self.config.missing == "fail":
            whom = ", ".join(map(str, sorted(lost)))
            raise PeerLost(
                f"node {self.uid}: nothing from node {whom} in round {self.round} within "
                f"{self.schedule.timeout_seconds(phase):g} s (communication.timeout_seconds"
                f"{f' for each of {phase + 1} phases' if phase else ''})", sorted(lost),
            )
        if lost and self.config.missing == "regroup":
            self.communication.suspect(lost, f"nothing from node {sorted(lost)} in round {self.round}")
        if missing:
            logger.warning("round %d: went on without %s", self.round, sorted(missing))

    # -- evaluation -------------------------------------------------------------------------------------------

    def evaluate_between(self, ordered: bool = False) -> Steps[None]:
        """Evaluate before the run's end; a stop cuts it short. The evaluation before round 0 shows where curves begin.
        Where nodes are in different rounds, each evaluates its own model alone.

        ordered: because people want to know, so that the run's course (early stop, best checkpoint) is not to change.
        """
        if self.schedule.asynchronous and (self.round or ordered):
            self.doing = "evaluation"
            self.evaluation, self.evaluated = self._evaluator.alone(), self.round
            self.record({"kind": "evaluation", "round": self.round, "time": clock.wall(), **self.evaluation})
            return
        try:
            yield from self.evaluate(ordered=ordered)
        except Interrupted:
            logger.info("evaluation after round %d given up: the run is stopping", self.round)

    def evaluate(self, closing: bool = False, ordered: bool = False) -> Steps[None]:
        """Evaluate the local and the merged model, as steps, and record the result. closing: the last time, which a
        stop does not cut short. ordered: as in `evaluate_between`."""
        self.doing, started = "evaluation", clock.now()
        members = self.generation.members
        key = EVALUATION + ("closing" if closing else f"round-{self.round}")
        found = yield from self._evaluator.evaluate(key, closing, (members.index(self.uid), len(members)))
        self.merged, self.evaluation, self.evaluated = found.merged, found.figures, self.round
        self.averages = None if found.average is None else (found.average, found.merged_average)
        self.record({"kind": "evaluation", "round": self.round, "time": clock.wall(), **self.evaluation})
        if self.trace is not None:
            self.trace.evaluated(self.round, started)
        if not ordered:
            self.course.take(self.evaluation, self.round)
        if self.course.over and not closing:
            self.record({"kind": "early_stop", "round": self.round, "time": clock.wall(), **self.course.figures()})

    def figures(self) -> dict[str, float | int | str]:
        """Returns the node's closing figures, by the names of summary.json."""
        counters = self.communication.counters
        return {
            "uid": self.uid, "rounds": self.round, **self.evaluation,
            **({"evaluated_round": self.evaluated} if self.evaluation else {}), **self.course.figures(),
            **self._totals.figures(),
            **({"dealt": packed(self.training.dealt)} if self.config.orphans == "adopted" else {}),
            **{f"bytes_{purpose}": sent for purpose, sent in counters.bytes_sent().items()},
            "bytes_saved": counters.saved_bytes,
            **({"bytes_relayed": relayed} if (relayed := counters.relayed_bytes) else {}),
            "faults": sum(counters.faults.values()) + counters.earlier.get("faults", 0),
            **(self.checkpoints.closing_figures() if self.checkpoints is not None else {}),
        }

    # -- checkpoints ------------------------------------------------------------------------------------------

    def sharing_state(self) -> list[dict[str, Any]]:
        """Returns copies of all that the fragments' rules and exchanges keep between rounds."""
        return [fragment.state_dict() for fragment in self.schedule.fragments]

    def load_sharing_state(self, state: Sequence[dict[str, Any]]) -> None:
        """Restores what `sharing_state` returned. Raises ValueError for the state of other rules or fragments."""
        for fragment, each in zip(self.schedule.fragments, state, strict=True):
            fragment.load_state_dict(each)

    def progress(self) -> dict[str, Any]:
        """Returns figures and counters of the rounds so far, which a resumed run goes on from."""
        return {
            **self._totals.state_dict(), "evaluation": dict(self.evaluation), "evaluated": self.evaluated,
            "counters": self.communication.counters.totals(), "course": self.course.state_dict(),
        }

    def load_progress(self, state: Mapping[str, Any]) -> None:
        """Restores what `progress` returned."""
        self._totals.load_state_dict(state)
        self.evaluation, self.evaluated = dict(state["evaluation"]), state["evaluated"]
        self.course.load_state_dict(state.get("course"))
        self.communication.counters.earlier = dict(state["counters"])
