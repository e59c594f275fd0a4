"""Replaces a node's checkpoints in a replay: in memory, and only those from which the run's nodes continued.

A node that comes back takes the state that its earlier process had in the replay before the same round of the same
generation; nothing of it is read from the run. A run that was resumed from another one begins with that run's files.
The digests of both are in the record, and are compared.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from decentnode.checkpoint.store import Cut, Manifest, Snapshot
from decentnode.communication.run_state import Steps
from decentnode.metrics.history import History
from decentnode.node.checkpoints.resuming import MODEL_PARTS, ResumePosition, evaluate_if_due, go_on
from decentnode.node.checkpoints.snapshot import Restored, capture
from decentnode.node.resumable import Resumable
from decentnode.simulate.world.records import Difference, Event, ProcessRecord, ProcessRecords, every_event, place_of
from decentnode.simulate.world.replay_transport import ReplayTransport
from decentnode.wire.generation import Name

CheckpointKey = tuple[int, int, Name]
"""(uid, round, generation) of a checkpoint from which the node itself continued later."""
CheckpointFiles = Mapping[tuple[int, str], Manifest]
"""By uid and the cut's folder: checkpoints of an earlier run."""


@dataclass
class ReplayCheckpointState:
    """The state that the checkpoints of all nodes share."""

    files: CheckpointFiles
    wanted: frozenset[CheckpointKey]
    kept: dict[CheckpointKey, Snapshot] = field(default_factory=dict)

    @classmethod
    def of(cls, lives: ProcessRecords, files: CheckpointFiles) -> ReplayCheckpointState:
        """Returns the state of a replay, nothing kept yet. files: those that `resumed` records name."""
        found = {_taken(life, event) for life, event in every_event(lives)
                 if event.kind == "restored" and event.fields}  # fmt: skip
        return cls(files, frozenset(found))


def _taken(life: ProcessRecord, event: Event) -> CheckpointKey:
    return life.uid, int(event.fields["round"]), event.name


class ReplayCheckpoints:
    """Takes the place of `Checkpoints` in one process of the replay."""

    def __init__(
        self, node: Resumable, life: ProcessRecord, transport: ReplayTransport, state: ReplayCheckpointState
    ) -> None:
        self._node, self._life, self._transport, self._state = node, life, transport, state
        self.resuming = any(event.kind == "resumed" for event in life.events)

    @property
    def _history(self) -> History:
        found = self._node.communication.history
        assert found is not None
        return found

    def between_rounds(self) -> Steps[None]:
        """Keeps the node's state if a later process of the node continues from it."""
        self._keep()
        yield from ()

    def after_the_last(self) -> None:
        """Does the same as `between_rounds`, after the last round."""
        self._keep()

    def _keep(self) -> None:
        node = self._node
        which = node.uid, node.round, node.generation.name
        if node.config.checkpoint is not None and which in self._state.wanted:
            number, origin = node.generation.name
            cut = Cut("", node.round, number, origin.hex(), tuple(node.generation.members))
            self._state.kept[which] = capture(node, cut, {})

    def restore_own_checkpoint(self, first_round: int) -> bool:  # noqa: ARG002
        """Restores the checkpoint that the run's node restored, as the replay kept it; returns whether there was one.
        Raises Difference."""
        if self._node.config.checkpoint is None:
            return False
        event = self._life.next
        if event is None or event.kind != "restored" or not event.fields:
            self._history.restored()
            return False
        which = _taken(self._life, event)
        snapshot = self._state.kept.get(which)
        if snapshot is None:
            raise Difference(f"{place_of(self._life, event)}: the run's node took its checkpoint of generation "
                             f"{which[2][0]}, in which this one did not come to that round")  # fmt: skip
        tensors = {name: tensor.clone() for name, tensor in snapshot.tensors.items()}
        restored = Restored(snapshot.tree, tensors, "the replay")
        digest = restored.digest(*MODEL_PARTS)
        restored.put_training(self._node)
        restored.put_rule(self._node)
        self._history.restored(which[1], which[2], digest)
        return True

    def resume(self) -> Steps[None]:
        """Continues from the file that the record names, as steps. Raises CheckpointError if it is damaged."""
        node, event = self._node, self._life.find_next("resumed")
        if event is None:  # the generation or the process ended before the nodes had agreed
            yield from self._transport.end()
            return
        cut, restored = str(event.fields.get("cut", "")), None
        if cut:
            restored = Restored.read(self._state.files[node.uid, cut])
            restored.put_training(node)
        fields = event.fields
        where = ResumePosition(int(fields["round"]), int(fields["evaluated"]), tuple(fields["without"]))
        yield from go_on(node, restored, cut, where)
        self.resuming = False
        yield from evaluate_if_due(node, where)

    def begin_generation(self) -> Steps[None]:
        """Does nothing: no checkpoint is in progress."""
        yield from ()

    def finish(self) -> None:
        """Does nothing: no checkpoint is being written."""

    def close(self, timeout_seconds: float) -> None:
        """Does nothing: no checkpoint is being written."""

    def closing_figures(self) -> dict[str, float | int]:
        return {}
