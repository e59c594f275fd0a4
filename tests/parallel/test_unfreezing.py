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
from tests.parallel.work import face, unfreezing
from tests.parallel.work.habits import alone  # noqa: F401  (a fixture)
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
def test_layers_that_are_unfrozen_train_as_if_they_had_been_frozen_after_the_wrapping(
    optimizer: str, options: dict[str, Any], swap: bool
) -> None:
    for differs, moved, apart in run_ranks(2, unfreezing.unfrozen, optimizer, options, swap):
        assert differs == 0.0 and moved > 1e-3 and apart < 1.0


@pytest.mark.sampled(one=["options"])
@pytest.mark.parametrize("options", [
    {}, {"transport": "collective"}, {"sharing": CHOCO}, {"sharing": LOCAL, "delayed": True},
    {"sharing": {"name": "full", "compression": {"name": "bfloat16"}}},
], ids=["auto", "collective", "choco", "delayed", "compressed"])  # fmt: skip
def test_layers_that_are_unfrozen_are_mixed_and_keep_their_mean(options: dict[str, Any]) -> None:
    for changed, before, after in run_ranks(3, unfreezing.mean_is_kept, {"topology": "ring", **options}):
        assert changed < 1e-5 and before > 0.3 and after < 0.02


@pytest.mark.parametrize("all_trained", [False, True])
def test_a_run_that_has_unfrozen_layers_is_resumed_with_the_same_bits(all_trained: bool) -> None:
    assert run_ranks(2, unfreezing.resumed, all_trained) == [(True, True)] * 2


def test_ranks_that_unfreeze_different_layers_are_told() -> None:
    for told in run_ranks(2, unfreezing.other_parts):
        assert "rank 1 has another list of trained parameters than rank 0: '2.weight', rank 0 has '0.weight'" in told


def test_a_rank_that_unfreezes_alone_is_told() -> None:
    for ok, told in outcomes_of_ranks(2, unfreezing.one_alone, timeout_seconds=60):
        assert not ok and re.match("rank .: PeerLost: rank .: the exchange of ", told), told


@pytest.mark.sampled(one=["name"])
@pytest.mark.parametrize("name", ["DDP", "EASGD", "EASGD+", "LSGD+"])
def test_a_comm_optimizer_trains_layers_that_are_unfrozen(name: str) -> None:
    for differs, moved, apart in run_ranks(2, unfreezing.comm_unfrozen, name):
        assert differs == 0.0 and moved > 1e-3 and apart < 1e-6


def test_averaged_gradients_are_those_of_layers_that_all_ranks_train() -> None:
    for told in run_ranks(2, unfreezing.comm_other_parts):
        assert "rank 1 has another list of parameters that are trained now and were frozen" in told


def test_a_refused_state_takes_no_more_layers_into_the_exchange() -> None:
    for told, steps in run_ranks(2, unfreezing.loads_another):
        assert "another list of trained parameters" in told and steps == 4


@pytest.mark.usefixtures("alone")
def test_decent_dp_s_face_refuses_what_is_unfrozen() -> None:
    wrapped = decent_dp.DecentralizedDataParallel(unfreezing.frozen_model(), lambda named: SGD([p for _, p in named]))
    unfreezing.halves(wrapped.module)[0].requires_grad_(True)
    with pytest.raises(RuntimeError, match=r"parameter 0\.weight was frozen when .*, and freeze them afterwards"):
        wrapped(batch(0, 0)[0])


@pytest.mark.parametrize("direct", [False, True])
def test_a_script_s_scaler_knows_of_unfrozen_layers(direct: bool) -> None:
    for moved in run_ranks(2, unfreezing.scaled, direct):
        assert 1e-4 < moved < 1.0


@pytest.mark.usefixtures("alone")
def test_groups_that_do_not_tell_where_an_unfrozen_layer_belongs(caplog: pytest.LogCaptureFixture) -> None:
    def by_layer(named: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD([{"params": [p]} for _, p in named], lr=0.1)

    module = model()
    module[0].requires_grad_(False)
    wrapped = DecentralizedDataParallel(module, by_layer)
    face.step(wrapped, 0, 0)
    module[0].requires_grad_(True)
    with pytest.raises(RuntimeError, match=r"parameter 0\.weight is trained now .* the optimizer's 4 groups"):
        face.step(wrapped, 0, 1)
    wrapped.optimizer.add_param_group({"params": module[0].parameters(), "lr": 0.01})
    before = module[0].weight.detach().clone()
    face.step(wrapped, 0, 1)
    assert not torch.equal(module[0].weight, before) and wrapped.steps == 2 and not caplog.messages


@pytest.mark.usefixtures("alone")
def test_unfrozen_layers_that_share_memory_are_refused() -> None:
    module = nn.Linear(3, 3)
    module.other = nn.Parameter(torch.zeros(2, 3).t())
    module.more = nn.Parameter(module.other.data[0], requires_grad=False)
    module.other.requires_grad_(False)
    wrapped = DecentralizedDataParallel(module, optimizer=partial(torch.optim.SGD, lr=0.1))
    module.other.requires_grad_(True)
    with pytest.raises(ValueError, match="other shares memory with more"):
        wrapped(torch.ones(1, 3))


@pytest.mark.usefixtures("alone")
def test_a_schedule_goes_on_over_unfrozen_layers() -> None:
    schedule = partial(torch.optim.lr_scheduler.StepLR, step_size=1, gamma=0.5)
    wrapped = DecentralizedDataParallel(unfreezing.frozen_model(), optimizer=SGD, lr_scheduler_fn=schedule)
    for t in range(4):
        if t == 2:
            unfreezing.halves(wrapped.module)[0].requires_grad_(True)
        x, y = batch(0, t)
        (wrapped(x) - y).square().mean().backward()
    assert wrapped.get_lr() == 0.05 / 16 and len(wrapped.optimizer.param_groups[0]["params"]) == 6
