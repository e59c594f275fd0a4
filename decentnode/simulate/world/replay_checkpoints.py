"""A node's checkpoints in a replay: in memory, and only those that the run's nodes went on from.

A node that comes back takes what its earlier process had before the same round of the same generation, as the replay
itself has come to it: nothing of it is read from the run. A run that goes on from another one begins with that one's
files. Digests of both are in the record, and compared.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from decentnode.checkpoint.store import Cut, Manifest, Snapshot
from decentnode.communication.run_state import Steps
from decentnode.metrics.history import History
from decentnode.node.checkpoints.going_on import OF_MODELS, GoingOn, evaluate_if_due, go_on
from decentnode.node.checkpoints.snapshot import Restored, capture
from decentnode.node.resumable import Resumable
from decentnode.simulate.world.records import Difference, Event, Life, Lives, every_event, place_of
from decentnode.simulate.world.replay_transport import Replayed
from decentnode.wire.generation import Name

Taken = tuple[int, int, Name]
"""(uid, round, generation) of a checkpoint that the node itself went on from later."""
Files = Mapping[tuple[int, str], Manifest]
"""By uid and the cut's folder: checkpoints of an earlier run."""


@dataclass
class ReplayedState:
    """What the checkpoints of all nodes have in common."""

    files: Files
    wanted: frozenset[Taken]
    kept: dict[Taken, Snapshot] = field(default_factory=dict)

    @classmethod
    def of(cls, lives: Lives, files: Files) -> ReplayedState:
        """files: those that `resumed` records name."""
        found = {_taken(life, event) for life, event in every_event(lives)
                 if event.kind == "restored" and event.fields}  # fmt: skip
        return cls(files, frozenset(found))


def _taken(life: Life, event: Event) -> Taken:
    return life.uid, int(event.fields["round"]), event.name


class ReplayedCheckpoints:
    """What one process of the replay has in the place of `Checkpoints`."""

    def __init__(self, node: Resumable, life: Life, transport: Replayed, state: ReplayedState) -> None:
        self._node, self._life, self._transport, self._state = node, life, transport, state
        self.resuming = any(event.kind == "resumed" for event in life.events)

    @property
    def _history(self) -> History:
        found = self._node.communication.history
        assert found is not None
        return found

    def between_rounds(self) -> Steps[None]:
        """Keep the state where a later process of the node goes on from it."""
        self._keep()
        yield from ()

    def after_the_last(self) -> None:
        """As `between_rounds`."""
        self._keep()

    def _keep(self) -> None:
        node = self._node
        which = node.uid, node.round, node.generation.name
        if node.config.checkpoint is not None and which in self._state.wanted:
            number, origin = node.generation.name
            cut = Cut("", node.round, number, origin.hex(), tuple(node.generation.members))
            self._state.kept[which] = capture(node, cut, {})

    def take_own(self, first_round: int) -> bool:  # noqa: ARG002
        """Take what the run's node took, as the replay has it. Raises Difference."""
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
        digest = restored.digest(*OF_MODELS)
        restored.put_training(self._node)
        restored.put_rule(self._node)
        self._history.restored(which[1], which[2], digest)
        return True

    def resume(self) -> Steps[None]:
        """Go on from the file that the record names, as steps. Raises CheckpointError where it is damaged."""
        node, event = self._node, self._life.ahead("resumed")
        if event is None:  # its generation ended, or its process, before the nodes had agreed
            yield from self._transport.end()
            return
        cut, restored = str(event.fields.get("cut", "")), None
        if cut:
            restored = Restored.read(self._state.files[node.uid, cut])
            restored.put_training(node)
        where = GoingOn(int(event.fields["round"]), int(event.fields["evaluated"]), tuple(event.fields["without"]))
        yield from go_on(node, restored, cut, where)
        self.resuming = False
        yield from evaluate_if_due(node, where)

    def begin_generation(self) -> Steps[None]:
        """Nothing is under way."""
        yield from ()

    def finish(self) -> None:
        """Nothing is being written."""

    def close(self, timeout_seconds: float) -> None:
        """Likewise."""

    def closing_figures(self) -> dict[str, float | int]:
        return {}
