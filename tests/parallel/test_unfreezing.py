"""Parameters that are frozen when they are wrapped and trained later."""

from __future__ import annotations

import re
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from decentnode.compat import decent_dp
from decentnode.parallel import DecentralizedDataParallel
from tests.parallel.ranks import outcomes_of_ranks, run_ranks
from tests.parallel.work import ddp_interface, unfreezing
from tests.parallel.work.models import SGD, batch, model

LOCAL = {"name": "local_sgd", "every": 2}
CHOCO = {"name": "choco", "choose": "all", "compression": {"name": "int8"}}


@pytest.mark.sampled(one=["optimizer", "options", "swap"])
@pytest.mark.parametrize("swap", [False, True])
@pytest.mark.parametrize(("optimizer", "options"), [
    ("sgd", {"transport": "collective", "topology": "ring"}), ("adam", {}), ("adagrad", {"step_in_backward": False}),
    ("groups", {"step_in_backward": False, "param_as_bucket_view": False}), ("groups", {"grad_clip_norm": 0.1}),
    ("sgd", {"sharing": LOCAL, "bucket_size_in_mb": 0}), ("sgd", {"sharing": {"name": "slowmo", "every": 2}}),
])  # fmt: skip
def test_unfrozen_layers_train_as_if_they_had_been_frozen_after_wrapping(
    optimizer: str, options: dict[str, Any], swap: bool
) -> None:
    for difference, moved, distance in run_ranks(2, unfreezing.compare_unfreezing, optimizer, options, swap):
        assert difference == 0.0 and moved > 1e-3 and distance < 1.0


@pytest.mark.sampled(one=["options"])
@pytest.mark.parametrize("options", [
    {}, {"transport": "collective"}, {"sharing": CHOCO}, {"sharing": LOCAL, "delayed": True},
    {"sharing": {"name": "full", "compression": {"name": "bfloat16"}}},
], ids=["auto", "collective", "choco", "delayed", "compressed"])  # fmt: skip
def test_unfrozen_layers_are_mixed_and_keep_their_mean(options: dict[str, Any]) -> None:
    for changed, before, after in run_ranks(3, unfreezing.mix_unfrozen_layers, {"topology": "ring", **options}):
        assert changed < 1e-5 and before > 0.3 and after < 0.02


@pytest.mark.parametrize("all_trained", [False, True])
def test_a_training_with_unfrozen_layers_is_resumed_with_the_same_bits(all_trained: bool) -> None:
    assert run_ranks(2, unfreezing.resume_after_unfreezing, all_trained) == [(True, True)] * 2


def test_ranks_that_unfreeze_different_layers_are_refused() -> None:
    for error in run_ranks(2, unfreezing.unfreeze_different_layers):
        assert "rank 1 has another list of trained parameters than rank 0: '2.weight', rank 0 has '0.weight'" in error


def test_training_fails_if_one_rank_alone_unfreezes_layers() -> None:
    for succeeded, error in outcomes_of_ranks(2, unfreezing.unfreeze_on_rank_0_only, timeout_seconds=60):
        assert not succeeded and re.match("rank .: PeerLost: rank .: the exchange of ", error), error


@pytest.mark.sampled(one=["name"])
@pytest.mark.parametrize("name", ["DDP", "EASGD", "EASGD+", "LSGD+"])
def test_a_comm_optimizer_trains_unfrozen_layers(name: str) -> None:
    results = run_ranks(2, unfreezing.compare_unfreezing_with_comm_optimizer, name)
    for difference, moved, difference_between_ranks in results:
        assert difference == 0.0 and moved > 1e-3 and difference_between_ranks < 1e-6


def test_averaging_gradients_fails_if_one_rank_alone_unfreezes_layers() -> None:
    for error in run_ranks(2, unfreezing.unfreeze_on_rank_0_with_averaged_gradients):
        assert "rank 1 has another list of parameters that are trained now and were frozen" in error


def test_a_refused_state_adds_no_layers_to_the_exchange() -> None:
    for error, steps in run_ranks(2, unfreezing.load_other_state_on_rank_0):
        assert "another list of trained parameters" in error and steps == 4


@pytest.mark.usefixtures("single_rank_group")
def test_the_decent_dp_wrapper_refuses_unfrozen_layers() -> None:
    wrapped = decent_dp.DecentralizedDataParallel(unfreezing.frozen_model(), lambda named: SGD([p for _, p in named]))
    unfreezing.split_layers(wrapped.module)[0].requires_grad_(True)
    with pytest.raises(RuntimeError, match=r"parameter 0\.weight was frozen when .*, and freeze them afterwards"):
        wrapped(batch(0, 0)[0])


@pytest.mark.parametrize("direct", [False, True])
def test_the_scripts_grad_scaler_unscales_gradients_of_unfrozen_layers(direct: bool) -> None:
    for moved in run_ranks(2, unfreezing.train_with_grad_scaler, direct):
        assert 1e-4 < moved < 1.0


@pytest.mark.usefixtures("single_rank_group")
def test_an_unfrozen_layer_needs_add_param_group_if_the_optimizers_groups_are_ambiguous(
    caplog: pytest.LogCaptureFixture
) -> None:
    def one_group_per_parameter(named: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD([{"params": [p]} for _, p in named], lr=0.1)

    module = model()
    module[0].requires_grad_(False)
    wrapped = DecentralizedDataParallel(module, one_group_per_parameter)
    ddp_interface.train_step(wrapped, 0, 0)
    module[0].requires_grad_(True)
    with pytest.raises(RuntimeError, match=r"parameter 0\.weight is trained now .* the optimizer's 4 groups"):
        ddp_interface.train_step(wrapped, 0, 1)
    wrapped.optimizer.add_param_group({"params": module[0].parameters(), "lr": 0.01})
    before = module[0].weight.detach().clone()
    ddp_interface.train_step(wrapped, 0, 1)
    assert not torch.equal(module[0].weight, before) and wrapped.steps == 2 and not caplog.messages


@pytest.mark.usefixtures("single_rank_group")
def test_unfrozen_layers_that_share_memory_are_refused() -> None:
    module = nn.Linear(3, 3)
    module.other = nn.Parameter(torch.zeros(2, 3).t())
    module.more = nn.Parameter(module.other.data[0], requires_grad=False)
    module.other.requires_grad_(False)
    wrapped = DecentralizedDataParallel(module, optimizer=partial(torch.optim.SGD, lr=0.1))
    module.other.requires_grad_(True)
    with pytest.raises(ValueError, match="other shares memory with more"):
        wrapped(torch.ones(1, 3))


@pytest.mark.usefixtures("single_rank_group")
def test_a_learning_rate_schedule_continues_when_layers_are_unfrozen() -> None:
    schedule = partial(torch.optim.lr_scheduler.StepLR, step_size=1, gamma=0.5)
    wrapped = DecentralizedDataParallel(unfreezing.frozen_model(), optimizer=SGD, lr_scheduler_fn=schedule)
    for t in range(4):
        if t == 2:
            unfreezing.split_layers(wrapped.module)[0].requires_grad_(True)
        x, y = batch(0, t)
        (wrapped(x) - y).square().mean().backward()
    assert wrapped.get_lr() == 0.05 / 16 and len(wrapped.optimizer.param_groups[0]["params"]) == 6
