"""Evaluates the saved models of a run: each node's and the merged one, on the run's test data or on other data."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from decentnode.build import device_of, make_model_on_device, shared_model
from decentnode.config.component import load_class
from decentnode.errors import UsageError
from decentnode.experiment import Experiment, load
from decentnode.launch.files.run_dir import refuse_script
from decentnode.metrics.figures import TaskMetrics
from decentnode.samples import NodeSamples
from decentnode.tasks.base import Task
from decentnode.training import TRAININGS
from decentnode.training.base import Training

logger = logging.getLogger(__name__)

MERGED = "merged"
RESOLVED = "config.resolved.yaml"


@dataclass(frozen=True)
class EvaluatedModels:
    """The metrics of a run's models on a test set."""

    run: Path
    measured: TaskMetrics
    samples: dict[int, int]
    """uid -> number of test samples on which the node's model was evaluated."""
    nodes: dict[int, dict[str, float]]
    """uid -> the task's metrics by name, for each node whose model was found, without attackers."""
    pooled: dict[str, float]
    """Metrics over the test samples of all nodes together, where each node has its own part of the test set; they are
    then the mean."""
    merged: dict[str, float] | None
    """Metrics of the merged model; None if the run saved none."""
    missing: tuple[int, ...]
    """Nodes whose models were not found."""

    @property
    def summary(self) -> dict[str, Any]:
        """All results as plain data, with `<metric>_mean`, `_min`, `_max` over the nodes and `<metric>_merged`."""
        figures: dict[str, Any] = {}
        for name in dict.fromkeys(name for row in self.nodes.values() for name in row):
            values = [row[name] for row in self.nodes.values() if name in row]
            figures |= {f"{name}_mean": self.pooled.get(name, sum(values) / len(values)), f"{name}_min": min(values),
                     f"{name}_max": max(values)}  # fmt: skip
        figures |= {f"{name}_{MERGED}": value for name, value in (self.merged or {}).items()}
        rows = {str(uid): {"samples": self.samples[uid], **row} for uid, row in self.nodes.items()}
        return {"run": str(self.run), "task": self.measured.task, **figures, "nodes": rows,
                "missing": list(self.missing)}  # fmt: skip


def evaluate(
    run: Path, sections: Mapping[str, Any] | None = None, overrides: Sequence[str] = (), device: str = "auto"
) -> EvaluatedModels:
    """Evaluates the models in a run's folder. Blocking; one model and one node's data are in memory at a time.

    sections: plain `data` and `task` sections that are merged over the run's, as a file over the one it extends.
    overrides: the same in the form "data.x=value". Raises UsageError if the run saved no model, or its models do not
    fit the data.
    """
    for key in [*(sections or {}), *(each.partition("=")[0].split(".")[0].strip() for each in overrides)]:
        if key not in ("data", "task"):
            raise UsageError(f"only data and task can be changed for an evaluation, got {key}; a run's models stay as "
                             "they were trained")  # fmt: skip
    refuse_script(run)
    if not (run / RESOLVED).is_file():
        raise UsageError(f"{run} has no {RESOLVED}, which describes its models")
    experiment = load(run / RESOLVED, overrides, {}, check=False, layers=[sections] if sections else [])
    model = experiment.model
    if getattr(model, "init", None) is not None:  # the initial model's file may be gone, and is not needed
        experiment = experiment.model_copy(update={"model": model.model_copy(update={"init": None})})
    return _Evaluation(experiment, run, device).all()


class _Sums:
    """Adds up a task's sums over nodes, separately for each prefix of a data split."""

    def __init__(self, task: Task) -> None:
        self._task, self._sums = task, dict[str, dict[str, float]]()

    def add(self, prefix: str, sums: Mapping[str, float]) -> None:
        known = self._sums.setdefault(prefix, dict.fromkeys(self._task.all_sums, 0.0))
        for name, value in sums.items():
            known[name] += value

    def metrics(self) -> dict[str, float]:
        return {f"{prefix}{name}": value for prefix, sums in self._sums.items()
                for name, value in self._task.evaluated(sums).items()}  # fmt: skip


