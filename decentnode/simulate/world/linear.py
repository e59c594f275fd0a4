"""Verifies a run of a linear rule: recomputes it in float64 as a product of mixing matrices, from what the nodes
recorded."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from decentnode.simulate.world.history import RoundRecord, Sent, must
from decentnode.wire.generation import Name

RELATIVE = 1e-4
"""Tolerance for rounding in float32 over the rounds of a run, relative to 1 + the largest entry."""


def check_product(
    rounds: Sequence[RoundRecord], sent: Sent, targets: Mapping[int, Tensor], lr: float, *, overlapped: bool
) -> int:
    """Compares every node's model after every round with the recomputed one. Returns the number of comparisons.

    rounds: of rule `full`, where node i makes one step of gradient descent with rate `lr` toward targets[i] [P]. A
    generation begins with the models that its members have. Raises Violation.
    """
    by_round: dict[tuple[Name, int], dict[int, RoundRecord]] = defaultdict(dict)
    for each in rounds:
        by_round[each.generation, each.round][each.uid] = each
    float64_targets = {uid: target.double() for uid, target in targets.items()}
    compared = 0
    states: dict[Name, dict[int, Tensor]] = defaultdict(dict)
    for name, round in sorted(sent):
        state, records = states[name], by_round[name, round]
        before_mixing = {uid: state.get(uid, model.double()) for uid, model in sent[name, round].items()}
        for uid, model in sent[name, round].items():
            _close(model, before_mixing[uid], f"node {uid} sends in round {round} of generation {name[0]}")
        for uid, each in records.items():
            terms = (weight * before_mixing[source] for source, weight in each.weights.items())
            mixed = sum(terms, torch.zeros(()).double())
            after = mixed - lr * (before_mixing[uid] - float64_targets[uid]) if overlapped else mixed
            _close(each.after, after, f"node {uid} has after round {round} of generation {name[0]}")
            state[uid] = after if overlapped else after - lr * (after - float64_targets[uid])
            compared += 1
    return compared


def check_mean(rounds: Sequence[RoundRecord], sent: Sent) -> int:
    """Checks that mixing kept the mean of all models in every round in which all members took part and no payload was
    missing. Returns the number of such rounds. rounds: of a rule that guarantees this, with doubly stochastic matrices
    and the sequential schedule. Raises Violation."""
    by_round: dict[tuple[Name, int], list[RoundRecord]] = defaultdict(list)
    for each in rounds:
        by_round[each.generation, each.round].append(each)
    checked = 0
    for (name, round), records in by_round.items():
        columns = torch.zeros(1 + max(records[0].members), dtype=torch.float64)
        for each in records:
            for source, weight in each.weights.items():
                columns[source] += weight
        members = list(records[0].members)
        if {each.uid for each in records} == {*members} and torch.allclose(columns[members], torch.ones(()).double()):
            before = torch.stack([sent[name, round][uid] for uid in members]).double().mean(0)
            after = torch.stack([each.after for each in records]).double().mean(0)
            _close(after, before, f"the mean of round {round} of generation {name[0]} is")
            checked += 1
    return checked


def _close(found: Tensor, expected: Tensor, what: str) -> None:
    error = float((found.double() - expected).abs().max())
    scale = 1.0 + float(expected.abs().max())
    must(error <= RELATIVE * scale, f"{what} something else than the replay: {error:.2g} beside {scale:.2g}")
