"""Measures how well losses tell a node's training samples from others (membership inference)."""

from __future__ import annotations

import numpy as np

from decentnode.metrics.figures import Metric

MEMBERSHIP = Metric(
    "membership_auc", "1", "how often a training sample of the node has a smaller loss than a test sample; at 0.5 "
    "losses do not tell them apart", "lower", word="membership AUC", samples="", compared="mean",
)  # fmt: skip


def membership_auc(members: np.ndarray, others: np.ndarray) -> float:
    """Returns the area under the curve of the attack that takes samples whose loss is below a threshold for training
    samples (Yeom et al. 2018, arXiv 1709.01604): the probability that a member has a smaller loss than another sample,
    counting equal ones as half. A NaN counts as infinity.

    members, others: losses, not empty.
    """
    members, others = (np.sort(np.where(np.isnan(each), np.inf, each)) for each in (members, others))
    larger = len(others) - np.searchsorted(others, members, side="right")
    not_smaller = len(others) - np.searchsorted(others, members, side="left")
    return float((larger + not_smaller).sum() / (2 * len(members) * len(others)))
