"""The records of rounds whose nodes were computed together, as the lines that a node writes of each of its own."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence

import numpy as np

from decentnode.metrics.writer import finite
from decentnode.simulate.engines.batched import RoundOfAll
from decentnode.simulate.virtual import VirtualTime


def lines_of(rounds: Sequence[RoundOfAll], virtual: VirtualTime | None = None) -> Iterator[bytes]:
    """Yields per node, ascending, its records of these rounds: a line of JSON each."""
    pieces: list[str | Sequence[str]] = []
    for number, found in enumerate(rounds):
        pieces += [("}\n" if number else "") + _head(found), *_own(found, virtual), found.edges]
    if rounds:
        yield from _joined([*pieces, "}\n"], len(rounds[0].edges))


def _joined(pieces: Sequence[str | Sequence[str]], count: int) -> Iterator[bytes]:
    """Yields per node the pieces behind each other. A piece is a text, or a text per node.

    Neighboring texts that all nodes have in common are joined once: with small models, an encoder that looks at every
    key of every node takes as long as the round.
    """
    shared: list[str] = [""]
    own: list[Sequence[str]] = []
    for piece in pieces:
        if isinstance(piece, str):
            shared[-1] += piece
        else:
            own.append(piece)
            shared.append("")
    line = [""] * (2 * len(own) + 1)
    line[::2] = shared
    for values in zip(*own, strict=True) if own else [()] * count:
        line[1::2] = values
        yield "".join(line).encode()


def _head(found: RoundOfAll) -> str:
    """Returns how the records of a round begin."""
    text = json.dumps({
        "kind": "round", "round": found.round, "time": found.time, "seconds": found.seconds,
        "train_seconds": found.train_seconds, "send_seconds": 0.0, "wait_seconds": 0.0,
        "mix_seconds": found.mix_seconds, "overlap": 1.0,
    }, separators=(",", ":"))  # fmt: skip
    return f'{text[:-1]},"loss":'


def _own(found: RoundOfAll, virtual: VirtualTime | None) -> list[str | Sequence[str]]:
    """Returns what follows in the records of a round, up to the edges. Nine digits of a loss are more than its float32
    parts have; all seventeen take twice as long as the rest of a line."""
    local = found.local
    return [
        [f"{loss:.9g}" for loss in local.losses.tolist()],
        ',"steps":', _texts(local.steps), ',"samples":', _texts(local.samples), f',"lr":{local.lr!r}',
        *_reports(found, virtual),
        ',"data_bytes_sent":', _texts(found.data), ',"metadata_bytes_sent":', _texts(found.metadata),
        ',"protocol_bytes_sent":0,"evaluation_bytes_sent":', _texts(found.evaluation),
        ',"control_bytes_sent":0,"edges":',
    ]  # fmt: skip


def _texts(values: np.ndarray) -> str | list[str]:
    """Returns the texts of integers [N]: one where all are the same."""
    given = values.tolist()
    return str(given[0]) if given.count(given[0]) == len(given) else [*map(str, given)]


def _reports(found: RoundOfAll, virtual: VirtualTime | None) -> list[Sequence[str]]:
    """Returns what training reports beside, and the virtual time; empty where there is neither."""
    count, reports = len(found.edges), found.local.reports
    if virtual is not None:
        ends = [{"virtual_seconds": virtual.finished(found.round + 1, uid)} for uid in range(count)]
        reports = [report | end for report, end in zip(reports or [{}] * count, ends, strict=True)]
    if not reports:
        return []
    return [["".join(f',"{key}":{json.dumps(finite(value))}' for key, value in each.items()) for each in reports]]
