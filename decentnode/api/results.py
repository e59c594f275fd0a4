"""What a run left, as tables, a figure and models."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from decentnode.errors import EnvironmentFault, UsageError
from decentnode.launch.files.run_dir import resolve
from decentnode.metrics import summary as summaries
from decentnode.metrics.reader import read
from decentnode.report.reading.measured import measured_in
from decentnode.words import duration, plural

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from pandas import DataFrame
    from torch import Tensor, nn

MERGED = "merged"


def open_run(path: str | os.PathLike[str] = "latest", run_dir: str | os.PathLike[str] = "runs") -> Run:
    """The run that a path names: its folder, the folder or the name of an experiment in `run_dir` (its latest run), or
    the "latest" of all. Raises UsageError when there is none."""
    return Run(resolve(os.fspath(path), Path(run_dir)))


class Run:
    """A run that has ended, or is going on, by its folder `path`. Everything but the summary is read when it is asked
    for."""

    def __init__(
        self, path: Path, summary: Mapping[str, Any] | None = None, given: Mapping[str, type[Any]] | None = None
    ) -> None:
        """summary: what summary.json has; read from there when not given. given: the objects that the run was made of.
        """
        self.path = path
        if summary is None:
            try:
                summary = summaries.read(path / "summary.json")
            except (OSError, ValueError):  # it goes on, or was killed
                summary = {}
        self.summary: dict[str, Any] = json.loads(json.dumps(summary))
        """The figures of summary.json; empty where the run has not ended in order."""
        self._given = dict(given or {})

    @property
    def name(self) -> str:
        """Name of the experiment."""
        return str(self.summary.get("name", self.path.parent.name))

    @property
    def status(self) -> str:
        """finished, interrupted or failed; "unfinished" where the run has left no summary."""
        return str(self.summary.get("status", "unfinished"))

    @property
    def config(self) -> dict[str, Any]:
        """All values of the experiment, defaults included. Raises UsageError where the folder has none."""
        try:
            found = yaml.safe_load((self.path / "config.resolved.yaml").read_text(encoding="utf-8"))
        except (OSError, ValueError, yaml.YAMLError) as error:
            raise UsageError(f"{self.path} holds no readable config.resolved.yaml: {error}") from error
        return {key: value for key, value in found.items() if key != "derived"}

    # -- tables -----------------------------------------------------------------------------------------------

    def rounds(self) -> DataFrame:
        """A row per node and round: loss, seconds, bytes and so on. Raises EnvironmentFault without pandas, UsageError
        where the run left no metrics."""
        return self._records("round")

    def evaluations(self) -> DataFrame:
        """A row per node and evaluation: what the task measures, of the node's own model (`accuracy`), as the mean over
        the nodes (`accuracy_mean`) and of the merged model (`accuracy_merged`). Raises as `rounds`."""
        return self._records("evaluation")

    def nodes(self) -> DataFrame:
        """A row per node with its closing figures; the index is its `node`. Raises EnvironmentFault without pandas."""
        told = self.summary.get("nodes", {})
        rows = {int(uid): {key: value for key, value in row.items() if key != "uid"} for uid, row in told.items()}
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
        """The figure that `decentnode plot` writes.

        metric: what the task measures, "loss", "consensus_distance" and so on, or "all". x: "rounds", "seconds",
        "bytes", "virtual_seconds", "epochs", "samples" or "all". preset: "curves", "heat-map", "consensus", "merged" or
        "target". Raises UsageError for others, and where there is nothing to draw.
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
        """The models that the run left, by node and "merged"; empty where it left none."""
        return Models(self)

    def __repr__(self) -> str:
        where = os.path.relpath(self.path)
        return f"<Run {self.name}: {self._told()}; {where if len(where) < len(str(self.path)) else self.path}>"

    def _told(self) -> str:
        if not self.summary:
            return self.status
        found, main = self.summary, measured_in(self.summary).main
        told = [f"{self.status} after {found.get('rounds')} of {plural(found.get('rounds_planned') or 0, 'round')}, "
                f"{duration(found.get('wall_seconds') or 0.0)}"]  # fmt: skip
        for ending in ("mean", MERGED):
            value = found.get(f"{main.name}_{ending}")
            if value is not None:
                told.append(f"{main.name}_{ending} {value:.3f}")
        return ", ".join(told)


class Models(Mapping[int | str, "nn.Module"]):
    """The models of a run by node, and the mean of them all as "merged". Each is made and read when it is asked for, by
    a reader that runs no code of the file."""

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
        """The model of a node, or the merged one, on the CPU and in evaluation mode. Raises KeyError for one that the
        run did not leave, UsageError where it cannot be made here; `state_dict` has its tensors then, too."""
        from decentnode import objects
        from decentnode.experiment import load
        from decentnode.experiment.initial_model import make_model
        from decentnode.models.weights import load_weights

        path = self._path(key)
        with objects.bound(self._run._given):
            experiment = load(self._run.path / "config.resolved.yaml", environ={}, check=False)
            module = make_model(experiment.model_copy(update={"model": _from_scratch(experiment.model)}),
                                experiment.open_data().spec)  # fmt: skip
        load_weights(module, path)
        return module.eval()

    @property
    def merged(self) -> nn.Module:
        """The mean of all models: `models["merged"]`. Raises KeyError, UsageError as that does."""
        return self[MERGED]

    def state_dict(self, key: int | str) -> dict[str, Tensor]:
        """The tensors of a model by their names, on the CPU. Raises KeyError for one that the run did not leave."""
        from safetensors.torch import load_file

        return load_file(self._path(key))

    def _path(self, key: int | str) -> Path:
        if key not in self._keys:
            there = f"there are {', '.join(map(str, self._keys))}" if self._keys else (
                f"the run has saved none ({self._run.status}); with node.checkpoint, a run that is cut off keeps its "
                "models")
            raise KeyError(f"no model {key!r}: {there}")
        return self._run.path / "models" / (f"{key:03d}.safetensors" if isinstance(key, int) else f"{key}.safetensors")

    def __repr__(self) -> str:
        return f"<Models {', '.join(map(str, self._keys))} of {self._run.name}>"


def _from_scratch(config: Any) -> Any:
    """The section without the file of weights to start from, which need not be there any more."""
    return config.model_copy(update={"init": None}) if getattr(config, "init", None) is not None else config


def pandas() -> Any:
    """The library. Raises EnvironmentFault where it is not installed."""
    try:
        import pandas
    except ImportError as error:
        raise EnvironmentFault("tables of a run need pandas: pip install 'decentnode[notebook]' (or pandas)") from error
    return pandas
