"""The wrapper's interface, as users of torch's DistributedDataParallel know it: states, copies, errors, joins."""

from __future__ import annotations

import copy
import gc
import logging
import weakref
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel
from torch.utils.data import DataLoader

from decentnode.parallel import CommOptimizer, DecentralizedDataParallel
from decentnode.parallel.steps import backward
from tests.parallel.ranks import CONTEXT, outcomes_of_ranks, run_ranks
from tests.parallel.work import ddp_interface
from tests.parallel.work.models import SGD, batch, flat, model


def wrap(seed: int = 0, **options: Any) -> DecentralizedDataParallel:
    return DecentralizedDataParallel(model(seed), **{"optimizer": SGD, **options})


def test_a_forward_pass_without_gradients_does_not_revert_the_average(
    single_rank_group: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    wrapped = wrap()
    wrapped.global_avg()
    monkeypatch.setattr(wrapped, "revert_global_avg", lambda: pytest.fail("reverted"))
    with torch.no_grad():
        wrapped(batch(0, 0)[0])


def test_a_gradient_hook_that_refers_to_the_wrapper_does_not_keep_it_alive(single_rank_group: None) -> None:
    wrapped = wrap()
    for p in wrapped.module.parameters():
        p.register_hook(lambda gradient, kept=wrapped: gradient * kept.training)
    reference = weakref.ref(wrapped)
    del wrapped, p
    gc.collect()
    assert reference() is None


@pytest.mark.parametrize("transport", ["auto", "collective"])
def test_ranks_average_join_with_uneven_inputs_and_load_states(transport: str) -> None:
    rank_0, rank_1 = run_ranks(2, ddp_interface.average_join_and_load, transport)
    assert rank_0["averaged_output"] == rank_1["averaged_output"]
    assert rank_0["steps"] == rank_1["steps"] == 8 and rank_0["distance"] < 1.0
    refusal = "rank 1 has another loaded state than rank 0: 'step 9', rank 0 has 'step 8'"
    for result in (rank_0, rank_1):
        assert result["same_after_load"] and refusal in result["refusal"]


@pytest.mark.slow
def test_training_fails_if_one_rank_alone_loads_a_state() -> None:
    outcomes = outcomes_of_ranks(2, ddp_interface.load_state_on_rank_0_only, timeout_seconds=60)
    (succeeded_0, error_0), (succeeded_1, error_1) = outcomes
    assert not succeeded_0 and not succeeded_1
    assert "PeerLost" in error_1 and "rank 0" in error_1.splitlines()[0]
    assert "load_state_dict failed" in error_0


def test_a_gradient_of_inf_on_one_rank_skips_the_step_on_all_ranks() -> None:
    results = run_ranks(2, ddp_interface.train_with_grad_scaler, timeout_seconds=60)
    for rank, (moved, difference, scales) in enumerate(results):
        assert moved == [True, False, True, True, True] and difference < 1e-6
        assert scales[1] == (512.0 if rank == 0 else 1024.0)


def test_a_grad_scaler_unscales_once_and_a_skipped_step_does_not_count() -> None:
    p = torch.ones(3, requires_grad=True)
    comm = CommOptimizer(torch.optim.SGD([p], lr=0.5), "EASGD", world_size=1)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    scaler.scale(p.sum()).backward()
    scaler.step(comm)
    scaler.update()
    assert p.tolist() == [0.5] * 3 and comm.dist_optimizer.steps == 1
    comm.zero_grad()
    scaler.scale((p * float("inf")).sum()).backward()
    scaler.step(comm)
    scaler.update()
    assert p.tolist() == [0.5] * 3 and comm.dist_optimizer.steps == 1 and scaler.get_scale() == 2.0


def test_states_of_torchs_ddp_and_of_the_bare_module_are_loaded(single_rank_group: None) -> None:
    source = model(3)
    wrapped = wrap()
    ddp_interface.train_step(wrapped, 0, 0)
    momentum = wrapped.optimizer.state_dict()
    wrapped.load_state_dict({f"module.{name}": value for name, value in source.state_dict().items()})  # torch's DDP
    assert torch.equal(flat(wrapped.module), flat(source)) and wrapped.steps == 1
    assert str(wrapped.optimizer.state_dict()) == str(momentum)
    wrapped.load_state_dict(model(4).state_dict())  # the module's own
    assert torch.equal(flat(wrapped.module), flat(model(4)))
    exported = wrapped.export()
    model().load_state_dict(exported)
    assert exported["0.weight"].untyped_storage().nbytes() == 4 * exported["0.weight"].numel()
    with pytest.raises(RuntimeError, match="Missing key"):
        wrapped.load_state_dict({"module.0.weight": exported["0.weight"]})


def test_copies_and_pickled_wrappers_are_models_that_take_no_part_in_training(
    single_rank_group: None, tmp_path: Path
) -> None:
    wrapped = wrap()
    copied, average = copy.deepcopy(wrapped), AveragedModel(wrapped)
    torch.save(wrapped, tmp_path / "model.pt")
    for t in range(2):
        ddp_interface.train_step(wrapped, 0, t)
        average.update_parameters(wrapped)
    loaded = torch.load(tmp_path / "model.pt", weights_only=False)
    x = batch(0, 0)[0]
    assert torch.equal(copied(x), model()(x)) and torch.equal(loaded(x), model()(x))
    assert not torch.equal(average(x), copied(x)) and list(copied.state_dict()) == list(loaded.state_dict())
    assert torch.equal(flat(copied), flat(model())), "training must not change the copy"
    (copied(x)).sum().backward()
    assert wrapped.steps == 2


def test_workers_of_a_data_loader_get_the_model_of_a_wrapper(single_rank_group: None) -> None:
    wrapped = wrap()
    outputs = ddp_interface.ModelOutputs(wrapped)
    loader = DataLoader(outputs, num_workers=1, batch_size=None, multiprocessing_context=CONTEXT)
    assert all(torch.equal(output, outputs[t]) for t, output in enumerate(loader))
    ddp_interface.train_step(wrapped, 0, 0)
    assert wrapped.steps == 1


@pytest.mark.parametrize("size", [25, 0.0002])
def test_a_rule_with_state_is_resumed_with_another_bucket_size(size: float, single_rank_group: None) -> None:
    rule = {"name": "slowmo"}
    first = wrap(sharing=rule, bucket_size_in_mb=0)
    for t in range(3):
        ddp_interface.train_step(first, 0, t)
    other, same = wrap(1, sharing=rule, bucket_size_in_mb=size), wrap(1, sharing=rule, bucket_size_in_mb=0)
    for resumed in (other, same):
        resumed.load_state_dict(first.state_dict())
    for t in range(3, 9):
        for wrapped in (first, other, same):
            ddp_interface.train_step(wrapped, 0, t)
    assert torch.equal(flat(first.module), flat(same.module))
    assert flat(other.module).tolist() == pytest.approx(flat(first.module).tolist(), abs=1e-6)


@pytest.mark.sampled(one=["ranks"])
@pytest.mark.parametrize("ranks", [1, 3])
def test_another_number_of_ranks_resumes_a_training(ranks: int, tmp_path: Path) -> None:
    run_ranks(2, ddp_interface.save_states, str(tmp_path))
    for same, steps, distance in run_ranks(ranks, ddp_interface.resume_with_other_world_size, str(tmp_path)):
        assert same and steps == 5 and distance < 0.1


ADAM = partial(torch.optim.Adam, lr=0.01)


@pytest.mark.parametrize(("saved", "here", "names_kind", "message"), [
    (SGD, ADAM, True, "optimizer must be SGD, which was saved, with .*momentum.*, got Adam with .*betas"),
    (ADAM, SGD, True, "optimizer must be Adam, which was saved, with .*betas.*, got SGD with .*momentum"),
    (SGD, ADAM, False, "optimizer must be the saved one, with .*momentum.*, got Adam with .*betas"),
    (partial(torch.optim.Adamax, lr=0.01), ADAM, True, "must be Adamax, which was saved, with no other option, got A"),
    (SGD, lambda params: SGD([{"params": p} for p in params]), True, r"the saved one, \[6\], got \[1, 1, 1"),
    (ADAM, partial(torch.optim.AdamW, lr=0.01), True, None),
], ids=["sgd", "adam", "an older file", "adamax", "groups", "adamw"])  # fmt: skip
def test_a_state_of_another_optimizer_is_refused_by_name_and_nothing_is_loaded(
    saved: Any, here: Any, names_kind: bool, message: str | None, single_rank_group: None
) -> None:
    """Also a state of an older file, which does not name its kind of optimizer."""
    first, other = wrap(optimizer=saved), wrap(1, optimizer=here)
    ddp_interface.train_step(first, 0, 0)
    ddp_interface.train_step(other, 0, 0)
    state, before = first.state_dict(), flat(other.module).clone()
    if not names_kind:
        del state["_extra_state"]["optimizer_kind"]
    if message is not None:
        with pytest.raises(ValueError, match=message):
            other.load_state_dict(state)
        assert torch.equal(flat(other.module), before)
    else:
        other.load_state_dict(state)
    ddp_interface.train_step(other, 0, 1)
    assert other.steps == 2


def test_a_state_of_another_scheduler_is_refused_by_name(single_rank_group: None) -> None:
    first = wrap(lr_scheduler_fn=lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 3))
    other = wrap(lr_scheduler_fn=lambda optimizer: torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0))
    ddp_interface.train_step(first, 0, 0)
    before = str(other.optimizer.state_dict())
    with pytest.raises(ValueError, match=r"lr_scheduler must be StepLR, which was saved, got LambdaLR: .* no 'lr_lam"):
        other.load_state_dict(first.state_dict())
    assert str(other.optimizer.state_dict()) == before


