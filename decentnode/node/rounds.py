"""Makes one round of a node: the local steps, the exchange phase by phase, and the round's record."""

from __future__ import annotations

import functools
import logging
import math
from collections.abc import Callable, Sequence
from typing import Any

from decentnode import clock
from decentnode.communication.base import Communication
from decentnode.communication.run_state import Steps
from decentnode.errors import Diverged, PeerLost
from decentnode.formatting import names
from decentnode.graph.base import RoundView
from decentnode.node.config import NodeConfig
from decentnode.node.faults import NodeFaults
from decentnode.node.generations.merging import TrainingWork
from decentnode.node.measuring.totals import RoundTotals
from decentnode.node.measuring.trace import NodeTrace
from decentnode.node.rules import NodeRules
from decentnode.node.sampling import Sampling
from decentnode.node.schedules.buffers import BufferExchange
from decentnode.node.schedules.dumps import Dumps
from decentnode.node.schedules.fragment_exchange import ExchangeOutcome
from decentnode.sharing.hooks import Hooks
from decentnode.tensors import sum_dtype
from decentnode.training.base import Training
from decentnode.wire.generation import Generation

logger = logging.getLogger(__name__)

Record = Callable[[dict[str, Any]], None]


class NodeRounds:
    """Makes the rounds of one node, one at a time: `begin`, `next_phase` for each further phase, `finish`."""

    def __init__(
        self, uid: int, config: NodeConfig, training: Training, communication: Communication, rules: NodeRules,
        *, sampling: Sampling | None, record: Record,
    ) -> None:
        """sampling: finds the neighbors of each round, in place of the rules' graphs. record: called once per round."""
        self.totals = RoundTotals(communication.counters)
        self.work = TrainingWork()
        self.sampling = sampling
        self.faults: NodeFaults | None = None
        """Faults to inject in rounds that begin from now on."""
        self.dumps: Dumps | None = None
        """Writes which coefficients the rule chose to send."""
        self.trace: NodeTrace | None = None
        self.is_within_round = False
        """Whether a round has begun and is not finished."""
        self._uid, self._config, self._training, self._communication = uid, config, training, communication
        self._rules, self._record = rules, record
        training.keep_sum = config.check_finite
        self._buffers = BufferExchange(averaged=config.buffers == "average" and not rules.schedule.asynchronous)
        self._buffer_view: RoundView
        self._started = self._idle_at_start = 0.0
        self._missing: frozenset[int] = frozenset()
        self._lost: frozenset[int] = frozenset()

    def begin(self, round: int, among: Generation) -> Steps[None]:
        """Make the local steps, unless the rule schedules them for a later phase, and begin the exchange with members
        of `among`, as steps."""
        schedule, self.is_within_round = self._rules.schedule, True
        if self.faults is not None:
            self.faults.enter(round)
        if self.trace is not None:
            schedule.make_times = self.trace.begin(round)
        self._started, self._idle_at_start = clock.now(), self._communication.idle_seconds or 0.0
        views, self._buffer_view = self._rules.views(round, among)
        if self.sampling is not None:
            yield from self.sampling.round(round)
            views = [[self.sampling.with_sampled_neighbors(view) for view in each] for each in views]
        schedule.weights_in = functools.partial(self._rules.weights_in, among)
        self._missing = self._lost = frozenset()
        yield from schedule.begin(round, views, lambda: self._after_steps(round))
        if schedule.sharing.requirements.phases == 1:
            yield from self._buffers.send(self._buffer_view, schedule)

    def next_phase(self, round: int, phase: int) -> Steps[None]:
        """Wait for the neighbors of the previous phase, mix their payloads, and send those of `phase` (1 or later), as
        steps."""
        schedule = self._rules.schedule
        mixed = yield from schedule.mix()
        self._account_missing(round, mixed)
        yield from schedule.send(phase)
        if phase == schedule.sharing.requirements.phases - 1:
            yield from self._buffers.send(self._buffer_view, schedule)

    def finish(self, round: int) -> Steps[None]:
        """Wait for the neighbors of the last phase, mix their payloads, and record the round, as steps."""
        schedule = self._rules.schedule
        mixed = yield from schedule.finish()
        yield from self._buffers.mix(self._buffer_view, schedule)
        self.is_within_round = False
        self._training.finish_round()
        if self.dumps is not None:
            schedule.dump(round, self.dumps)
        self._account_missing(round, mixed)
        self._record_round(round)
        if self.trace is not None:
            self.trace.end(round)

    def abandon(self) -> None:
        """Abandon the current round, as nothing of it will arrive any more."""
        self.is_within_round = False
        self._rules.schedule.abandon()
        self._buffers.abandon()

    def _record_round(self, round: int) -> None:
        schedule, counters = self._rules.schedule, self._communication.counters
        times, update = schedule.times, schedule.update
        idle = self._communication.idle_seconds
        # while this node waited, the thread stepped other nodes: only the time that it slept is lost
        if idle is not None:
            times.wait = min(times.wait, idle - self._idle_at_start)
        seconds = clock.now() - self._started
        self.totals.add(seconds, times, self._lost)
        self._record({
            "kind": "round", "round": round, "time": clock.recorded(), "seconds": seconds,
            "train_seconds": times.train, "send_seconds": times.send,
            "wait_seconds": times.wait, "mix_seconds": times.mix, "overlap": times.overlap,
            "loss": update.loss, "steps": update.steps, "samples": update.samples, **update.report,
            **{f"{purpose}_bytes_sent": sent for purpose, sent in counters.bytes_sent().items()},
            **self.totals.edge_changes(),
            **({"missing": sorted(self._missing)} if self._missing else {}),
            **({"lost": sorted(self._lost)} if self._lost else {}),
            **({"fragments": schedule.due} if len(self._rules.fragments) > 1 else {}), **schedule.report(),
        })
        logger.debug("round %d: loss %.4f, %.1f ms", round, update.loss, 1e3 * seconds)

    def _after_steps(self, round: int) -> None:
        schedule = self._rules.schedule
        self.work.add(schedule.update.samples)
        if self.faults is not None:
            schedule.times.train += self.faults.slow_down(schedule.times.train)
        if self._config.check_finite and not math.isfinite(self._sum_of_model()):
            raise Diverged(f"node {self._uid}: the model holds NaN or infinity after the local steps of round {round}")

    def _sum_of_model(self) -> float:
        """Returns the sum of all parameters. Uses the sum that the training returned with its loss, unless rules may
        have changed the model since: computing it here makes the host wait for the GPU once more."""
        schedule = self._rules.schedule
        known_sum = schedule.update.parameters_sum
        if known_sum is None or any(type(each.rule).adjust is not Hooks.adjust for each in schedule.fragments):
            parameters = self._training.model.parameters
            return float(parameters.sum(dtype=sum_dtype(parameters.dtype)))
        return known_sum

    def _account_missing(self, round: int, mixed: Sequence[ExchangeOutcome]) -> None:
        """Account for the nodes from which nothing arrived in one phase. Raises PeerLost with `node.missing: fail`."""
        missing = frozenset(uid for each in mixed for uid in each.missing)
        lost = frozenset(uid for each in mixed for uid in each.missing - each.departed)
        self._missing |= missing
        self._lost |= lost
        if lost and self._config.missing != "return_weight":
            self._handle_lost(round, lost)
        if missing:
            logger.warning("round %d: continued without node %s", round, names(sorted(missing)))

    def _handle_lost(self, round: int, lost: frozenset[int]) -> None:
        """Handle lost neighbors without which the round may not continue: report them as suspects with `node.missing:
        regroup`, and raise PeerLost with `fail`."""
        communication, what = self._communication, f"nothing from node {names(sorted(lost))} in round {round}"
        why = communication.why_silent(lost)
        if self._config.missing == "regroup":
            communication.suspect(lost, f"{what}: {why}" if why else what)
            return
        waited = f"waited {self._rules.schedule.times.wait:.1f} s"
        phases = self._rules.schedule.sharing.requirements.phases
        limit = f"communication.timeout_seconds: {communication.config.timeout_seconds:g}"
        limit += f" for each of {phases} phases" if phases > 1 else ""
        raise PeerLost(f"node {self._uid}: {what}, {waited} ({limit}){f': {why}' if why else ''}", sorted(lost))
