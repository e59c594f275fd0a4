"""The run directory: runs/<name>/<time>-<id>/ (docs/howto/repeat.rst, "The folder of a run")."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import time
from collections.abc import Iterable
from pathlib import Path

import yaml

from decentnode.errors import EnvironmentFault, UsageError
from decentnode.launch.entry import node_dir
from decentnode.launch.messages import Facts
from decentnode.metrics.summary import write_atomic


def create(runs: Path, name: str, machine: int = 0, local: Iterable[int] = ()) -> Path:
    """A new directory for one run, with a folder per local node, and `latest` pointing to it.

    Machine 0 owns `latest`; on a file system that machines share, the others have `latest-machine<n>`.
    Raises EnvironmentFault when it cannot be made.
    """
    suffix = f"-machine{machine}" if machine else ""
    stamp = time.strftime("%Y-%m-%dT%H-%M-%S")
    path = runs / name / f"{stamp}-{secrets.token_hex(2)}{suffix}"
    try:
        path.mkdir(parents=True)
        for uid in local:
            node_dir(path, uid).mkdir(parents=True)
        for folder in ("models", "plots"):
            (path / folder).mkdir()
        point(path.parent / f"latest{suffix}", path.name)
    except OSError as error:
        raise EnvironmentFault(
            f"cannot make the run directory {path}: {error.strerror}; choose another place with --run-dir"
        ) from error
    return path


def point(link: Path, target: str) -> None:
    """Let the symbolic link `link` name `target`, in one step. Raises OSError."""
    temporary = link.with_name(f".{link.name}.{os.getpid()}.{secrets.token_hex(2)}")
    os.symlink(target, temporary)
    try:
        os.replace(temporary, link)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise


def write_inputs(path: Path, facts: Facts, command: str) -> None:
    """Exactly what is trained on. Raises EnvironmentFault when the disk refuses."""
    files = {
        "config.yaml": facts.config_text,
        "config.resolved.yaml": facts.resolved_text,
        "command.txt": command + "\n",
        "mapping.yaml": facts.mapping_text,
        "graph.edges": facts.graph_text,
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
    """The run directory that a user means: the directory itself, its parent (its latest run), or "latest".

    Raises UsageError when there is none.
    """
    given = Path(path)
    runs = runs or Path("runs")
    candidates = [given, given / "latest", runs / given / "latest", runs / given]
    if str(path) == "latest":
        with contextlib.suppress(OSError):
            candidates += sorted(runs.glob("*/latest"), key=lambda link: -link.stat().st_mtime)
    for candidate in candidates:
        if (candidate / "nodes").is_dir():
            return candidate.resolve()
    raise UsageError(f"no run in {given}: a run directory holds a folder 'nodes'")


def home_of(run: Path) -> Path | None:
    """The folder beside a run that lies in no folder of its experiment, as one that was copied alone; None for others,
    whose config says it (`run.dir` is two folders up)."""
    try:
        name = yaml.safe_load((run / "config.resolved.yaml").read_text(encoding="utf-8"))["name"]
    except (OSError, ValueError, TypeError, KeyError, yaml.YAMLError):
        return None
    return None if run.parent.name == name else run.parent


def resolve_all(what: str | Path, runs: Path) -> list[Path]:
    """The run directories that a user means by several: the directory itself, all runs of an experiment's folder or of
    its name in `runs`, oldest first, or the "latest" of all.

    Raises UsageError when there are none.
    """
    if str(what) != "latest":
        for folder in (Path(what), runs / what):
            if (folder / "nodes").is_dir():
                return [folder.resolve()]
            inside = {each.parent.resolve() for each in folder.glob("*/nodes")} if folder.is_dir() else set()
            if inside:
                return sorted(inside)
    return [resolve(what, runs)]
