"""training.sampling = resample: all samples are dealt to the nodes again for every epoch."""

from __future__ import annotations

import copy
from pathlib import Path

import numpy as np
import pytest
import torch

from decentnode.build import build_in_process
from decentnode.errors import ConfigError
from decentnode.experiment import load

QUICKSTART = Path(__file__).parents[2] / "configs" / "quickstart.yaml"
SETS = ["graph={name: ring, nodes: 3}", "mapping={machines: 1, nodes_per_machine: 3}", "data.partition=iid",
        "training={batch_size: 100, local_epochs: 1, sampling: resample, optimizer: {name: sgd, lr: 0.1}}"]  # fmt: skip


def make_trainings(*more: str) -> list:
    return [node.training for node in build_in_process(load(QUICKSTART, [*SETS, *more]))]


def test_every_epoch_has_a_new_partition_of_all_samples() -> None:
    data = load(QUICKSTART, SETS).open_data()
    dealt = [[data.of(uid).deal_again(epoch) for uid in range(3)] for epoch in range(3)]  # type: ignore[misc]
    whole = np.sort(data.dataset().train(np.arange(1437)).inputs.reshape(1437, -1), 0)
    for parts in dealt:
        together = np.concatenate([part.inputs for part in parts]).reshape(1437, -1)  # type: ignore[union-attr]
        assert np.array_equal(np.sort(together, 0), whole)
    assert np.array_equal(dealt[0][1].inputs, data.of(1).train.inputs)  # type: ignore[union-attr]
    assert not np.array_equal(dealt[1][1].inputs, dealt[0][1].inputs)  # type: ignore[union-attr]
    assert not np.array_equal(dealt[1][1].inputs, dealt[2][1].inputs)  # type: ignore[union-attr]


def test_a_node_trains_on_a_new_share_in_every_epoch() -> None:
    training, fixed = make_trainings()[0], make_trainings("training.sampling=fixed")[0]
    for one in (training, fixed):
        one.local_update(0)
    assert torch.equal(training.model.parameters, fixed.model.parameters)  # the first epoch is the share that it has
    update = training.local_update(1)
    fixed.local_update(1)
    assert (update.steps, update.samples) == (5, 479)
    assert not torch.equal(training.model.parameters, fixed.model.parameters)


def test_training_resumes_bit_for_bit_in_an_epoch_that_began_within_a_round() -> None:
    steps = "training={batch_size: 100, local_steps: 3, sampling: resample, optimizer: {name: sgd, lr: 0.1}}"
    whole, first, second = (make_trainings(steps)[1] for _ in range(3))
    for round in range(4):  # 12 steps; an epoch has 5
        whole.local_update(round)
    for round in range(2):
        first.local_update(round)
    state = copy.deepcopy(first.state_dict())
    second.model.parameters.copy_(first.model.parameters)
    second.load_state_dict(state)
    for round in range(2, 4):
        second.local_update(round)
    assert state["epoch"] == 1 and torch.equal(second.model.parameters, whole.model.parameters)


def test_resampling_requires_validation_on_the_test_set() -> None:
    with pytest.raises(ConfigError, match=r"must have validation\.source: test with sampling: resample"):
        load(QUICKSTART, [*SETS, "training.validation={source: train}"])
    load(QUICKSTART, [*SETS, "training.validation={source: test}"])


@pytest.mark.parametrize("steps", ["local_steps: 3", "local_epochs: 2"])
def test_skipping_to_a_round_gives_the_share_of_that_round(steps: str) -> None:
    keys = f"training={{batch_size: 100, {steps}, sampling: resample, optimizer: {{name: sgd, lr: 0.1}}}}"
    shares = "data.partition={name: dirichlet, alpha: 0.5, balanced: false}"
    trained, skipped = (make_trainings(keys, shares)[1] for _ in range(2))
    for round in range(4):
        trained.local_update(round)
    skipped.skip_to(4)
    names = ("ticks", "epoch", "cursor")
    assert [skipped.state_dict()[name] for name in names] == [trained.state_dict()[name] for name in names]
    skipped.model.parameters.copy_(trained.model.parameters)
    skipped.local_update(4)
    trained.local_update(4)
    assert torch.equal(skipped.model.parameters, trained.model.parameters)
