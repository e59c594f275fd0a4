"""Resumes runs from checkpoints: finds them, checks that they fit the experiment, and attaches them to nodes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from decentnode.checkpoint import store
from decentnode.checkpoint.store import FOLDER, Manifest
from decentnode.errors import CheckpointError, UsageError
from decentnode.experiment import Experiment
from decentnode.experiment.identity import compared, identity
from decentnode.launch.children.messages import Task
from decentnode.launch.files import run_dir
from decentnode.launch.files.node_files import Reporter
from decentnode.metrics import summary as summaries
from decentnode.node.checkpoints.manager import Checkpoints
from decentnode.node.checkpoints.resume_agreement import ResumeFrom
from decentnode.node.measuring.early_stopping import reason_for_early_end
from decentnode.node.node import Node
from decentnode.node.schedules.dumps import Dumps


@dataclass(frozen=True)
class ResumableRun:
    """The checkpoints on this machine from which a run is resumed."""

    run: Path
    """The folder of the run."""
    folders: tuple[Path, ...]
    """The run's folder, and sibling folders with checkpoints of the same runs, such as another machine's part."""
    runs: tuple[str, ...]
    """Ids of the runs to which the checkpoints belong."""
    newest: Manifest


def find(experiment: Experiment, wanted: str) -> ResumableRun | None:
    """Finds the checkpoints of a run. Returns None if this machine has none.

    wanted: the folder of a run or its experiment's name; "" for the latest run of this name that has checkpoints.
    Raises UsageError if there is no such run, or if its checkpoints are of an experiment that computes something else.
    """
    if wanted:
        folder = run_dir.resolve(wanted, experiment.run_dir)
    else:
        places = sorted(experiment.run_dir.glob(f"{experiment.name}/*/{FOLDER}"), reverse=True)
        runs = [place.parent for place in places if not place.parent.is_symlink() and any(_manifests(place.parent))]
        if not runs:
            return None
        folder = runs[0]
    manifests = list(_manifests(folder))
    if not manifests:
        return None
    ids = {each.cut.run for each in manifests}
    siblings = [other for other in sorted(folder.parent.iterdir())
              if other != folder and not other.is_symlink() and any(each.cut.run in ids for each in _manifests(other))]
    newest = max(manifests, key=lambda each: (*each.cut.age, each.time))
    lines = store.differences(compared(newest.config), identity(experiment))
    if lines:
        raise UsageError("\n".join([
            f"{folder} must be resumed with its own experiment; these keys differ:", *lines,
        ]))  # fmt: skip
    return ResumableRun(folder, (folder, *siblings), tuple(sorted(ids)), newest)


def _manifests(run: Path) -> Iterator[Manifest]:
    """Yields one valid manifest for each cut in a run's folder."""
    for place in sorted((run / FOLDER).glob("*-*")):
        for path in sorted(place.glob("[0-9]*.json")):
            try:
                yield store.read_manifest(path)
            except CheckpointError:
                continue
            break


def finished(found: ResumableRun, experiment: Experiment) -> str:
    """Returns a sentence that says so if the run has already done the requested number of rounds, or ended early for
    good, and has written its results; else ""."""
    try:
        summary = summaries.read(found.run / "summary.json")
    except (OSError, ValueError):
        return ""
    rounds, stop = experiment.node.rounds, experiment.node.early_stop
    done = _done_by_all(found, experiment.make_graph().num_nodes)
    if summary.get("status") != "finished" or done is None:
        return ""
    if done < rounds and stop is not None and summary.get("ended") == "early_stop":
        why = reason_for_early_end(stop, summary.get("best") or {}) if done == summary.get("rounds") else ""
        return f"{found.run} ended early, after {done} of {rounds} rounds: {why}; more patience than " \
               f"{stop.patience}, or --set node.early_stop=null, continues it" if why else ""  # fmt: skip
    if done < rounds:
        return ""
    return f"{found.run} is finished: it has done {done} of {rounds} rounds; --set node.rounds=N continues it to N"


def _done_by_all(found: ResumableRun, num_nodes: int) -> int | None:
    """Returns how many rounds the most advanced node had done at the newest cut of which all members in the mapping
    have a checkpoint; None without such a cut."""
    folders = [folder / FOLDER for folder in found.folders]
    manifests = [store.scan(folders, uid, found.runs)[0] for uid in range(num_nodes)]
    rounds_by_cut = [{each.cut: each.round for each in own} for own in manifests]
    complete = [cut for cut in set().union(*rounds_by_cut)
                if all(cut in rounds_by_cut[uid] for uid in cut.members if uid < num_nodes)]  # fmt: skip
    if not complete:
        return None
    newest = max(complete, key=lambda cut: cut.age)
    return max(rounds_by_cut[uid][newest] for uid in newest.members if uid < num_nodes)


def attach(node: Node, experiment: Experiment, task: Task, reporter: Reporter) -> None:
    """Sets up a node to write checkpoints and dumps to its run's folder, and to resume from the checkpoints that the
    task names."""
    dump = getattr(experiment.sharing, "dump", None)
    if task.run_dir is not None and dump is not None and dump.by(node.uid):
        folder = run_dir.node_dir(task.run_dir, node.uid) / "dumps"
        node.rounds.dumps = Dumps(folder, dump, node.training.model.named_shapes)
    if task.run_dir is None or (experiment.node.checkpoint is None and task.resume is None):
        return
    resume = None
    if task.resume is not None:
        resume = ResumeFrom(tuple(Path(folder) / FOLDER for folder in task.resume), frozenset(task.resume_runs))

    def resumed(manifest: Manifest | None, round: int) -> None:
        if manifest is not None:
            before = run_dir.node_dir(manifest.path.parents[2], node.uid)
            reporter.import_earlier(before / "metrics.jsonl", round)

    # Through JSON, as it will be read from the file, so that it compares equal with the next run's.
    plain = json.loads(json.dumps(identity(experiment)))
    node.checkpoints = Checkpoints(node, Path(task.run_dir) / FOLDER, plain, resume, resumed)
