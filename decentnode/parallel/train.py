"""Records what a script trains as nodes record theirs: `decentnode plot`, `compare`, `report` and `trace` read it.

A rank of the wrapper is a node of the run, an epoch of the script a round.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import shlex
import statistics
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self

import torch
import yaml
from torch import Tensor
from torch.nn import Module

from decentnode import clock
from decentnode.checkpoint import store
from decentnode.checkpoint.state import decode, encode
from decentnode.errors import CheckpointError
from decentnode.metrics import reader
from decentnode.metrics import summary as summaries
from decentnode.metrics.figures import LOSS, Metric, TaskMetrics
from decentnode.metrics.run_folder import SCRIPT, create, node_dir
from decentnode.metrics.writer import MetricsWriter
from decentnode.metrics.writer import encode as line_of
from decentnode.parallel.ddp import DecentralizedDataParallel
from decentnode.parallel.exchange import mean_over_ranks
from decentnode.parallel.process_group import device_of_group, gather_texts, num_ranks, together
from decentnode.system import write_atomic
from decentnode.tasks.classification import ACCURACY

Evaluation = Callable[[Module], Mapping[str, float]]
"""Returns each metric of a module, in eval mode and without gradients. It must not wait for other ranks."""

KNOWN = {ACCURACY.name: ACCURACY, LOSS.name: LOSS}
"""Metrics that a script may name alone."""


class Stateful(Protocol):
    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state_dict: dict[str, Any]) -> Any: ...


@dataclasses.dataclass
class _Epoch:
    """The sums of the epoch under way."""

    began: float
    exposed: float
    """Seconds that the wrapper had waited by then."""
    first_step: int
    loss: Tensor | float = 0.0
    losses: int = 0
    samples: int = 0


def _plain(config: Mapping[str, Any]) -> dict[str, Any]:
    """The config as files give it back: tuples are lists, and keys text. Raises ValueError for what no file takes."""
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
    ) -> None:
        """Blocking: makes runs/<name>/<time>-<id>, on every machine where ranks are.

        config: what the run is compared by (plain values for YAML; `seed` tells repeats apart). evaluate: measures a
        module; it is called for the rank's own model and for the mean of all. metrics: what it returns, the main one
        first. evaluate_every: epochs from one evaluation to the next. keep: checkpoints kept per rank, one is written
        after every epoch; 0 for none. resume: goes on with the latest run of this name if it has a checkpoint that all
        ranks have; else a new one begins. also: further objects whose states are part of checkpoints, by name.
        Raises ValueError for arguments that do not fit and where the config of the run to go on with was another,
        EnvironmentFault where the directory cannot be made, AssemblyError where another rank could not.
        """
        if model._member is not None:
            raise ValueError("TrainingRun needs missing='fail': its files are of ranks that stay")
        if evaluate_every < 1 or keep < 0:
            raise ValueError(f"evaluate_every must be 1 or more and keep 0 or more, got {evaluate_every} and {keep}")
        self.model, self.rank, self.world_size = model, model.rank, model.world_size
        self.done = 0
        """Epochs that are over."""
        self._evaluate_model, self._every, self._keep, self._also = evaluate, evaluate_every, keep, dict(also or {})
        known = tuple(each if isinstance(each, Metric) else KNOWN.get(each) for each in metrics)
        if not known or None in known:
            raise ValueError(f"metrics must be {', '.join(KNOWN)} or Metric objects, got {metrics!r}")
        self._measured = TaskMetrics(SCRIPT, tuple(each for each in known if each is not None))
        self._config = _plain({"name": name, **(config or {})})
        self._began, self._planned = clock.now(), 0
        self.path = self._directory(Path(runs), name, resume)
        self._writer = MetricsWriter(self._folder / "metrics.jsonl")
        self._sent = 0
        """Bytes that earlier processes of the run had sent."""
        self._epoch: _Epoch | None = None
        if resume:
            self._go_on()
        self._from = self.done
        self._says("begins")

    # -- the directory ------------------------------------------------------------------------------------------

    def _directory(self, runs: Path, name: str, resume: bool) -> Path:
        """The run's directory, which rank 0 chooses. Blocking."""
        latest = runs / name / "latest"
        with together("make the run directory"):
            path = None
            if self.rank == 0:
                path = latest.resolve() if resume and (latest / "nodes").is_dir() else self._made(runs, name)
        told = gather_texts("" if path is None else path.name, device_of_group(), "run")[0] if num_ranks() > 1 else ""
        path = (runs / name / told).absolute() if path is None else path
        with together("make the run directory"):
            self._folder = node_dir(path, self.rank)
            self._folder.mkdir(parents=True, exist_ok=True)
        return path

    def _made(self, runs: Path, name: str) -> Path:
        text = yaml.safe_dump(self._config, sort_keys=False)
        path = create(runs.absolute(), name, local=range(self.world_size))
        for file, content in (("config.yaml", text), ("config.resolved.yaml", text),
                              ("command.txt", shlex.join(sys.argv) + "\n"),
                              ("task.json", json.dumps(self._measured.plain(), indent=2) + "\n")):  # fmt: skip
            write_atomic(path / file, content)
        return path

    # -- training -----------------------------------------------------------------------------------------------

    def epochs(self, total: int) -> Iterator[int]:
        """Yields the numbers of the epochs that are to be trained, from 0 or from where the run goes on; between them
        it records, evaluates and writes checkpoints. Blocking, on all ranks."""
        self._planned = total
        if self.done == 0:
            self.evaluate()
        while self.done < total:
            self._says("trains")
            self._epoch = _Epoch(clock.now(), self.model.metrics["exposed_seconds"], self.model.steps)
            yield self.done
            self._record()
            if self.done % self._every == 0 or self.done == total:
                self.evaluate()
            if self._keep:
                self._save()

    def add(self, loss: Tensor | float, samples: int = 0) -> None:
        """Counts a step's loss, and its samples, into the record of the epoch. Not blocking, on GPUs neither."""
        if self._epoch is None:
            raise ValueError("add needs an epoch under way: call it inside `for epoch in run.epochs(...)`")
        self._epoch.loss = self._epoch.loss + (loss.detach() if isinstance(loss, Tensor) else loss)
        self._epoch.losses += 1
        self._epoch.samples += samples

    def _record(self) -> None:
        epoch, metrics = self._epoch, self.model.metrics
        assert epoch is not None
        seconds, waited = clock.now() - epoch.began, metrics["exposed_seconds"] - epoch.exposed
        steps = self.model.steps - epoch.first_step
        record: dict[str, Any] = {
            "kind": "round", "round": self.done, "time": clock.wall(), "seconds": seconds,
            "train_seconds": max(0.0, seconds - waited), "wait_seconds": waited, "steps": steps,
            "steps_per_second": steps / seconds, "lr": self.model.get_lr(),
            "data_bytes_sent": self._sent + int(metrics["bytes_sent"]), "metadata_bytes_sent": 0,
        }  # fmt: skip
        if epoch.losses:
            record["loss"] = float(epoch.loss) / epoch.losses
        if epoch.samples:
            record |= {"samples": epoch.samples, "samples_per_second": epoch.samples / seconds}
        self._writer.write(record)
        self.done, self._epoch = self.done + 1, None

    def evaluate(self) -> dict[str, float]:
        """Measures the rank's own model, the mean of all, and the consensus distance, and records them. Blocking, on
        all ranks. Returns the record's figures."""
        found: dict[str, float] = {}
        self._says("evaluates")
        if self._evaluate_model is not None:
            with together("evaluate the model"):
                own = self._measure()
            means = torch.tensor([*own.values()], dtype=torch.float64, device=device_of_group())
            if num_ranks() > 1:
                mean_over_ranks(means)
            with self.model.averaged(), together("evaluate the averaged model"):
                merged = self._measure()
            for (name, value), mean in zip(own.items(), means.tolist(), strict=True):
                found |= {name: value, f"{name}_mean": mean, f"{name}_merged": merged[name]}
        found["consensus_distance"] = self.model.consensus_distance()
        self._writer.write({"kind": "evaluation", "round": self.done, "time": clock.wall(), **found,
                            "contributors": self.world_size})  # fmt: skip
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

    # -- checkpoints --------------------------------------------------------------------------------------------

    def _state(self) -> dict[str, Any]:
        return {"wrapper": self.model.state_dict(), "random": torch.get_rng_state(),
                "also": {name: each.state_dict() for name, each in self._also.items()}}  # fmt: skip

    def _save(self) -> None:
        """Blocking until the disk has it."""
        tensors: dict[str, Tensor] = {}
        tree = encode(self._state(), "state", tensors, copy=False)
        cut = store.Cut(self.path.name, self.done, 0, "", tuple(range(self.world_size)))
        folder = self.path / store.FOLDER
        store.write(folder, store.Snapshot(self.rank, cut, self._config, tree, tensors))
        kept, _ = store.scan([folder], self.rank)
        for old in store.surplus([each.cut for each in kept], self._keep, ()):
            store.remove(folder, old.folder, self.rank)

    def _go_on(self) -> None:
        """Loads the newest checkpoint that all ranks have, and forgets what was recorded after it. Blocking."""
        found, _ = store.scan([self.path / store.FOLDER], self.rank)
        mine = {each.cut.round: each for each in found if len(each.cut.members) == self.world_size}
        told = gather_texts(json.dumps(sorted(mine)), device_of_group(), "checkpoints") if num_ranks() > 1 else []
        common = set(mine).intersection(*(json.loads(each) for each in told))
        with together("go on with the run"):
            if not common:
                self._begin_anew({len(each.cut.members) for each in found} - {self.world_size})
                return
            manifest = mine[max(common)]
            changed = store.differences(manifest.config, self._config)
            if changed:
                raise ValueError(f"the run in {self.path} goes on with its own config: {'; '.join(changed)}")
            state = decode(manifest.tree, manifest.load())
        self.model.load_state_dict(state["wrapper"])
        torch.set_rng_state(state["random"])
        for name, each in self._also.items():
            each.load_state_dict(state["also"][name])
        self.done = manifest.cut.round
        self._forget_later()

    def _begin_anew(self, others: set[int]) -> None:
        """Forgets the records of a run that ended before its first checkpoint. others: for how many ranks it has
        checkpoints nevertheless. Raises CheckpointError where more than a first epoch would be lost."""
        epochs = max((record["round"] + (record["kind"] != "evaluation") for record in
                      reader.read(self._folder / "metrics.jsonl")), default=0)  # fmt: skip
        if others or epochs > bool(self._keep):
            has = f"checkpoints of {' and '.join(map(str, sorted(others)))} ranks alone" if others else "none"
            raise CheckpointError(f"{self.path} has records of {epochs} epochs and no checkpoint that all "
                                  f"{self.world_size} ranks have ({has}): move it away, or resume=False")  # fmt: skip
        self._keep_records([])

    def _forget_later(self) -> None:
        kept = [record for record in reader.read(self._folder / "metrics.jsonl")
                if record["round"] < self.done + (record["kind"] == "evaluation")]  # fmt: skip
        self._keep_records(kept)
        self._sent = max((int(record.get("data_bytes_sent", 0)) for record in kept), default=0)

    def _keep_records(self, kept: Sequence[dict[str, Any]]) -> None:
        path = self._folder / "metrics.jsonl"
        write_atomic(path, b"".join(map(line_of, kept)).decode())
        self._writer.close()
        self._writer = MetricsWriter(path)

    # -- the end ------------------------------------------------------------------------------------------------

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Blocking, on all ranks: writes the summary, unless the script failed."""
        self._says("finished" if kind is None else "failed")
        if kind is None:
            own = json.dumps(self.figures())
            told = gather_texts(own, device_of_group(), "figures") if num_ranks() > 1 else [own]
            ended_before = self.done == self._from and (self.path / "summary.json").exists()
            if self.rank == 0 and not ended_before:
                self._summarize({uid: json.loads(each) for uid, each in enumerate(told)})
        self._writer.close()

    def _says(self, doing: str) -> None:
        """Writes what this rank does for `decentnode status`; a disk that refuses costs that alone."""
        status = {"uid": self.rank, "pid": os.getpid(), "time": clock.wall(), "round": self.done,
                  "rounds": self._planned, "doing": doing, "waiting_for": [], "waiting_seconds": 0.0, "edges": {},
                  "faults": {}}  # fmt: skip
        with contextlib.suppress(OSError):
            write_atomic(self._folder / "status.json", json.dumps(status))

    def figures(self) -> dict[str, Any]:
        """This rank's closing figures, by the names of summary.json."""
        records = list(reader.read(self._folder / "metrics.jsonl"))
        rounds = [each for each in records if each["kind"] == "round"]
        last: dict[str, Any] = next((each for each in reversed(records) if each["kind"] == "evaluation"), {})
        seconds = [each["seconds"] for each in rounds]
        measured = {key: value for key, value in last.items() if key not in ("kind", "time", "round", "contributors")}
        return measured | {
            "uid": self.rank, "rounds": self.done, "evaluated_round": last.get("round"),
            "round_seconds_median": statistics.median(seconds) if seconds else None,
            "round_seconds_total": sum(seconds), "wait_seconds": sum(each["wait_seconds"] for each in rounds),
            "bytes_data": rounds[-1]["data_bytes_sent"] if rounds else 0, "bytes_metadata": 0,
        }  # fmt: skip

    def _summarize(self, nodes: Mapping[int, Mapping[str, Any]]) -> None:
        summaries.write(self.path / "summary.json", {
            "name": self._config["name"], "run": self.path.name, "ended": "rounds", "exit_code": 0,
            "status": "finished" if self.done >= self._planned else "interrupted", "num_nodes": self.world_size,
            "rounds_planned": self._planned, "wall_seconds": clock.now() - self._began,
            "task": self._measured.plain(), **summaries.combine(nodes, self._measured),
        })  # fmt: skip
