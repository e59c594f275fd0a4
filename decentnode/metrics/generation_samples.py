"""Records which samples a node trained on in each generation: a short text in its figures, a list in the summary."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import astuple, dataclass
from typing import Any

from decentnode.metrics.figures import MAX_COUNTS_CHARACTERS


@dataclass
class GenerationSamples:
    """What a node trained on as a member of one generation, from the beginning of an epoch on."""

    generation: int
    first_round: int
    samples: int
    """The number of samples in an epoch of this node."""
    adopted: int
    """How many of `samples` were adopted from nodes that were not members."""
    trained: int = 0
    """Samples of all local steps together, over all epochs; the last epoch may be incomplete."""


def packed(dealt: Iterable[GenerationSamples]) -> str:
    """Returns the generations as one short text, the newest first, as many as fit into MAX_COUNTS_CHARACTERS
    characters."""
    text = ""
    for each in sorted(dealt, key=lambda each: (-each.first_round, -each.generation)):
        longer = f"{text} {':'.join(map(str, astuple(each)))}".strip()
        if len(longer) > MAX_COUNTS_CHARACTERS:
            break
        text = longer
    return text


def unpacked(text: object) -> list[GenerationSamples]:
    """Returns what `packed` encoded, the oldest first; [] for anything else."""
    found = []
    for entry in text.split() if isinstance(text, str) else ():
        numbers = [int(each) for each in entry.split(":") if each.isdecimal()]
        if len(numbers) == 5:
            found.append(GenerationSamples(*numbers))
    return found[::-1]


def merged(earlier: object, later: object) -> str:
    """Merges the packed generations of two processes of one node.

    If both know a generation, the entry with more trained samples is kept: the later process may have started from an
    older checkpoint.
    """
    every: dict[tuple[int, int], GenerationSamples] = {}
    for each in (*unpacked(earlier), *unpacked(later)):
        known = every.get((each.first_round, each.generation))
        if known is None or each.trained > known.trained:
            every[each.first_round, each.generation] = each
    return packed(every.values())


def epochs(text: object) -> list[dict[str, Any]]:
    """Returns the entries of summary.json about a node's samples: by generation, how many whole epochs it trained and
    how many samples of the last one."""
    return [
        {"generation": each.generation, "from_round": each.first_round, "samples": each.samples,
         "adopted": each.adopted, "trained": each.trained, "epochs": each.trained // max(1, each.samples),
         "of_last_epoch": each.trained % max(1, each.samples)}
        for each in unpacked(text)
    ]  # fmt: skip
