"""What users of torch's DistributedDataParallel do with a model: it works here, or is refused with the reason."""

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
from tests.parallel.work import ddp_interface, ddp_usage
from tests.parallel.work.models import SGD, batch, flat, model

pytestmark = pytest.mark.usefixtures("single_rank_group")


def wrap(module: nn.Module | None = None, **options: Any) -> DecentralizedDataParallel:
    return DecentralizedDataParallel(model() if module is None else module, **{"optimizer": SGD, **options})


def extended(make: Callable[[nn.Linear], Any]) -> nn.Module:
    """Returns a linear layer extended by another parameter, which `make` makes of the layer."""
    module = nn.Linear(3, 3)
    module.other = make(module)
    return module


def with_buffer(buffer: torch.Tensor) -> nn.Module:
    module = nn.Linear(6, 3)
    module.register_buffer("kept", buffer)
    return module


@pytest.mark.parametrize(("module", "message"), [
    (lambda: extended(lambda m: nn.Parameter(m.weight.data.t())), "must not share memory"),
    (lambda: extended(lambda m: nn.Parameter(m.weight.data[0], requires_grad=False)),
     "weight shares memory with other"),
    (lambda: with_buffer(torch.eye(3).to_sparse()), "buffer kept must be a dense tensor"),
    (lambda: extended(lambda _: nn.Parameter(torch.zeros(6).as_strided((3, 3), (1, 1)))), "memory for each"),
    (lambda: nn.LazyLinear(3), "parameter weight .* run a forward pass first"),
    (lambda: nn.Linear(3, 3, device="meta"), "parameter weight .* on the device meta"),
    (lambda: nn.Sequential(wrap()), "must not be wrapped already, its module 0 is a Decent"),
    (torch.inference_mode()(lambda: nn.Linear(3, 3)), r"weight must be made, and wrapped, outside of torch\.i"),
    (lambda: nn.ParameterList([torch.empty(0)]), "must have parameters that require gradients"),
], ids=["transposed", "frozen part", "sparse", "windows", "lazy", "meta", "wrapped", "inference", "empty"])  # fmt: skip
def test_a_model_whose_parameters_cannot_be_exchanged_is_refused(module: Callable[[], nn.Module], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        wrap(module())


def test_wrapping_in_inference_mode_is_refused() -> None:
    module = model()
    with torch.inference_mode(), pytest.raises(ValueError, match=r"0\.weight must be made, and wrapped, outside"):
        wrap(module)
    with torch.inference_mode(), pytest.raises(ValueError, match=r"parameter 0 of the .* outside"):
        CommOptimizer(SGD(module.parameters()), "EASGD", world_size=1)
    with pytest.raises(ValueError, match=r"parameter 0 of .* on the device meta"):
        CommOptimizer(SGD(nn.Linear(3, 3, device="meta").parameters()), "EASGD", world_size=1)


@pytest.mark.parametrize(("options", "message"), [
    ({"transport": "gloo"}, "transport must be one of auto, .*, got 'gloo'"),
    ({"grad_clip_norm": -1.0}, "grad_clip_norm must be"), ({"grad_clip_norm": float("nan")}, "grad_clip_norm must be"),
    ({"bucket_size_in_mb": -1}, "bucket_size_in_mb must"), ({"bucket_size_in_mb": float("inf")}, "bucket_size_in_mb"),
    ({"timeout_seconds": 0}, "timeout_seconds must"), ({"local_world_size": -1}, "local_world_size must"),
    ({"optimizer": lambda _: SGD([nn.Parameter(torch.ones(2))])}, "optimizer must have parameters of the model"),
    ({"optimizer": lambda params: ddp_usage.NeedsClosure(params, lr=0.1)}, "without a closure: NeedsClosure"),
    ({"optimizer": SGD([nn.Parameter(torch.ones(2))])}, "optimizer must be a function .* object SGD"),
    ({"lr_scheduler_fn": StepLR(SGD([nn.Parameter(torch.ones(2))]), 1)}, "such as .*StepLR, step_size.* object StepLR"),
    ({"grad_clip_norm": None}, "grad_clip_norm must be a number, got None"),
    ({"sharing": {"name": "ac", "finale": 1}}, r"^sharing ac \(takes .*final.*\): finale: [^\n]*$"),
    ({"optim_fn": SGD}, "exactly one of optim_fn and optimizer must be given, such as optimizer=functools.partial"),
], ids=lambda value: "".join(value))  # fmt: skip
def test_invalid_options_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        wrap(**options)


@pytest.mark.parametrize("optimizer", [SGD, ddp_interface.FUSED_ADAM])
def test_a_second_backward_pass_through_a_graph_from_before_the_step_is_refused(optimizer: Any) -> None:
    wrapped = wrap(optimizer=optimizer)
    for t in range(2):  # the second step of fused Adam is one compiled pass, whose writes torch does not see
        x, y = batch(0, t)
        loss = (wrapped(x) - y).square().mean()
        loss.backward(retain_graph=True)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()
        wrapped.zero_grad()


@pytest.mark.parametrize("direct", [False, True])
def test_a_step_that_begins_at_the_averaged_model_is_refused(direct: bool) -> None:
    wrapped = wrap()
    wrapped.global_avg()
    wrapped.eval()
    with pytest.raises(RuntimeError, match="must not begin at the average of global_avg"):
        (wrapped.module if direct else wrapped)(batch(0, 0)[0]).sum().backward()
    wrapped.revert_global_avg()
    wrapped.zero_grad()
    ddp_interface.train_step(wrapped, 0, 0)
    assert wrapped.steps == 1


def test_nested_averages_keep_the_local_model_and_a_kept_average_is_not_reverted() -> None:
    wrapped = wrap()
    with wrapped.averaged():
        with wrapped.averaged():
            pass
        assert wrapped._average.local is not None
        wrapped.global_avg(will_revert=False)
    assert wrapped._average.local is None
    with torch.no_grad():
        wrapped.module[0].weight.add_(1.0)
    wrapped.train()(batch(0, 0)[0])
    assert float(wrapped.module[0].weight.detach().mean()) > 0.5, "the kept average must not be reverted"


def test_a_model_whose_dtype_is_converted_after_wrapping_is_refused() -> None:
    converted = wrap()
    converted.double()
    with pytest.raises(ValueError, match=r"got torch\.float64 .* wrap the model after converting it"):
        converted(torch.zeros(1, 6).double()).sum().backward()


def test_parameters_that_only_the_model_or_only_the_optimizer_has(caplog: pytest.LogCaptureFixture) -> None:
    def sgd_of_some(params: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(list(params)[2:], lr=0.1)

    wrapped, reference = wrap(optimizer=sgd_of_some, grad_clip_norm=0.05), model()
    plain = sgd_of_some(reference.parameters())
    for t in range(4):  # if parameters without an optimizer kept their gradients, clipping would shrink all others
        ddp_interface.train_step(wrapped, 0, t)
        x, y = batch(0, t)
        (reference(x) - y).square().mean().backward()
        nn.utils.clip_grad_norm_(reference.parameters(), 0.05)
        plain.step()
        reference.zero_grad()
    assert torch.allclose(flat(wrapped.module), flat(reference), atol=1e-6)
    assert not caplog.messages
    wrapped.optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2))]})
    for t in range(2):
        ddp_interface.train_step(wrapped, 0, t)
    assert len(caplog.messages) == 1 and "has 1 parameters that are not in the wrapped model" in caplog.text


