"""Formats the records of rounds whose nodes were computed together as the lines of metrics.jsonl that single nodes
write."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence

import numpy as np

from decentnode.metrics.writer import finite
from decentnode.simulate.engines.batched import PopulationRound
from decentnode.simulate.virtual import VirtualTime


def lines_of(rounds: Sequence[PopulationRound], virtual: VirtualTime | None = None) -> Iterator[bytes]:
    """Yields for each node, ascending, its records of these rounds, one line of JSON per round."""
    pieces: list[str | Sequence[str]] = []
    for number, record in enumerate(rounds):
        pieces += [("}\n" if number else "") + _beginning(record), *_node_pieces(record, virtual), record.edges]
    if rounds:
        yield from _concatenated([*pieces, "}\n"], len(rounds[0].edges))


def _concatenated(pieces: Sequence[str | Sequence[str]], count: int) -> Iterator[bytes]:
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


def _beginning(record: PopulationRound) -> str:
    """Returns the beginning of a round's records, which all nodes share."""
    text = json.dumps({
        "kind": "round", "round": record.round, "time": record.time, "seconds": record.seconds,
        "train_seconds": record.train_seconds, "send_seconds": 0.0, "wait_seconds": 0.0,
        "mix_seconds": record.mix_seconds, "overlap": 1.0,
    }, separators=(",", ":"))  # fmt: skip
    return f'{text[:-1]},"loss":'


def _node_pieces(record: PopulationRound, virtual: VirtualTime | None) -> list[str | Sequence[str]]:
    """Returns the pieces of a round's records from the loss to the edges. Losses have nine digits, more than their
    float32 parts; writing all seventeen takes twice as long as the rest of a line."""
    local = record.local
    return [
        [f"{loss:.9g}" for loss in local.losses.tolist()] if local.lr is not None else "null",
        ',"steps":', _as_strings(local.steps), ',"samples":', _as_strings(local.samples),
        f',"lr":{local.lr!r}' if local.lr is not None else "",
        *_reports(record, virtual),
        ',"data_bytes_sent":', _as_strings(record.data), ',"metadata_bytes_sent":', _as_strings(record.metadata),
        ',"protocol_bytes_sent":0,"evaluation_bytes_sent":', _as_strings(record.evaluation),
        ',"control_bytes_sent":0,"edges":',
    ]  # fmt: skip


def _as_strings(values: np.ndarray) -> str | list[str]:
    """Returns integers [N] as strings, one per node; a single string if all are equal."""
    numbers = values.tolist()
    return str(numbers[0]) if numbers.count(numbers[0]) == len(numbers) else [*map(str, numbers)]


def _reports(record: PopulationRound, virtual: VirtualTime | None) -> list[Sequence[str]]:
    """Returns a piece with training's additional reports and one with the virtual time, as far as there are any."""
    pieces: list[Sequence[str]] = []
    if record.local.reports:
        pieces.append(["".join(f',"{key}":{json.dumps(finite(value))}' for key, value in each.items())
                       for each in record.local.reports])  # fmt: skip
    if virtual is not None:
        ends = virtual.all_finished(record.round + 1).tolist()
        pieces.append([f',"virtual_seconds":{end!r}' if math.isfinite(end) else ',"virtual_seconds":null'
                       for end in ends])  # fmt: skip
    return pieces
