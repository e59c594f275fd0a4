"""Training whose script takes the steps (`step_in_backward=False`), as with an optimizer of torch."""

from __future__ import annotations

import copy
import gc
import warnings
from collections import defaultdict
from typing import Any

import pytest
import torch
from torch import nn

from decentnode.parallel import CommOptimizer, DecentralizedDataParallel
from tests.parallel.ranks import run_ranks
from tests.parallel.work import stepping
from tests.parallel.work.models import SGD, batch, flat, model
from tests.parallel.work.stepping import ADAM, backward


class CallsOtherModel(nn.Module):
    """Calls a model that is not one of its submodules, as a discriminator calls a generator."""

    def __init__(self, other: nn.Module) -> None:
        super().__init__()
        self.own, self.others = nn.Linear(3, 3), [other]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.own(self.others[0](x))
        return y


def wrap(module: nn.Module | None = None, **options: Any) -> DecentralizedDataParallel:
    options = {"optimizer": SGD, "step_in_backward": False, **options}
    return DecentralizedDataParallel(model() if module is None else module, **options)


@pytest.mark.sampled(of=lambda n, kind, options: {kind, *options})
@pytest.mark.parametrize(("n", "kind", "options"), [
    (2, "sgd", {"topology": "ring"}), (3, "odd", {"topology": "ring", "transport": "collective"}),
    (2, "adam", {"topology": "complete"}), (2, "adam", {"param_as_bucket_view": False}),
    (3, "sgd", {"sharing": {"name": "choco", "choose": "all", "compression": {"name": "int8"}}, "topology": "ring"}),
    (2, "sgd", {"sharing": {"name": "local_sgd", "every": 3}, "delayed": True}),
])  # fmt: skip
def test_steps_of_the_script_have_the_bits_of_steps_in_backward(n: int, kind: str, options: dict[str, Any]) -> None:
    for same, steps, distance in run_ranks(n, stepping.compare_ways_of_stepping, kind, options):
        assert same and steps == 8 and distance > 0


@pytest.mark.parametrize("unscales", [True, False])
def test_the_scripts_grad_scaler_has_the_bits_of_one_that_the_wrapper_steps(unscales: bool) -> None:
    assert all(run_ranks(2, stepping.compare_grad_scalers, unscales))


def test_ranks_join_with_uneven_inputs() -> None:
    (steps_0, mean_0), (steps_1, mean_1) = run_ranks(2, stepping.join_with_uneven_inputs)
    assert steps_0 == steps_1 == 7 and mean_0 == mean_1


def test_a_training_is_resumed_with_the_same_bits() -> None:
    assert all(run_ranks(2, stepping.resume_and_compare))


@pytest.mark.usefixtures("single_rank_group")
def test_sharpness_aware_minimization_has_the_bits_of_a_plain_optimizer() -> None:
    """SAM takes two backward passes in a step, between which the script moves the parameters, and may step by a
    closure: gradients and parameters must be the script's until it steps."""
    wrapped, plain = wrap(), model()
    for module, optimizer in ((wrapped, wrapped.optimizer), (plain, SGD(plain.parameters()))):
        params = list(module.parameters())

        def loss(t: int, module: nn.Module = module) -> torch.Tensor:
            x, y = batch(0, t)
            return (module(x) - y).square().mean()

        for t in range(5):
            loss(t).backward()
            before = [p.detach().clone() for p in params]
            moves = [0.05 * p.grad / nn.utils.get_total_norm([q.grad for q in params]) for p in params]
            with torch.no_grad():
                for p, move in zip(params, moves, strict=True):
                    p.add_(move)
            optimizer.zero_grad()
            loss(t).backward()
            with torch.no_grad():
                for p, value in zip(params, before, strict=True):
                    p.copy_(value)
            optimizer.step()
            assert all(p.grad is not None for p in params)
            optimizer.zero_grad()
            assert optimizer.step(lambda t=t, optimizer=optimizer: _with_gradient(loss(t), optimizer)) > 0
    assert torch.equal(flat(wrapped.module), flat(plain)) and wrapped.steps == 10


