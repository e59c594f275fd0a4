"""Reads the results of a run: tables, a figure and models."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from decentnode.config.yaml_source import load_plain
from decentnode.errors import EnvironmentFault, UsageError
from decentnode.formatting import duration, plural
from decentnode.launch.files.run_dir import resolve
from decentnode.metrics import summary as summaries
from decentnode.metrics.reader import read
from decentnode.report.reading.measured import metrics_of_summary

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from pandas import DataFrame
    from torch import Tensor, nn

MERGED = "merged"


def open_run(path: str | os.PathLike[str] = "latest", run_dir: str | os.PathLike[str] = "runs") -> Run:
    """Returns the run that a path names: the run's folder, the folder or the name of an experiment in `run_dir` (its
    latest run), or the "latest" of all runs. Raises UsageError if there is none."""
    return Run(resolve(os.fspath(path), Path(run_dir)))


class Run:
    """A run that has ended or is in progress, with its folder `path`. Everything but the summary is read on access."""

    def __init__(
        self, path: Path, summary: Mapping[str, Any] | None = None, given: Mapping[str, type[Any]] | None = None
    ) -> None:
        """summary: the contents of summary.json; read from the file if not given. given: the objects of which the
        experiment was made."""
        self.path = path
        if summary is None:
            try:
                summary = summaries.read(path / "summary.json")
            except (OSError, ValueError):  # the run is in progress, or was killed
                summary = {}
        self.summary: dict[str, Any] = json.loads(json.dumps(summary))
        """The contents of summary.json; empty if the run has not ended regularly."""
        self._given = dict(given or {})

    @property
    def name(self) -> str:
        """Name of the experiment."""
        return str(self.summary.get("name", self.path.parent.name))

    @property
    def status(self) -> str:
        """finished, interrupted or failed; "unfinished" if the run has written no summary."""
        return str(self.summary.get("status", "unfinished"))

    @property
    def config(self) -> dict[str, Any]:
        """All values of the experiment, including defaults. Raises UsageError if the folder has no readable config."""
        try:
            found = load_plain((self.path / "config.resolved.yaml").read_text(encoding="utf-8"))
        except (OSError, ValueError, yaml.YAMLError) as error:
            raise UsageError(f"{self.path} holds no readable config.resolved.yaml: {error}") from error
        return {key: value for key, value in found.items() if key != "derived"}

    # -- tables -----------------------------------------------------------------------------------------------

    def rounds(self) -> DataFrame:
        """Returns a row per node and round: loss, seconds, bytes and so on. Raises EnvironmentFault without pandas,
        UsageError if the run has no metrics."""
        return self._records("round")

    def evaluations(self) -> DataFrame:
        """Returns a row per node and evaluation: the task's metrics of the node's own model (`accuracy`), as the mean
        over the nodes (`accuracy_mean`) and of the merged model (`accuracy_merged`). Raises as `rounds` does."""
        return self._records("evaluation")

    def nodes(self) -> DataFrame:
        """Returns a row per node with its closing figures, indexed by `node`. Raises EnvironmentFault without pandas.
        """
        figures = self.summary.get("nodes", {})
        rows = {int(uid): {key: value for key, value in row.items() if key != "uid"} for uid, row in figures.items()}
        frame = pandas().DataFrame.from_dict(rows, orient="index").sort_index()
        frame.index.name = "node"
        return frame

    def _records(self, kind: str) -> DataFrame:
        frames = pandas()
        files = sorted(each for each in self.path.glob("nodes/*/metrics.jsonl") if each.parent.name.isdigit())
        if not files:
            raise UsageError(f"{self.path} holds no metrics: nodes/*/metrics.jsonl must have records")
        rows = [{"node": int(file.parent.name), **{k: v for k, v in record.items() if k not in ("kind", "uid", "node")}}
                for file in files for record in read(file) if record.get("kind") == kind]  # fmt: skip
        frame = frames.DataFrame(rows)
        return frame.sort_values(["round", "node"], ignore_index=True) if len(frame) else frame

    # -- figure and models ------------------------------------------------------------------------------------

    def plot(self, metric: str = "all", x: str = "all", preset: str = "curves") -> Figure:
        """Returns the figure that `decentnode plot` writes.

        metric: a metric of the task, "loss", "consensus_distance" and so on, or "all". x: "rounds", "seconds", "bytes",
        "virtual_seconds", "epochs", "samples" or "all". preset: "curves", "heat-map", "consensus", "merged" or
        "target". Raises UsageError for other values, and if there is nothing to draw.
        """
        from decentnode.metrics.figures import EVERY_AXIS
        from decentnode.report.pictures import presets
        from decentnode.report.pictures.plots import draw
        from decentnode.report.reading.runs import axes_of, lines, overview

        if x != "all" and x not in EVERY_AXIS:
            raise UsageError(f"x must be one of {', '.join([*EVERY_AXIS, 'all'])}, got {x!r}")
        drawn, _ = lines([self.path])
        if preset != "curves":
            return presets.draw(preset, drawn, metric, x)
        return draw(drawn, overview(drawn) if metric == "all" else [metric], axes_of(drawn) if x == "all" else [x])[0]

    def models(self) -> Models:
        """Returns the models that the run saved, by node and "merged"; empty if it saved none."""
        return Models(self)

    def __repr__(self) -> str:
        where = os.path.relpath(self.path)
        return f"<Run {self.name}: {self._description()}; {where if len(where) < len(str(self.path)) else self.path}>"

    def _description(self) -> str:
        if not self.summary:
            return self.status
        found, main = self.summary, metrics_of_summary(self.summary).main
        parts = [f"{self.status} after {found.get('rounds')} of {plural(found.get('rounds_planned') or 0, 'round')}, "
                f"{duration(found.get('wall_seconds') or 0.0)}"]  # fmt: skip
        for ending in ("mean", MERGED):
            value = found.get(f"{main.name}_{ending}")
            if value is not None:
                parts.append(f"{main.name}_{ending} {value:.3f}")
        return ", ".join(parts)


class Models(Mapping[int | str, "nn.Module"]):
    """The saved models of a run by node, and the mean of all as "merged". Each is built and read on access; reading
    runs no code from the file."""

    def __init__(self, run: Run) -> None:
        self._run = run
        names = {file.stem for file in (run.path / "models").glob("*.safetensors")}
        self._keys: list[int | str] = [*sorted(int(name) for name in names if name.isdigit())]
        self._keys += [MERGED] if MERGED in names else []

    def __iter__(self) -> Iterator[int | str]:
        return iter(self._keys)

    def __len__(self) -> int:
        return len(self._keys)

    def __contains__(self, key: object) -> bool:
        return key in self._keys

    def __getitem__(self, key: int | str) -> nn.Module:
        """Returns the model of a node, or the merged one, on the CPU and in evaluation mode. Raises KeyError if the run
        did not save it, UsageError if it cannot be built here; `state_dict` returns its tensors even then."""
        from decentnode import objects
        from decentnode.experiment import load
        from decentnode.experiment.initial_model import make_model
        from decentnode.models.weights import load_weights

        path = self._path(key)
        with objects.bound(self._run._given):
            experiment = load(self._run.path / "config.resolved.yaml", environ={}, check=False)
            module = make_model(experiment.model_copy(update={"model": _without_initial_weights(experiment.model)}),
                                experiment.open_data().spec)  # fmt: skip
        load_weights(module, path)
        return module.eval()

    @property
    def merged(self) -> nn.Module:
        """The mean of all models: `models["merged"]`. Raises KeyError or UsageError as indexing does."""
        return self[MERGED]

    def state_dict(self, key: int | str) -> dict[str, Tensor]:
        """Returns the tensors of a model by name, on the CPU. Raises KeyError if the run did not save the model."""
        from safetensors.torch import load_file

        return load_file(self._path(key))

    def _path(self, key: int | str) -> Path:
        if key not in self._keys:
            available = f"there are {', '.join(map(str, self._keys))}" if self._keys else (
                f"the run has saved none ({self._run.status}); with node.checkpoint, a run that is cut off keeps its "
                "models")
            raise KeyError(f"no model {key!r}: {available}")
        return self._run.path / "models" / (f"{key:03d}.safetensors" if isinstance(key, int) else f"{key}.safetensors")

    def __repr__(self) -> str:
        return f"<Models {', '.join(map(str, self._keys))} of {self._run.name}>"


def _without_initial_weights(config: Any) -> Any:
    """Returns the model's section without the file of initial weights, which may be gone and is not needed."""
    return config.model_copy(update={"init": None}) if getattr(config, "init", None) is not None else config


def pandas() -> Any:
    """Returns the module pandas. Raises EnvironmentFault if it is not installed."""
    try:
        import pandas
    except ImportError as error:
        raise EnvironmentFault("tables of a run need pandas: pip install 'decentnode[notebook]' (or pandas)") from error
    return pandas
