"""All processes of a simulated run: advances them when their waits are over, and injects faults."""

from __future__ import annotations

import contextlib
import math
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from decentnode import clock, entropy
from decentnode.communication.parts import Schema
from decentnode.communication.run_state import Steps, Wait
from decentnode.communication.shared_memory.model_slots import SlotWait
from decentnode.communication.zeromq.config import ZeroMQConfig
from decentnode.communication.zeromq.protocol.link_state import BULK, CONTROL
from decentnode.errors import DecentnodeError, PeerLost
from decentnode.faults import (
    AnyFault,
    Break,
    ClockJump,
    Cut,
    Faults,
    FullDisk,
    HalfOpen,
    Kill,
    Pause,
    Restart,
    Slow,
    lasts,
    resolve,
)
from decentnode.node.node import Node
from decentnode.simulate.world.event_queue import EventQueue
from decentnode.simulate.world.network import VirtualNetwork
from decentnode.simulate.world.process_setup import ProcessSetup
from decentnode.simulate.world.transport import Simulated
from decentnode.simulate.world.transport_observer import TransportObserver
from decentnode.wire.generation import Caller, Limits
from decentnode.wire.messages import NO_RUN, PROTOCOL_VERSION, REACH_DIRECT, Declined, Described, Granted, Knock

ASK_AGAIN_SECONDS = 0.5
"""Time after which a node that was told to ask again asks once more to be admitted."""
MANY_ROUNDS = 10_000
"""Rounds in which random faults may occur, in a world that does not state the number of its rounds."""
MakeNode = Callable[[int, Callable[[tuple[Schema, ...]], Simulated]], Node]
"""make(uid, make_communication) builds a node, as `build.build` does."""


@dataclass(frozen=True)
class Setting:
    """The parameters of a world, apart from its nodes."""

    num_nodes: int
    config: ZeroMQConfig
    limits: Limits | None = None
    """Limits of the membership protocol; None if the membership never changes."""
    faults: Faults = Faults()
    seed: int = 0
    """Seed of the connections' random draws, and of ids."""
    compute_seconds: Callable[[int, int], float] = lambda _uid, _round: 0.0
    """Returns the duration of the local steps for (uid, round)."""
    newcomers: int = 0
    """Largest number of nodes beyond `num_nodes` that may be admitted."""
    starts_within_seconds: float = 0.0
    """The starts of the processes are spread over this time."""


