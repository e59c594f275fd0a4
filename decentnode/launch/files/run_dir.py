"""Creates, finds and writes the run directory runs/<name>/<time>-<id>/ for the supervisor (docs/howto/repeat.rst, "The
folder of a run")."""

from __future__ import annotations

import contextlib
import json
import shutil
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from decentnode.errors import EnvironmentFault, UsageError
from decentnode.launch.children.messages import Facts
from decentnode.launch.files import provenance, supervisor_file
from decentnode.metrics import summary as summaries
from decentnode.metrics.run_folder import SCRIPT
from decentnode.metrics.run_folder import create as create
from decentnode.metrics.run_folder import node_dir as node_dir
from decentnode.metrics.run_folder import point as point
from decentnode.similar_words import did_you_mean
from decentnode.system import write_atomic

ENVIRONMENT_SECONDS = 30.0
"""Longest wait, at the end of a run, for the thread that writes versions and git's state."""

APART = "apart-"
"""Prefix, followed by a uid, of folders in models/. With `node.on_partition: both`, several generations may have a
merged model: the node with the lowest uid of its generation writes it to such a folder, unless it is node 0."""


def write_inputs(path: Path, facts: Facts, command: str) -> None:
    """Writes configs, graph, mapping, command and copied files. Raises EnvironmentFault if the disk refuses."""
    files = {
        "config.yaml": facts.config_text,
        "config.resolved.yaml": facts.resolved_text,
        "command.txt": command + "\n",
        "mapping.yaml": facts.mapping_text,
        "graph.edges": facts.graph_text,
        "task.json": json.dumps(facts.task, indent=2) + "\n",
        "faults.jsonl": "".join(f"{json.dumps(each)}\n" for each in facts.faults),
    }
    try:
        for name, text in files.items():
            if text:
                write_atomic(path / name, text)
        for name, source in facts.inputs.items():
            (path / name).parent.mkdir(exist_ok=True)
            shutil.copyfile(source, path / name)
    except OSError as error:
        raise EnvironmentFault(f"cannot write to the run directory {path}: {error.strerror}") from error


def resolve(path: str | Path, runs: Path | None = None) -> Path:
    """Returns the run directory that a user names by the directory itself, by its parent or the experiment's name in
    `runs` (default: runs/), of which it is the latest run, or by "latest".

    Raises UsageError if there is none.
    """
    given = Path(path)
    runs = runs or Path("runs")
    candidates = [given, given / "latest", runs / given / "latest", runs / given]
    for folder in (given, runs / given):  # without the link: removed with its run, not copied, or of another machine
        candidates += sorted((each.parent for each in folder.glob("[0-9]*/nodes")), reverse=True)
    if str(path) == "latest":
        links = [link for link in runs.glob("*/latest") if link.exists()]
        candidates += sorted(links, key=lambda link: -link.stat().st_mtime)
        candidates += sorted((each.parent for each in runs.glob("*/[0-9]*/nodes")), key=lambda run: run.name)[-1:]
    for candidate in candidates:
        if (candidate / "nodes").is_dir():
            return candidate.resolve()
    hint = "" if given.exists() or given.suffix not in (".yaml", ".yml") else ", and there is no such file"
    for folder in (given / "sweep", runs / given / "sweep", given, runs / given):
        if (folder / "points").is_dir():
            hint = f"; {folder} is a sweep: name a run in {folder / 'points'}, or use --all-runs with plot and " \
                    "report"  # fmt: skip
            break
    if not hint and not given.exists() and not (runs / given).exists():
        names = {each.parent.parent.name for each in runs.glob("*/*/nodes")}
        hint = f", and {runs}/ has none of that name{did_you_mean(str(given), names)}"
    raise UsageError(f"no run in {given}: a run directory holds a folder 'nodes'{hint}")


def refuse_script(run: Path) -> None:
    """Raises UsageError for the run of a script (`decentnode.parallel.train`), because its config is the script's own
    and not an experiment."""
    try:
        name = json.loads((run / "task.json").read_text(encoding="utf-8"))["name"]
    except (OSError, ValueError, TypeError, KeyError):
        return
    if name == SCRIPT:
        raise UsageError(
            f"{run} is the run of a script: its config is not an experiment, and its models are in its checkpoints. "
            f"To continue it, start the script again with resume=True, as in {run / 'command.txt'}"
        )


def copied_run_parent(run: Path) -> Path | None:
    """Returns the parent folder of a run that is not in its experiment's folder, such as a copy. Returns None for other
    runs: their config says where new runs go (`run.dir` is two folders up)."""
    try:
        name = yaml.safe_load((run / "config.resolved.yaml").read_text(encoding="utf-8"))["name"]
    except (OSError, ValueError, TypeError, KeyError, yaml.YAMLError):
        return None
    return None if run.parent.name == name else run.parent


