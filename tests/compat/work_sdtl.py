"""Functions of ranks for the tests of `decentnode.compat.sdtl`, and a simulation of SDTL's methods in one process."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from decentnode.compat.sdtl import CommOptimizer
from tests.parallel.work import models

STARTS = torch.tensor([[0.5, 0.0, -1.0], [0.0, 2.0, 1.0], [-0.5, 0.5, 0.0]])
GOALS = torch.tensor([[1.0, -2.0, 0.5], [3.0, 1.0, -1.0], [-2.0, 0.0, 4.0]])
RATE, LOCAL, STRENGTH, PERIOD, STEPS = 0.1, 0.2, 0.3, 4, 10


def train(rank: int, n: int) -> dict[str, Any]:
    """Trains with every method from the rank's start towards its goal, then again from a state saved at step 6. Returns
    method -> the parameters of both."""
    results: dict[str, Any] = {}
    for name in ("EASGD", "EASGD+", "LSGD", "LSGD+"):
        ends = []
        saved: Any = None
        for resumed in (False, True):
            x = STARTS[rank].clone().to(models.DEVICE).requires_grad_()
            y = STARTS[rank].flip(0).to(models.DEVICE).requires_grad_()  # in another parameter group
            goals = GOALS.to(models.DEVICE)
            local = torch.optim.SGD([{"params": [x]}, {"params": [y]}], lr=RATE)
            comm = CommOptimizer(local, name, n, LOCAL, STRENGTH, PERIOD, faithful=True)
            if resumed:
                with torch.no_grad():
                    x.copy_(saved[0])
                    y.copy_(saved[1])
                comm.load_state_dict(saved[2])
            for t in range(6 if resumed else 0, STEPS):
                if t == 6 and not resumed:
                    saved = x.detach().clone(), y.detach().clone(), models.through_file(comm.state_dict())
                comm.zero_grad()
                (0.5 * ((x - goals[rank]).square().sum() + (y - goals[rank - 1]).square().sum())).backward()
                comm.step()
            ends.append([*x.tolist(), *y.tolist()])
        results[name] = ends
    return results


def simulate(name: str, n: int = 3) -> list[list[float]]:
    """Returns the parameters of each rank by an independent computation in one process, in float64. SDTL's methods
    treat each parameter group by itself."""
    first = simulate_group(name, n, STARTS.double(), GOALS.double())
    second = simulate_group(name, n, STARTS.double().flip(1), GOALS.double().roll(1, 0))
    return [a + b for a, b in zip(first, second, strict=True)]


def simulate_group(name: str, n: int, xs: Tensor, goals: Tensor) -> list[list[float]]:
    """Simulates one parameter group. xs: [n, 3] the ranks' starts, goals: [n, 3]."""
    centers, kept, squares = xs.clone(), xs.clone(), torch.zeros_like(goals)
    scores = torch.zeros(n).double()
    for t in range(1, STEPS + 1):
        grads = xs - goals
        xs = xs - RATE * grads
        xs = xs + LOCAL / PERIOD * (centers - xs)
        if name.startswith("LSGD"):
            scores = 0.9 * scores + 0.1 * ((kept - xs) * grads).sum(1)
            kept = xs.clone()
        squares = 0.9 * squares + 0.1 * grads**2
        if t % (PERIOD - 1):
            continue
        if name == "EASGD":
            mean = xs.mean(0)
            xs = xs + STRENGTH / n * (centers - xs)
            centers = centers + STRENGTH * (mean - centers)
            continue
        weights = squares + 1e-8
        target = (xs * weights).sum(0) / weights.sum(0) if name == "EASGD+" else xs[int(scores.argmin())]
        if name == "LSGD":
            xs = xs + STRENGTH * (target - xs)
            centers = xs.clone()
        else:
            change = STRENGTH * (target - kept.mean(0))
            centers = (kept.mean(0) + change).expand(n, -1).clone()
            xs = xs + change
            xs = xs + STRENGTH * (centers - xs)
        kept = xs.clone()
    return xs.tolist()
