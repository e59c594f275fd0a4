"""`Sharing.direction`, by which a rule corrects the gradient of every local step."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from decentnode.build import build_in_process, step_all
from decentnode.experiment import load
from decentnode.graph.base import RoundView
from decentnode.sharing.full import Full

QUICKSTART = Path(__file__).parents[2] / "configs" / "quickstart.yaml"


class HalvesGradients(Full):
    """Full sharing with halved gradients."""

    requirements = replace(Full.requirements, gradient=True)

    def direction(self, gradient: Tensor, view: RoundView) -> Tensor:
        assert view.neighbors
        return gradient.mul_(0.5)


def run(schedule: str, *sets: str) -> Tensor:
    nodes = build_in_process(load(QUICKSTART, [
        "graph={name: ring, nodes: 4}", "mapping.nodes_per_machine=4", f"node={{rounds: 3, schedule: {schedule}}}",
        "training.local_steps=2", "training.optimizer={name: sgd, lr: 0.1, momentum: 0.9}", *sets,
    ]))  # fmt: skip
    step_all(nodes)
    return torch.stack([node.training.model.parameters for node in nodes])


@pytest.mark.parametrize("schedule", ["sequential", "overlapped"])
@pytest.mark.parametrize("codec", ["null", "{name: float16}"])
def test_a_rule_corrects_every_gradient(schedule: str, codec: str) -> None:
    """A run with halved gradients has the bits of a run with half the learning rate."""
    rule = f"sharing={{name: 'tests.node.test_direction:HalvesGradients', compression: {codec}}}"
    plain = f"sharing={{name: full, compression: {codec}}}"
    assert torch.equal(run(schedule, rule), run(schedule, plain, "training.optimizer.lr=0.05"))