@pytest.mark.parametrize(("local", "method", "message"), [
    (ADAM, "EASGD", "optimizer must be SGD, which was saved, with .*, got Adam with"),
    (SGD, "LSGD", "dist_optim_name must be that of the saved method, EASGD, got LSGD: the state has no .*leader"),
    (SGD, "EASGD+", "dist_optim_name must be that of the saved method, EASGD, got EASGDPlus: the state has no norm"),
])  # fmt: skip
def test_a_state_of_another_comm_optimizer_is_refused_by_name(local: Any, method: str, message: str) -> None:
    p = torch.ones(3, requires_grad=True)
    first, other = CommOptimizer(SGD([p]), "EASGD"), CommOptimizer(local([p]), method)
    with pytest.raises(ValueError, match=message):
        other.load_state_dict(first.state_dict())
    other.load_state_dict(CommOptimizer(local([p]), method).state_dict())


@pytest.mark.parametrize(("options", "message"), [
    ({"optimizer": torch.optim.LBFGS}, "without a closure: LBFGS"),
    ({"lr_scheduler_fn": torch.optim.lr_scheduler.ReduceLROnPlateau}, "without a metric, got ReduceLROnPlateau"),
], ids=["LBFGS", "plateau"])  # fmt: skip
def test_optimizers_and_schedulers_that_need_arguments_in_step_are_refused(
    options: dict[str, Any], message: str, single_rank_group: None
) -> None:
    with pytest.raises(ValueError, match=message):
        wrap(**options)