def test_require_backward_grad_sync_false_accumulates_gradients_like_no_sync() -> None:
    wrapped = wrap()
    wrapped.require_backward_grad_sync = False
    ddp_interface.train_step(wrapped, 0, 0)
    assert wrapped.steps == 0 and not wrapped.require_backward_grad_sync
    wrapped.require_backward_grad_sync = True
    ddp_interface.train_step(wrapped, 0, 1)
    assert wrapped.steps == 1


def test_no_step_is_taken_after_one_that_was_interrupted() -> None:
    def fails_once(*_: Any) -> None:
        hook.remove()
        raise MemoryError

    wrapped = wrap()
    ddp_interface.train_step(wrapped, 0, 0)
    hook = wrapped.optimizer.register_step_pre_hook(fails_once)
    with pytest.raises(MemoryError):
        ddp_interface.train_step(wrapped, 0, 1)
    with pytest.raises(RuntimeError, match="a step was interrupted by MemoryError"):
        ddp_interface.train_step(wrapped, 0, 2)
    assert wrapped.steps == 1


def test_only_the_last_wrapper_of_a_module_steps_it(caplog: pytest.LogCaptureFixture) -> None:
    module = model()
    first = wrap(module)
    second = wrap(module)
    ddp_interface.train_step(first, 0, 0)
    assert (first.steps, second.steps) == (0, 1) and "was wrapped before" in caplog.text


