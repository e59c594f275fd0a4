"""Waits for the means over all nodes, by which nodes agree when a checkpoint is due and which one all of them have."""

from __future__ import annotations

import logging

from torch import Tensor

from decentnode.communication.base import Pending
from decentnode.communication.run_state import Steps
from decentnode.errors import Interrupted, PeerLost
from decentnode.node.measuring.evaluation import steps_until_ready
from decentnode.node.resumable import Resumable

logger = logging.getLogger(__name__)


def mean_unless_ending(
    node: Resumable, pending: Pending, what: str, patience_seconds: float | None = None
) -> Steps[tuple[Tensor, int] | None]:
    """Returns a mean and the number of nodes that contributed, as steps. Returns None if the run is stopping, or if it
    continues without a node that did not contribute (`node.missing: return_weight`, or `patience_seconds` is given).
    Blocks for at most `communication.timeout_seconds`. Raises PeerLost if a node did not contribute in that time and
    the run does not continue without it.

    what: what the nodes agree on with this mean, for the warning. patience_seconds: the longest wait, after which the
    node continues without the mean.
    """
    if not pending.ready:
        yield from steps_until_ready(pending, node.sharing.requirements.phases)
    try:
        timeout_seconds = node.communication.config.timeout_seconds
        longest = timeout_seconds if patience_seconds is None else min(timeout_seconds, patience_seconds)
        return (yield from pending.steps(longest))
    except Interrupted:
        return None
    except PeerLost as lost:
        if node.config.missing != "return_weight" and patience_seconds is None:
            raise
        logger.warning("nodes do not agree %s: %s", what, lost)
        return None
