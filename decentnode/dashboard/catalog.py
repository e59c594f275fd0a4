"""The runs that a dashboard shows, by ids that it assigns, so that clients never pass a path."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from decentnode import clock

MAX_RUNS = 500
LOOK_SECONDS = 2.0


@dataclass(frozen=True)
class ListedRun:
    """A run in the list."""

    id: str
    name: str
    """The experiment's name."""
    path: Path
    changed: float
    """When the run's folder last changed, in seconds since 1970."""


class Catalog:
    """Finds runs: those named by the user, and those in folders of experiments. Not thread-safe."""

    def __init__(self, named: Sequence[Path], folders: Sequence[Path]) -> None:
        """named: run folders, which are listed first. folders: folders of experiments, in which new runs may appear."""
        self.named = [path.resolve() for path in named]
        self._folders = list(dict.fromkeys(path.resolve() for path in folders))
        self._searched_at = -LOOK_SECONDS
        self._found: dict[str, ListedRun] = {}

    def runs(self) -> list[ListedRun]:
        """Returns the runs: the named ones first, then the newest. Blocking: searches the disk every LOOK_SECONDS."""
        if clock.now() - self._searched_at >= LOOK_SECONDS:
            self._searched_at = clock.now()
            self._search()
        return [*self._found.values()]

    def get(self, id: str) -> Path | None:
        """Returns the folder of a run; None for an unknown id."""
        if id not in self._found:
            self._search()
        found = self._found.get(id)
        return None if found is None else found.path

    def _search(self) -> None:
        others = [run for folder in self._folders for run in _runs_in(folder)]
        others = sorted({*others} - {*self.named}, key=_modification_time, reverse=True)
        chosen = [*self.named, *others][:MAX_RUNS]
        self._found = {}
        for path in chosen:
            id = f"{path.parent.name}/{path.name}"
            if id in self._found:  # two folders may each have a run of the same name and time
                id = f"{id}~{len(self._found)}"
            self._found[id] = ListedRun(id, path.parent.name, path, _modification_time(path))


def _runs_in(folder: Path) -> list[Path]:
    """Returns the runs in a folder of experiments (runs/<name>/<time>), without links."""
    runs_found = []
    try:
        with os.scandir(folder) as experiments:
            for experiment in experiments:
                if not experiment.is_dir(follow_symlinks=False):
                    continue
                with os.scandir(experiment.path) as runs:
                    runs_found += [Path(run.path) for run in runs
                              if run.is_dir(follow_symlinks=False) and os.path.isdir(os.path.join(run.path, "nodes"))]
    except OSError:
        return runs_found
    return runs_found


def _modification_time(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0
