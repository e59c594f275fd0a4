"""What users of torch's DistributedDataParallel do with a wrapper: right, or refused with the reason."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import StepLR
from torch.utils.checkpoint import checkpoint

from decentnode.parallel import CommOptimizer, DecentralizedDataParallel
from tests.parallel.ranks import outcomes_of_ranks, run_ranks
from tests.parallel.work import face, habits
from tests.parallel.work.habits import alone  # noqa: F401  (a fixture)
from tests.parallel.work.models import SGD, batch, flat, model

pytestmark = pytest.mark.usefixtures("alone")


def wrapper(module: nn.Module | None = None, **options: Any) -> DecentralizedDataParallel:
    return DecentralizedDataParallel(model() if module is None else module, **{"optimizer": SGD, **options})


def shared(make: Callable[[nn.Linear], Any]) -> nn.Module:
    module = nn.Linear(3, 3)
    module.other = make(module)
    return module


def with_buffer(buffer: torch.Tensor) -> nn.Module:
    module = nn.Linear(6, 3)
    module.register_buffer("kept", buffer)
    return module


@pytest.mark.parametrize(("module", "says"), [
    (lambda: shared(lambda m: nn.Parameter(m.weight.data.t())), "must not share memory"),
    (lambda: shared(lambda m: nn.Parameter(m.weight.data[0], requires_grad=False)), "weight shares memory with other"),
    (lambda: with_buffer(torch.eye(3).to_sparse()), "buffer kept must be a dense tensor"),
    (lambda: shared(lambda _: nn.Parameter(torch.zeros(6).as_strided((3, 3), (1, 1)))), "memory for each"),
    (lambda: nn.LazyLinear(3), "parameter weight .* run a forward pass first"),
    (lambda: nn.Linear(3, 3, device="meta"), "parameter weight .* on the device meta"),
    (lambda: nn.Sequential(wrapper()), "must not be wrapped already, its module 0 is a Decent"),
    (torch.inference_mode()(lambda: nn.Linear(3, 3)), r"weight must be made, and wrapped, outside of torch\.i"),
], ids=["transposed", "frozen part", "sparse", "windows", "lazy", "meta", "wrapped", "inference"])  # fmt: skip
def test_models_that_cannot_be_exchanged_are_refused(module: Callable[[], nn.Module], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        wrapper(module())


def test_nothing_is_wrapped_in_inference_mode() -> None:
    module = model()
    with torch.inference_mode(), pytest.raises(ValueError, match=r"0\.weight must be made, and wrapped, outside"):
        wrapper(module)
    with torch.inference_mode(), pytest.raises(ValueError, match=r"parameter 0 of the .* outside"):
        CommOptimizer(SGD(module.parameters()), "EASGD", world_size=1)
    with pytest.raises(ValueError, match=r"parameter 0 of .* on the device meta"):
        CommOptimizer(SGD(nn.Linear(3, 3, device="meta").parameters()), "EASGD", world_size=1)


@pytest.mark.parametrize(("options", "says"), [
    ({"transport": "gloo"}, "transport must be one of auto, .*, got 'gloo'"),
    ({"grad_clip_norm": -1.0}, "grad_clip_norm must be"), ({"grad_clip_norm": float("nan")}, "grad_clip_norm must be"),
    ({"bucket_size_in_mb": -1}, "bucket_size_in_mb must"), ({"bucket_size_in_mb": float("inf")}, "bucket_size_in_mb"),
    ({"timeout_seconds": 0}, "timeout_seconds must"), ({"local_world_size": -1}, "local_world_size must"),
    ({"optimizer": lambda _: SGD([nn.Parameter(torch.ones(2))])}, "optimizer must have parameters of the model"),
    ({"optimizer": lambda params: habits.Sharpness(params, lr=0.1)}, "without a closure: Sharpness"),
    ({"optimizer": SGD([nn.Parameter(torch.ones(2))])}, "optimizer must be a function .* object SGD"),
    ({"lr_scheduler_fn": StepLR(SGD([nn.Parameter(torch.ones(2))]), 1)}, "such as .*StepLR, step_size.* object StepLR"),
    ({"grad_clip_norm": None}, "grad_clip_norm must be a number, got None"),
    ({"sharing": {"name": "ac", "finale": 1}}, r"^sharing ac \(takes .*final.*\): finale: [^\n]*$"),
    ({"optim_fn": SGD}, "exactly one of optim_fn and optimizer must be given, such as optimizer=functools.partial"),
], ids=lambda value: "".join(value))  # fmt: skip
def test_options_that_mean_nothing_are_refused(options: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        wrapper(**options)


@pytest.mark.parametrize("optimizer", [SGD, face.FUSED])
def test_a_graph_of_before_a_step_is_not_used_again(optimizer: Any) -> None:
    wrapped = wrapper(optimizer=optimizer)
    for t in range(2):  # the second step of fused Adam is one compiled pass, whose writes torch does not see
        x, y = batch(0, t)
        loss = (wrapped(x) - y).square().mean()
        loss.backward(retain_graph=True)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()
        wrapped.zero_grad()


@pytest.mark.parametrize("direct", [False, True])
def test_the_average_is_not_stepped(direct: bool) -> None:
    wrapped = wrapper()
    wrapped.global_avg()
    wrapped.eval()
    with pytest.raises(RuntimeError, match="must not begin at the average of global_avg"):
        (wrapped.module if direct else wrapped)(batch(0, 0)[0]).sum().backward()
    wrapped.revert_global_avg()
    wrapped.zero_grad()
    face.step(wrapped, 0, 0)
    assert wrapped.steps == 1


def test_an_average_that_is_kept_and_averages_inside_each_other() -> None:
    wrapped = wrapper()
    with wrapped.averaged():
        with wrapped.averaged():
            pass
        assert wrapped._average.local is not None
        wrapped.global_avg(will_revert=False)
    assert wrapped._average.local is None
    with torch.no_grad():
        wrapped.module[0].weight.add_(1.0)
    wrapped.train()(batch(0, 0)[0])
    assert float(wrapped.module[0].weight.detach().mean()) > 0.5, "nothing was brought back"


def test_what_is_converted_later_is_refused() -> None:
    converted = wrapper()
    converted.double()
    with pytest.raises(ValueError, match=r"got torch\.float64 .* wrap the model after converting it"):
        converted(torch.zeros(1, 6).double()).sum().backward()


def test_parameters_of_the_optimizer_or_the_model_alone(caplog: pytest.LogCaptureFixture) -> None:
    def partly(params: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(list(params)[2:], lr=0.1)

    wrapped, reference = wrapper(optimizer=partly, grad_clip_norm=0.05), model()
    plain = partly(reference.parameters())
    for t in range(4):  # gradients that nobody clears would grow, and clipping would shrink all others
        face.step(wrapped, 0, t)
        x, y = batch(0, t)
        (reference(x) - y).square().mean().backward()
        nn.utils.clip_grad_norm_(reference.parameters(), 0.05)
        plain.step()
        reference.zero_grad()
    assert torch.allclose(flat(wrapped.module), flat(reference), atol=1e-6)
    assert not caplog.messages
    wrapped.optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2))]})
    for t in range(2):
        face.step(wrapped, 0, t)
    assert len(caplog.messages) == 1 and "has 1 parameters that are not in the wrapped model" in caplog.text


def test_the_attribute_that_scripts_set_instead_of_no_sync() -> None:
    wrapped = wrapper()
    wrapped.require_backward_grad_sync = False
    face.step(wrapped, 0, 0)
    assert wrapped.steps == 0 and not wrapped.require_backward_grad_sync
    wrapped.require_backward_grad_sync = True
    face.step(wrapped, 0, 1)
    assert wrapped.steps == 1


def test_a_step_that_was_broken_off_is_the_last() -> None:
    def fails_once(*_: Any) -> None:
        hook.remove()
        raise MemoryError

    wrapped = wrapper()
    face.step(wrapped, 0, 0)
    hook = wrapped.optimizer.register_step_pre_hook(fails_once)
    with pytest.raises(MemoryError):
        face.step(wrapped, 0, 1)
    with pytest.raises(RuntimeError, match="a step was interrupted by MemoryError"):
        face.step(wrapped, 0, 2)
    assert wrapped.steps == 1


def test_a_module_wrapped_again_is_stepped_once(caplog: pytest.LogCaptureFixture) -> None:
    module = model()
    first = wrapper(module)
    second = wrapper(module)
    face.step(first, 0, 0)
    assert (first.steps, second.steps) == (0, 1) and "was wrapped before" in caplog.text


@pytest.mark.parametrize("step_in_backward", [True, False])
def test_ranks_do_not_exchange_twice(step_in_backward: bool) -> None:
    module = model()
    comm = CommOptimizer(SGD(module.parameters()), "EASGD")
    with pytest.raises(ValueError, match=r"optimizer must not exchange with other ranks itself, got a CommOptimizer"):
        wrapper(model(), optimizer=lambda params: CommOptimizer(SGD(params), "EASGD"))
    with pytest.raises(ValueError, match=r"with other ranks itself, got a CommOptimizer: .*Either wrap the model"):
        CommOptimizer(comm, "LSGD")
    wrapped = wrapper(module, step_in_backward=step_in_backward)
    with pytest.raises(ValueError, match=r"those of a model that DecentralizedDataParallel wraps.*or close\(\) the"):
        comm.step()
    says = "those of a model that" if step_in_backward else "got a ScriptOptimizer"
    with pytest.raises(ValueError, match=says):
        CommOptimizer(wrapped.optimizer, "EASGD")
    with pytest.raises(ValueError, match="those of a model that DecentralizedDataParallel wraps"):
        CommOptimizer(SGD(wrapped.parameters()), "EASGD")
    wrapped.close()
    comm.step()
    assert CommOptimizer(SGD(module.parameters()), "EASGD").steps == 0


def test_a_parameter_among_the_outputs_keeps_no_hooks() -> None:
    wrapped = wrapper(habits.Scaled())
    for t in range(3):
        output, scale = wrapped(batch(0, t)[0])
        (output.sum() * scale).backward()
    assert not wrapped.module.scale._backward_hooks and wrapped.steps == 3


@pytest.mark.parametrize("what", ["hidden", "whole", "twice"])
def test_a_pass_inside_a_pass_is_no_step(what: str) -> None:
    """Reentrant checkpoints whose outer pass the wrapper hears of late: in outputs of a class of their own, around it,
    and around two uses of it."""
    wrapped, plain = wrapper(habits.Boxed()), habits.Boxed()
    optimizer = SGD(plain.parameters())

    def loss(module: Any, t: int) -> torch.Tensor:
        x = batch(0, t)[0].requires_grad_()
        if what == "hidden":
            return module(x).value.square().mean()
        whole = partial(checkpoint, lambda z: module(z).value, use_reentrant=True)
        return (whole(x) + (whole(-x) if what == "twice" else 0.0)).square().mean()

    for t in range(3):
        loss(wrapped, t).backward()
        loss(plain, t).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert wrapped.steps == 3 and torch.allclose(flat(wrapped.module), flat(plain), atol=1e-6)


def test_files_by_the_names_of_modules_that_are_called_module_or_compiled() -> None:
    source = {name: value + 1.0 for name, value in habits.Named().state_dict().items()}
    for given in (source, {f"module.{name}": value for name, value in source.items()}):
        wrapped = wrapper(habits.Named())
        wrapped.load_state_dict(given)
        assert torch.equal(wrapped.module.module.weight, source["module.weight"])
    compiled = wrapper(torch.compile(model(), backend="eager"))  # type: ignore[arg-type]
    compiled.load_state_dict(model(3).state_dict())
    model().load_state_dict(compiled.export())
    assert torch.equal(flat(compiled.module), flat(model(3)))
    assert {"", "module"} <= compiled._rename_entries(model().state_dict())._metadata.keys()  # type: ignore[attr-defined]


def test_the_state_of_a_wrapper_that_was_compiled_itself_is_loaded_whole() -> None:
    trained, resumed = wrapper(), wrapper()
    face.step(trained, 0, 0)
    resumed.load_state_dict(torch.compile(trained, backend="eager").state_dict())  # type: ignore[attr-defined]
    assert resumed.steps == 1 and torch.equal(flat(resumed.module), flat(trained.module))


def test_a_copy_takes_the_wrapper_s_state() -> None:
    wrapped = wrapper()
    target = copy.deepcopy(wrapped)
    face.step(wrapped, 0, 0)
    target.load_state_dict(wrapped.state_dict())
    assert torch.equal(flat(target), flat(wrapped.module))


@pytest.mark.slow
def test_distances_of_complex_models() -> None:
    for found, expected, own, moved in run_ranks(2, habits.complex_distances):
        assert found == pytest.approx(expected) and own == pytest.approx(moved) and moved > 0


@pytest.mark.sampled(one=["transport"])
@pytest.mark.parametrize("transport", ["auto", "collective"])
def test_buffers_of_every_kind_are_rank_0_s(transport: str) -> None:
    assert run_ranks(2, habits.buffers, transport) == [[], []]


def test_buffers_that_differ_are_named() -> None:
    for ok, told in outcomes_of_ranks(2, habits.other_buffers, timeout_seconds=60):
        assert not ok and "rank 1 has another list of buffers than rank 0: 'kept (4,)" in told


@pytest.mark.sampled(one=["transport"])
@pytest.mark.parametrize("transport", ["auto", "collective"])
def test_a_refused_state_leaves_a_training_that_goes_on(transport: str) -> None:
    (first, *one), (other, *two) = run_ranks(2, habits.refused_state, transport, timeout_seconds=60)
    assert "rank 1 could not load the state" in first and "Missing key" in other
    assert one == two == [6]


def test_a_state_without_what_its_optimizer_kept_is_refused() -> None:
    """As torch.distributed.checkpoint loads it into a new one, whose optimizer has kept nothing yet."""
    wrapped = wrapper(optimizer=partial(torch.optim.Adam, lr=0.1))
    face.step(wrapped, 0, 0)
    state = wrapped.state_dict()
    state["_extra_state"]["optimizer"]["state"] = {}
    with pytest.raises(ValueError, match=r"must have the 18 values that the optimizer kept .* as bytes"):
        wrapped.load_state_dict(state)
    module = model()
    comm = CommOptimizer(torch.optim.Adam(module.parameters(), lr=0.1), "EASGD")
    module(batch(0, 0)[0]).sum().backward()
    comm.step()
    state = comm.state_dict()
    state["local"]["state"] = {}
    with pytest.raises(ValueError, match=r"must have the 18 values that the optimizer kept .* as bytes"):
        comm.load_state_dict(state)


@pytest.mark.slow
def test_a_training_goes_on_from_a_distributed_checkpoint(tmp_path: Path) -> None:
    assert run_ranks(2, habits.distributed_checkpoint, str(tmp_path)) == [True, True]


def test_a_state_that_comes_as_part_of_a_larger_one() -> None:
    assert run_ranks(2, habits.inside_another) == [(5, True)] * 2


def test_gradients_of_ranks_that_use_different_parts() -> None:
    assert max(run_ranks(3, habits.other_heads)) < 1e-6


@pytest.mark.sampled(one=["name"])
@pytest.mark.parametrize("name", ["EASGD", "EASGD+", "LSGD", "LSGD+", "DDP"])
def test_a_state_that_one_rank_alone_loads_into_its_optimizer_is_told(name: str) -> None:
    for told in run_ranks(2, habits.comm_loads_alone, name, timeout_seconds=60):
        assert "must take the same number of steps" in told or told.startswith("RuntimeError")


def test_losses_that_only_some_ranks_tell_are_no_leader_s() -> None:
    for told in run_ranks(2, habits.losses_of_one, timeout_seconds=60):
        assert "rank 1 calls step without a loss, rank 0 with one" in told


@pytest.mark.sampled(one=["name", "overlap"])
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("name", ["EASGD", "EASGD+", "LSGD", "LSGD+"])
def test_another_number_of_ranks_takes_up_a_comm_optimizer(name: str, overlap: bool, tmp_path: Any) -> None:
    run_ranks(2, habits.comm_saves, name, overlap, str(tmp_path))
    for spread, steps in run_ranks(3, habits.comm_takes_up, name, overlap, str(tmp_path)):
        assert spread < 1.0 and steps == 12


@pytest.mark.parametrize("kind", [torch.float64, torch.complex64, "mixed"])
def test_elastic_averaging_of_every_kind_of_parameter(kind: Any) -> None:
    assert max(run_ranks(2, habits.elastic_of, kind)) < (1e-12 if kind == torch.float64 else 1e-6)


def test_a_comm_optimizer_is_an_optimizer_as_far_as_it_can_be() -> None:
    module = model()
    comm = CommOptimizer(torch.optim.SGD(module.parameters(), lr=0.1), "EASGD", world_size=1)
    seen: list[int] = []
    comm.register_step_post_hook(lambda *_: seen.append(1))
    module(batch(0, 0)[0]).sum().backward()
    comm.step()
    assert seen == [1]
    with pytest.raises(TypeError, match=r"its state_dict\(\) can"):
        copy.deepcopy(comm)
    comm.local_optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2))]})
    with pytest.raises(RuntimeError, match="must keep the parameters"):
        comm.step()
    with pytest.raises(ValueError, match="without a closure: LBFGS"):
        CommOptimizer(torch.optim.LBFGS(module.parameters()), "EASGD", world_size=1)


@pytest.mark.parametrize("kind", ["comm", "script", "backward"])
def test_hooks_around_the_state_of_an_optimizer_are_called(kind: str) -> None:
    module, seen = model(), []
    if kind == "comm":
        holder: Any = CommOptimizer(SGD(module.parameters()), "EASGD", world_size=1)
        optimizer: torch.optim.Optimizer = holder
    else:
        holder = wrapper(module, step_in_backward=kind == "backward")
        optimizer = holder.optimizer
    optimizer.register_state_dict_pre_hook(lambda own: seen.append(own is optimizer))
    optimizer.register_state_dict_post_hook(lambda _, state: {**state, "more": 1})
    optimizer.register_load_state_dict_pre_hook(
        lambda _, state: {key: value for key, value in state.items() if key != "more" or seen.append(value)}
    )
    optimizer.register_load_state_dict_post_hook(lambda own: seen.append(own is optimizer))
    state = optimizer.state_dict()
    optimizer.load_state_dict(state)
    assert state["more"] == 1 and seen == [True, 1, True]
    holder.load_state_dict(holder.state_dict())
    assert seen == [True, 1, True] * 2


def test_an_idle_rank_mixes_its_own_model(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        for steps, local in run_ranks(2, habits.idle_after_average):
            assert steps == 3 and local