class Process:
    """One process of a node: its parts and its progress."""

    def __init__(self, world: World, uid: int, life: int, granted: Granted | None = None) -> None:
        """life: number of earlier processes of this uid. granted: for a node that is not in the mapping, the answer
        with which a member admitted it."""
        self.world, self.uid, self.life, self.granted = world, uid, life, granted
        self.heap = world.heap
        self.node = world.make_node(uid, self._transport)
        self.io, self.facts = self.transport.io, self.transport.facts
        self.facts.notified = self._notified
        self.facts.on_wait_began = lambda _since: None  # not needed: the timer is set anew after every event
        self.io.settled = self._settled
        self.error: Exception | None = None
        """The error with which it failed."""
        self.over = False
        """Whether it reached its end."""
        self.dead = False
        self.wait: Wait | None = None
        """The wait that must be over before it continues."""
        self._is_scheduled = self._is_stepping = False
        self._steps = self._main_steps()

    def _transport(self, schemas: tuple[Schema, ...]) -> Simulated:
        self.transport = Simulated(self.world.setting.config, schemas, self._make_setup())
        return self.transport

    def _make_setup(self) -> ProcessSetup:
        world = self.world
        return ProcessSetup(
            uid=self.uid, num_nodes=world.setting.num_nodes + world.setting.newcomers, network=world.network,
            observer=world.observer,
            digest="simulated", limits=world.setting.limits, compute_seconds=self._compute_seconds,
            founders=world.setting.num_nodes, granted=self.granted,
        )  # fmt: skip

    def _compute_seconds(self, round: int) -> float:
        return self.world.setting.compute_seconds(self.uid, round) * math.prod(self.world.slowness.get(self.uid, ()))

    def _main_steps(self) -> Steps[None]:
        if self.life or self.granted is not None:
            self.transport.join()
        else:
            yield from self.transport.start_steps(self.transport.config.start_timeout_seconds)
        yield from self.node.steps()
        yield from self.transport.close_steps()

    def _fail_steps(self, error: Exception) -> Steps[None]:
        """Ends the process as a daemon's process ends: reports the failure to the others, unless it only follows from a
        failure elsewhere."""
        if not isinstance(error, PeerLost):
            self.transport.fail(self.uid, str(error))
        yield from self.transport.close_steps()

    @property
    def alive(self) -> bool:
        """Whether it has not ended and was not killed."""
        return not (self.over or self.dead)

    def begin(self) -> None:
        self._resume()

    def _notified(self) -> None:
        if not self._is_scheduled:
            self._is_scheduled = True
            self.heap.at(self.heap.now, self._resume)

    def _settled(self) -> None:
        if isinstance(self.wait, SlotWait) and not self._is_stepping:  # the last lease's end is not notified
            self._notified()
        self.world.settled(self)

    def _resume(self) -> None:
        """Steps the node until it has to wait."""
        self._is_scheduled = False
        if not self.alive:
            return
        if self.heap.now < self.io.suspended_until:
            self._is_scheduled = True
            self.heap.at(self.io.suspended_until, self._resume)
            return
        self._is_stepping = True
        while self.alive and self._step():
            pass
        if not self.dead:
            self.io.settle()
        self._is_stepping = False

    def _step(self) -> bool:
        """Advances the node by one step if its wait is over; returns whether there may be another step."""
        raised: Exception | None = None
        if self.wait is not None:
            try:
                if not self.wait.step(self.heap.now):
                    self._schedule_check(self.wait, self.wait.deadline)
                    return False
            except DecentnodeError as error:
                raised = error
        round = self.node.round
        try:
            self.wait = next(self._steps) if raised is None else self._steps.throw(raised)
        except StopIteration:
            self.wait, self.over = None, True
        except DecentnodeError as error:
            if self.error is not None:
                raise
            self.error, self.wait, self._steps = error, None, self._fail_steps(error)
        if self.node.round != round:
            self.world.entered(self)
        return self.alive

    def _schedule_check(self, wait: Wait, due: float) -> None:
        def check() -> None:
            if self.wait is wait and wait.deadline == due:
                self._resume()

        assert due > self.heap.now, f"{type(wait).__name__} is not over at its deadline"
        self.heap.at(due, check)

    # -- faults -----------------------------------------------------------------------------------------------

    def kill(self) -> None:
        """Ends the process without notice."""
        self.dead = True
        self.transport.close()
        self.world.network.end(self.uid)
        self._steps.close()


