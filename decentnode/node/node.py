"""One participant of a run: the loop over rounds, generations of members, evaluations and the closing report."""

from __future__ import annotations

import itertools
import logging
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from decentnode import clock
from decentnode.communication.base import Communication
from decentnode.communication.counters import EVALUATION
from decentnode.errors import Diverged, Interrupted, PeerLost, Regrouping
from decentnode.graph.base import Graph, RoundView, averaging_group_of
from decentnode.graph.base import parts as connected_parts
from decentnode.node.buffers import BufferExchange
from decentnode.node.config import NodeConfig
from decentnode.node.evaluation import Evaluator, steps_until_ready
from decentnode.node.schedule import SCHEDULES, Mixed
from decentnode.sharing.base import Sharing
from decentnode.sharing.rounds import exchange_rounds, rule_view
from decentnode.training.base import Training, Update
from decentnode.wire.generation import Generation

logger = logging.getLogger(__name__)

Record = Callable[[dict[str, Any]], None]


@dataclass(frozen=True)
class NodeParts:
    """What a node is made of."""

    graph: Graph
    training: Training
    sharing: Sharing
    communication: Communication
    renew: Callable[[], Sharing] | None = None
    """Makes the sharing rule as it is before its first round, for every further generation of members. Must be given
    with `node.missing: regroup`."""


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
        self.seed = seed
        self.record = record
        self.generation = Generation(0, tuple(range(self.graph.num_nodes)))
        self._renew = parts.renew
        self._take_rule(parts.sharing)
        self._buffers = BufferExchange(averaged=config.buffers == "average")
        self._evaluator = Evaluator(
            self.training, self.communication, recompute=config.buffers == "recompute",
            phases=self.sharing.requirements.phases,
        )  # fmt: skip
        self.round = 0
        """How many rounds are finished."""
        self.merged: Tensor | None = None
        """[P + B] mean of all models (parameters, then float buffers) at the last evaluation."""
        self.reports: dict[int, dict[str, float | int | str]] = {}
        """On the lowest uid after the run: every node's closing figures."""
        self.doing = "joining"
        """What the node does now, in a few words, for status.json."""
        self._last_view: RoundView | None = None
        self._last_group: tuple[tuple[int, tuple[int, ...]], tuple[int, ...]] | None = None
        self._stop_asked = False
        self._edges: dict[int, tuple[int, int, int, int, float]] = {}
        self._evaluation: dict[str, float] = {}
        self._evaluated = -1
        self._round_seconds: list[float] = []
        self._train_seconds = 0.0
        self._wait_seconds = 0.0
        self._overlaps = 0.0
        self._waits: dict[int, float] = {}

    def _take_rule(self, sharing: Sharing) -> None:
        self.sharing = sharing
        self.schedule = SCHEDULES[self.config.schedule](
            self.training, sharing, self.communication, averaging_groups=self.config.missing == "fail",
            in_background=self.config.mix_in_background,
        )

    # -- running ----------------------------------------------------------------------------------------------

    def run(self) -> None:
        """Run all remaining rounds, the closing evaluation and the closing report. Blocking.

        Raises PeerLost, Diverged, Interrupted and what training and sharing raise.
        """
        for _ in self.steps():
            pass

    def ask_stop(self) -> None:
        """Ask every node to finish the round under way, then close. Any thread or signal handler may call it."""
        self._stop_asked = True
        self.communication.stop_asked()

    def steps(self) -> Iterator[None]:
        """Run as `run` does, but yield wherever another node has to act before this one can go on.

        Stepping all nodes of a run in turn, one yield each, is how an in-process run works without threads. Raises
        Interrupted only where a stop finds the node outside of the run and without a round of its own.
        """
        work = self._work()
        while True:
            try:
                yield from work
                return
            except Regrouping as reason:
                logger.info("round %d: %s", self.round, reason)
            except PeerLost as lost:
                if self.config.missing != "regroup" or not lost.missing:
                    raise
                self.communication.suspect(lost.missing, str(lost))
            except Interrupted as reason:
                if self.round == 0:
                    raise
                logger.warning("%s: this node ends with what it has after round %d", reason, self.round)
                return
            self.schedule.abandon()
            work = self._work(first=self._regroup())

    def _work(self, first: Iterator[None] | None = None) -> Iterator[None]:
        """The steps of all remaining rounds and the end of the run; `first` before them."""
        yield from first or ()
        generation = self.communication.generation
        if generation is not None and generation.name != self.generation.name:
            yield from self._take_part(generation)
        if self.round == 0 < self.config.rounds and self.config.evaluate_every and not self._stopping():
            yield from self._evaluate_between()
        while self.round < self.config.rounds and not self._stopping():
            self.communication.enter(self.round)
            self.begin_round(self.round)
            yield
            for phase in range(1, self.sharing.requirements.phases):
                self.next_phase(phase)
                yield
            self.finish_round(self.round)
            self.round += 1
            every = self.config.evaluate_every
            if every and self.round % every == 0 and self.round < self.config.rounds and not self._stopping():
                yield from self._evaluate_between()
        if self._stopping():
            ahead = itertools.islice(exchange_rounds(self.sharing, self.round), min(self.graph.period or 16, 16))
            later = {uid for round in ahead for plan in self._planned(round) for uid in plan.neighbors}
            self.communication.depart(self.round, later)
        # Always, and by everybody: whether an evaluation of this round was finished before a stop or given up because
        # of it differs from node to node, and who had one would leave the others waiting in the closing one.
        yield from self.evaluate(closing=True)
        self.communication.report(self.figures())
        yield
        self.reports = self.communication.reports(self.communication.config.timeout_seconds)

    def _stopping(self) -> bool:
        if self._stop_asked and not self.communication.stopping:
            self.communication.announce_stop()
        return self.communication.stopping

    # -- generations of members -------------------------------------------------------------------------------

    def _regroup(self) -> Iterator[None]:
        """Yields until the next generation is in force and this node is a member of it."""
        self.doing = "agreeing on the next generation"
        model = self.training.model
        model.rebind(model.parameters.clone())  # it may lie in shared memory that the old generation releases
        pending = self.communication.regroup()
        yield
        while not pending.ready:
            yield
        yield from self._take_part(pending.wait())

    def _take_part(self, generation: Generation) -> Iterator[None]:
        """Go on as a member of `generation`, with the present model; fresh members get the mean of the others'
        first."""
        before, self.generation = self.generation, generation
        if generation.fresh:
            self.doing = "getting a model" if self.uid in generation.fresh else "giving a model"
            yield from self._give_models(generation)
        self.round = min(generation.first_round, self.config.rounds)
        assert self._renew is not None
        self._take_rule(self._renew())
        then, now = {*before.members}, {*generation.members}
        self.record({
            "kind": "generation", "generation": generation.number, "origin": generation.origin.hex(),
            "round": self.round, "time": clock.wall(),
            "members": sorted(now), "left": sorted(then - now), "joined": sorted(now - then | generation.fresh),
        })
        logger.info("generation %d of %d nodes from round %d", generation.number, len(generation.members), self.round)
        if self.uid == generation.members[0]:
            for part in connected_parts(self.graph, generation.members, min(self.graph.period or 16, 16))[1:]:
                logger.warning("the graph no longer joins nodes %s to the others", sorted(part))

    def _give_models(self, generation: Generation) -> Iterator[None]:
        """Give the mean of the other members' models to fresh members; the models of the others stay as they are."""
        model = self.training.model
        own = torch.cat([model.parameters, model.buffers.to(model.dtype)])
        fresh = self.uid in generation.fresh
        pending = self.communication.mean("generation/model", torch.zeros_like(own) if fresh else own, closing=True)
        yield from steps_until_ready(pending, self.sharing.requirements.phases)
        mean, contributors = pending.wait(self.communication.config.timeout_seconds)
        if fresh:
            mean = (mean * (contributors / (contributors - len(generation.fresh)))).to(own.device)
            model.parameters.copy_(mean[: model.num_parameters])
            model.buffers.copy_(mean[model.num_parameters :])
            self.communication.caught_up()

    # -- one round --------------------------------------------------------------------------------------------

    def begin_round(self, round: int) -> Update:
        """Make the local steps and begin the exchange. Does not wait for a neighbor."""
        self.doing = "local steps"
        self._started = clock.now()
        self._plans = self._planned(round)
        self._missing: frozenset[int] = frozenset()
        self._update = self.schedule.begin(self._plans[0], lambda: self._check_finite(round))
        if self.sharing.requirements.phases == 1:
            self._buffers.send(self._plans[-1], self.schedule)
        return self._update

    def next_phase(self, phase: int) -> None:
        """Wait for the neighbors of the phase before, mix, and send the payload of `phase` (1 or later). Blocking."""
        self.doing = f"exchange, phase {phase} of {self.sharing.requirements.phases}"
        self._account_missing(self._plans[phase - 1], self.schedule.mix(self._plans[phase - 1]))
        self.schedule.send(self._plans[phase])
        if phase == self.sharing.requirements.phases - 1:
            self._buffers.send(self._plans[-1], self.schedule)

    def _planned(self, round: int) -> list[RoundView]:
        """Returns a view per phase, then that of the float buffers: with one phase the rule's, else the graph's own.

        All are known before the first phase sends (H2 in communication/hybrid/transport.py).
        """
        seen, rule = replace(self._seen(round), lr=self.training.learning_rate), self.sharing
        plans = [rule.plan(replace(seen, phase=phase) if phase else seen) for phase in range(rule.requirements.phases)]
        plans.append(plans[0] if len(plans) == 1 else rule.plan_buffers(seen))
        members = self.generation.members
        return plans if len(members) == self.graph.num_nodes else [plan.among(members) for plan in plans]

    def _seen(self, round: int) -> RoundView:
        """Returns the graph's view of a round. For a graph that never changes it is computed once per generation."""
        members, generation = self.generation.members, self.generation.number
        alive = members if len(members) < self.graph.num_nodes else None
        number = self.sharing.exchange_number(round)
        last = self._last_view
        if number is not None and last is not None and self.graph.period == 1 and last.generation == generation:
            return replace(last, round=round, extra={})
        seen = replace(rule_view(self.sharing, self.graph, self.uid, round, self.seed, alive), generation=generation)
        if number is not None:
            seen = self._last_view = replace(seen, averaging_group=self._averaging_group(number, alive))
        return seen

    def _averaging_group(self, number: int, alive: tuple[int, ...] | None) -> tuple[int, ...]:
        """Returns the group of nodes that average as a whole in this exchange, computed once per exchange of the
        graph's period and generation; empty where the schedule has none. number: of the exchange."""
        period = self.graph.period
        key = (number if period is None else number % period, self.generation.members)
        if not self.schedule.averaging_groups:
            return ()
        if self._last_group is None or self._last_group[0] != key:
            self._last_group = key, averaging_group_of(self.graph, self.uid, number, alive)
        return self._last_group[1]

    def finish_round(self, round: int) -> None:
        """Wait for the neighbors of the last phase, mix, and record the round. Blocking."""
        self.doing = "exchange"
        mixed = self.schedule.finish(self._plans[-2])
        self._buffers.mix(self._plans[-1], self.schedule)
        self._account_missing(self._plans[-2], mixed)
        times, update = self.schedule.times, self._update
        seconds = clock.now() - self._started
        self._round_seconds.append(seconds)
        self._train_seconds += times.train
        self._wait_seconds += times.wait
        self._overlaps += times.overlap
        self.record({
            "kind": "round", "round": round, "time": clock.wall(), "seconds": seconds,
            "train_seconds": times.train, "send_seconds": times.send,
            "wait_seconds": times.wait, "mix_seconds": times.mix, "overlap": times.overlap,
            "loss": update.loss, "steps": update.steps, "samples": update.samples, **update.report,
            **{f"{purpose}_bytes_sent": sent for purpose, sent in self.communication.counters.bytes_sent().items()},
            "edges": self._edge_deltas(), **self._slowest(),
            **({"missing": sorted(self._missing)} if self._missing else {}),
        })
        logger.debug("round %d: loss %.4f, %.1f ms", round, update.loss, 1e3 * seconds)

    def _edge_deltas(self) -> dict[str, list[float]]:
        """Returns peer -> [bytes of payloads sent, received, chunks sent, resends, seconds waited] in this round."""
        found = {}
        for uid, edge in self.communication.counters.known():
            total = (edge.payload_bytes_sent, edge.payload_bytes_received, edge.frames_sent, edge.resends,
                     edge.wait_seconds)  # fmt: skip
            last = self._edges.get(uid, (0, 0, 0, 0, 0.0))
            if total != last:
                self._edges[uid] = total
                found[str(uid)] = [round(now - then, 6) for now, then in zip(total, last, strict=True)]
        return found

    def _slowest(self) -> dict[str, float]:
        """Returns the neighbor that this round waited for longest, and for how many seconds; empty without a wait."""
        longest, whom = 0.0, -1
        for uid, edge in self.communication.counters.known():
            waited = edge.wait_seconds - self._waits.get(uid, 0.0)
            self._waits[uid] = edge.wait_seconds
            if waited > longest:
                longest, whom = waited, uid
        return {"waited_for": whom, "waited_seconds": longest} if whom >= 0 else {}

    def _check_finite(self, round: int) -> None:
        if self.config.check_finite and not math.isfinite(float(self.training.model.parameters.sum())):
            raise Diverged(f"node {self.uid}: the model holds NaN or infinity after the local steps of round {round}")

    def _account_missing(self, now: RoundView, mixed: Mixed) -> None:
        """Note the nodes of which nothing came in one phase. Raises PeerLost with `node.missing: fail`."""
        self._missing |= mixed.missing
        lost = mixed.missing - mixed.departed
        if lost and self.config.missing == "fail":
            whom = ", ".join(map(str, sorted(lost)))
            raise PeerLost(
                f"node {self.uid}: nothing from node {whom} in round {now.round} within "
                f"{self.schedule.timeout_seconds(now.phase):g} s (communication.timeout_seconds"
                f"{f' for each of {now.phase + 1} phases' if now.phase else ''})", sorted(lost),
            )
        if lost and self.config.missing == "regroup":
            self.communication.suspect(lost, f"nothing from node {sorted(lost)} in round {now.round}")
        if mixed.missing:
            logger.warning("round %d: went on without %s", now.round, sorted(mixed.missing))

    # -- evaluation -------------------------------------------------------------------------------------------

    def _evaluate_between(self) -> Iterator[None]:
        """Evaluate before the run's end; a stop cuts it short. The evaluation before round 0 shows where curves
        begin."""
        try:
            yield from self.evaluate()
        except Interrupted:
            logger.info("evaluation after round %d given up: the run is stopping", self.round)

    def evaluate(self, closing: bool = False) -> Iterator[None]:
        """Evaluate the local and the merged model, as steps, and record the result. closing: the last time, which a
        stop does not cut short."""
        self.doing = "evaluation"
        members = self.generation.members
        key = EVALUATION + ("closing" if closing else f"round-{self.round}")
        found = yield from self._evaluator.evaluate(key, closing, (members.index(self.uid), len(members)))
        self.merged, self._evaluation, self._evaluated = found.merged, found.figures, self.round
        self.record({"kind": "evaluation", "round": self.round, "time": clock.wall(), **self._evaluation})

    def figures(self) -> dict[str, float | int | str]:
        """Returns the node's closing figures, by the names of summary.json."""
        counters = self.communication.counters
        known = [item for item in counters.known() if item[1].wait_seconds > 0]  # not of sums
        waited = max(known, key=lambda item: item[1].wait_seconds, default=None)
        ordered = sorted(self._round_seconds)
        return {
            "uid": self.uid, "rounds": self.round, **self._evaluation,
            **({"evaluated_round": self._evaluated} if self._evaluation else {}),
            "round_seconds_median": ordered[len(ordered) // 2] if ordered else 0.0,
            "round_seconds_total": sum(ordered), "train_seconds": self._train_seconds,
            "wait_seconds": self._wait_seconds, "overlap": self._overlaps / max(1, len(ordered)),
            **{f"bytes_{purpose}": sent for purpose, sent in counters.bytes_sent().items()},
            "bytes_saved": counters.saved_bytes,
            "waited_for": waited[0] if waited else -1, "waited_seconds": waited[1].wait_seconds if waited else 0.0,
            "faults": sum(counters.faults.values()),
        }