@pytest.mark.parametrize("step_in_backward", [True, False])
def test_a_wrapper_and_a_comm_optimizer_for_the_same_parameters_are_refused(step_in_backward: bool) -> None:
    module = model()
    comm = CommOptimizer(SGD(module.parameters()), "EASGD")
    with pytest.raises(ValueError, match=r"optimizer must not exchange with other ranks itself, got a CommOptimizer"):
        wrap(model(), optimizer=lambda params: CommOptimizer(SGD(params), "EASGD"))
    with pytest.raises(ValueError, match=r"with other ranks itself, got a CommOptimizer: .*Either wrap the model"):
        CommOptimizer(comm, "LSGD")
    wrapped = wrap(module, step_in_backward=step_in_backward)
    with pytest.raises(ValueError, match=r"those of a model that DecentralizedDataParallel wraps.*or close\(\) the"):
        comm.step()
    message = "those of a model that" if step_in_backward else "got a ScriptOptimizer"
    with pytest.raises(ValueError, match=message):
        CommOptimizer(wrapped.optimizer, "EASGD")
    with pytest.raises(ValueError, match="those of a model that DecentralizedDataParallel wraps"):
        CommOptimizer(SGD(wrapped.parameters()), "EASGD")
    wrapped.close()
    comm.step()
    assert CommOptimizer(SGD(module.parameters()), "EASGD").steps == 0


def test_a_parameter_among_the_outputs_keeps_no_backward_hooks() -> None:
    wrapped = wrap(ddp_usage.ReturnsParameter())
    for t in range(3):
        output, scale = wrapped(batch(0, t)[0])
        (output.sum() * scale).backward()
    assert not wrapped.module.scale._backward_hooks and wrapped.steps == 3


@pytest.mark.parametrize("what", ["hidden output", "around the model", "around two calls"])
def test_the_inner_backward_pass_of_a_reentrant_checkpoint_is_no_step(what: str) -> None:
    """The checkpoint is where the wrapper learns late of the outer pass: inside a model whose output is of an unknown
    class, around the whole model, or around each of two calls of it."""
    wrapped, plain = wrap(ddp_usage.HidesOutput()), ddp_usage.HidesOutput()
    optimizer = SGD(plain.parameters())

    def loss(module: Any, t: int) -> torch.Tensor:
        x = batch(0, t)[0].requires_grad_()
        if what == "hidden output":
            return module(x).value.square().mean()
        whole = partial(checkpoint, lambda z: module(z).value, use_reentrant=True)
        return (whole(x) + (whole(-x) if what == "around two calls" else 0.0)).square().mean()

    for t in range(3):
        loss(wrapped, t).backward()
        loss(plain, t).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert wrapped.steps == 3 and torch.allclose(flat(wrapped.module), flat(plain), atol=1e-6)


def test_states_load_into_modules_with_a_part_called_module_and_into_compiled_ones() -> None:
    source = {name: value + 1.0 for name, value in ddp_usage.HasPartNamedModule().state_dict().items()}
    for state in (source, {f"module.{name}": value for name, value in source.items()}):
        wrapped = wrap(ddp_usage.HasPartNamedModule())
        wrapped.load_state_dict(state)
        assert torch.equal(wrapped.module.module.weight, source["module.weight"])
    compiled = wrap(torch.compile(model(), backend="eager"))  # type: ignore[arg-type]
    compiled.load_state_dict(model(3).state_dict())
    model().load_state_dict(compiled.export())
    assert torch.equal(flat(compiled.module), flat(model(3)))
    assert {"", "module"} <= compiled._rename_entries(model().state_dict())._metadata.keys()  # type: ignore[attr-defined]


def test_the_state_of_a_compiled_wrapper_loads_with_its_steps() -> None:
    trained, resumed = wrap(), wrap()
    ddp_interface.train_step(trained, 0, 0)
    resumed.load_state_dict(torch.compile(trained, backend="eager").state_dict())  # type: ignore[attr-defined]
    assert resumed.steps == 1 and torch.equal(flat(resumed.module), flat(trained.module))


