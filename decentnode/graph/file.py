"""Graph files in decentralizepy's two formats.

`.edges`: the number of nodes, then one "u v" per line (either or both directions). `.adj`: the number of nodes,
then line u + 2 holds the neighbors of node u.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar

from decentnode import component
from decentnode.component import Config
from decentnode.errors import GraphError
from decentnode.graph.topology import Lists, Topology, components

MAX_FILE_NODES = 1 << 20


class FileConfig(Config):
    file: Path
    """Path of a .edges or .adj file, relative to the experiment's file."""


class FileGraph(Topology):
    """An undirected static graph from a file."""

    Config: ClassVar[type[component.Config]] = FileConfig

    def _set_up(self) -> None:
        assert isinstance(self.config, FileConfig)
        self._static = read(self.base_dir / self.config.file)
        self.num_nodes = len(self._static)

    def _lists(self, phase: int) -> Lists:  # noqa: ARG002
        return self._static


def read(path: Path, connected: bool = True) -> Lists:
    """Neighbor lists. Raises GraphError with the line of what is wrong."""
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except OSError as error:
        raise GraphError(f"{path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise GraphError(f"{path}: not a text file") from error
    while lines and not lines[-1].strip():
        lines.pop()
    if not lines:
        raise GraphError(f"{path}: is empty; line 1 must be the number of nodes")
    n = _count(path, lines[0])
    lists = _read_adjacency(path, lines, n) if path.suffix == ".adj" else _read_edges(path, lines, n)
    parts = components(lists)
    if connected and len(parts) > 1:
        raise GraphError(
            f"{path}: the graph is not connected: it falls into {len(parts)} parts; node {parts[1][0]} "
            f"cannot be reached from node 0"
        )
    return lists


def _count(path: Path, line: str) -> int:
    words = line.split()
    if len(words) != 1 or not words[0].isdecimal() or not 1 <= int(words[0]) <= MAX_FILE_NODES:
        raise GraphError(f"{path}:1: must be the number of nodes, got {line.strip()!r:.60}")
    return int(words[0])


def _uid(path: Path, number: int, word: str, n: int) -> int:
    if not word.isdecimal() or not word.isascii():
        raise GraphError(f"{path}:{number}: must be node numbers, got {word!r:.60}")
    if int(word) >= n:
        raise GraphError(f"{path}:{number}: node {word} is out of range, nodes are 0 to {n - 1}")
    return int(word)


def _read_edges(path: Path, lines: Sequence[str], n: int) -> Lists:
    sets: list[set[int]] = [set() for _ in range(n)]
    for number, line in enumerate(lines[1:], 2):
        words = line.split()
        if len(words) != 2:
            raise GraphError(f"{path}:{number}: must be two node numbers, got {line.strip()!r:.60}")
        i, j = (_uid(path, number, word, n) for word in words)
        if i == j:
            raise GraphError(f"{path}:{number}: node {i} is joined to itself")
        sets[i].add(j)
        sets[j].add(i)
    return [tuple(sorted(each)) for each in sets]


def _read_adjacency(path: Path, lines: Sequence[str], n: int) -> Lists:
    rows = list(lines[1:]) + [""] * (n + 1 - len(lines))
    if len(rows) > n:
        raise GraphError(f"{path}:{n + 2}: a graph of {n} nodes must have {n} lines after the first, got {len(rows)}")
    lists = []
    for uid, line in enumerate(rows):
        neighbors = [_uid(path, uid + 2, word, n) for word in line.split()]
        if uid in neighbors:
            raise GraphError(f"{path}:{uid + 2}: node {uid} is joined to itself")
        if len(set(neighbors)) != len(neighbors):
            raise GraphError(f"{path}:{uid + 2}: node {uid} names a neighbor twice")
        lists.append(tuple(sorted(neighbors)))
    for uid, neighbors_ in enumerate(lists):
        for j in neighbors_:
            if uid not in lists[j]:
                raise GraphError(
                    f"{path}:{uid + 2}: node {uid} has node {j} as neighbor, but line {j + 2} does not have node {uid}"
                )
    return lists


def format_edges(lists: Lists) -> str:
    """Every undirected edge in both directions, as decentralizepy writes them."""
    rows = [f"{i} {j}" for i, neighbors in enumerate(lists) for j in neighbors]
    return "\n".join([str(len(lists)), *rows]) + "\n"


def format_adjacency(lists: Lists) -> str:
    return "\n".join([str(len(lists)), *(" ".join(map(str, neighbors)) for neighbors in lists)]) + "\n"


def write(lists: Lists, path: Path, adjacency: bool | None = None) -> None:
    """Write neighbor lists or edges (None: by the suffix) in one step: never half a file. Raises GraphError."""
    as_lists = path.suffix == ".adj" if adjacency is None else adjacency
    text = format_adjacency(lists) if as_lists else format_edges(lists)
    try:
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except OSError as error:
        raise GraphError(f"{path}: {error.strerror}") from error
