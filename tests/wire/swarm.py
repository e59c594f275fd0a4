"""Random schedules of faults for a run of three to seven nodes, with a check that the invariants of agreement hold and
that the nodes agree in the end.

The faults are deaths, freezes, broken links, lost, late and repeated messages, and nodes whose own code raises (they
report the failure and say goodbye). Nodes also finish after the last round, and are asked to stop.
`python -m tests.wire.swarm [SCHEDULES [FIRST]]` runs many schedules on all cores.
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
"""(kind, a number that selects the node, the link or the side of the partition, seconds until the next fault)"""
FAULT_WEIGHTS = {
    "kill": 5, "restart": 6, "fail": 2, "freeze": 3, "thaw": 4, "isolate": 4, "partition": 3, "cut": 2, "heal": 6,
    "stop": 1, "wait": 2,
}  # fmt: skip
"""How often each kind is drawn."""
SETTLE_SECONDS = 60 * SUSPECT
"""How long the live nodes may take to agree after all faults have ended."""


class Swarm(World):
    """A world whose nodes finish after the last round, and whose training waits only for nodes that cannot answer."""

    def __init__(
        self, num_nodes: int, seed: int, loss: float, rounds: int, late: float, merges: bool = False
    ) -> None:
        super().__init__(num_nodes, seed=seed, loss=loss, rounds=rounds, merges=merges)
        self.late_share = late
        self.finished: set[int] = set()
        """Nodes that ended after the closing evaluation."""
        self.stop_requested = False
        self._closed: set[Name] = set()
        """Generations whose members all have the result of the closing evaluation."""

    def deliver(self, uid: int, message: Message) -> None:
        """Does not encode the message, for speed; the codec has its own tests."""
        self.handle_events(uid, self.processes[uid].membership.receive(message, self.now))

    def awaited_by(self, uid: int) -> Iterable[int]:
        """Returns the members from which nothing arrives: dead, frozen, in another generation, or behind a broken link.
        Members that said goodbye are awaited, too, until the generation has its closing evaluation."""
        own = self.processes[uid].membership
        left = own.left if own.generation.name in self._closed else ()
        others = [member for member in own.generation.members if member != uid and member not in left]
        return [other for other in others if not self._reaches(other, uid, own.generation)] if own.steady else ()

    def _reaches(self, source: int, uid: int, generation: Generation) -> bool:
        process = self.processes.get(source)
        return (process is not None and not process.frozen and frozenset((source, uid)) not in self.broken_links
                and process.membership.steady and process.membership.generation == generation)  # fmt: skip

    # -- faults -----------------------------------------------------------------------------------------------

    def apply(self, kind: str, number: int) -> None:
        """Applies a fault. number: selects whom it hits."""
        uid = number % self.num_nodes
        if kind == "kill":
            self.kill(uid)
        elif kind == "restart":
            for candidate in [uid, *range(self.num_nodes)]:
                if candidate not in self.processes and candidate not in self.finished:
                    self.restart(candidate)
                    break
        elif kind == "fail":
            self.fail(uid)
        elif kind in ("freeze", "thaw"):
            getattr(self, kind)(uid)
        elif kind == "isolate":
            self.cut_off({uid})
        elif kind == "partition":
            self.cut_off({node for node in range(self.num_nodes) if number >> node & 1})
        elif kind == "cut":
            self.broken_links.add(frozenset((uid, (uid + 1 + number // 8 % (self.num_nodes - 1)) % self.num_nodes)))
        elif kind == "heal":
            self.broken_links.clear()
        elif kind == "stop" and uid in self.processes:
            self.stop_requested = True
            self.processes[uid].membership.stopping = True

    def fail(self, uid: int) -> None:
        """Lets the code of node `uid` raise: the node reports the failure, says goodbye and ends."""
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
        self.send_outbox(uid, membership)

    # -- the end of the run -----------------------------------------------------------------------------------

    def step(self) -> None:
        super().step()
        for uid, process in sorted(self.processes.items()):
            if process.frozen or not process.membership.steady:
                continue
            generation = process.membership.generation
            self._spread_stop(process, generation)
            if generation.name in self._closed or self._can_close(generation):
                self._closed.add(generation.name)
                if self.random.random() < 0.3:
                    self._say_goodbye(uid)
                    del self.processes[uid]
                    self.finished.add(uid)
        in_force = self.generations_in_force()
        assert len(in_force) <= 1 or self.limits.merges, f"two are in force: {in_force}"

    def _spread_stop(self, process: Process, generation: Generation) -> None:
        """Tells the process of the requested stop if a member that can reach it knows of it."""
        uid, membership = process.membership.uid, process.membership
        if self.stop_requested and not membership.stopping:
            others = [other for other in generation.members if other != uid and self._reaches(other, uid, generation)]
            membership.stopping = any(self.processes[other].membership.stopping for other in others)

    def _can_close(self, generation: Generation) -> bool:
        """Returns whether all members are past their last round and reach each other for the closing evaluation."""
        for uid in generation.members:
            process = self.processes.get(uid)
            if process is None or process.frozen or process.membership.generation != generation:
                return False
            membership = process.membership
            if not membership.steady or (membership.position < self.limits.rounds and not membership.stopping):
                return False
        return not any(frozenset((a, b)) in self.broken_links for a in generation.members for b in generation.members)


def draw_schedule(seed: int, merges: bool = False) -> tuple[Swarm, list[Fault]]:
    """Returns a swarm and its faults, which depend only on `seed`. merges: all sides of a partition continue."""
    draw = random.Random(seed)
    num_nodes = draw.choice([3, 3, 4, 5, 5, 6, 7])
    rounds = draw.choice([6, 20, 10**9, 10**9])
    loss, late = draw.choice([0.0, 0.0, 0.05, 0.2]), draw.choice([0.0, 0.02, 0.1])
    kinds, weights = zip(*FAULT_WEIGHTS.items(), strict=True)
    faults = [
        (kind, draw.randrange(1 << 10), draw.choice([0.25, 0.5, 1.0, SUSPECT, 2 * SUSPECT, 5 * SUSPECT]))
        for kind in draw.choices(kinds, weights, k=draw.randint(2, 14))
    ]
    return Swarm(num_nodes, seed, loss, rounds, late, merges), faults


def run_schedule(seed: int, membership: type[Membership] = Membership, merges: bool = False) -> str:
    """Runs the schedule of `seed`. Returns what went wrong, or ""."""
    world, faults = draw_schedule(seed, merges)
    if membership is not Membership:
        world.replace_memberships(membership)
    try:
        for kind, number, seconds in faults:
            world.apply(kind, number)
            world.run(seconds)
        _end_faults(world)
        return _wait_for_agreement(world)
    except AssertionError as error:
        return f"{error} (at {world.now - 100:g} s)"


def _end_faults(world: Swarm) -> None:
    """Mends all links, thaws frozen nodes, and restarts dead ones unless the run is stopping."""
    world.broken_links.clear()
    world.loss = min(world.loss, 0.05)
    for uid in range(world.num_nodes):
        world.thaw(uid)
        if world.stop_requested and uid in world.processes:
            world.processes[uid].membership.stopping = True  # as if the user had told every machine to stop
        if uid not in world.processes and uid not in world.finished and not world.stop_requested:
            world.restart(uid)


def _wait_for_agreement(world: Swarm) -> str:
    """Runs until all live nodes are in one generation or, if the run is over or stopped, have ended. Returns "", or
    the nodes' stages if that does not happen in time."""
    any_has_model = any(not process.membership.fresh for process in world.processes.values())
    ends = world.stop_requested or bool(world.finished)
    deadline = world.now + SETTLE_SECONDS
    while world.now < deadline:
        world.run(SUSPECT / 2)
        ends = ends or bool(world.finished)
        if world.is_settled() or not world.processes:
            return ""
    if not any_has_model or (ends and not world.stop_requested):
        return ""  # no node has a model, or so many have finished that the others are too few to continue
    stages = {uid: (p.membership.stage, *p.membership.generation.name) for uid, p in world.processes.items()}
    inside = [uid for uid, process in world.processes.items() if process.membership.stage != "outside"]
    if world.stop_requested and not inside:
        return ""  # a run that is stopping admits no node
    return f"never agreed again: {stages}"


def find_failures(first: int, count: int, merges: bool = False) -> list[tuple[int, str]]:
    """Runs the schedules of seeds first .. first + count - 1. Returns (seed, what went wrong) of those that failed."""
    return [(seed, wrong) for seed in range(first, first + count) if (wrong := run_schedule(seed, merges=merges))]


def main() -> int:
    schedules = int(sys.argv[1]) if len(sys.argv) > 1 else 200_000
    first = int(sys.argv[2]) if len(sys.argv) > 2 else 0
    began, done, failed, size = time.monotonic(), 0, 0, 500
    workers = int(os.environ.get("DECENTNODE_WORKERS", os.cpu_count() or 1))
    with ProcessPoolExecutor(workers, initializer=die_with_parent, initargs=(os.getpid(),)) as pool:
        starts = range(first, first + schedules, size)
        running = {pool.submit(find_failures, start, min(size, first + schedules - start)): start for start in starts}
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
