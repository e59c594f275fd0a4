"""The samples of an attacker that trains on wrong labels."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from decentnode.errors import DataError
from decentnode.samples import AnySamples, NodeSamples, Samples

Relabel = Callable[[np.ndarray], np.ndarray]
"""relabel(labels [N] int64) -> [N] int64."""


def poisoned(samples: NodeSamples, relabel: Relabel) -> NodeSamples:
    """Returns a node's samples with other labels of the training samples, also where they are dealt again. Raises
    DataError for samples whose labels are not in memory."""
    again, among = samples.deal_again, samples.deal_among

    def deal_again(epoch: int) -> AnySamples:
        assert again is not None
        return _relabeled(again(epoch), relabel)

    def deal_among(members: tuple[int, ...]) -> tuple[AnySamples, int]:
        assert among is not None
        found, count = among(members)
        return _relabeled(found, relabel), count

    return replace(samples, train=_relabeled(samples.train, relabel), deal_again=deal_again if again else None,
                   deal_among=deal_among if among else None)  # fmt: skip


def _relabeled(samples: AnySamples, relabel: Relabel) -> AnySamples:
    if not isinstance(samples, Samples) or not isinstance(samples.targets, np.ndarray):
        raise DataError("the labels of this data are read with each batch, so that an attacker cannot change them; use "
                        "data that is held in memory")  # fmt: skip
    return replace(samples, targets=relabel(samples.targets.astype(np.int64)))
