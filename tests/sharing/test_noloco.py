"""Properties of noloco beyond the contract."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import pytest
import torch

from decentnode.errors import ConfigError
from decentnode.experiment import load
from decentnode.sharing.noloco import NoLoCo
from tests.graph.contract import make
from tests.sharing.contract import random_models, rule, run_round

QUICKSTART = Path(__file__).parents[2] / "configs" / "quickstart.yaml"


@pytest.mark.parametrize("n", [5, 6])
def test_noloco_moves_the_mean_as_one_outer_optimizer_would(n: int) -> None:
    """The random pairs do not change the mean over all nodes: m <- b m + a mean(D), p <- p + m, where D is what the
    local steps changed."""
    models = random_models(n, 4, torch.float64)
    rules = [rule("noloco", every=2, momentum=0.5, pull=0.7)() for _ in models]
    slow = torch.stack(models).mean(0)
    momentum = torch.zeros_like(slow)
    for r in range(8):
        run_round(rules, models, make("ring", nodes=n), r)
        if r % 2 == 0:
            targets = torch.arange(float(n), dtype=torch.float64)[:, None]
            before = torch.stack(models)
            stepped = before - 0.1 * (before - targets)  # the local step of the next round, which exchanges
            continue
        momentum = 0.5 * momentum + 0.7 * (stepped.mean(0) - slow)
        slow = slow + momentum
        torch.testing.assert_close(torch.stack(models).mean(0), slow)


def pairings(n: int) -> list[np.ndarray]:
    """Returns the mixing matrices of all ways to pair n nodes; of an odd number, one stays alone."""
    found = {}
    for order in itertools.permutations(range(n)):
        matrix = np.eye(n)
        for i, j in zip(order[:-1:2], order[1::2], strict=False):
            matrix[np.ix_([i, j], [i, j])] = 0.5
        found[matrix.tobytes()] = matrix
    return list(found.values())


@pytest.mark.parametrize(("n", "momentum", "pull"), [
    (2, 0.9, 0.7), (3, 0.8, 0.7), (3, 0.9, 0.7), (4, 0.9, 0.3), (4, 0.9, 0.7), (5, 0.5, 0.7), (5, 0.8, 1.0),
])  # fmt: skip
def test_growth_is_that_of_the_second_moments_over_all_pairings(n: int, momentum: float, pull: float) -> None:
    """The mean of A (x) A over all pairings, where A is (p, m) -> (p', m') on the differences between nodes."""
    same, apart = np.eye(n), np.eye(n) - 1 / n
    total, matrices = np.zeros((4 * n * n, 4 * n * n)), pairings(n)
    for matrix in matrices:
        after = np.hstack([-pull * (same - matrix), momentum * same])
        step = np.vstack([np.hstack([same, np.zeros((n, n))]) + after, after]) @ np.kron(np.eye(2), apart)
        total += np.kron(step, step) / len(matrices)
    noloco = rule("noloco", momentum=momentum, pull=pull)()
    assert isinstance(noloco, NoLoCo)
    growth = noloco.growth(n, momentum)
    assert growth == pytest.approx(abs(np.linalg.eigvals(total)).max() ** 0.5, rel=1e-9)
    assert (f"grow by {growth - 1:.1%} per exchange" in noloco.objection(make("ring", nodes=n))) == (growth > 1)


@pytest.mark.parametrize(("momentum", "diverges"), [(0.9, True), (0.7, False)])
def test_differences_between_models_grow_as_the_objection_says(momentum: float, diverges: bool) -> None:
    n, exchanges = 64, 100
    graph, models = make("ring", nodes=n), random_models(n, 4, torch.float64)
    rules = [rule("noloco", every=1, momentum=momentum)() for _ in models]
    distances = []
    for r in range(exchanges):
        run_round(rules, models, graph, r, pull=0.0)
        stacked = torch.stack(models)
        distances.append(float((stacked - stacked.mean(0)).norm()))
    noloco = rules[0]
    assert isinstance(noloco, NoLoCo)
    growth = noloco.growth(n, momentum)
    assert growth == pytest.approx((distances[-1] / distances[exchanges // 2 - 1]) ** (2 / exchanges), rel=0.02)
    assert (growth > 1) == diverges == bool(noloco.objection(graph))


def test_runs_whose_momentum_drives_models_apart_are_refused() -> None:
    sets = ["sharing={name: noloco}", "sharing.momentum=0.9"]
    with pytest.raises(ConfigError, match=r"sharing: noloco drives the models of 16 nodes apart .* momentum: 0.8 or"):
        load(QUICKSTART, sets)
    load(QUICKSTART, [*sets, "sharing.momentum=0.8"])