def test_an_expanded_parameter_is_refused(single_rank_group: None) -> None:
    module = nn.Linear(3, 2)
    module.bias = nn.Parameter(torch.zeros(1).expand(2))
    with pytest.raises(ValueError, match="parameter bias must have memory for each"):
        DecentralizedDataParallel(module, optimizer=SGD)


def test_compiled_autograd_is_refused_by_name(single_rank_group: None) -> None:
    from torch._dynamo import compiled_autograd, config

    wrapped = wrap()
    with config.patch(compiled_autograd=True), pytest.raises(RuntimeError, match="compiled autograd must be off"):
        wrapped(batch(0, 0)[0])
    output = wrapped(batch(0, 0)[0]).sum()
    with compiled_autograd._enable(lambda graph: graph), pytest.raises(RuntimeError, match="compiled autograd must"):
        output.backward()
    ddp_interface.train_step(wrapped, 0, 0)
    assert wrapped.steps == 1


def test_a_backward_pass_that_steps_two_wrapped_modules_is_logged_once(
    single_rank_group: None, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(backward, "_warned", False)
    small = partial(DecentralizedDataParallel, optimizer=SGD)
    generator, judge = small(nn.Linear(2, 3)), small(nn.Linear(3, 1))
    with caplog.at_level(logging.WARNING):
        judge(generator(torch.ones(1, 2)).detach()).sum().backward()
        judge.requires_grad_(False)
        judge(generator(torch.ones(1, 2))).sum().backward()  # what the warning recommends
        judge.requires_grad_(True)
        assert (generator.steps, judge.steps) == (1, 1) and not caplog.messages
        for _ in range(2):
            judge(generator(torch.ones(1, 2))).sum().backward()
    assert (generator.steps, judge.steps) == (3, 3)
    assert len(caplog.messages) == 1 and "steps two wrapped modules" in caplog.text


def test_one_rank_trains_with_the_shared_memory_transport(single_rank_group: None) -> None:
    wrapped, plain = wrap(transport="shared_memory"), model()
    ddp_interface.train_step(wrapped, 0, 0)
    x, y = batch(0, 0)
    (plain(x) - y).square().mean().backward()
    SGD(plain.parameters()).step()
    assert wrapped.steps == 1 and torch.equal(flat(wrapped.module), flat(plain))


def test_a_backward_pass_in_eval_mode_is_a_step(single_rank_group: None) -> None:
    wrapped = wrap()
    wrapped.eval()
    ddp_interface.train_step(wrapped, 0, 0)
    assert wrapped.steps == 1
