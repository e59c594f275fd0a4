"""Makes an experiment's virtual time from its compute times, links, traffic and schedule."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from decentnode import clock, native
from decentnode.build import build, threads_of
from decentnode.communication.hybrid.config import TorchConfig
from decentnode.communication.inproc import Hub, Inproc, InprocConfig
from decentnode.errors import UsageError
from decentnode.experiment import Experiment
from decentnode.experiment.virtual_time import ComputeConfig, LinksConfig
from decentnode.metrics.reader import read
from decentnode.node.schedules.schedules import SCHEDULES
from decentnode.simulate.cliques import CliqueTransfers
from decentnode.simulate.timeline.compute import Compute
from decentnode.simulate.timeline.network import Network
from decentnode.simulate.timeline.rounds import Clock, TimeLine, TransfersOfRound, time_line
from decentnode.simulate.traffic import Traffic

MEASURED_ROUNDS = 5
"""Rounds of local steps whose median duration is used, after a warm-up round."""
MEASURED_SECONDS = 10.0
"""No further round is measured after this time."""


def is_described(experiment: Experiment) -> bool:
    """Returns whether the experiment describes virtual time (simulate.compute or simulate.links)."""
    return experiment.simulate.compute is not None or experiment.simulate.links is not None


def measured_step_seconds(experiment: Experiment) -> float:
    """Returns the seconds of one local step, measured on this machine with the first node that trains, and with as many
    threads as the mapping gives it. Blocking for about MEASURED_SECONDS at most, plus the time to make the model."""
    num_nodes, servers = experiment.make_graph().num_nodes, experiment.servers()
    uid = next(uid for uid in range(num_nodes) if uid not in servers)
    hub = Hub(num_nodes)
    config = InprocConfig.model_validate({"name": "inproc"})
    node = build(experiment, uid, lambda schemas: Inproc(config, uid=uid, hub=hub, schemas=schemas))
    with native.torch_threads(threads_of(experiment, uid)):
        node.training.local_update(0)
        found: list[float] = []
        measuring_began = clock.now()
        while len(found) < MEASURED_ROUNDS and (not found or clock.now() - measuring_began < MEASURED_SECONDS):
            round_began = clock.now()
            node.training.local_update(1 + len(found))
            found.append(clock.now() - round_began)
    return statistics.median(found) / local_steps(experiment)


def local_steps(experiment: Experiment) -> int:
    """Returns the number of local steps of a round; 1 if it follows from the data (local_epochs): a step then stands
    for all of them."""
    return int(getattr(experiment.training, "local_steps", 1) or 1)


def make_compute(
    experiment: Experiment, config: ComputeConfig, step_seconds: float | None = None, steps: int | None = None
) -> Compute:
    """Returns the compute times of the experiment's nodes. step_seconds: of a step, if the config says `measured`;
    None: measured now, unless a trace of devices gives it. steps: of a round; None: the experiment's local steps."""
    mapping = experiment.make_mapping()
    if config.step_seconds != "measured":
        step_seconds = config.step_seconds
    elif config.trace is not None:
        step_seconds = 0.0
    elif step_seconds is None:
        step_seconds = measured_step_seconds(experiment)
    machine_of = [mapping.place(uid).machine for uid in range(mapping.num_nodes)]
    return Compute(
        config, machine_of, step_seconds=step_seconds, local_steps=steps or local_steps(experiment),
        batch_size=int(getattr(experiment.training, "batch_size", 1)), seed=experiment.seed,
        base_dir=experiment.base_dir,
    )  # fmt: skip


def make_network(experiment: Experiment, config: LinksConfig, compute: Compute) -> Network:
    mapping = experiment.make_mapping()
    machine_of = [mapping.place(uid).machine for uid in range(mapping.num_nodes)]
    return Network(config, machine_of, node_bytes_per_second=compute.bytes_per_second, seed=experiment.seed,
                   base_dir=experiment.base_dir)  # fmt: skip


def make_clock(
    experiment: Experiment, *, links: LinksConfig | None = None, step_seconds: float | None = None,
    traffic: Traffic | None = None,
) -> Clock:
    """Returns the clock of an experiment. links: replaces the experiment's own. step_seconds: as for `make_compute`.
    Raises what its parts raise."""
    section = experiment.simulate
    compute = make_compute(experiment, section.compute or ComputeConfig.model_validate({}), step_seconds)
    network = make_network(experiment, links or section.links or LinksConfig.model_validate({}), compute)
    traffic = traffic or Traffic(experiment)
    transfers: TransfersOfRound = traffic
    asynchronous = SCHEDULES[experiment.node.schedule].asynchronous
    if isinstance(experiment.communication, TorchConfig) and not asynchronous:
        transfers = CliqueTransfers(experiment, traffic, network)
    return Clock(
        compute, network, transfers, steps_before=traffic.steps_before, trains=traffic.trains,
        overlapped=experiment.node.schedule == "overlapped",
        mixes_in_background=experiment.node.mix_in_background is not False,
        asynchronous=asynchronous, rounds=experiment.node.rounds, cycle=traffic.cycle,
    )  # fmt: skip


class VirtualTime:
    """The virtual time of a running simulation; a round's times are computed when they are first needed."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._ends: list[np.ndarray] = []

    def _end(self, round: int) -> np.ndarray:
        while len(self._ends) <= round:
            self._ends.append(self._clock.step()[3])
        return self._ends[round]

    def all_finished(self, rounds: int) -> np.ndarray:
        """Returns when each node finished its first `rounds` rounds, at least one."""
        return self._end(rounds - 1)

    def finished(self, rounds: int, uid: int | None = None) -> float:
        """Returns when a node finished its first `rounds` rounds; without `uid`, when all nodes had."""
        if not rounds:
            return 0.0
        end = self._end(rounds - 1)
        return float(end.max() if uid is None else end[uid])

    def ended(self, uid: int, rounds: int) -> float:
        """Returns the same as `finished`, for one node; `AsynchronousRounds` has a method of this name, too."""
        return self.finished(rounds, uid)

    def add_virtual_time(self, uid: int, record: Mapping[str, Any]) -> dict[str, Any]:
        """Returns a node's record with `virtual_seconds` added: for a round, when the node finished it; for an
        evaluation, when all nodes had finished the rounds before it."""
        if record.get("kind") == "round":
            return {**record, "virtual_seconds": self.finished(record["round"] + 1, uid)}
        if record.get("kind") == "evaluation":
            return {**record, "virtual_seconds": self.finished(record["round"])}
        return dict(record)


def time_line_of(experiment: Experiment, rounds: int, **options: Any) -> tuple[TimeLine, Clock]:
    """Returns (the time line of the experiment's first rounds, its clock). options: as for `make_clock`."""
    made = make_clock(experiment, **options)
    return time_line(made, rounds), made


def recorded_step_seconds(run: Path) -> tuple[int, float | None]:
    """Returns (the number of rounds that all nodes of a run finished, the median seconds of its local steps or None if
    there are none recorded). Raises UsageError if not every node has finished a round."""
    rounds: list[int] = []
    seconds: list[float] = []
    for file in sorted(run.glob("nodes/*/metrics.jsonl")):
        own = [record for record in read(file) if record.get("kind") == "round"]
        rounds.append(1 + max((record["round"] for record in own), default=-1))
        seconds += [record["train_seconds"] / record["steps"] for record in own if record["steps"]]
    if not rounds or not min(rounds):
        raise UsageError(f"{run} has no round that all nodes finished")
    return min(rounds), statistics.median(seconds) if seconds else None
