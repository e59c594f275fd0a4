"""The folder of a run, runs/<name>/<time>-<id>/, and in it a folder per node: made here, filled by whoever trains."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterable
from datetime import datetime
from pathlib import Path

from decentnode import clock, entropy
from decentnode.errors import EnvironmentFault
from decentnode.system import replacing

SCRIPT = "script"
"""What task.json of the run of a script calls its task (`decentnode.parallel.train`)."""


def node_dir(run_dir: str | Path, uid: int) -> Path:
    """Returns the folder that a node writes into: nodes/<uid>, three digits."""
    return Path(run_dir) / "nodes" / f"{uid:03d}"


def folder_name(began: float, word: str) -> str:
    """Returns the name of a run's directory. began: seconds since 1970. word: tells apart what began at once."""
    return f"{datetime.fromtimestamp(began).strftime('%Y-%m-%dT%H-%M-%S')}-{word}"


def create(
    runs: Path, name: str, machine: int = 0, local: Iterable[int] = (), folder: str | None = None,
    fill: Callable[[Path], None] | None = None,
) -> Path:  # fmt: skip
    """Make a directory for one run, with a folder per local node, and let `latest` point to it. Returns its path.

    folder: the directory's name, which processes on several machines may have agreed on: it may be there already.
    Machine 0 owns `latest`; on a file system that machines share, the others have `latest-machine<n>`.
    fill: writes its first files. Where it raises, or the disk refuses, a directory without `folder` is removed again,
    and `latest` stays: nothing has been recorded in it.
    Raises EnvironmentFault when it cannot be made.
    """
    suffix = f"-machine{machine}" if machine else ""
    path = runs / name / (folder or f"{folder_name(clock.wall(), entropy.word(2))}{suffix}")
    try:
        path.mkdir(parents=True, exist_ok=folder is not None)
        for uid in local:
            node_dir(path, uid).mkdir(parents=True, exist_ok=folder is not None)
        for part in ("models", "plots"):
            (path / part).mkdir(exist_ok=folder is not None)
        if fill is not None:
            fill(path)
        point(path.parent / f"latest{suffix}", path.name)
    except (OSError, EnvironmentFault) as error:
        if folder is None:
            shutil.rmtree(path, ignore_errors=True)
        if isinstance(error, EnvironmentFault):
            raise
        raise EnvironmentFault(
            f"cannot make the run directory {path}: {error.strerror}; choose another place with --run-dir"
        ) from error
    return path


def point(link: Path, target: str) -> None:
    """Make the symbolic link `link` point to `target`, atomically. Raises OSError."""
    with replacing(link) as temporary:
        os.symlink(target, temporary)