def _with_gradient(loss: torch.Tensor, optimizer: torch.optim.Optimizer) -> torch.Tensor:
    optimizer.zero_grad()
    loss.backward()
    return loss


@pytest.mark.usefixtures("single_rank_group")
def test_the_optimizer_of_the_wrapper_behaves_like_one_of_torch() -> None:
    wrapped = wrap(lr_scheduler_fn=lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5))
    optimizer = wrapped.optimizer
    assert isinstance(optimizer, torch.optim.Optimizer) and optimizer.param_groups[0]["lr"] == 0.05
    wrapped.set_accumulate_grad(False)
    wrapped.require_backward_grad_sync = True  # frameworks set it
    backward(wrapped, 0, 0)
    assert wrapped.steps == 0 and not optimizer.state
    optimizer.step()
    assert wrapped.steps == 1 and optimizer.state and wrapped.get_lr() == 0.025
    state = copy.deepcopy(optimizer.state_dict())
    optimizer.step()
    optimizer.load_state_dict(state)
    assert optimizer.param_groups[0]["lr"] == 0.025 == wrapped.get_lr()
    optimizer.add_param_group({"params": [nn.Parameter(torch.ones(1))]})
    assert len(wrapped.optimizer.param_groups) == 2 and "SGD" in repr(optimizer)
    optimizer.param_groups, optimizer.state = optimizer.param_groups[:1], defaultdict(dict)  # frameworks assign them
    assert len(wrapped._gossip.local.optimizer.param_groups) == 1 and not wrapped._gossip.local.optimizer.state
    with pytest.raises(TypeError, match="a ScriptOptimizer cannot be copied"):
        copy.deepcopy(optimizer)


class WithModes(torch.optim.SGD):
    """Has modes, as schedule-free optimizers do."""

    mode = "train"

    def eval(self) -> None:
        self.mode = "eval"


@pytest.mark.usefixtures("single_rank_group")
@pytest.mark.parametrize("kind", ["script", "comm"])
def test_methods_that_only_the_local_optimizer_has_are_called(kind: str) -> None:
    local = WithModes(model().parameters(), lr=0.1)
    wrapped = wrap(optimizer=lambda params: WithModes(params, lr=0.1))
    optimizer: Any = wrapped.optimizer if kind == "script" else CommOptimizer(local, "EASGD")
    optimizer.eval()
    assert optimizer.mode == optimizer.local_optimizer.mode == "eval"
    assert not hasattr(optimizer, "other") and not hasattr(optimizer, "found_inf")


class AroundAnother:
    """Steps an optimizer and is none of torch's classes, as wrappers of optimizers in other libraries."""

    def __init__(self, params: Any) -> None:
        self.inner = SGD(params)
        self.param_groups, self.state, self.zero_grad = self.inner.param_groups, self.inner.state, self.inner.zero_grad
        self.state_dict, self.load_state_dict = self.inner.state_dict, self.inner.load_state_dict

    def step(self, closure: Any = None) -> Any:
        return self.inner.step(closure)


@pytest.mark.usefixtures("single_rank_group")
@pytest.mark.parametrize("kind", ["backward", "script", "comm"])
def test_an_optimizer_that_is_none_of_torchs_classes_trains_with_the_bits_of_the_one_that_it_steps(kind: str) -> None:
    module, plain = model(), model()
    trained: nn.Module = module
    if kind == "comm":
        optimizer: Any = CommOptimizer(AroundAnother(module.parameters()), "EASGD")  # type: ignore[arg-type]
    else:
        trained = wrap(module, optimizer=AroundAnother, step_in_backward=kind == "backward")
        optimizer = None if kind == "backward" else trained.optimizer
    for each, steps in ((trained, optimizer), (plain, SGD(plain.parameters()))):
        for t in range(3):
            backward(each, 0, t)
            if steps is not None:
                steps.step()
                steps.zero_grad()
    assert torch.equal(flat(module), flat(plain))


