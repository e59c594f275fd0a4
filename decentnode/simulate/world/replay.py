"""Replays a run on machines, from what its nodes recorded: the same nodes on virtual time.

In a run, chance decides who misses whose payload, where in its round a node is when its generation ends, who leads the
next generation, with which members and under which name, and who dies and comes back when. All of this is taken from
the records. The rest is executed again: local steps, what rules send, links, mixing, the promises of members and their
consequences. Every record that a node makes in the replay is compared with the run's, so that the first difference is
found.

A node continues as long as its record does. Where the record says that it left its generation, it leaves; where the
record ends, the process was killed, and its replay waits. Once all nodes wait, the next generation is proposed by the
node that proposed it in the run.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from decentnode.communication.parts import Schema
from decentnode.communication.run_state import Steps
from decentnode.communication.zeromq.config import ZeroMQConfig
from decentnode.communication.zeromq.protocol.reconfiguration import GenerationWait
from decentnode.faults import Faults, Link
from decentnode.metrics.history import History
from decentnode.simulate.world.records import (
    Difference,
    Event,
    ProcessRecord,
    ProcessRecords,
    Violation,
    mixed_payloads,
    place_of,
)
from decentnode.simulate.world.replay_checkpoints import CheckpointFiles, ReplayCheckpoints, ReplayCheckpointState
from decentnode.simulate.world.replay_transport import ReplayTransport, WaitForever
from decentnode.simulate.world.transport import Simulated
from decentnode.simulate.world.world import MakeNode, Process, Setting, World
from decentnode.wire.generation import Limits, Name, proposer_of

NEVER_SECONDS = 1e9
"""A time-out that never expires: a node gives up on others only where the records say so."""
PATIENCE_SECONDS = 60.0
"""No step of a replay takes this much virtual time, because its connections have no faults."""


class ReplayProcess(Process):
    """Replays one process of a node, up to the end of its record."""

    world: ReplayWorld

    def __init__(self, world: ReplayWorld, uid: int, life: ProcessRecord) -> None:
        self.record = life
        super().__init__(world, uid, life.number)
        self.transport.history = History(self._compare_record)
        checkpoints = ReplayCheckpoints(self.node, life, self.replay_transport, world.checkpoints)
        if checkpoints.resuming or self.node.config.checkpoint is not None:
            self.node.checkpoints = checkpoints

    @property
    def replay_transport(self) -> ReplayTransport:
        assert isinstance(self.transport, ReplayTransport)
        return self.transport

    def _transport(self, schemas: tuple[Schema, ...]) -> Simulated:
        setting = self.world.setting
        self.transport = ReplayTransport(setting.config, schemas, self._make_setup(), life=self.record,
                                         mixed_in_run=self.world.mixed_in_run)  # fmt: skip
        return self.transport

    def _compare_record(self, kind: str, fields: dict[str, Any]) -> None:
        """Compares what the node records with the run's next record; after the end of the run's record, nothing is
        compared."""
        event = self.record.next
        if event is None:
            return
        wrong = difference(event, kind, fields)
        if wrong:
            raise Difference(f"{place_of(self.record, event)}: {wrong}")
        self.record.cursor += 1
        self.world.compared += 1
        if kind == "stopping":
            self.replay_transport.note_stop_request()
        elif kind == "left":
            self.replay_transport.membership.give_up()

    def _main_steps(self) -> Steps[None]:
        why = ""
        try:
            if self.life:
                self.transport.join()
            else:
                yield from self.transport.start_steps(NEVER_SECONDS)
            yield from self.node.steps()
        except Violation:
            raise
        except Exception as error:  # the run's node ended with it, too, if its record ends here
            why = f"{type(error).__name__}: {error}"
        event = self.record.next
        if event is not None:
            raise Difference(f"{place_of(self.record, event)}: the run's node {describe(event)}, "
                             f"this one ends{f' with {why}' if why else ''}")  # fmt: skip
        yield WaitForever()

    @property
    def is_waiting(self) -> bool:
        """Whether it can continue only with another generation, or not at all."""
        return not self.alive or isinstance(self.wait, WaitForever | GenerationWait)


@dataclass
class ReplayResult:
    """The result of a replay."""

    compared: int
    """Number of records that were the same."""
    generations: list[Event]
    """The generations that were entered, besides the first."""
    skipped: list[ProcessRecord]
    """Processes that were started again and died before they took part."""


class ReplayWorld(World):
    """The nodes of a run that is replayed."""

    processes: dict[int, ReplayProcess]  # type: ignore[assignment]

    def __init__(
        self, setting: Setting, make_node: MakeNode, lives: ProcessRecords, files: CheckpointFiles | None = None
    ) -> None:
        """files: the checkpoints from which the run was resumed, if any."""
        super().__init__(setting, make_node)
        self.record, self.mixed_in_run = lives, mixed_payloads(lives)
        self.checkpoints = ReplayCheckpointState.of(lives, files or {})
        self.compared = 0
        self._entering: list[tuple[ProcessRecord, Event]] = []
        """The records of nodes that are to enter the generation that is being agreed on."""

    def _process(self, uid: int, life: int) -> Process:
        return ReplayProcess(self, uid, self.record[uid][life])

    def replay(self) -> ReplayResult:
        """Replays the run. Blocking; raises Difference, and errors of the code under test."""
        generations = []
        with self._virtual():
            for uid in self.record:
                self.heap.after(0.0, self._begin(uid, 0).begin)
            while True:
                if not self.heap.run(self._all_wait, self.heap.now + PATIENCE_SECONDS):
                    raise Difference(self._describe_stall())
                event = self._next_generation()
                if event is None:
                    break
                generations.append(event)
                self._propose(event)
        begun = {(process.uid, process.life) for process in self.lives}
        return ReplayResult(self.compared, generations, [
            life for each in self.record.values() for life in each if (life.uid, life.number) not in begun
        ])  # fmt: skip

    def _all_wait(self) -> bool:
        entered = all(life.next is not event for life, event in self._entering)
        return entered and all(process.is_waiting for process in self.processes.values())

    def _pending_entries(self, name: Name) -> list[tuple[ProcessRecord, Event]]:
        """Returns the records of nodes that entered this generation and have not yet entered it in the replay."""
        return [(life, event) for each in self.record.values() for life in each
                for event in life.events[life.cursor :] if event.kind == "entered" and event.name == name]  # fmt: skip

    def _next_generation(self) -> Event | None:
        """Returns the record of the next generation that its members can enter; None if all records are at their end.
        Raises Difference."""
        waiting = [event for each in self.record.values() for life in each if (event := _first_entry(life)) is not None]
        for event in sorted(waiting, key=lambda each: each.name):
            if all(_first_entry(life) is own for life, own in self._pending_entries(event.name)):
                return event
        for process in self.processes.values():
            assert isinstance(process, ReplayProcess)
            event_ = process.record.next
            if event_ is not None:
                raise Difference(f"{place_of(process.record, event_)}: the run's node {describe(event_)}, this one "
                                 f"waits after round {process.node.round}: {process.node.doing}")  # fmt: skip
        return None

    def _propose(self, event: Event) -> None:
        """Makes the node that led the run's agreement propose the generation, with the run's members."""
        enterers = self._pending_entries(event.name)
        entering = {life.uid: life for life, _ in enterers}
        for uid in event.members:
            self._ensure_present(uid, entering.get(uid), uid in event.fresh)
        leader = self.processes[proposer_of(event.name[1])].transport
        assert isinstance(leader, ReplayTransport)
        of = leader.reconfiguration
        assert of is not None
        if event.fields.get("stopping"):
            leader.membership.stopping = True
        self._entering = enterers
        leader.membership.propose_recorded(event.name, frozenset(event.members), self.heap.now)
        leader.io.call(lambda: of.tick(self.heap.now))
        leader.io.settle()

    def _ensure_present(self, uid: int, life: ProcessRecord | None, fresh: bool) -> None:
        """Makes sure that a member of the next generation takes part: as a process that is started again if it was in
        the run, or as one that joins from outside."""
        process = self.processes[uid]
        assert isinstance(process, ReplayProcess)
        if life is None and fresh and process.record.next is None and process.life + 1 < len(self.record[uid]):
            life = self.record[uid][process.life + 1]
        if life is not None and life is not process.record:
            process.kill()
            self._begin(uid, life.number).begin()
        elif fresh:
            transport = process.transport
            assert isinstance(transport, ReplayTransport) and transport.reconfiguration is not None
            if not transport.membership.fresh:
                transport.reconfiguration.leave("the others continued without this node", self.heap.now)

    def _describe_stall(self) -> str:
        stalled = [
            f"node {process.uid} after round {process.node.round}, {process.node.doing}: {type(process.wait).__name__}"
            for process in self.processes.values() if not process.is_waiting
        ]  # fmt: skip
        if not stalled:
            stalled = [f"{place_of(life, event)}: it does not enter generation {event.name[0]} as in the run"
                    for life, event in self._entering if life.next is event]  # fmt: skip
        return f"the replay does not continue as the run did: {'; '.join(stalled)}"


def _first_entry(life: ProcessRecord) -> Event | None:
    """Returns the record of the generation that a process enters next, if everything before it has been replayed, else
    None. A restarted process that has not yet taken part may have other records before it."""
    for event in life.events[life.cursor :]:
        if event.kind == "entered":
            return event
        if not (life.number and life.cursor == 0 and event.kind in ("left", "averaging")):
            return None
    return None


DESCRIPTIONS = {
    "steps": "made its local steps", "sent": "sent its payloads", "mixed": "mixed what it received",
    "broken_off": "interrupted an exchange", "averaging": "began a mean", "averaged": "got a mean",
    "left": "left its generation", "entered": "entered a generation", "stopping": "stopped",
    "leaving": "left the run, on request",
    "restored": "came back to its own checkpoint", "resumed": "continued from a checkpoint",
    "ordered": "was ordered to evaluate",
}  # fmt: skip


def describe(event: Event) -> str:
    """Returns a record in a few words, as a predicate."""
    key = event.fields.get("key")
    return DESCRIPTIONS[event.kind] + (f" ({key})" if key else "")


def difference(event: Event, kind: str, fields: Mapping[str, Any]) -> str:
    """Returns how a record made in the replay (kind, fields) differs from the run's; "" if they are the same."""
    if kind != event.kind:
        at = f" in round {fields['round']}" if "round" in fields else f" ({fields['key']})" if "key" in fields else ""
        return f"the run's node {describe(event)}, this one {DESCRIPTIONS[kind]}{at}"
    for key in sorted({*fields, *event.fields} - {"reason"}):
        then, now = event.fields.get(key), fields.get(key)
        if key == "partly" and then and now:  # a part that changed while it was read has no digest
            now = {uid: [stop, digest if then.get(uid, (0, None))[1] else None] for uid, (stop, digest) in now.items()}
        if then == now:
            continue
        if key in ("to", "from") and isinstance(then, dict) and isinstance(now, dict):
            others = sorted(int(uid) for uid in {*then, *now} if then.get(uid) != now.get(uid))
            one = str(others[0])
            what = "sent node" if key == "to" else "mixed of node"
            return (f"the run's node {what} {', '.join(map(str, others))} something else than this one: "
                    f"{then.get(one, 'nothing')} in the run, {now.get(one, 'nothing')} here")  # fmt: skip
        return f"the run's node {describe(event)} with {key} {then}, this one with {now}"
    return ""


def replay_setting(num_nodes: int, config: ZeroMQConfig, limits: Limits | None) -> Setting:
    """Returns the setting of a replay: connections without faults, and time-outs that never expire. config: the run's,
    or a similar one."""
    patient = dict.fromkeys(("timeout_seconds", "start_timeout_seconds", "suspect_seconds"), NEVER_SECONDS)
    kept = {"chunk_bytes": config.chunk_bytes, "window_bytes": config.window_bytes}
    plain = ZeroMQConfig.model_validate({"name": "zeromq", "checksum": "xxh3", **patient, **kept})
    if limits is not None:
        limits = Limits(NEVER_SECONDS, NEVER_SECONDS, limits.min_nodes, limits.rounds, limits.needed)
    return Setting(num_nodes, plain, limits, Faults(links=Link(latency_seconds=1e-3, jitter_seconds=0.0)))
