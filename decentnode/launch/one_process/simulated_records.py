"""Formats the records of rounds whose nodes were computed together as the lines of metrics.jsonl that single nodes
write."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence

import numpy as np

from decentnode.metrics.writer import finite
from decentnode.simulate.engines.batched import RoundOfAll
from decentnode.simulate.virtual import VirtualTime


def lines_of(rounds: Sequence[RoundOfAll], virtual: VirtualTime | None = None) -> Iterator[bytes]:
    """Yields for each node, ascending, its records of these rounds, one line of JSON per round."""
    pieces: list[str | Sequence[str]] = []
    for number, found in enumerate(rounds):
        pieces += [("}\n" if number else "") + _head(found), *_own(found, virtual), found.edges]
    if rounds:
        yield from _joined([*pieces, "}\n"], len(rounds[0].edges))


def _joined(pieces: Sequence[str | Sequence[str]], count: int) -> Iterator[bytes]:
    """Yields for each of `count` nodes the concatenated pieces. A piece is one string for all nodes, or one per node.

    Neighboring strings that all nodes share are joined only once: with small models, a JSON encoder that visits every
    key of every node takes as long as the round itself.
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
    """Returns the beginning of a round's records, which all nodes share."""
    text = json.dumps({
        "kind": "round", "round": found.round, "time": found.time, "seconds": found.seconds,
        "train_seconds": found.train_seconds, "send_seconds": 0.0, "wait_seconds": 0.0,
        "mix_seconds": found.mix_seconds, "overlap": 1.0,
    }, separators=(",", ":"))  # fmt: skip
    return f'{text[:-1]},"loss":'


def _own(found: RoundOfAll, virtual: VirtualTime | None) -> list[str | Sequence[str]]:
    """Returns the pieces of a round's records from the loss to the edges. Losses have nine digits, more than their
    float32 parts; writing all seventeen takes twice as long as the rest of a line."""
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
    """Returns integers [N] as strings, one per node; a single string if all are equal."""
    given = values.tolist()
    return str(given[0]) if given.count(given[0]) == len(given) else [*map(str, given)]


def _reports(found: RoundOfAll, virtual: VirtualTime | None) -> list[Sequence[str]]:
    """Returns a piece with training's additional reports and the virtual time; empty if there is neither."""
    count, reports = len(found.edges), found.local.reports
    if virtual is not None:
        ends = [{"virtual_seconds": virtual.finished(found.round + 1, uid)} for uid in range(count)]
        reports = [report | end for report, end in zip(reports or [{}] * count, ends, strict=True)]
    if not reports:
        return []
    return [["".join(f',"{key}":{json.dumps(finite(value))}' for key, value in each.items()) for each in reports]]
