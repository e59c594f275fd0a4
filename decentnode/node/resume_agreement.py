"""How the nodes of a resumed run agree on the checkpoint that all of them go on from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from decentnode.checkpoint import agreement
from decentnode.checkpoint.store import Cut, Manifest
from decentnode.communication.run_state import Steps
from decentnode.node.evaluation import mean_of
from decentnode.node.resumable import Resumable


@dataclass(frozen=True)
class ResumeFrom:
    """Where a run looks for the checkpoints that it goes on from."""

    folders: tuple[Path, ...]
    """checkpoints/ of runs."""
    runs: frozenset[str] | None = None
    """Ids of the runs whose cuts count; all when None."""


def agreed_cut(node: Resumable, cuts: Sequence[Cut], attempt: int) -> Steps[tuple[int, int] | None]:
    """Returns (round, key) of the newest cut that all of its members have, the same on all nodes; None where there is
    none. As steps, blocking for the others' answers.

    cuts: those that this node has whole. attempt: 0, 1, ... for the same call after a cut that could not be read.
    """
    rows = yield from gathered(node, f"resume/offers-{attempt}", agreement.offers(cuts), agreement.MOST_CUTS)
    without = [uid for uid, row in enumerate(rows) if not any(row)]
    found = agreement.complete(cuts, rows, without)
    votes = yield from gathered(node, f"resume/votes-{attempt}", agreement.vote(found), 3)
    return agreement.chosen(votes)


def gathered(node: Resumable, key: str, values: Sequence[int], width: int) -> Steps[list[list[int]]]:
    """Returns everybody's `width` values by uid, as steps. Blocking for at most the longer one of the transport's
    time-outs."""
    pending = node.communication.mean(key, agreement.row(values, node.uid, node.graph.num_nodes, width))
    config = node.communication.config
    longest = max(config.timeout_seconds, config.start_timeout_seconds)
    mean, contributors = yield from mean_of(pending, node.sharing.requirements.phases, longest)
    return agreement.gathered(mean, contributors)


def no_common_cut(uid: int, manifests: Sequence[Manifest], problems: Sequence[str]) -> str:
    """Returns what node `uid` says where no round is one that all nodes have a whole checkpoint of."""
    own = ", ".join(str(each.cut.round) for each in manifests) or "none"
    text = f"node {uid}: there is no round that all nodes have a whole checkpoint of; its own: {own}"
    return "\n".join([text, *problems])
