"""Builds the replay of a run from its experiment and its records, and executes it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from decentnode.build import build, limits_of
from decentnode.checkpoint import store
from decentnode.checkpoint.store import FOLDER, Manifest
from decentnode.communication.parts import Schema
from decentnode.communication.zeromq.config import ZeroMQConfig
from decentnode.errors import UsageError
from decentnode.experiment import Experiment
from decentnode.node.node import Node
from decentnode.simulate.world.records import ProcessRecords, every_event, place_of
from decentnode.simulate.world.replay import ReplayResult, ReplayWorld, replay_setting
from decentnode.simulate.world.replay_checkpoints import CheckpointFiles
from decentnode.simulate.world.transport import Simulated

PLAIN = ZeroMQConfig.model_validate({"name": "zeromq"})


def checkpoints_of(folder: Path, lives: ProcessRecords) -> dict[tuple[int, str], Manifest]:
    """Returns the checkpoints of an earlier run from which nodes continued, by uid and the cut's folder; they are
    looked for in the run's folder and in those of other runs beside it. Raises UsageError if one is missing,
    CheckpointError if it is damaged."""
    found: dict[tuple[int, str], Manifest] = {}
    beside = [other for other in sorted(folder.parent.iterdir()) if not other.is_symlink()]
    for life, event in every_event(lives):
        cut = event.fields.get("cut") if event.kind == "resumed" else None
        if not cut or (life.uid, cut) in found:
            continue
        name = Path(FOLDER) / Path(str(cut)).name / f"{life.uid:03d}.json"
        path = next((run / name for run in (folder, *beside) if (run / name).is_file()), None)
        if path is None:
            raise UsageError(f"{place_of(life, event)}: the run was resumed from a checkpoint that is neither in "
                             f"{folder} "
                             f"nor in another run beside it: {name}")  # fmt: skip
        found[life.uid, cut] = store.read_manifest(path)
    return found


def replay_run(
    experiment: Experiment, lives: ProcessRecords, files: CheckpointFiles | None = None
) -> tuple[ReplayWorld, ReplayResult]:
    """Replays a run on the CPU from what its nodes recorded. files: as `checkpoints_of` returns them. Blocking. Raises
    Difference, and errors of building nodes."""
    config = experiment.communication
    limits = limits_of(experiment) if experiment.node.missing == "regroup" else None

    def make_node(uid: int, make_communication: Callable[[tuple[Schema, ...]], Simulated]) -> Node:
        return build(experiment, uid, make_communication, device="cpu")

    kept = config if isinstance(config, ZeroMQConfig) else PLAIN
    world = ReplayWorld(replay_setting(experiment.make_graph().num_nodes, kept, limits), make_node, lives, files)
    return world, world.replay()