@pytest.mark.usefixtures("single_rank_group")
@pytest.mark.parametrize("kind", [SGD, ADAM])
def test_gradients_are_unscaled_with_the_bits_of_torch(kind: Any) -> None:
    """Fused optimizers divide by the scale; for others, the scaler multiplies by its reciprocal."""
    wrapped, plain = wrap(optimizer=kind), model()
    for module, optimizer in ((wrapped, wrapped.optimizer), (plain, kind(plain.parameters()))):
        scaler = torch.amp.GradScaler("cpu", init_scale=777.7)
        for t in range(4):
            optimizer.zero_grad()
            backward(module, 0, t, scaler)
            scaler.step(optimizer)
            scaler.update()
    assert torch.equal(flat(wrapped.module), flat(plain))


@pytest.mark.slow
@pytest.mark.usefixtures("single_rank_group")
def test_a_compiled_step_has_the_bits_of_a_plain_one_without_warnings() -> None:
    wrapped, plain = wrap(optimizer=ADAM), model()
    optimizer = ADAM(plain.parameters())
    step = torch.compile(wrapped.optimizer.step, backend="eager")
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # dynamo warns if it traces into the step
        for t in range(3):
            for module, take_step in ((wrapped, step), (plain, optimizer.step)):
                module.zero_grad()
                backward(module, 0, t)
                take_step()
    assert torch.equal(flat(wrapped.module), flat(plain)) and wrapped.steps == 3


@pytest.mark.usefixtures("single_rank_group")
def test_a_script_that_steps_another_optimizer_gets_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    for own in (True, False):
        wrapped = wrap()
        other = SGD(wrapped.parameters())
        for t in range(30):
            backward(wrapped, 0, t)
            (wrapped.optimizer if own else other).step()
        warned = [message for message in caplog.messages if "the script must step model.optimizer" in message]
        assert len(warned) == (not own)


@pytest.mark.usefixtures("single_rank_group")
def test_a_script_whose_gradients_come_from_no_backward_pass_gets_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    wrapped = wrap(step_in_backward=True)
    for t in range(30):
        x, y = batch(0, t)
        loss = (wrapped(x) - y).square().mean()
        for p, gradient in zip(wrapped.parameters(), torch.autograd.grad(loss, [*wrapped.parameters()]), strict=True):
            p.grad = gradient
        wrapped.optimizer.step()
    (warned,) = caplog.messages
    assert "took no step" in warned and "torch.autograd.grad" in warned


@pytest.mark.usefixtures("single_rank_group")
def test_a_wrapper_inside_torchs_ddp_is_refused() -> None:
    for enclose in (lambda module: module, lambda module: nn.Sequential(module)):
        twice = nn.parallel.DistributedDataParallel(enclose(wrap()))
        with pytest.raises(RuntimeError, match="must not be inside torch's DistributedDataParallel, which averages"):
            backward(twice, 0, 0)
        with torch.no_grad():
            twice(batch(0, 0)[0])
    beside = nn.parallel.DistributedDataParallel(CallsOtherModel(wrap()))
    backward(beside, 0, 0)  # the wrapper is not inside: allowed


@pytest.mark.usefixtures("single_rank_group")
def test_steps_at_an_average_or_of_a_replaced_wrapper_are_refused() -> None:
    with pytest.raises(ValueError, match="scaler must be None with step_in_backward=False: the script steps with"):
        wrap(scaler=torch.amp.GradScaler("cpu"))
    wrapped = wrap()
    optimizer = wrapped.optimizer
    with wrapped.averaged(), pytest.raises(RuntimeError, match="must not begin at the average of global_avg"):
        optimizer.step()
    again = DecentralizedDataParallel(wrapped.module, optimizer=SGD, step_in_backward=False)
    with pytest.raises(RuntimeError, match="its model was wrapped again: step the optimizer of the one that trains"):
        optimizer.step()
    last = again.optimizer
    assert again.close() and not again.close()
    del again
    gc.collect()
    with pytest.raises(RuntimeError, match="the wrapper of this optimizer no longer exists"):
        last.step()
