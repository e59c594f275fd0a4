"""The checkpoints of a training that is recorded as a run: their contents, and which of them a run continues from."""

from __future__ import annotations

import contextlib
import json
import logging
from collections.abc import Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor

from decentnode.checkpoint import store
from decentnode.checkpoint.state import decode, encode, to_host
from decentnode.checkpoint.streams import load_streams, streams
from decentnode.errors import CheckpointError
from decentnode.parallel.ddp import DecentralizedDataParallel
from decentnode.parallel.process_group.agreement import succeed_on_all_ranks
from decentnode.parallel.recording.ranks import RunRanks
from decentnode.parallel.recording.records import RankRecords
from decentnode.parallel.states.accumulated import restore_accumulated, save_accumulated

logger = logging.getLogger(__name__)


class Stateful(Protocol):
    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state_dict: dict[str, Any]) -> Any: ...


class RunCheckpoints:
    """One rank's checkpoints of a run."""

    def __init__(self, model: DecentralizedDataParallel, ranks: RunRanks, config: Mapping[str, Any], keep: int,
                 also: Mapping[str, Stateful]) -> None:  # fmt: skip
        """config: what the run is compared by. keep: how many are kept, 0 for none. also: further objects whose states
        are part of them, by name."""
        self._model, self._ranks, self._config, self._keep, self._also = model, ranks, config, keep, also
        self._device = next(model.module.parameters()).device
        self._random: dict[str, Any] | None = None
        """The states of the process's random generators in the checkpoint, until they are restored."""

    def _state(self) -> dict[str, Any]:
        model = self._model
        return {"wrapper": model.full_state_dict(), "random": streams(self._device),
                "also": {name: each.state_dict() for name, each in self._also.items()},
                "accumulated": save_accumulated(model._named, model._watch)}  # fmt: skip

    def check(self) -> None:
        """Raises CheckpointError for a state that no file can keep."""
        encode(self._state(), "state", {}, copy=False)

    def _together_if_fixed(self, what: str) -> AbstractContextManager[None]:
        """Returns `succeed_on_all_ranks` if the ranks are fixed; otherwise a context that does nothing."""
        return succeed_on_all_ranks(what) if self._ranks.folder is None else contextlib.nullcontext()

    def save(self, run: Path, epochs: int) -> None:
        """Writes a checkpoint into the run's directory, after so many epochs. Blocking, with fixed ranks until the
        disks of all ranks have it: only then are older ones removed, since such a run continues from a checkpoint that
        all ranks have."""
        tensors: dict[str, Tensor] = {}
        tree = encode(self._state(), "state", tensors, copy=False)
        to_host(tensors)
        cut = store.Cut(run.name, epochs, self._model.generation, "", self._ranks.members)
        folder, uid = run / store.FOLDER, self._ranks.uid
        snapshot = store.Snapshot(uid, cut, self._config, tree, tensors)
        with self._together_if_fixed("write a checkpoint"):
            store.write(folder, snapshot)
        kept, _ = store.scan([folder], uid)
        for old in store.surplus([each.cut for each in kept], self._keep, ()):
            store.remove(folder, old.folder, uid)

    def resume(self, run: Path, records: RankRecords) -> int:
        """Loads the newest checkpoint that all ranks have, and drops the records after it. Blocking. Returns the number
        of finished epochs, 0 if there is no checkpoint. Raises ValueError if the run's config was another,
        CheckpointError."""
        folder, uid, world = run / store.FOLDER, self._ranks.uid, len(self._ranks.members)
        found, _ = store.scan([folder], uid)
        mine = self._usable(folder)
        gathered = self._model._gossip.exchange.gather_by_rank(json.dumps(sorted(mine)), "checkpoints")
        common = set(mine).intersection(*(map(tuple, json.loads(each)) for each in gathered.values()))
        with self._together_if_fixed("go on with the run"):
            if not common:
                self._restart_run(run, records, {len(each.cut.members) for each in found} - {world})
                return 0
            manifest = mine[max(common, key=lambda each: (each[0], each[1] == world, each[1]))]
            changed = store.differences(manifest.config, self._config)
            if changed:
                raise ValueError(f"the run in {run} continues with its own config: {'; '.join(changed)}")
            state = decode(manifest.tree, manifest.load())
        self._load(state, manifest)
        epochs = manifest.cut.round
        if self._ranks.folder is None:
            for later in (one.cut for one in found if one.cut.round > epochs):  # not all ranks have these
                store.remove(folder, later.folder, uid)
        records.drop_from(epochs)
        return epochs

    def _usable(self, folder: Path) -> dict[tuple[int, int], store.Manifest]:
        """Returns the checkpoints on this machine that this rank may continue from, by (finished epochs, number of
        ranks then, or 0 with missing="regroup")."""
        if self._ranks.folder is None:
            return checkpoints_of_ranks(folder, self._ranks.uid)
        return {(epochs, 0): each for epochs, each in checkpoints_of_any_node(folder, self._ranks.uid).items()}

    def _load(self, state: Mapping[str, Any], manifest: store.Manifest) -> None:
        model, uid, world = self._model, self._ranks.uid, len(self._ranks.members)
        model.load_state_dict(state["wrapper"])
        for name, each in self._also.items():
            each.load_state_dict(state["also"][name])
        restore_accumulated(model._named, model._watch, state.get("accumulated", {}))
        self._random = state["random"] if manifest.uid == uid else None  # no two ranks may draw the same numbers
        before = len(manifest.cut.members)
        if self._ranks.folder is None and before != world and uid == 0:
            rest = f"ranks {before} and up begin as rank mod {before}" if before < world else (
                f"the models of ranks {world} to {before - 1} are no longer used")
            logger.warning("the run continues with %d ranks from a checkpoint of %d: %s", world, before, rest)

    def _restart_run(self, run: Path, records: RankRecords, others: set[int]) -> None:
        """Drops the records of a run that ended before its first checkpoint. others: for how many ranks it has
        checkpoints nevertheless. Raises CheckpointError if more than a first epoch would be lost."""
        epochs = records.epochs
        if others or epochs > bool(self._keep):
            has = f"checkpoints of {' and '.join(map(str, sorted(others)))} ranks alone" if others else "none"
            world = len(self._ranks.members)
            raise CheckpointError(f"{run} has records of {epochs} epochs but no checkpoint that all {world} ranks "
                                  f"have ({has}): move it away, or use resume=False")  # fmt: skip
        records.drop_from(-1)

    def restore_random_state(self) -> None:
        """Restores the process's random generators from the checkpoint, once; does nothing if the run began anew."""
        if self._random is not None:
            load_streams(self._random, self._device)
            self._random = None


def checkpoints_of_any_node(folder: Path, uid: int) -> dict[int, store.Manifest]:
    """Returns the checkpoints of node `uid` by finished epochs. Where it has none, because it was no member or is new,
    that of the lowest uid that has one on this machine. folder: checkpoints/ of the run."""
    found: dict[int, store.Manifest] = {}
    uids = {int(each.stem) for each in folder.glob("*/*.json") if each.stem.isdecimal()}
    for other in [uid, *sorted(uids - {uid})]:
        for each in store.scan([folder], other)[0]:
            found.setdefault(each.cut.round, each)
    return found


def checkpoints_of_ranks(folder: Path, uid: int) -> dict[tuple[int, int], store.Manifest]:
    """Returns the checkpoints on this machine from which rank `uid` continues, by (finished epochs, number of ranks
    then): its own, and of fewer ranks n that of rank `uid` mod n. folder: checkpoints/ of the run."""
    found: dict[tuple[int, int], store.Manifest] = {}
    for other in sorted({int(each.stem) for each in folder.glob("*/*.json") if each.stem.isdecimal()}):
        for each in store.scan([folder], other)[0]:
            size = len(each.cut.members)
            if other == uid % size:
                found.setdefault((each.cut.round, size), each)
    return found
