"""Random schedules of faults for a run of three to seven nodes, and what must hold in every one of them.

Beside deaths, freezes, broken connections, lost, late and repeated messages, nodes fail in their own code (they say so,
and goodbye), finish after the last round, and are asked to stop. `python -m tests.wire.swarm [SCHEDULES [FIRST]]` runs
many on all cores.
"""

from __future__ import annotations

import os
import random
import sys
import time
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor, as_completed

from decentnode.launch.supervising.entry import die_with_parent
from decentnode.wire.generation import Generation, Name
from decentnode.wire.membership import Membership
from decentnode.wire.messages import Bye, Message
from tests.wire.world import RUN, SUSPECT, Process, World

Fault = tuple[str, int, float]
"""(kind, a number that says whom, seconds until the next)"""
KINDS = {
    "kill": 5, "restart": 6, "fail": 2, "freeze": 3, "thaw": 4, "alone": 4, "apart": 3, "cut": 2, "heal": 6, "stop": 1,
    "wait": 2,
}  # fmt: skip
SETTLE_SECONDS = 60 * SUSPECT
"""How long those that live may take to agree, once everything works again."""


class Swarm(World):
    """A world whose nodes finish after the last round, and wait only for whom they would really wait."""

    def __init__(
        self, num_nodes: int, seed: int, loss: float, rounds: int, late: float, merges: bool = False
    ) -> None:
        super().__init__(num_nodes, seed=seed, loss=loss, rounds=rounds, merges=merges)
        self.late = late
        self.departed: set[int] = set()
        self.stopped = False
        self._closed: set[Name] = set()
        """Generations whose closing evaluation all members have."""

    def take(self, uid: int, message: Message) -> None:
        """Without the bytes in between: they are the codec's tests."""
        self._handle(uid, self.processes[uid].membership.receive(message, self.now))

    def waited_for(self, uid: int) -> Iterable[int]:
        """Those of whom nothing comes: dead or frozen, in another generation, or behind a broken connection. Who said
        goodbye is waited for, too, until the generation has its closing evaluation."""
        own = self.processes[uid].membership
        left = own.left if own.generation.name in self._closed else ()
        others = [each for each in own.generation.members if each != uid and each not in left]
        return [other for other in others if not self._reaches(other, uid, own.generation)] if own.steady else ()

    def _reaches(self, source: int, uid: int, generation: Generation) -> bool:
        process = self.processes.get(source)
        return (process is not None and not process.frozen and frozenset((source, uid)) not in self.cut
                and process.membership.steady and process.membership.generation == generation)  # fmt: skip

    # -- faults -----------------------------------------------------------------------------------------------

    def apply(self, kind: str, who: int) -> None:
        uid = who % self.num_nodes
        if kind == "kill":
            self.kill(uid)
        elif kind == "restart":
            for each in [uid, *range(self.num_nodes)]:
                if each not in self.processes and each not in self.departed:
                    self.restart(each)
                    break
        elif kind == "fail":
            self.fail(uid)
        elif kind in ("freeze", "thaw"):
            getattr(self, kind)(uid)
        elif kind == "alone":
            self.cut_off({uid})
        elif kind == "apart":
            self.cut_off({each for each in range(self.num_nodes) if who >> each & 1})
        elif kind == "cut":
            self.cut.add(frozenset((uid, (uid + 1 + who // 8 % (self.num_nodes - 1)) % self.num_nodes)))
        elif kind == "heal":
            self.cut.clear()
        elif kind == "stop" and uid in self.processes:
            self.stopped = True
            self.processes[uid].membership.stopping = True

    def fail(self, uid: int) -> None:
        """Its own code raises: it says so, then goodbye, and ends."""
        process = self.processes.get(uid)
        if process is not None and not process.frozen and process.membership.stage != "outside":
            process.membership.fail()
            self._say_goodbye(uid)
            del self.processes[uid]

    def _say_goodbye(self, uid: int) -> None:
        membership = self.processes[uid].membership
        generation = membership.message_generation
        membership.outbox += [
            (other, Bye(RUN, generation.number, uid, origin=generation.origin))
            for other in generation.members if other != uid
        ]  # fmt: skip
        self.send(uid, membership)

    # -- the end of the run -----------------------------------------------------------------------------------

    def step(self) -> None:
        super().step()
        for uid, process in sorted(self.processes.items()):
            if process.frozen or not process.membership.steady:
                continue
            generation = process.membership.generation
            self._tell_stop(process, generation)
            if generation.name in self._closed or self._closes(generation):
                self._closed.add(generation.name)
                if self.random.random() < 0.3:  # it has the closing evaluation, and ends
                    self._say_goodbye(uid)
                    del self.processes[uid]
                    self.departed.add(uid)
        whole = self.in_force()
        assert len(whole) <= 1 or self.limits.merges, f"two are in force: {whole}"

    def _tell_stop(self, process: Process, generation: Generation) -> None:
        """A stop goes from member to member."""
        uid, membership = process.membership.uid, process.membership
        if self.stopped and not membership.stopping:
            others = [other for other in generation.members if other != uid and self._reaches(other, uid, generation)]
            membership.stopping = any(self.processes[other].membership.stopping for other in others)

    def _closes(self, generation: Generation) -> bool:
        """Whether all members are past their last round, and reach each other for the closing evaluation."""
        for uid in generation.members:
            process = self.processes.get(uid)
            if process is None or process.frozen or process.membership.generation != generation:
                return False
            membership = process.membership
            if not membership.steady or (membership.position < self.limits.rounds and not membership.stopping):
                return False
        return not any(frozenset((a, b)) in self.cut for a in generation.members for b in generation.members)


def plan(seed: int, merges: bool = False) -> tuple[Swarm, list[Fault]]:
    """The schedule number `seed`: always the same. merges: all sides of a broken network go on."""
    draw = random.Random(seed)
    num_nodes = draw.choice([3, 3, 4, 5, 5, 6, 7])
    rounds = draw.choice([6, 20, 10**9, 10**9])
    loss, late = draw.choice([0.0, 0.0, 0.05, 0.2]), draw.choice([0.0, 0.02, 0.1])
    kinds, weights = zip(*KINDS.items(), strict=True)
    faults = [
        (kind, draw.randrange(1 << 10), draw.choice([0.25, 0.5, 1.0, SUSPECT, 2 * SUSPECT, 5 * SUSPECT]))
        for kind in draw.choices(kinds, weights, k=draw.randint(2, 14))
    ]
    return Swarm(num_nodes, seed, loss, rounds, late, merges), faults


def survive(seed: int, membership: type[Membership] = Membership, merges: bool = False) -> str:
    """One schedule; "" or what went wrong."""
    world, faults = plan(seed, merges)
    if membership is not Membership:
        world.use(membership)
    try:
        for kind, who, seconds in faults:
            world.apply(kind, who)
            world.run(seconds)
        _heal(world)
        return _end(world)
    except AssertionError as error:
        return f"{error} (at {world.now - 100:g} s)"


def _heal(world: Swarm) -> None:
    world.cut.clear()
    world.loss = min(world.loss, 0.05)
    for uid in range(world.num_nodes):
        world.thaw(uid)
        if world.stopped and uid in world.processes:
            world.processes[uid].membership.stopping = True  # every machine was told
        if uid not in world.processes and uid not in world.departed and not world.stopped:
            world.restart(uid)


def _end(world: Swarm) -> str:
    """Everybody that lives must come together again; or, where the run is over or stopped, end."""
    with_model = any(not process.membership.fresh for process in world.processes.values())
    ends = world.stopped or bool(world.departed)
    deadline = world.now + SETTLE_SECONDS
    while world.now < deadline:
        world.run(SUSPECT / 2)
        ends = ends or bool(world.departed)
        if world.settled() or not world.processes:
            return ""
    if not with_model or (ends and not world.stopped):
        return ""  # nobody knows a model; or those that finished are too many for the others to go on without them
    stages = {uid: (p.membership.stage, *p.membership.generation.name) for uid, p in world.processes.items()}
    left = [uid for uid, process in world.processes.items() if process.membership.stage != "outside"]
    if world.stopped and not left:
        return ""  # nobody is let in any more
    return f"never came together again: {stages}"


def shard(first: int, count: int, merges: bool = False) -> list[tuple[int, str]]:
    """Schedules first .. first + count - 1: those that failed."""
    return [(seed, wrong) for seed in range(first, first + count) if (wrong := survive(seed, merges=merges))]


def main() -> int:
    schedules = int(sys.argv[1]) if len(sys.argv) > 1 else 200_000
    first = int(sys.argv[2]) if len(sys.argv) > 2 else 0
    began, done, failed, size = time.monotonic(), 0, 0, 500
    workers = int(os.environ.get("DECENTNODE_WORKERS", os.cpu_count() or 1))
    with ProcessPoolExecutor(workers, initializer=die_with_parent, initargs=(os.getpid(),)) as pool:
        starts = range(first, first + schedules, size)
        running = {pool.submit(shard, start, min(size, first + schedules - start)): start for start in starts}
        for future in as_completed(running):
            start = running[future]
            done += min(size, first + schedules - start)
            for seed, wrong in future.result():
                failed += 1
                print(f"schedule {seed}: {wrong}", flush=True)
            print(f"{done} of {schedules} schedules, {failed} failed, {time.monotonic() - began:.0f} s", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