def test_a_deep_copy_loads_the_wrappers_state() -> None:
    wrapped = wrap()
    target = copy.deepcopy(wrapped)
    ddp_interface.train_step(wrapped, 0, 0)
    target.load_state_dict(wrapped.state_dict())
    assert torch.equal(flat(target), flat(wrapped.module))


def test_the_entries_of_a_deep_copy_and_of_the_wrapper_have_the_same_order() -> None:
    wrapped = wrap()
    ddp_interface.train_step(wrapped, 0, 0)
    average, larger = copy.deepcopy(wrapped), nn.ModuleList([wrapped, nn.Linear(2, 2)])
    entries = wrapped.state_dict()
    assert [*entries][:-1] == [*average.state_dict()] and [*entries][-1] == "_extra_state"
    assert [*larger.state_dict()] == [*(f"0.{name}" for name in entries), "1.weight", "1.bias"]
    for copied, own in zip(average.state_dict().values(), entries.values(), strict=False):  # as timm's ModelEma
        copied.lerp_(own, 0.5)
    assert torch.equal(flat(average.module), flat(wrapped.module))


@pytest.mark.slow
def test_distances_between_complex_models_match_the_formula() -> None:
    for distance, expected, own, expected_own in run_ranks(2, ddp_usage.measure_complex_distances):
        assert distance == pytest.approx(expected) and own == pytest.approx(expected_own) and expected_own > 0


@pytest.mark.sampled(one=["transport"])
@pytest.mark.parametrize("transport", ["auto", "collective"])
def test_buffers_of_every_type_and_layout_become_those_of_rank_0(transport: str) -> None:
    assert run_ranks(2, ddp_usage.find_wrong_buffers, transport) == [[], []]


@pytest.mark.parametrize(("other", "named"), [
    ("wrap its optimizer", "'make the optimizer'"), ("gather", "something else"),
])
def test_ranks_that_do_different_things_are_told_so(other: str, named: str) -> None:
    """Each took the other's text for its own: "rank 1 could not wrap the model: ..."."""
    (succeeded, error), _ = outcomes_of_ranks(2, ddp_usage.diverge, other, timeout_seconds=60)
    assert not succeeded and f"AssemblyError: rank 1 is at {named}, rank 0 at 'wrap the model': all ranks must" in error


def test_wrapping_fails_where_ranks_have_different_buffers() -> None:
    for succeeded, error in outcomes_of_ranks(2, ddp_usage.wrap_with_different_buffers, timeout_seconds=60):
        assert not succeeded and "rank 1 has another list of buffers than rank 0: 'kept (4,)" in error


@pytest.mark.sampled(one=["transport"])
@pytest.mark.parametrize("transport", ["auto", "collective"])
def test_training_continues_after_a_state_was_refused(transport: str) -> None:
    outcomes = run_ranks(2, ddp_usage.load_bad_state_on_rank_1, transport, timeout_seconds=60)
    (error_0, steps_0), (error_1, steps_1) = outcomes
    assert "rank 1 could not load the state" in error_0 and "Missing key" in error_1
    assert steps_0 == steps_1 == 6


def test_a_state_without_the_optimizers_values_is_refused() -> None:
    """torch.distributed.checkpoint loads such a state into a new wrapper, whose optimizer has no values yet."""
    wrapped = wrap(optimizer=partial(torch.optim.Adam, lr=0.1))
    ddp_interface.train_step(wrapped, 0, 0)
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
def test_a_training_resumed_from_a_distributed_checkpoint_has_the_same_bits(tmp_path: Path) -> None:
    assert run_ranks(2, ddp_usage.resume_from_distributed_checkpoint, str(tmp_path)) == [True, True]


def test_a_wrapper_is_loaded_as_part_of_a_larger_module() -> None:
    assert run_ranks(2, ddp_usage.load_as_part_of_module) == [(5, True)] * 2


@pytest.mark.parametrize("missing", ["fail", "regroup"])
def test_a_script_receives_its_own_messages_from_any_rank_and_no_bucket(missing: str) -> None:
    assert run_ranks(2, ddp_usage.exchange_beside_own_messages, missing) == [7.0, 7.0]


def test_wrappers_that_ranks_step_in_different_orders_are_not_mixed_with_each_other() -> None:
    assert run_ranks(2, ddp_usage.step_two_wrappers_in_another_order) == [[0.0, 0.0]] * 2


