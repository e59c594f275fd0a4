"""Simulations of D-PSGD and of sharing rules in one process, with which the tests compare."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from decentnode.config.component import Config
from decentnode.graph.base import Graph, RoundView
from decentnode.parallel.planning.plan import Plan
from decentnode.parallel.planning.rules import make_sharing
from decentnode.payload import Payload
from decentnode.sharing.full import Full
from decentnode.sharing.requirements import Requirements
from tests.parallel.work.models import SGD, batch, flat, model


def simulate(graph: Graph, n: int, steps: int, factors: Sequence[float] = ()) -> list[Tensor]:
    """D-PSGD with W(t) in one process: x_i <- sum_j W_ij x_j, then the local step at the gradient of the old x_i.

    factors: [steps] how much of the way to sum_j W_ij x_j is gone, all of it when not given.
    """
    models = [model().cpu() for _ in range(n)]
    optimizers = [SGD(m.parameters()) for m in models]
    for t in range(steps):
        for rank, m in enumerate(models):
            x, y = (tensor.cpu() for tensor in batch(rank, t))
            m.zero_grad()
            (m(x) - y).square().mean().backward()
        before = [flat(m).double() for m in models]
        for rank, m in enumerate(models):
            mixed = sum(w * before[j] for j, w in graph.weights(rank, t).items())
            if factors:
                mixed = before[rank] + factors[t] * (mixed - before[rank])
            torch.nn.utils.vector_to_parameters(mixed.float(), m.parameters())  # type: ignore[union-attr]
            optimizers[rank].step()
    return [flat(m) for m in models]


class Clipped(Full):
    """A user's own rule that is not linear: no neighbor moves an element by more than 0.01."""

    requirements = Requirements(elementwise=True)

    def mix(self, model: Tensor, received: Mapping[int, Payload], view: RoundView) -> None:
        before = model.clone()
        for uid, payload in received.items():
            model.add_((payload.tensors["x"] - before).clamp_(-0.01, 0.01), alpha=view.weights[uid])


def make_rule_argument(section: Any) -> Any:
    """Returns what a script passes as sharing=: an object of Clipped for "object", else the section itself."""
    return Clipped(Config()) if section == "object" else section


def simulate_rule(graph: Graph, section: Any, n: int, steps: int) -> list[Tensor]:
    """As `simulate`, for any elementwise rule, each rank's on its whole model."""
    models = [model().cpu() for _ in range(n)]
    optimizers = [SGD(m.parameters()) for m in models]
    rules = [make_sharing(make_rule_argument(section)) for _ in range(n)]
    for rank, rule in enumerate(rules):
        rule.begin(flat(models[rank]), Plan(graph, rule, rank).view(0))
    for t in range(steps):
        for rank, m in enumerate(models):
            x, y = (tensor.cpu() for tensor in batch(rank, t))
            m.zero_grad()
            (m(x) - y).square().mean().backward()
        before = [flat(m) for m in models]
        for rank, (m, rule) in enumerate(zip(models, rules, strict=True)):
            plan, mixed = Plan(graph, rule, rank), before[rank].clone()
            view = plan.view(t)
            if view.sources:
                rule.mix(mixed, {j: Payload({"x": before[j]}) for j in view.sources}, view)
            rule.finish(mixed, view)
            rule.begin(mixed, plan.view(t + 1))
            torch.nn.utils.vector_to_parameters(mixed, m.parameters())
            optimizers[rank].step()
    return [flat(m) for m in models]
