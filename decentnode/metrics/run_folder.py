"""Creates the folder of a run, runs/<name>/<time>-<id>/, with a folder per node; the nodes write the files."""

from __future__ import annotations

import functools
import os
import shutil
from collections.abc import Callable, Iterable
from datetime import datetime
from pathlib import Path

from decentnode import clock, entropy
from decentnode.errors import EnvironmentFault
from decentnode.system import replacing

SCRIPT = "script"
"""The task's name in task.json for runs of a script (`decentnode.parallel.train`)."""


@functools.lru_cache(maxsize=1 << 14)
def node_dir(run_dir: str | Path, uid: int) -> Path:
    """Returns the folder that a node writes to: nodes/<uid>, with three digits."""
    return Path(run_dir) / "nodes" / f"{uid:03d}"


def folder_name(began: float, word: str) -> str:
    """Returns the name of a run's folder. began: seconds since 1970. word: distinguishes runs that began at once."""
    return f"{datetime.fromtimestamp(began).strftime('%Y-%m-%dT%H-%M-%S')}-{word}"


def create(
    runs: Path, name: str, machine: int = 0, local: Iterable[int] = (), folder: str | None = None,
    fill: Callable[[Path], None] | None = None,
) -> Path:  # fmt: skip
    """Creates the folder of one run, with a folder per local node, and points the link `latest` to it. Returns its
    path.

    folder: its name, if processes on several machines have agreed on one; then the folder may exist already. Machine 0
    owns `latest`; the others have `latest-machine<n>`, because machines may share a file system. fill: writes the first
    files. Raises EnvironmentFault if the folder cannot be created, or if `fill` raises that or OSError; then a folder
    without an agreed name is removed again, and `latest` stays.
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
    """Makes the symbolic link `link` point to `target`, atomically. Raises OSError."""
    with replacing(link) as temporary:
        os.symlink(target, temporary)
