"""Graph files in decentralizepy's two formats.

`.edges`: the number of nodes, then one "u v" per line (either or both directions). `.adj`: the number of nodes,
then line u + 2 holds the neighbors of node u.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar

from decentnode.config import component
from decentnode.config.component import Config
from decentnode.errors import GraphError
from decentnode.graph.topology import Lists, Topology, components
from decentnode.system import write_atomic

MAX_FILE_NODES = 1 << 20
MAX_REPORTED_LINES = 20
"""An error lists at most this many wrong lines of a file."""


class FileConfig(Config):
    file: Path
    """Path of a .edges or .adj file, relative to the experiment's file."""


class FileGraph(Topology):
    """An undirected static graph from a file."""

    Config: ClassVar[type[component.Config]] = FileConfig
    config: FileConfig

    def _set_up(self) -> None:
        self._static = read(self.base_dir / self.config.file)
        self.num_nodes = len(self._static)

    def _lists(self, phase: int) -> Lists:  # noqa: ARG002
        return self._static


def read(path: Path) -> Lists:
    """Returns the neighbor lists of a graph file. Raises GraphError, which lists the lines that are wrong."""
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
    problems: list[str] = []
    lists = (_read_adjacency if path.suffix == ".adj" else _read_edges)(lines, n, problems)
    if problems:
        more = [f"... and {len(problems) - MAX_REPORTED_LINES} more"] if len(problems) > MAX_REPORTED_LINES else []
        raise GraphError("\n".join([*(f"{path}:{each}" for each in problems[:MAX_REPORTED_LINES]), *more]))
    parts = components(lists)
    if len(parts) > 1:
        raise GraphError(
            f"{path}: the graph is not connected: it has {len(parts)} parts; node {parts[1][0]} "
            f"cannot be reached from node 0"
        )
    return lists


def _count(path: Path, line: str) -> int:
    words = line.split()
    if len(words) != 1 or not words[0].isdecimal() or not 1 <= int(words[0]) <= MAX_FILE_NODES:
        raise GraphError(f"{path}:1: must be the number of nodes, got {line.strip()!r:.60}")
    return int(words[0])


def _uids(words: Sequence[str], n: int, number: int, problems: list[str]) -> list[int]:
    """Returns the nodes that a line names; for each word that is not a node number, appends an error to `problems`."""
    found = []
    for word in words:
        if not word.isdecimal() or not word.isascii():
            problems.append(f"{number}: must be node numbers, got {word!r:.60}")
        elif int(word) >= n:
            problems.append(f"{number}: node {word} is out of range, nodes are 0 to {n - 1}")
        else:
            found.append(int(word))
    return found


def _read_edges(lines: Sequence[str], n: int, problems: list[str]) -> Lists:
    """Returns the neighbor lists of the valid lines. Appends "line number: what is wrong" to `problems` for the others,
    as `_read_adjacency` does."""
    sets: list[set[int]] = [set() for _ in range(n)]
    for number, line in enumerate(lines[1:], 2):
        words = line.split()
        if len(words) != 2:
            problems.append(f"{number}: must be two node numbers, got {line.strip()!r:.60}")
            continue
        pair = _uids(words, n, number, problems)
        if len(pair) == 2 and pair[0] == pair[1]:
            problems.append(f"{number}: node {pair[0]} is joined to itself")
        elif len(pair) == 2:
            sets[pair[0]].add(pair[1])
            sets[pair[1]].add(pair[0])
    return [tuple(sorted(each)) for each in sets]


def _read_adjacency(lines: Sequence[str], n: int, problems: list[str]) -> Lists:
    lines_of_nodes = list(lines[1:]) + [""] * (n + 1 - len(lines))
    if len(lines_of_nodes) > n:
        problems.append(f"{n + 2}: a graph of {n} nodes must have {n} lines after the first, got {len(lines_of_nodes)}")
    lists = []
    for uid, line in enumerate(lines_of_nodes[:n]):
        neighbors = _uids(line.split(), n, uid + 2, problems)
        if uid in neighbors:
            problems.append(f"{uid + 2}: node {uid} is joined to itself")
        if len(set(neighbors)) != len(neighbors):
            problems.append(f"{uid + 2}: node {uid} names a neighbor twice")
        lists.append(tuple(sorted(neighbors)))
    if problems:  # an edge that is listed on one side only may be due to a line already reported
        return lists
    for uid, neighbors_ in enumerate(lists):
        problems += [
            f"{uid + 2}: node {uid} has node {j} as neighbor, but line {j + 2} does not have node {uid}"
            for j in neighbors_ if uid not in lists[j]
        ]  # fmt: skip
    return lists


def format_edges(lists: Lists) -> str:
    """Returns the text of a .edges file: every undirected edge in both directions, as decentralizepy writes it."""
    rows = [f"{i} {j}" for i, neighbors in enumerate(lists) for j in neighbors]
    return "\n".join([str(len(lists)), *rows]) + "\n"


def format_adjacency(lists: Lists) -> str:
    return "\n".join([str(len(lists)), *(" ".join(map(str, neighbors)) for neighbors in lists)]) + "\n"


def write(lists: Lists, path: Path, adjacency: bool | None = None) -> None:
    """Writes neighbor lists to a file atomically, in the .adj format or the .edges format (`adjacency` None: by the
    suffix). Raises GraphError."""
    as_lists = path.suffix == ".adj" if adjacency is None else adjacency
    text = format_adjacency(lists) if as_lists else format_edges(lists)
    try:
        write_atomic(path, text)
    except OSError as error:
        raise GraphError(f"{path}: {error.strerror}") from error