class _Evaluation:
    """Evaluates the nodes of a run one after the other, with one module whose values are replaced."""

    def __init__(self, experiment: Experiment, run: Path, device: str) -> None:
        self.experiment, self.run, self.folder = experiment, run, run / "models"
        self.count = experiment.make_graph().num_nodes
        self.saved = [uid for uid in range(self.count) if self._path(uid).is_file()]
        if not self.saved and not (self.folder / f"{MERGED}.safetensors").is_file():
            raise UsageError(
                f"{run} has no models: nodes write them when a run ends normally; with node.checkpoint, such as "
                "{every: 20}, a run that was cut off can be continued with --resume"
            )
        self.data = experiment.open_data()
        self.data.check()
        self.task: Task = experiment.make_task()
        self.device = device_of(device, key="device")
        module = make_model_on_device(experiment, self.data.spec, self.device)
        self.model = shared_model(experiment, module).model

    def _path(self, uid: int) -> Path:
        return self.folder / f"{uid:03d}.safetensors"

    def all(self) -> EvaluatedModels:
        merged_file = self.folder / f"{MERGED}.safetensors"
        merged = _read(merged_file) if merged_file.is_file() else None
        kept = merged is not None and self._has_private_parameters(merged)
        samples, nodes = dict[int, int](), dict[int, dict[str, float]]()
        of_merged, of_pooled, attackers = _Sums(self.task), _Sums(self.task), self.experiment.attackers()
        honest = [uid for uid in range(self.count) if uid not in attackers]
        for index, uid in enumerate(honest):
            own = _read(self._path(uid)) if uid in self.saved else None
            if own is None and (merged is None or kept):
                continue
            training = self._training(uid)
            if own is not None:
                self._load(own, self._path(uid))
                nodes[uid] = {}
                for split in training.evaluated:
                    found = training.evaluate(split.name)
                    samples.setdefault(uid, found.samples)
                    nodes[uid] |= {f"{split.prefix}{name}": value for name, value in found.metrics.items()}
                    if split.pooled:
                        of_pooled.add(split.prefix, found.sums)
            if merged is not None:  # on each node's part of shared test data, as in the run
                self._load({**(own or {}), **merged} if kept else merged, merged_file)
                for split in training.evaluated:
                    part = (index, len(honest)) if split.shared else (0, 1)
                    of_merged.add(split.prefix, training.evaluate(split.name, part).sums)
        missing = tuple(uid for uid in honest if uid not in self.saved)
        found_merged = of_merged.metrics() if merged is not None else None
        return EvaluatedModels(self.run, self.experiment.measured(), samples, nodes, of_pooled.metrics(), found_merged,
                               missing)  # fmt: skip

    def _has_private_parameters(self, merged: Mapping[str, Tensor]) -> bool:
        """Returns whether the nodes kept some parameters private. The merged model lacks these, and is evaluated with
        each node's own."""
        return bool(self.model.module.state_dict().keys() - merged.keys())

    def _load(self, values: Mapping[str, Tensor], path: Path) -> None:
        state = self.model.module.state_dict()
        wrong = [name for name in {*state, *values} if name not in state or name not in values
                 or state[name].shape != values[name].shape]  # fmt: skip
        if wrong:
            raise UsageError(f"{path} does not fit the model for this data: {', '.join(sorted(wrong)[:4])} "
                             f"{'differs' if len(wrong) == 1 else 'differ'}; is it data of another shape?")  # fmt: skip
        with torch.no_grad():
            for name, value in state.items():
                value.copy_(values[name])

    def _training(self, uid: int) -> Training:
        """Returns the node's training component, for its evaluation only."""
        config: Any = self.experiment.training
        if self.data.test == "global" and not self.data.sharded:  # no training sample needs to be read
            test = self.data.global_test(self.data.dataset())
            given = NodeSamples(test, test)
            config = config.model_copy(update={"drop_last": False, "sampling": "fixed"})
        else:
            given = replace(self.data.of(uid), deal_again=None)
            config = config.model_copy(update={"sampling": "fixed"})
        made: Training = load_class(config.name, TRAININGS, "training")(
            config, self.model, self.task, given, seed=self.experiment.seed, uid=uid
        )
        return made


def _read(path: Path) -> dict[str, Tensor]:
    """Returns the tensors of a safetensors file, which runs no code from it. Raises UsageError if it cannot be read."""
    try:
        return load_file(path)
    except (OSError, SafetensorError) as error:
        raise UsageError(f"{path} cannot be read as a model: {error}") from error
