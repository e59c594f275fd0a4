"""The contract of `Training`: checks that every implementation must pass."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from decentnode.training.base import Training

MakeTraining = Callable[[int], Training]
"""Makes a new training for a uid; equal uids give equal trainings."""


def check_training(make: MakeTraining) -> None:
    check_rounds(make)
    check_uids_differ(make)
    check_evaluation(make(0))
    check_resume(make)
    check_direction(make)


def run_rounds(training: Training, rounds: range) -> Tensor:
    """Runs these rounds, and returns a copy of the parameters."""
    for round in rounds:
        training.local_update(round)
    return training.model.parameters.clone()


def check_rounds(make: MakeTraining) -> None:
    """Checks what an update reports, and that rounds repeat bit for bit whatever the state of torch's generator."""
    training = make(0)
    assert training.num_samples > 0
    before, storage = training.model.parameters.clone(), training.model.parameters
    update = training.local_update(0)
    assert update.steps > 0 and update.samples > 0 and update.loss > 0
    assert update.last_gradient is None
    assert all(isinstance(value, float) for value in update.report.values())
    assert training.model.parameters is storage and not torch.equal(before, storage)
    assert all(p.grad is None for p in training.model.module.parameters())
    torch.manual_seed(99)  # the state of torch's generator must not matter
    torch.rand(3)
    assert torch.equal(run_rounds(make(0), range(3)), run_rounds(make(0), range(3)))


def check_uids_differ(make: MakeTraining) -> None:
    assert not torch.equal(run_rounds(make(0), range(2)), run_rounds(make(1), range(2)))


def check_evaluation(training: Training) -> None:
    """Checks that parts of an evaluation add up to the whole, and that it changes no state of the module."""
    run_rounds(training, range(2))
    model, module = training.model, training.model.module
    state_before = copy.deepcopy(module.state_dict())
    modes = [part.training for part in module.modules()]
    generator = torch.get_rng_state()
    whole = training.evaluate("test")
    assert whole.samples > 0 and {*whole.metrics} == {each.name for each in training.task.measured().metrics}
    assert tuple(whole.sums) == training.task.all_sums and whole.metrics["loss"] > 0
    parts = [training.evaluate("test", (index, 3)) for index in range(3)]
    assert sum(part.samples for part in parts) == whole.samples
    sums = {name: sum(part.sums[name] for part in parts) for name in whole.sums}
    assert training.task.evaluated(sums) == pytest.approx(whole.metrics, rel=1e-5)
    beyond = training.evaluate("test", (whole.samples, whole.samples + 1))
    assert not beyond.samples and not beyond.metrics and not any(beyond.sums.values())
    assert all(torch.equal(state_before[name], value) for name, value in module.state_dict().items())
    assert modes == [part.training for part in module.modules()]
    assert torch.equal(generator, torch.get_rng_state())
    assert not model.parameters.is_inference()
    with pytest.raises(ValueError, match="split must be one of"):
        training.evaluate("rest")


def check_resume(make: MakeTraining) -> None:
    """Checks that a training continues bit for bit from a saved state."""
    whole = run_rounds(make(0), range(7))
    first = make(0)
    parameters_after_4 = run_rounds(first, range(4))
    state = copy.deepcopy(first.state_dict())
    run_rounds(first, range(4, 6))  # later steps must not change the saved state
    second = make(0)
    second.model.parameters.copy_(parameters_after_4)
    second.load_state_dict(state)
    assert torch.equal(run_rounds(second, range(4, 7)), whole)


def check_direction(make: MakeTraining) -> None:
    """Checks that an update calls `direction` with every gradient, and steps along what it returns."""
    seen: list[Tensor] = []

    def record_gradient(gradient: Tensor) -> Tensor:
        seen.append(gradient)
        return gradient.clone()

    plain, hooked, stopped = make(0), make(0), make(0)
    hooked.keep_gradient = True
    before = stopped.model.parameters.clone()
    plain.local_update(0)
    update = hooked.local_update(0, record_gradient)
    assert torch.equal(plain.model.parameters, hooked.model.parameters)
    assert len(seen) == update.steps
    assert update.last_gradient is not None and torch.equal(update.last_gradient, seen[-1])
    assert seen[0].shape == before.shape
    stopped.local_update(0, torch.zeros_like)
    assert torch.equal(stopped.model.parameters, before)