def test_averaged_float16_gradients_do_not_overflow() -> None:
    assert run_ranks(2, ddp_usage.average_large_half_gradients) == [[-53248.0] * 3] * 2


def test_gradients_are_averaged_where_ranks_use_different_heads() -> None:
    assert max(run_ranks(3, ddp_usage.average_gradients_of_different_heads)) < 1e-6


@pytest.mark.sampled(one=["name"])
@pytest.mark.parametrize("name", ["EASGD", "EASGD+", "LSGD", "LSGD+", "DDP"])
def test_a_comm_optimizer_fails_if_one_rank_alone_loads_a_state(name: str) -> None:
    for error in run_ranks(2, ddp_usage.load_comm_state_on_rank_0_only, name, timeout_seconds=60):
        assert "must take the same number of steps" in error or error.startswith("RuntimeError")


def test_lsgd_fails_if_only_some_ranks_pass_a_loss() -> None:
    for error in run_ranks(2, ddp_usage.pass_loss_on_rank_0_only, timeout_seconds=60):
        assert "rank 1 calls step without a loss, rank 0 with one" in error


@pytest.mark.sampled(one=["name", "overlap"])
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("name", ["EASGD", "EASGD+", "LSGD", "LSGD+"])
def test_another_number_of_ranks_resumes_a_comm_optimizer(name: str, overlap: bool, tmp_path: Any) -> None:
    run_ranks(2, ddp_usage.save_comm_states, name, overlap, str(tmp_path))
    for change, steps in run_ranks(3, ddp_usage.resume_comm_with_other_world_size, name, overlap, str(tmp_path)):
        assert change < 1.0 and steps == 12


@pytest.mark.parametrize("kind", [torch.float64, torch.complex64, "mixed"])
def test_easgd_of_every_type_of_parameter_equals_that_of_one_process(kind: Any) -> None:
    tolerance = 1e-12 if kind == torch.float64 else 1e-6
    assert max(run_ranks(2, ddp_usage.compare_easgd_with_one_process, kind)) < tolerance


def test_a_comm_optimizer_calls_step_hooks_and_refuses_copies_and_new_parameters() -> None:
    module = model()
    comm = CommOptimizer(torch.optim.SGD(module.parameters(), lr=0.1), "EASGD", world_size=1)
    hook_calls: list[int] = []
    comm.register_step_post_hook(lambda *_: hook_calls.append(1))
    module(batch(0, 0)[0]).sum().backward()
    comm.step()
    assert hook_calls == [1]
    with pytest.raises(TypeError, match=r"its state_dict\(\) can"):
        copy.deepcopy(comm)
    comm.local_optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2))]})
    with pytest.raises(RuntimeError, match="must keep the parameters"):
        comm.step()
    with pytest.raises(ValueError, match="without a closure: LBFGS"):
        CommOptimizer(torch.optim.LBFGS(module.parameters()), "EASGD", world_size=1)


@pytest.mark.parametrize("kind", ["comm", "script", "backward"])
def test_state_dict_hooks_of_an_optimizer_are_called(kind: str) -> None:
    """By its own state_dict and load_state_dict, and by those of the object that holds it."""
    module, calls = model(), []
    if kind == "comm":
        holder: Any = CommOptimizer(SGD(module.parameters()), "EASGD", world_size=1)
        optimizer: torch.optim.Optimizer = holder
    else:
        holder = wrap(module, step_in_backward=kind == "backward")
        optimizer = holder.optimizer
    optimizer.register_state_dict_pre_hook(lambda own: calls.append(own is optimizer))
    optimizer.register_state_dict_post_hook(lambda _, state: {**state, "more": 1})
    optimizer.register_load_state_dict_pre_hook(
        lambda _, state: {key: value for key, value in state.items() if key != "more" or calls.append(value)}
    )
    optimizer.register_load_state_dict_post_hook(lambda own: calls.append(own is optimizer))
    state = optimizer.state_dict()
    optimizer.load_state_dict(state)
    assert state["more"] == 1 and calls == [True, 1, True]
    holder.load_state_dict(holder.state_dict())
    assert calls == [True, 1, True] * 2


def test_a_rank_without_inputs_mixes_its_own_model_and_not_the_average(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        for steps, is_reverted in run_ranks(2, ddp_usage.join_without_inputs_after_average):
            assert steps == 3 and is_reverted