def resolve_all(what: str | Path, runs: Path) -> list[Path]:
    """Returns the run directories that a user names, oldest first: the directory itself; all runs in an experiment's
    folder, given by path or by its name in `runs`; the runs of all points of a sweep; or the "latest" of all runs.

    Raises UsageError if there are none.
    """
    if str(what) != "latest":
        for folder in (Path(what), runs / what):
            if (folder / "nodes").is_dir():
                return [folder.resolve()]
            for runs_of_it in ("*/nodes", "points/*/*/latest/nodes", "sweep/points/*/*/latest/nodes"):
                inside = {each.parent.resolve() for each in folder.glob(runs_of_it)} if folder.is_dir() else set()
                if inside:
                    return sorted(inside, key=lambda each: (each.name, each))
    return [resolve(what, runs)]


class Records:
    """Writes the supervisor's files to the run directory: inputs, environment, summary. After the run has begun, errors
    of the disk are added to `notices` and do not stop the run."""

    def __init__(self, facts: Facts, config: str, command: str) -> None:
        """Creates the run directory with its inputs. Raises EnvironmentFault if the disk refuses."""
        def fill(path: Path) -> None:
            write_inputs(path, facts, command)
            supervisor_file.write(path)

        self.directory = create(Path(facts.runs_dir), facts.name, facts.machine, facts.local, fill=fill)
        self.notices: list[str] = []
        self._facts = facts
        self._config_dir = Path(config).absolute().parent
        self._thread: threading.Thread | None = None
        self._modules: dict[str, dict[str, str]] = {}

    def keep_modules(self, modules: Mapping[str, str]) -> None:
        """Copies those of the user's own modules (name -> path) that are not copied yet, so that the run can be
        repeated."""
        try:
            new = {name: path for name, path in modules.items() if name not in self._modules}
            self._modules |= provenance.keep_modules(new, self.directory)
        except OSError as error:
            self.notices.append(f"the run's own modules could not be kept: {error.strerror}")

    def start(self) -> None:
        """Starts a thread that writes the environment; versions and git's state take up to a second. Idempotent."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._write_environment, daemon=True)
            self._thread.start()

    def _write_environment(self) -> None:
        facts = {"name": self._facts.name, "digest": self._facts.digest, "machine": self._facts.machine}
        try:
            provenance.write(self.directory, facts, self._config_dir)
        except OSError as error:
            self.notices.append(f"the environment could not be written: {error.strerror}")

    def _write_modules(self) -> None:
        """Adds the user's modules to env.json, which is written before all of them are known."""
        path = self.directory / "env.json"
        if self._modules and path.exists():
            with contextlib.suppress(OSError, ValueError):
                found = {**json.loads(path.read_text()), "modules": self._modules}
                write_atomic(path, json.dumps(found, indent=2) + "\n")

    def finish(self, summary: dict[str, Any], whole: bool) -> bool:
        """Waits until the environment is written, and writes summary.json if `summary` is of the `whole` run, not only
        of this machine's nodes. Blocking for at most ENVIRONMENT_SECONDS. Returns False if summary.json could not be
        written."""
        self.start()
        assert self._thread is not None
        self._thread.join(ENVIRONMENT_SECONDS)
        self._write_modules()
        written = True
        if whole:
            try:
                summaries.write(self.directory / "summary.json", summary)
            except OSError as error:
                self.notices.append(f"summary.json could not be written: {error.strerror}")
                written = False
        supervisor_file.remove(self.directory)
        return written


def has_checkpoint(run: Path, num_nodes: int) -> bool:
    """Returns whether a run's folder has a cut with checkpoints of all its members that are in the mapping, judging by
    the names of the files. The folder of one machine among several has none."""
    for place in (run / "checkpoints").glob("[0-9]*-*"):
        found = {path.stem: path for path in sorted(place.glob("[0-9]*.json"))}
        try:
            members = json.loads(next(iter(found.values())).read_text(encoding="utf-8"))["body"]["cut"]["members"]
        except (OSError, ValueError, LookupError, StopIteration):
            continue
        if all(f"{uid:03d}" in found for uid in members if uid < num_nodes):
            return True
    return False


def promote_merged_model(run_dir: Path) -> None:
    """Moves the merged model to models/ from the APART folder of the lowest uid, unless models/ has one already. Raises
    OSError."""
    models = run_dir / "models"
    separate = sorted(models.glob(f"{APART}*"))
    if not separate or (models / "merged.safetensors").exists():
        return
    for each in separate[0].iterdir():
        if each.is_dir():
            (models / each.name).mkdir(exist_ok=True)
            for file in each.iterdir():
                file.replace(models / each.name / file.name)
            each.rmdir()
        else:
            each.replace(models / each.name)
    separate[0].rmdir()
