"""Records a script's training in the format of the nodes' runs, for `decentnode plot`, `compare`, `report`, `trace`.

A rank of the wrapper is a node of the run, an epoch of the script is a round.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import shlex
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

import torch
import yaml
from torch import Tensor
from torch.nn import Module

from decentnode import clock
from decentnode.metrics import summary as summaries
from decentnode.metrics.figures import ACCURACY, LOSS, Metric, TaskMetrics
from decentnode.metrics.run_folder import SCRIPT, create
from decentnode.parallel.ddp import DecentralizedDataParallel
from decentnode.parallel.process_group.agreement import succeed_on_all_ranks
from decentnode.parallel.process_group.collectives import gather_texts
from decentnode.parallel.process_group.default_group import device_of_group, num_ranks
from decentnode.parallel.recording.checkpoints import RunCheckpoints, Stateful
from decentnode.parallel.recording.ranks import ranks_of
from decentnode.parallel.recording.records import RankRecords, figures_of
from decentnode.system import write_atomic

logger = logging.getLogger(__name__)

Evaluation = Callable[[Module], Mapping[str, float]]
"""Returns each metric of a module, in eval mode and without gradients. It must not wait for other ranks."""

T = TypeVar("T")

METRICS_BY_NAME = {ACCURACY.name: ACCURACY, LOSS.name: LOSS}
"""Metrics that a script may give by name alone."""


@dataclasses.dataclass
class _Epoch:
    """The sums of the epoch in progress."""

    began: float
    exposed: float
    """Seconds that the wrapper had waited for exchanges when the epoch began."""
    first_step: int
    loss: Tensor | float = 0.0
    losses: int = 0
    samples: int = 0


def _plain(config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the config as a file gives it back: tuples as lists, keys as text. Raises ValueError for other values."""
    try:
        return dict(json.loads(json.dumps(config)))
    except TypeError as error:
        raise ValueError(f"config must hold numbers, text, lists and dicts alone: {error}") from None