class World:
    """A run of whole nodes on virtual time."""

    def __init__(self, setting: Setting, make_node: MakeNode, observer: TransportObserver | None = None) -> None:
        self.setting, self.make_node, self.observer = setting, make_node, observer or TransportObserver()
        self.heap = EventQueue()
        self.network = VirtualNetwork(self.heap, setting.faults.links, setting.seed)
        self.slowness: dict[int, list[float]] = {}
        """By uid: the factors by which local steps take longer, one for each fault in effect."""
        self.lives: list[Process] = []
        """All processes, in the order in which they began."""
        self.processes: dict[int, Process] = {}
        """By uid: the latest process."""
        self.happened: Counter[str] = Counter()
        """Number of faults of the plan that occurred, by kind."""
        self.turned_away: list[str] = []
        """Reasons why nodes that are not in the mapping were refused."""
        self.settled: Callable[[Process], None] = lambda _process: None
        """Called after every event of a process."""
        self.began: Callable[[Process], None] = lambda _process: None
        """Called with every process before anything happens to it."""
        rounds = setting.limits.rounds if setting.limits is not None else MANY_ROUNDS
        self._plan = resolve(setting.faults.plan, setting.seed, setting.num_nodes, rounds, setting.newcomers)
        self._by_round = [(i, fault) for i, fault in enumerate(self._plan) if fault.at_round is not None]

    @contextlib.contextmanager
    def _virtual(self) -> Iterator[None]:
        with clock.use(self.heap.clock), entropy.use(entropy.seeded(self.setting.seed)):
            yield

    def run(self, until_seconds: float) -> bool:
        """Runs the world; returns whether all processes ended by the time `until_seconds`. Blocking; raises errors of
        the observer's checks, and of the code under test."""
        setting = self.setting
        with self._virtual():
            for uid in range(setting.num_nodes):
                process = self._begin(uid, 0)
                self.heap.after(self.network.random.random() * setting.starts_within_seconds, process.begin)
            for index, fault in enumerate(self._plan):
                if fault.at_seconds is not None:
                    self.heap.at(fault.at_seconds, lambda i=index, fault=fault: self.strike(i, fault))  # type: ignore[misc]
            if setting.faults.lossy_seconds is not None:
                self.heap.at(setting.faults.lossy_seconds, self._stop_losses)
            return self.heap.run(lambda: not any(each.alive for each in self.processes.values()), until_seconds)

    def admit(self, ask: int, at: str) -> None:
        """A node that is not in the mapping asks member `ask`, and then the members that it names, to be admitted; it
        begins once it has a uid. It asks again every ASK_AGAIN_SECONDS. at: its host, an address by which members would
        recognize it.

        Questions and answers are instantaneous here, and never lost; over sockets they have a connection of their own.
        """
        process = self.processes[ask]
        reconfiguration = process.transport.reconfiguration
        assert reconfiguration is not None
        knock = Knock(NO_RUN, 0, 0, PROTOCOL_VERSION, f"tcp://{at}:7000", f"tcp://{at}:7001", REACH_DIRECT, "")
        answer: Granted | Described | Declined | None = None
        if process.alive and self.heap.now >= process.io.suspended_until:
            answer = reconfiguration.knocked(knock, Caller(), self.heap.now)
            process.io.settle()
        if isinstance(answer, Granted):
            self.happened["admitted"] += 1
            made = self.processes[answer.uid] = Process(self, answer.uid, 0, answer)
            self.lives.append(made)
            self.began(made)
            made.begin()
            return
        if isinstance(answer, Declined) and answer.final:
            self.turned_away.append(answer.reason)
        elif isinstance(answer, Declined) and answer.uid != ask:
            self.admit(answer.uid, at)
        else:
            follower = next(iter(uid for uid, each in self.processes.items() if each.alive), ask)
            self.heap.after(ASK_AGAIN_SECONDS, lambda: self.admit(follower, at))

    def _process(self, uid: int, life: int) -> Process:
        return Process(self, uid, life)

    def _begin(self, uid: int, life: int) -> Process:
        process = self.processes[uid] = self._process(uid, life)
        self.lives.append(process)
        self.began(process)
        return process

    def _stop_losses(self) -> None:
        self.network.faulty = False

    def entered(self, process: Process) -> None:
        """Is called when a node begins another round."""
        for index, fault in [each for each in self._by_round if each[1].concerns(process.uid)]:
            if process.node.round >= (fault.at_round or 0):
                self._by_round.remove((index, fault))
                self.heap.after(0.0, lambda i=index, fault=fault: self.strike(i, fault))  # type: ignore[misc]

    def strike(self, index: int, fault: AnyFault) -> None:
        """Injects a fault. index: its index in the plan. Raises ValueError for a fault that no simulated world
        supports."""
        self.happened[fault.do] += 1
        now, network = self.heap.now, self.network
        if isinstance(fault, Cut):
            network.partition(*fault.sides, fault.seconds)
        elif isinstance(fault, Break | HalfOpen):
            plane = CONTROL if fault.plane == "control" else BULK
            (network.cut if isinstance(fault, Break) else network.halve)(fault.source, fault.to, plane)
        elif isinstance(fault, Slow):
            for uid in fault.uids:
                self._slow_down(uid, fault)
        elif isinstance(fault, FullDisk | ClockJump):
            raise ValueError(f"a simulated world has neither disks nor a time of day: {fault.do}")
        elif isinstance(fault, Kill | Restart | Pause):
            for process in [self.processes[uid] for uid in fault.uids if uid in self.processes]:
                if isinstance(fault, Restart):
                    if process.dead:
                        self._begin(process.uid, process.life + 1).begin()
                elif process.alive and isinstance(fault, Pause):
                    process.io.suspend(now + fault.seconds)
                elif process.alive and isinstance(fault, Kill):
                    process.kill()

        else:
            rule = index, fault
            network.rules.append(rule)
            if lasts(fault) < math.inf:
                self.heap.after(lasts(fault), lambda: network.rules.remove(rule))

    def _slow_down(self, uid: int, fault: Slow) -> None:
        factors = self.slowness.setdefault(uid, [])

        def recover() -> None:
            factors.remove(fault.factor)

        factors.append(fault.factor)
        if lasts(fault) < math.inf:
            self.heap.after(lasts(fault), recover)
