"""One participant: graph, sharing, communication and training, and the loop that turns rounds."""

from __future__ import annotations

import contextlib
import itertools
import logging
import math
import time
from collections.abc import Callable, Generator, Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from decentnode.communication.base import EVALUATION, AveragingGroup, Communication, Pending
from decentnode.errors import Diverged, Interrupted, PeerLost, Regrouping
from decentnode.graph.base import Graph, RoundView, averaging_group_of, parts
from decentnode.node.config import NodeConfig
from decentnode.node.schedule import SCHEDULES, Mixed
from decentnode.payload import Payload
from decentnode.sharing.base import Sharing
from decentnode.sharing.rounds import exchange_rounds, rule_view
from decentnode.tensors import blocks
from decentnode.training.base import Evaluation, Training, Update
from decentnode.wire.generation import Generation

logger = logging.getLogger(__name__)

Record = Callable[[dict[str, Any]], None]


class Node:
    """Runs the rounds of one uid. Blocking through `run`; stepped by hand through `steps`."""

    def __init__(
        self, uid: int, config: NodeConfig, graph: Graph, training: Training, sharing: Sharing,
        communication: Communication, *, seed: int, record: Record = lambda _: None,
        renew: Callable[[], Sharing] | None = None,
    ) -> None:
        """record: called once per round and per evaluation with plain numbers, on the training thread.

        renew: makes the rule as it is before its first round, for every further generation of members.
        """
        if config.missing == "regroup" and renew is None:
            raise ValueError("node.missing: regroup needs renew, got None")
        self.uid = uid
        self.config = config
        self.graph = graph
        self.training = training
        self.communication = communication
        self.seed = seed
        self.record = record
        self.generation = Generation(0, tuple(range(graph.num_nodes)))
        self._renew = renew
        self._take_rule(sharing)
        self.round = 0
        """Rounds finished."""
        self.merged: Tensor | None = None
        """[P + B] mean of all models (parameters, then float buffers) at the last evaluation."""
        self.reports: dict[int, dict[str, float | int | str]] = {}
        """On the lowest uid after the run: every node's closing figures."""
        self.doing = "joining"
        """What the node is at, in a word or two, for whoever looks on."""
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
            behind=self.config.mix_in_background,
        )

    # -- running ----------------------------------------------------------------------------------------------

    def run(self) -> None:
        """Blocking: all rounds from where the node stands, the closing evaluation, the closing report."""
        for _ in self.steps():
            pass

    def ask_stop(self) -> None:
        """Any thread or signal handler: finish the round under way on every node, then close."""
        self._stop_asked = True
        self.communication.stop_asked()

    def steps(self) -> Iterator[None]:
        """The run, yielding wherever another node has to act before this one can go on.

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
        """What is left of the run; `first` before it."""
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
            for phase in range(1, self.sharing.phases):
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
        """Steps until the next generation is in force and this node is part of it."""
        self.doing = "agreeing on the next generation"
        model = self.training.model
        model.rebind(model.parameters.clone())  # it may lie in a place that belongs to the old generation
        pending = self.communication.regroup()
        yield
        while not pending.ready:
            yield
        yield from self._take_part(pending.wait())

    def _take_part(self, generation: Generation) -> Iterator[None]:
        """Go on with `generation`, from the models that its members have; those without one get the others' mean."""
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
            "round": self.round, "time": time.time(),
            "members": sorted(now), "left": sorted(then - now), "joined": sorted(now - then | generation.fresh),
        })
        logger.info("generation %d of %d nodes from round %d", generation.number, len(generation.members), self.round)
        if self.uid == generation.members[0]:
            for part in parts(self.graph, generation.members, min(self.graph.period or 16, 16))[1:]:
                logger.warning("the graph no longer joins nodes %s to the others", sorted(part))

    def _give_models(self, generation: Generation) -> Iterator[None]:
        """The mean of the models that there are, unchanged by that, becomes the model of those that have none."""
        model = self.training.model
        own = torch.cat([model.parameters, model.buffers.to(model.dtype)])
        fresh = self.uid in generation.fresh
        pending = self.communication.mean("generation/model", torch.zeros_like(own) if fresh else own, closing=True)
        yield from self._until_ready(pending)
        mean, contributors = pending.wait(self.communication.config.timeout_seconds)
        if fresh:
            mean = (mean * (contributors / (contributors - len(generation.fresh)))).to(own.device)
            model.parameters.copy_(mean[: model.num_parameters])
            model.buffers.copy_(mean[model.num_parameters :])
            self.communication.caught_up()

    # -- one round --------------------------------------------------------------------------------------------

    def begin_round(self, round: int) -> Update:
        """Local steps and the exchange in flight; does not wait for a neighbor."""
        self.doing = "local steps"
        self._started = time.perf_counter()
        self._plans = self._planned(round)
        self._missing: frozenset[int] = frozenset()
        self._update = self.schedule.begin(self._plans[0], lambda: self._check_finite(round))
        if self.sharing.phases == 1:
            self._buffers = self._send_buffers(self._plans[-1])
        return self._update

    def next_phase(self, phase: int) -> None:
        """Blocking: wait for the neighbors of the phase before, mix, and send what `phase` (1 or later) sends."""
        self.doing = f"exchange, phase {phase} of {self.sharing.phases}"
        self._account_missing(self._plans[phase - 1], self.schedule.mix(self._plans[phase - 1]))
        self.schedule.send(self._plans[phase])
        if phase == self.sharing.phases - 1:
            self._buffers = self._send_buffers(self._plans[-1])

    def _planned(self, round: int) -> list[RoundView]:
        """A view per phase, then that of the float buffers: with one phase the rule's, else the graph's own.

        All are known before the first of them sends (H2 in communication/hybrid/transport.py).
        """
        seen, rule = replace(self._seen(round), lr=self.training.learning_rate), self.sharing
        plans = [rule.plan(replace(seen, phase=phase) if phase else seen) for phase in range(rule.phases)]
        plans.append(plans[0] if len(plans) == 1 else rule.plan_buffers(seen))
        members = self.generation.members
        return plans if len(members) == self.graph.num_nodes else [plan.among(members) for plan in plans]

    def _seen(self, round: int) -> RoundView:
        """What the graph says of a round; of one that never changes, found once for every set of members."""
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
        """Found once for every exchange of the graph's period and set of members. number: of the exchange."""
        period = self.graph.period
        key = (number if period is None else number % period, self.generation.members)
        if not self.schedule.averaging_groups:
            return ()
        if self._last_group is None or self._last_group[0] != key:
            self._last_group = key, averaging_group_of(self.graph, self.uid, number, alive)
        return self._last_group[1]

    def finish_round(self, round: int) -> None:
        """Blocking: wait for the neighbors of the last phase, mix, record."""
        self.doing = "exchange"
        mixed = self.schedule.finish(self._plans[-2])
        self._mix_buffers(self._plans[-1])
        self._account_missing(self._plans[-2], mixed)
        times, update = self.schedule.times, self._update
        seconds = time.perf_counter() - self._started
        self._round_seconds.append(seconds)
        self._train_seconds += times.train
        self._wait_seconds += times.wait
        self._overlaps += times.overlap
        self.record({
            "kind": "round", "round": round, "time": time.time(), "seconds": seconds,
            "train_seconds": times.train, "send_seconds": times.send,
            "wait_seconds": times.wait, "mix_seconds": times.mix, "overlap": times.overlap,
            "loss": update.loss, "steps": update.steps, "samples": update.samples, **update.report,
            **{f"{purpose}_bytes_sent": sent for purpose, sent in self.communication.counters.bytes_sent().items()},
            "edges": self._edge_deltas(), **self._slowest(),
            **({"missing": sorted(self._missing)} if self._missing else {}),
        })
        logger.debug("round %d: loss %.4f, %.1f ms", round, update.loss, 1e3 * seconds)

    def _edge_deltas(self) -> dict[str, list[float]]:
        """Peer -> [bytes of payloads sent, received, chunks sent, resends, seconds waited] of this round."""
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
        """The neighbor that this round waited for longest."""
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
        """Note who did not come in one phase. Raises PeerLost where that is not to be borne."""
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

    # -- float buffers ----------------------------------------------------------------------------------------

    def _shares_buffers(self) -> bool:
        return self.config.buffers == "average" and self.training.model.buffers.numel() > 0

    def _send_buffers(self, now: RoundView) -> Any:
        if not self._shares_buffers():
            return None
        payload = Payload({"x": self.training.model.buffers})
        outgoing = dict.fromkeys(now.neighbors, payload)
        group = AveragingGroup(now.averaging, payload) if self.schedule.averaging_groups and now.averaging else None
        return self.communication.exchange(now.round, outgoing, now.sources, self.sharing.phases, group)

    def _mix_buffers(self, now: RoundView) -> None:
        if self._buffers is None:
            return
        flat, exchange = self.training.model.buffers, self._buffers
        for arrival in exchange.arrivals(self.schedule.timeout_seconds(self.sharing.phases - 1)):
            part = flat[arrival.start : arrival.stop]
            if arrival.total is not None:
                self.sharing.mix_sum(part, part, arrival.total, now)
                continue
            received, missing = dict(arrival.received), arrival.missing
            mixed = self._mixed_buffers(part, received, now.without(missing))
            while spoiled := exchange.spoiled() & received.keys():
                received, missing = {u: p for u, p in received.items() if u not in spoiled}, missing | spoiled
                mixed = self._mixed_buffers(part, received, now.without(missing))
            part.copy_(mixed)

    def _mixed_buffers(self, part: Tensor, received: Mapping[int, Payload], now: RoundView) -> Tensor:
        """part [n]: of this node's buffers. A tensor of its own."""
        mixed = part * now.weights[self.uid]
        for uid, payload in received.items():
            mixed.add_(payload.tensors["x"], alpha=now.weights[uid])
        return mixed

    # -- evaluation -------------------------------------------------------------------------------------------

    def _evaluate_between(self) -> Iterator[None]:
        """An evaluation before the run's end, which a stop cuts short. That before round 0 shows where curves begin."""
        try:
            yield from self.evaluate()
        except Interrupted:
            logger.info("evaluation after round %d given up: the run is stopping", self.round)

    def evaluate(self, closing: bool = False) -> Iterator[None]:
        """Local model, merged model and consensus distance, as steps; the result goes to `record`.

        The merged model is the mean of all models; every node evaluates it on its own part of the test set.
        """
        self.doing = "evaluation"
        key = EVALUATION + ("closing" if closing else f"round-{self.round}")
        timeout = self.communication.config.timeout_seconds
        model, measured = self.training.model, self._measure()
        if measured.numel():
            self.training.load_statistics(measured)
        own = torch.cat([model.parameters, model.buffers.to(model.dtype)])
        pending = self.communication.mean(f"{key}/model", own, closing)
        local = self.training.evaluate("test")  # while the mean is on its way
        yield from self._until_ready(pending)
        self.merged, contributors = pending.wait(timeout)
        if measured.numel():
            self.merged = yield from self._recomputed(self.merged, f"{key}/statistics", closing)
        merged = self._evaluate_merged(self.merged)
        distance, norm = _squares(own[: model.num_parameters], self.merged[: model.num_parameters])
        sums = torch.tensor(
            [distance, merged.loss * merged.samples,
             merged.accuracy * merged.samples, merged.samples, local.accuracy, local.loss], dtype=torch.float64)
        pending = self.communication.mean(f"{key}/figures", sums, closing)
        yield from self._until_ready(pending)
        mean, _ = pending.wait(timeout)
        self._evaluated = self.round
        self._evaluation = {
            "loss": local.loss, "accuracy": local.accuracy,
            "accuracy_mean": float(mean[4]), "loss_mean": float(mean[5]),
            "accuracy_merged": float(mean[2] / mean[3]), "loss_merged": float(mean[1] / mean[3]),
            "consensus_distance": math.sqrt(float(mean[0])) / max(math.sqrt(norm), 1e-30),
            "consensus_rms": math.sqrt(float(mean[0])),
            "contributors": contributors,
        }
        if self.training.has_validation:
            validation = self.training.evaluate("validation")
            self._evaluation |= {"validation_loss": validation.loss, "validation_accuracy": validation.accuracy}
        self.record({"kind": "evaluation", "round": self.round, "time": time.time(), **self._evaluation})

    def _recomputed(self, merged: Tensor, key: str, closing: bool) -> Generator[None, None, Tensor]:
        """The merged model [P + B] with the statistics that it has over the data of all nodes."""
        with self._holding(merged):
            measured = self._measure()
        pending = self.communication.mean(key, measured, closing)
        yield from self._until_ready(pending)
        mean, _ = pending.wait(self.communication.config.timeout_seconds)
        with self._holding(merged):
            self.training.load_statistics(mean)
            model = self.training.model
            return torch.cat([model.parameters, model.buffers.to(model.dtype)])

    def _until_ready(self, pending: Pending) -> Iterator[None]:
        """Steps for others to come as far as this node; after a stop they may have all phases of a round to go."""
        yield
        for _ in range(self.sharing.phases):
            if not pending.ready:
                yield

    def _evaluate_merged(self, merged: Tensor) -> Evaluation:
        """The merged model on this member's part of the test set; the node's own model is restored."""
        with self._holding(merged):
            members = self.generation.members
            return self.training.evaluate("test", (members.index(self.uid), len(members)))

    def _measure(self) -> Tensor:
        """Statistics of the model as it is now over the node's own samples; empty where buffers are not recomputed."""
        if self.config.buffers != "recompute":
            return torch.zeros(0, dtype=torch.float64)
        return self.training.measure_statistics()

    @contextlib.contextmanager
    def _holding(self, merged: Tensor) -> Iterator[None]:
        """The training's model is `merged` [P + B] meanwhile."""
        model = self.training.model
        parameters, buffers = model.parameters.clone(), model.buffers.clone()
        model.parameters.copy_(merged[: model.num_parameters])
        model.buffers.copy_(merged[model.num_parameters :])
        try:
            yield
        finally:
            model.parameters.copy_(parameters)
            model.buffers.copy_(buffers)

    def figures(self) -> dict[str, float | int | str]:
        """The node's closing figures, as they go to summary.json."""
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


def _squares(x: Tensor, mean: Tensor) -> tuple[float, float]:
    """(||x - mean||^2, ||mean||^2) in double precision, block by block: copies of whole models would take more memory
    than the run. x, mean: [P]."""
    total = torch.zeros(2, dtype=torch.float64, device=x.device)
    for start, stop in blocks(0, x.numel()):
        far = mean[start:stop].double()
        total[1] += far.square().sum()
        total[0] += far.sub_(x[start:stop]).square().sum()
    return float(total[0]), float(total[1])