class TrainingRun:
    """The run directory of a training, as a context: records by epoch, evaluations, checkpoints, and the summary.

    All ranks make one, with the same arguments, and go through the same epochs:

        with TrainingRun(model, "digits", evaluate=evaluate, resume=True) as run:
            for epoch in run.epochs(10):
                for x, y in batches(epoch):
                    loss = loss_of(model(x), y)
                    loss.backward()
                    run.add(loss, len(x))

    A run that ends with an exception has no summary and is shown as not finished.

    With missing="regroup" a rank is a node by its uid, which it keeps. An epoch is then `steps_per_epoch` steps,
    because a regrouping may skip steps and a newcomer may begin in the middle of an epoch:
    `for x, y in run.steps(batches(epoch))`. A newcomer that joins while the others evaluate between two epochs takes
    no part in that.
    """

    def __init__(
        self,
        model: DecentralizedDataParallel,
        name: str,
        *,
        config: Mapping[str, Any] | None = None,
        evaluate: Evaluation | None = None,
        metrics: Sequence[str | Metric] = ("accuracy", "loss"),
        runs: str | Path = "runs",
        evaluate_every: int = 1,
        keep: int = 2,
        resume: bool = False,
        also: Mapping[str, Stateful] | None = None,
        steps_per_epoch: int | None = None,
    ) -> None:
        """Blocking: makes runs/<name>/<time>-<id>, on every machine that has ranks.

        config: what the run is compared by (plain values for YAML; `seed` tells repetitions apart). evaluate: measures
        a module; it is called for the rank's own model and for the mean of all. metrics: what it returns, the main one
        first. evaluate_every: epochs from one evaluation to the next. keep: checkpoints kept per rank, one is written
        after every epoch; 0 for none. resume: continues the latest run of this name if it has a checkpoint that all
        ranks have; otherwise a new one begins. With another number of ranks than the n of the checkpoint, rank r
        continues from that of rank r mod n, and logs it. also: further objects whose states are part of checkpoints,
        by name. steps_per_epoch: after how many steps `steps` ends; needed with missing="regroup".
        Raises ValueError for arguments that do not fit and if the run to continue had another config,
        EnvironmentFault if the directory cannot be made or another process records there, CheckpointError for a
        state that no file can keep and if the run to continue has no checkpoint, AssemblyError if another rank failed.
        """
        if model._participant is not None and steps_per_epoch is None:
            raise ValueError('TrainingRun needs steps_per_epoch with missing="regroup": a rank that joins needs it to '
                             "know when the others' epochs end")  # fmt: skip
        if evaluate_every < 1 or keep < 0 or (steps_per_epoch is not None and steps_per_epoch < 1):
            raise ValueError("evaluate_every and steps_per_epoch must be 1 or more and keep 0 or more, got "
                             f"{evaluate_every}, {steps_per_epoch} and {keep}")  # fmt: skip
        self.model, self._ranks, self._steps_per_epoch = model, ranks_of(model), steps_per_epoch
        self.done = 0
        """Epochs that are finished."""
        self._evaluate_model, self._evaluate_every, self._keep = evaluate, evaluate_every, keep
        known = tuple(each if isinstance(each, Metric) else METRICS_BY_NAME.get(each) for each in metrics)
        if not known or None in known:
            raise ValueError(f"metrics must be {', '.join(METRICS_BY_NAME)} or Metric objects, got {metrics!r}")
        self._measured = TaskMetrics(SCRIPT, tuple(each for each in known if each is not None))
        self._config = _plain({"name": name, **(config or {})})
        self._checkpoints = RunCheckpoints(model, self._ranks, self._config, keep, dict(also or {}))
        if keep and model._to_load is None:
            self._checkpoints.check()  # raises now, not after an epoch, for a state that cannot be saved
        self._began, self._planned = clock.now(), 0
        self.path = self._choose_directory(Path(runs), name, resume)
        self._epoch: _Epoch | None = None
        self._has_joined = model._participant is not None and model._participant.joined_at is not None
        if self._has_joined:
            self.done = self._epoch_of_step()
            self._records.drop_from(self.done)
        elif resume:
            self.done = self._checkpoints.resume(self.path, self._records)
        self._first_epoch = self.done
        self._write_status("begins")

    @property
    def uid(self) -> int:
        """The node of the run that this process is."""
        return self._ranks.uid

    def _epoch_of_step(self) -> int:
        return self.model.steps // (self._steps_per_epoch or 1)

    # -- the directory ------------------------------------------------------------------------------------------

    def _choose_directory(self, runs: Path, name: str, resume: bool) -> Path:
        """Makes or finds the run's directory, which rank 0 chooses; with missing="regroup" every rank knows its name.
        Blocking."""
        latest = runs / name / "latest"
        if self._ranks.folder is not None:
            exists = (runs / name / self._ranks.folder / "nodes").is_dir()
            resumes = resume and not exists and (latest / "nodes").is_dir()
            agreed = latest.resolve() if resumes else self._create_directory(runs, name)
            self._open_records(agreed)
            return agreed
        path: Path | None = None
        with succeed_on_all_ranks("make the run directory"):
            if self.uid == 0:
                again = resume and (latest / "task.json").is_file()
                path = latest.resolve() if again else self._create_directory(runs, name)
        folder = gather_texts("" if path is None else path.name, device_of_group(), "run")[0] if num_ranks() > 1 else ""
        path = (runs / name / folder).absolute() if path is None else path
        with succeed_on_all_ranks("make the run directory"):
            self._open_records(path)
        return path

    def _open_records(self, path: Path) -> None:
        """Begins to record in the run's directory as this rank. Raises as `RankRecords`."""
        self._records = RankRecords(path, self.uid)

    def _create_directory(self, runs: Path, name: str) -> Path:
        text = yaml.safe_dump(self._config, sort_keys=False)
        folder = self._ranks.folder
        path = create(runs.absolute(), name, local=self._ranks.members if folder is None else (), folder=folder)
        for file, content in (("config.yaml", text), ("config.resolved.yaml", text),
                              ("command.txt", shlex.join(sys.argv) + "\n"),
                              ("task.json", json.dumps(self._measured.plain(), indent=2) + "\n")):  # fmt: skip
            write_atomic(path / file, content)
        return path

    # -- training -----------------------------------------------------------------------------------------------

    def epochs(self, total: int) -> Iterator[int]:
        """Yields the numbers of the epochs to train, from 0 or from where the run continues. Between epochs it records,
        evaluates and writes checkpoints. Blocking, on all ranks."""
        self._planned = total
        self._checkpoints.restore_random_state()  # not before: scripts draw the same up to here, resumed or not
        if self._has_joined and self.done == self._first_epoch:
            self._finish_epoch()
        elif self.done == 0:
            self.evaluate()
        while self.done < total:
            self._write_status("trains")
            self._epoch = _Epoch(clock.now(), self.model.metrics["exposed_seconds"], self.model.steps)
            end = (self.done + 1) * (self._steps_per_epoch or 0)
            yield self.done
            if self._ranks.folder is not None and self.model.steps < end:
                raise ValueError(f"an epoch must have the steps of run.steps(...), up to {end}, got {self.model.steps}")
            self._record()
            if self._ranks.folder is not None:
                self.done = self._epoch_of_step()
            self._finish_epoch()

    def _finish_epoch(self) -> None:
        """Evaluates and writes a checkpoint. Does nothing if this rank has joined in the middle of an epoch, or when
        others had begun that."""
        if self._ranks.folder is not None and (self.model.steps % (self._steps_per_epoch or 1) or
                                               self._ranks.joined_late):  # fmt: skip
            return
        if self.done % self._evaluate_every == 0 or self.done == self._planned:
            self.evaluate()
        if self._keep:
            self._checkpoints.save(self.path, self.done)

    def steps(self, batches: Iterable[T]) -> Iterator[T]:
        """Yields batches until the wrapper has taken the steps of the epoch, starting again from the first batch where
        there are too few; without `steps_per_epoch` yields each once. Raises ValueError where no batch is given or none
        ends in a step."""
        if self._steps_per_epoch is None:
            yield from batches
            return
        end = (self.done + 1) * self._steps_per_epoch
        while self.model.steps < end:
            before = self.model.steps
            for batch in batches:
                yield batch
                if self.model.steps >= end:
                    return
            if self.model.steps == before:
                raise ValueError("an epoch must have batches, at least one of which ends in a step of the wrapper, "
                                 "got none")

    def add(self, loss: Tensor | float, samples: int = 0) -> None:
        """Adds a step's loss, and its number of samples, to the epoch's record. Not blocking, not even on GPUs."""
        if self._epoch is None:
            raise ValueError("add must be called during an epoch: call it inside `for epoch in run.epochs(...)`")
        self._epoch.loss = self._epoch.loss + (loss.detach() if isinstance(loss, Tensor) else loss)
        self._epoch.losses += 1
        self._epoch.samples += samples

    def _record(self) -> None:
        epoch, metrics = self._epoch, self.model.metrics
        assert epoch is not None
        seconds, waited = clock.now() - epoch.began, metrics["exposed_seconds"] - epoch.exposed
        steps = self.model.steps - epoch.first_step
        record: dict[str, Any] = {
            "kind": "round", "round": self.done, "time": clock.recorded(), "seconds": seconds,
            "train_seconds": max(0.0, seconds - waited), "wait_seconds": waited, "steps": steps,
            "steps_per_second": steps / seconds, "lr": self.model._gossip.rate(),
            "data_bytes_sent": self._records.bytes_sent_before + int(metrics["bytes_sent"]), "metadata_bytes_sent": 0,
        }  # fmt: skip
        if epoch.losses:
            record["loss"] = float(epoch.loss) / epoch.losses
        if epoch.samples:
            record |= {"samples": epoch.samples, "samples_per_second": epoch.samples / seconds}
        self._records.write(record)
        self.done, self._epoch = self.done + 1, None

    def evaluate(self) -> dict[str, float]:
        """Measures the rank's own model, the mean of all, and the consensus distance, and records them. Returns the
        record's figures. Blocking, on all ranks."""
        self._write_status("evaluates")
        found = self._ranks.evaluate(None if self._evaluate_model is None else self._measure)
        self._records.write({"kind": "evaluation", "round": self.done, "time": clock.recorded(), **found})
        return found

    def _measure(self) -> dict[str, float]:
        assert self._evaluate_model is not None
        module, names = self.model.module, [metric.name for metric in self._measured.metrics]
        training = [each for each in module.modules() if each.training]
        module.eval()
        try:
            with torch.no_grad():
                found = dict(self._evaluate_model(module))
        finally:
            for each in training:
                each.training = True
        if set(found) != set(names):
            raise ValueError(f"evaluate must return {', '.join(names)}, got {', '.join(map(str, found))}; other "
                             "metrics are named by `metrics`")  # fmt: skip
        return {name: float(found[name]) for name in names}

    # -- the end ------------------------------------------------------------------------------------------------

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Writes the summary, unless the script failed. Blocking, on all ranks."""
        self._write_status("finished" if kind is None else "failed")
        if kind is None and not self._ranks.joined_late:
            gathered = self.model._gossip.exchange.gather_by_rank(json.dumps(self.figures()), "figures")
            ended_before = self.done == self._first_epoch and (self.path / "summary.json").exists()
            if self.uid == min(gathered) and not ended_before:
                figures = {uid: json.loads(each) for uid, each in gathered.items()}
                self._summarize(self._figures_of_departed(set(gathered)) | figures)
        self._records.close()

    def _write_status(self, doing: str) -> None:
        self._records.write_status(doing, self.done, self._planned)

    def _figures_of_departed(self, present: set[int]) -> dict[int, dict[str, Any]]:
        """Returns the closing figures of nodes that are no longer ranks, from their records on this machine."""
        if self._ranks.folder is None:
            return {}
        known = {int(each.parent.name) for each in (self.path / "nodes").glob("[0-9]*/metrics.jsonl")}
        return {uid: self.figures(uid) for uid in known - present}

    def figures(self, uid: int | None = None) -> dict[str, Any]:
        """Returns a node's closing figures, by the names of summary.json; this rank's if `uid` is None."""
        if uid is None or uid == self.uid:
            return figures_of(self.path, self.uid) | {"rounds": self.done}
        return figures_of(self.path, uid)

    def _summarize(self, nodes: Mapping[int, Mapping[str, Any]]) -> None:
        summaries.write(self.path / "summary.json", {
            "name": self._config["name"], "run": self.path.name, "ended": "rounds", "exit_code": 0,
            "status": "finished" if self.done >= self._planned else "interrupted", "num_nodes": len(nodes),
            "rounds_planned": self._planned, "wall_seconds": clock.now() - self._began,
            "task": self._measured.plain(), **summaries.combine(nodes, self._measured),
        })  # fmt: skip
