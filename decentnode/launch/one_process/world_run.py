"""Runs a simulation with injected faults or newcomers. Its nodes are simulated processes in a world on virtual time
(simulate/world/), with the files and messages of a run on real machines; their records can be checked and replayed in
the same way."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from decentnode.build import build, limits_of
from decentnode.communication.parts import Schema
from decentnode.communication.zeromq.config import ZeroMQConfig
from decentnode.errors import Interrupted, PeerLost, UsageError
from decentnode.experiment import Experiment
from decentnode.experiment.virtual_time import ComputeConfig
from decentnode.faults import AnyFault, ClockJump, Faults, FullDisk, Kill, Link, ProcessFault, Restart
from decentnode.launch.children.messages import ChildMessage, Engine, Failed, Finished, NodeJoined, Task
from decentnode.launch.children.own_modules import local_modules
from decentnode.launch.files.node_files import NodeRecords, Reporter, resolve_recording, save_node
from decentnode.launch.files.resume import attach
from decentnode.launch.files.run_dir import node_dir
from decentnode.launch.nodes.node_process import describe_failure
from decentnode.launch.one_process.batched_run import Stoppable
from decentnode.mapping.base import Place
from decentnode.mapping.newcomer import Newcomer, machine_of
from decentnode.node.node import Node
from decentnode.simulate.virtual import make_compute
from decentnode.simulate.world.replay_run import PLAIN
from decentnode.simulate.world.transport import Simulated
from decentnode.simulate.world.world import Process, Setting, World
from decentnode.wire.orders import Action

logger = logging.getLogger(__name__)

STEP_SECONDS = 0.01
"""Virtual seconds of a local step if `simulate.compute` does not say. A constant, not a measurement, so that a run is
repeatable bit for bit."""
LINK = Link(latency_seconds=0.001, jitter_seconds=0.0)
RESTART_SECONDS = 1.0
"""Virtual seconds until a killed process is restarted, if `node.restarts` allows it."""
LONGEST_SECONDS = 1e8
"""Limit of virtual seconds, longer than any run."""


def needs_world(experiment: Experiment) -> bool:
    """Returns whether a simulated run of this experiment needs the world of simulated processes."""
    return bool(experiment.faults or experiment.simulate.newcomers)


def simulation_refusal(experiment: Experiment, resumes: bool) -> str:
    """Returns why the experiment's faults and newcomers cannot be simulated; "" if they can. resumes: whether the run
    is to be resumed from checkpoints."""
    for fault in experiment.faults:
        if isinstance(fault, FullDisk | ClockJump):
            return f"a simulated run has no disk and no wall clock for {fault.do} to strike; use a run with processes"
    if experiment.simulate.engine == "batched":
        return "simulate.engine: batched has no processes or connections, which faults and newcomers need; leave " \
               "it out"  # fmt: skip
    if experiment.simulate.links is not None:
        return "simulate.links must be left out with faults or simulate.newcomers, which use links of their own"
    return "a simulated run with faults or newcomers cannot be resumed: run it from the beginning" if resumes else ""


class SupervisedWorld(World):
    """A world that restarts killed processes of nodes in the mapping, as a supervisor does."""

    restarts: int = 0
    """`node.restarts`."""

    def __init__(self, *parts: Any) -> None:
        """parts: of `World`."""
        super().__init__(*parts)
        self.injected: Counter[str] = Counter()
        """Number of injected process faults by kind."""
        self.asking_host = ""
        """The host of the newcomer that asked last for admission."""
        self.given_up: set[str] = set()
        """Hosts of newcomers that no longer ask for admission."""

    def admit(self, ask: int, at: str) -> None:
        self.asking_host = at
        if at not in self.given_up:
            super().admit(ask, at)

    def strike(self, index: int, fault: AnyFault) -> None:
        hit = [uid for uid in fault.uids if isinstance(fault, ProcessFault) and uid in self.processes
                  and self.processes[uid].alive != isinstance(fault, Restart)]  # fmt: skip
        if hit:
            self.injected[fault.do] += len(hit)
        super().strike(index, fault)
        for uid in hit:
            again = uid < self.setting.num_nodes and self.processes[uid].life < self.restarts
            if isinstance(fault, Kill) and again:
                self.heap.after(RESTART_SECONDS, lambda uid=uid: self._restart(uid))  # type: ignore[misc]

    def _restart(self, uid: int) -> None:
        process = self.processes[uid]
        if process.dead and any(each.alive for each in self.processes.values()):
            self._begin(uid, process.life + 1).begin()


class WorldRun:
    """Runs all nodes of a task with injected faults, and its newcomers, until the last one ends."""

    def __init__(
        self, task: Task, experiment: Experiment, send: Callable[[ChildMessage], None], tick: Callable[[], None]
    ) -> None:
        """tick: called after every event of a node. Raises UsageError if the faults or newcomers cannot be simulated.
        """
        if why := simulation_refusal(experiment, task.resume is not None):
            raise UsageError(why)
        self._task, self._experiment, self._send, self._tick = task, experiment, send, tick
        self._reporters: dict[int, Reporter] = {}
        self._records: dict[int, NodeRecords] = {}
        self._stop_asked = self._stop_passed_on = False
        default = ComputeConfig.model_validate({"step_seconds": STEP_SECONDS})
        self._compute = make_compute(experiment, experiment.simulate.compute or default)
        self._newcomers = {f"10.0.{index // 256}.{index % 256}": each
                           for index, each in enumerate(experiment.simulate.newcomers)}  # fmt: skip
        """Newcomers by their hosts, which are only labels."""
        self._admitted: dict[str, Process] = {}
        self.world = self._make_world()
        for host, each in self._newcomers.items():
            self.world.heap.at(each.at_seconds, lambda host=host: self._ask_admission(host))  # type: ignore[misc]
            if each.leaves_at_seconds is not None:
                self.world.heap.at(each.leaves_at_seconds, lambda host=host: self._ask_leave(host))  # type: ignore[misc]

    def _make_world(self) -> SupervisedWorld:
        experiment = self._experiment
        config = experiment.communication
        config = config if isinstance(config, ZeroMQConfig) else PLAIN
        regroups = experiment.node.missing == "regroup"
        world = SupervisedWorld(Setting(
            experiment.make_graph().num_nodes, config.model_copy(update={"checksum": "xxh3"}),
            limits_of(experiment) if regroups else None, Faults(links=LINK, plan=experiment.make_faults()),
            seed=experiment.seed, compute_seconds=self._compute_seconds, newcomers=experiment.node.newcomers,
        ), self._make_node)  # fmt: skip
        world.restarts = experiment.node.restarts if regroups else 0
        world.began, world.settled = self._began, self._settled
        return world

    def _make_node(self, uid: int, make_communication: Callable[[tuple[Schema, ...]], Simulated]) -> Node:
        def record(found: dict[str, Any]) -> None:
            self._reporters[uid].record(found)

        return build(self._experiment_of(uid), uid, make_communication, record, device="cpu")

    def _experiment_of(self, uid: int) -> Experiment:
        """Returns the experiment for a node that is being built; a newcomer's has its place in the run."""
        mapping = self._experiment.make_mapping()
        if uid < mapping.num_nodes:
            return self._experiment
        host, found = self.world.asking_host, self._experiment.model_copy()
        place = Place(uid, machine_of(uid, mapping), 0, host, None, "cpu", host, None)
        found.seat(Newcomer(place, b"", b"", self._newcomers[host].samples_of))
        return found

    def _compute_seconds(self, uid: int, round: int) -> float:
        seconds = self._compute.seconds(round)
        if uid < len(seconds):
            return float(seconds[uid])
        return float(np.median(seconds)) if self.world.processes[uid].node.training.num_samples else 0.0

    def _ask_admission(self, host: str) -> None:
        """Lets a newcomer ask a living member for admission."""
        self.world.admit(next((uid for uid, each in self.world.processes.items() if each.alive), 0), host)

    def _ask_leave(self, host: str) -> None:
        """Asks a newcomer to leave; one that was not admitted yet gives up."""
        self.world.given_up.add(host)
        process = self._admitted.get(host)
        if process is not None and process.alive:
            process.node.ask_leave()
            process.io.settle()

    def ask_stop(self) -> None:
        """As `Stoppable.ask_stop`."""
        self._stop_asked = True

    def order(self, action: Action) -> None:
        """As `Stoppable.order`: only warns that the order is not supported, because virtual time cannot wait for a
        user."""
        logger.warning("%s: a simulated run with faults or newcomers only accepts the order to stop", action)

    def _began(self, process: Process) -> None:
        """Opens the records of a process that begins, also of a restarted one."""
        uid, task, node = process.uid, self._task, process.node
        if process.granted is not None:
            self._admitted[self.world.asking_host] = process
        if uid in self._records:
            self._records[uid].close()
        else:
            folder = node_dir(task.run_dir, uid) if task.run_dir else None
            if folder is not None:
                folder.mkdir(parents=True, exist_ok=True)
            send = self._send if uid in task.uids else _discard  # as on machines, where newcomers have no supervisor
            self._reporters[uid] = Reporter(uid, folder and folder / "metrics.jsonl", send, task.progress_seconds)
            send(NodeJoined(uid))
        record = resolve_recording(self._experiment) is True
        self._records[uid] = NodeRecords([node], task.run_dir, record, self._experiment.run)
        attach(node, self._experiment, task, self._reporters[uid])
        self._records[uid].joined(uid)

    def _settled(self, process: Process) -> None:
        self._tick()
        if self._stop_asked and not self._stop_passed_on and process.alive:
            self._stop_passed_on = True
            process.node.ask_stop()
            process.io.settle()

    def run(self) -> int:
        """Runs all nodes to the end, and saves and reports their results. Returns the exit code. Blocking; raises the
        error that ends the run, with the `uid` of its node as an attribute."""
        try:
            over = self.world.run(LONGEST_SECONDS)
            assert over, "the simulated run does not end"
            self._warn_never_admitted()
            processes = [self.world.processes[uid] for uid in self._task.uids]
            successful = [each for each in processes if not each.dead and each.error is None]
            if not successful or self._experiment.node.missing != "regroup":
                self._raise_first(processes)
            newcomers = [each for uid, each in self.world.processes.items() if uid not in self._task.uids]
            ended = {each.uid: self._end_newcomer(each) for each in newcomers}
            reports = {str(uid): figures for uid, figures in ended.items() if figures is not None}
            for process in reversed(processes):
                self._end(process, reports)
            return 0 if all(each.node.over for each in successful) else Interrupted.exit_code
        except BaseException as error:
            for uid, each in self._records.items():
                each.failed(getattr(error, "uid", uid), error, alone=True)
            raise
        finally:
            for records in self._records.values():
                records.close()
            for reporter in self._reporters.values():
                reporter.close()

    def _warn_never_admitted(self) -> None:
        """Warns about newcomers that were never admitted, with the reason."""
        now, most = f"{self.world.heap.now:.4g}", self._experiment.node.newcomers
        for index, (host, each) in enumerate(self._newcomers.items()):
            if host in self._admitted:
                continue
            if each.at_seconds > self.world.heap.now:
                why = f"the run ended before it was to ask, at {each.at_seconds:g} virtual seconds"
            elif host in self.world.given_up:
                why = f"it was not admitted before it was to leave, at {each.leaves_at_seconds:g} virtual seconds"
            else:
                why = "it was not admitted before the run ended"
            numbers = f"node.newcomers: {most}; the run took {now} virtual seconds"
            logger.warning("simulate.newcomers[%d] never came: %s (%s)", index, why, numbers)

    def _raise_first(self, processes: Sequence[Process]) -> None:
        """Raises the error of the first failed node, preferring nodes that did not merely lose another one. Does
        nothing if none failed."""
        failed = [each for each in processes if each.error is not None]
        for process in sorted(failed, key=lambda each: isinstance(each.error, PeerLost)):
            assert process.error is not None
            process.error.__dict__.setdefault("uid", process.uid)
            raise process.error

    def _end(self, process: Process, reports: dict[str, dict[str, Any]]) -> None:
        """Saves and reports the results of a node in the mapping. reports: closing figures of newcomers, which do not
        report to the supervisor themselves."""
        uid, node = process.uid, process.node
        if process.dead:
            title = f"node {uid} was killed, as `faults` says"
            self._send(Failed(uid, PeerLost.exit_code, title, title))
        elif process.error is not None:
            self._send(describe_failure(uid, process.error))
        else:
            figures, injected = self._close(node), dict(self.world.injected)
            self._send(Finished(uid, figures, not node.over, reports, local_modules(), injected_faults=injected))

    def _end_newcomer(self, process: Process) -> dict[str, Any] | None:
        """Saves a newcomer's results. Returns its closing figures; None if it died, failed, or left before the others.
        """
        if process.dead:
            return None
        if process.error is not None:
            self._records[process.uid].failed(process.uid, process.error)
            return None
        figures = self._close(process.node)
        return None if process.node.left else figures

    def _close(self, node: Node) -> dict[str, Any]:
        """Saves the results of a node that ended regularly. Returns its closing figures."""
        if node.checkpoints is not None:
            node.checkpoints.close(node.communication.config.timeout_seconds)
        self._records[node.uid].over(node, not node.over)
        figures = node.figures()
        if self._task.run_dir:
            save_node(node, Path(self._task.run_dir))
        return figures


def _discard(_message: ChildMessage) -> None:
    """Discards a message."""


def run_in_world(
    task: Task, experiment: Experiment, send: Callable[[ChildMessage], None],
    ready: Callable[[Sequence[Stoppable]], None], tick: Callable[[], None],
) -> int:
    """Runs all nodes of a simulated task with faults or newcomers; `in_process.run_nodes` does it without either.
    Returns the exit code. Blocking."""
    run = WorldRun(task, experiment, send, tick)
    reasons = {"faults strike": experiment.faults, "newcomers join": experiment.simulate.newcomers}
    causes = " and ".join(each for each, is_given in reasons.items() if is_given)
    send(Engine("world", f"{causes} whole nodes on virtual time"))
    ready([run])
    return run.run()
