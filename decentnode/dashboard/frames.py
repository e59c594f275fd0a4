"""Keeps the state of every node and edge after each round of a run, in arrays of bounded size: of a long run only every
2nd, 4th, ... round is kept."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

NODE_COLUMNS = ("time", "loss", "seconds", "wait", "sent", "generation", "metric", "train")
"""State of a node after a round: seconds since the run began, training loss, seconds of the round and of its waits,
payload bytes sent so far, its generation, its last evaluation in the task's main metric, seconds of its local steps."""
EDGE_COLUMNS = ("bytes", "wait", "mixed")
"""Payloads from one node to another in a round: bytes received, seconds that the receiver waited for them, and when it
mixed the last of them (seconds since the run began)."""
MAX_FRAMES = 4000
MAX_BYTES = 96 << 20
"""Memory for all frames of one run."""

TIME, LOSS, SECONDS, WAIT, SENT, GENERATION, METRIC, TRAIN = range(len(NODE_COLUMNS))
BYTES, WAITED, MIXED = range(len(EDGE_COLUMNS))


@dataclass
class Frame:
    """The state of all nodes and edges after some round. Unknown values are NaN: an absent node has no time."""

    nodes: np.ndarray
    """[N, columns] float64."""
    edges: np.ndarray
    """[E, columns] float32."""
    version: int = 0
    """Version of the recording at the last change of the frame."""


@dataclass
class Frames:
    """Frames by number of finished rounds. When the bounds are exceeded, every other frame is dropped, and the stride
    of later ones is doubled."""

    most: int = MAX_FRAMES
    most_bytes: int = MAX_BYTES
    stride: int = 1
    """Rounds from one frame to the next."""
    thinned: int = 0
    """Version of the recording at which frames were last dropped."""
    kept: dict[int, Frame] = field(default_factory=dict)

    def at(self, rounds: int, nodes: int, edges: int, version: int) -> Frame | None:
        """Returns the frame after `rounds` for the caller to change, with room for at least `nodes` and `edges`; None
        if frames of this round are not kept."""
        if rounds % self.stride:
            return None
        frame = self.kept.get(rounds)
        if frame is None:
            frame = self.kept[rounds] = Frame(_unknown(nodes, NODE_COLUMNS, np.float64),
                                              _unknown(edges, EDGE_COLUMNS, np.float32))  # fmt: skip
            if len(self.kept) > self.most or len(self.kept) * _bytes(nodes, edges) > self.most_bytes:
                self._drop_every_other(version)
                if rounds % self.stride:
                    return None
        frame.nodes, frame.edges = with_rows(frame.nodes, nodes), with_rows(frame.edges, edges)
        frame.version = version
        return frame

    def _drop_every_other(self, version: int) -> None:
        if len(self.kept) > 2:
            self.stride *= 2
            self.thinned = version
            self.kept = {rounds: frame for rounds, frame in self.kept.items() if rounds % self.stride == 0}

    def packed(self, first: int, count: int, nodes: int, edges: int) -> bytes:
        """Returns up to `count` frames, from the one after `first` rounds on, as little-endian float32: number of
        frames, N, E, then for each frame its rounds, nodes [N, columns] and edges [E, columns]."""
        chosen = sorted(rounds for rounds in self.kept if rounds >= first)[:count]
        parts = [np.array([len(chosen), nodes, edges], "<f4")]
        for rounds in chosen:
            frame = self.kept[rounds]
            parts += [np.array([rounds], "<f4"), with_rows(frame.nodes, nodes).astype("<f4").ravel(),
                      with_rows(frame.edges, edges).astype("<f4").ravel()]  # fmt: skip
        return b"".join(part.tobytes() for part in parts)


def _unknown(rows: int, columns: tuple[str, ...], dtype: type) -> np.ndarray:
    return np.full((rows, len(columns)), np.nan, dtype)


def with_rows(array: np.ndarray, rows: int) -> np.ndarray:
    """Returns the array with at least this many rows; new rows are NaN."""
    missing = rows - len(array)
    if missing <= 0:
        return array
    return np.concatenate([array, np.full((missing, array.shape[1]), np.nan, array.dtype)])


def _bytes(nodes: int, edges: int) -> int:
    return 8 * nodes * len(NODE_COLUMNS) + 4 * edges * len(EDGE_COLUMNS)
