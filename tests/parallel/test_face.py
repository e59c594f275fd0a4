"""The wrapper as a user of torch's DistributedDataParallel expects it: files, copies, refusals, uneven inputs."""

from __future__ import annotations

import copy
import gc
import logging
import weakref
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.optim.swa_utils import AveragedModel

from decentnode.parallel import CommOptimizer, DecentralizedDataParallel
from decentnode.parallel.steps import backward
from tests.parallel.ranks import outcomes_of_ranks, run_ranks
from tests.parallel.work import face
from tests.parallel.work.models import SGD, batch, flat, model


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[None]:
    """A process group of this process alone."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def wrapper(seed: int = 0, **options: Any) -> DecentralizedDataParallel:
    return DecentralizedDataParallel(model(seed), **{"optimizer": SGD, **options})


def test_outputs_of_the_average_in_train_mode_without_gradients(alone: None, monkeypatch: pytest.MonkeyPatch) -> None:
    wrapped = wrapper()
    wrapped.global_avg()
    monkeypatch.setattr(wrapped, "revert_global_avg", lambda: pytest.fail("reverted"))
    with torch.no_grad():
        wrapped(batch(0, 0)[0])


def test_a_hook_of_the_script_that_refers_to_the_wrapper_does_not_keep_it(alone: None) -> None:
    wrapped = wrapper()
    for p in wrapped.module.parameters():
        p.register_hook(lambda gradient, kept=wrapped: gradient * kept.training)
    gone = weakref.ref(wrapped)
    del wrapped, p
    gc.collect()
    assert gone() is None


@pytest.mark.parametrize("transport", ["auto", "collective"])
def test_ranks_average_join_and_load(transport: str) -> None:
    first, other = run_ranks(2, face.several, transport)
    assert first["average's"] == other["average's"]
    assert first["steps"] == other["steps"] == 8 and first["distance"] < 1.0
    for found in (first, other):
        assert found["same"] and "rank 1 has another loaded state than rank 0: 'step 9', rank 0 has 'step 8'" in found[
            "refused"
        ]


@pytest.mark.slow
def test_a_state_that_one_rank_alone_loads_is_told() -> None:
    (ok, here), (other_ok, there) = outcomes_of_ranks(2, face.loads_alone, timeout_seconds=60)
    assert not ok and not other_ok
    assert "PeerLost" in there and "rank 0" in there.splitlines()[0]
    assert "load_state_dict failed" in here


def test_an_inf_on_one_rank_is_every_rank_s() -> None:
    for rank, (moved, difference, scales) in enumerate(run_ranks(2, face.scaled, timeout_seconds=60)):
        assert moved == [True, False, True, True, True] and difference < 1e-6
        assert scales[1] == (512.0 if rank == 0 else 1024.0)


def test_gradients_are_unscaled_once_and_a_bad_step_is_none() -> None:
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


def test_files_of_others(alone: None) -> None:
    source = model(3)
    wrapped = wrapper()
    face.step(wrapped, 0, 0)
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


def test_copies_and_files_of_the_wrapper_are_the_model(alone: None, tmp_path: Path) -> None:
    wrapped = wrapper()
    copied, average = copy.deepcopy(wrapped), AveragedModel(wrapped)
    torch.save(wrapped, tmp_path / "model.pt")
    for t in range(2):
        face.step(wrapped, 0, t)
        average.update_parameters(wrapped)
    loaded = torch.load(tmp_path / "model.pt", weights_only=False)
    x = batch(0, 0)[0]
    assert torch.equal(copied(x), model()(x)) and torch.equal(loaded(x), model()(x))
    assert not torch.equal(average(x), copied(x)) and list(copied.state_dict()) == list(loaded.state_dict())
    assert torch.equal(flat(copied), flat(model())), "it takes no part"
    (copied(x)).sum().backward()
    assert wrapped.steps == 2


@pytest.mark.parametrize("size", [25, 0.0002])
def test_another_bucket_size_resumes_a_rule_with_state(size: float, alone: None) -> None:
    rule = {"name": "slowmo"}
    first = wrapper(sharing=rule, bucket_size_in_mb=0)
    for t in range(3):
        face.step(first, 0, t)
    other, same = wrapper(1, sharing=rule, bucket_size_in_mb=size), wrapper(1, sharing=rule, bucket_size_in_mb=0)
    for each in (other, same):
        each.load_state_dict(first.state_dict())
    for t in range(3, 9):
        for each in (first, other, same):
            face.step(each, 0, t)
    assert torch.equal(flat(first.module), flat(same.module))
    assert flat(other.module).tolist() == pytest.approx(flat(first.module).tolist(), abs=1e-6)


@pytest.mark.sampled(one=["ranks"])
@pytest.mark.parametrize("ranks", [1, 3])
def test_another_number_of_ranks_takes_a_run_up(ranks: int, tmp_path: Path) -> None:
    run_ranks(2, face.kept, str(tmp_path))
    for same, steps, distance in run_ranks(ranks, face.taken_up, str(tmp_path)):
        assert same and steps == 5 and distance < 0.1


ADAM = partial(torch.optim.Adam, lr=0.01)


@pytest.mark.parametrize(("saved", "here", "told", "says"), [
    (SGD, ADAM, True, "optimizer must be SGD, which was saved, with .*momentum.*, got Adam with .*betas"),
    (ADAM, SGD, True, "optimizer must be Adam, which was saved, with .*betas.*, got SGD with .*momentum"),
    (SGD, ADAM, False, "optimizer must be the saved one, with .*momentum.*, got Adam with .*betas"),
    (partial(torch.optim.Adamax, lr=0.01), ADAM, True, "must be Adamax, which was saved, with no other option, got A"),
    (SGD, lambda params: SGD([{"params": each} for each in params]), True, r"the saved one, \[6\], got \[1, 1, 1"),
    (ADAM, partial(torch.optim.AdamW, lr=0.01), True, None),
], ids=["sgd", "adam", "an older file", "adamax", "groups", "adamw"])  # fmt: skip
def test_a_state_of_another_optimizer_is_named_and_nothing_is_loaded(
    saved: Any, here: Any, told: bool, says: str | None, alone: None
) -> None:
    first, other = wrapper(optimizer=saved), wrapper(1, optimizer=here)
    face.step(first, 0, 0)
    face.step(other, 0, 0)
    state, before = first.state_dict(), flat(other.module).clone()
    if not told:
        del state["_extra_state"]["optimizer_kind"]
    if says is not None:
        with pytest.raises(ValueError, match=says):
            other.load_state_dict(state)
        assert torch.equal(flat(other.module), before)
    else:
        other.load_state_dict(state)
    face.step(other, 0, 1)
    assert other.steps == 2


def test_a_state_of_another_scheduler_is_named(alone: None) -> None:
    first = wrapper(lr_scheduler_fn=lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 3))
    other = wrapper(lr_scheduler_fn=lambda optimizer: torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0))
    face.step(first, 0, 0)
    before = str(other.optimizer.state_dict())
    with pytest.raises(ValueError, match=r"lr_scheduler must be StepLR, which was saved, got LambdaLR: .* no 'lr_lam"):
        other.load_state_dict(first.state_dict())
    assert str(other.optimizer.state_dict()) == before


@pytest.mark.parametrize(("local", "method", "says"), [
    (ADAM, "EASGD", "optimizer must be SGD, which was saved, with .*, got Adam with"),
    (SGD, "LSGD", "dist_optim_name must be that of the saved method, EASGD, got LSGD: the state has no .*leader"),
    (SGD, "EASGD+", "dist_optim_name must be that of the saved method, EASGD, got EASGDPlus: the state has no norm"),
])  # fmt: skip
def test_a_state_of_another_comm_optimizer_is_named(local: Any, method: str, says: str) -> None:
    p = torch.ones(3, requires_grad=True)
    first, other = CommOptimizer(SGD([p]), "EASGD"), CommOptimizer(local([p]), method)
    with pytest.raises(ValueError, match=says):
        other.load_state_dict(first.state_dict())
    other.load_state_dict(CommOptimizer(local([p]), method).state_dict())


@pytest.mark.parametrize(("options", "says"), [
    ({"optimizer": torch.optim.LBFGS}, "without a closure: LBFGS"),
    ({"lr_scheduler_fn": torch.optim.lr_scheduler.ReduceLROnPlateau}, "without a metric, got ReduceLROnPlateau"),
], ids=["LBFGS", "plateau"])  # fmt: skip
def test_what_cannot_train_is_refused(options: dict[str, Any], says: str, alone: None) -> None:
    with pytest.raises(ValueError, match=says):
        wrapper(**options)


def test_parameters_without_memory_of_their_own_are_refused(alone: None) -> None:
    module = nn.Linear(3, 2)
    module.bias = nn.Parameter(torch.zeros(1).expand(2))
    with pytest.raises(ValueError, match="parameter bias must have memory for each"):
        DecentralizedDataParallel(module, optimizer=SGD)


def test_compiled_autograd_is_refused_by_name(alone: None) -> None:
    from torch._dynamo import compiled_autograd, config

    wrapped = wrapper()
    with config.patch(compiled_autograd=True), pytest.raises(RuntimeError, match="compiled autograd must be off"):
        wrapped(batch(0, 0)[0])
    output = wrapped(batch(0, 0)[0]).sum()
    with compiled_autograd._enable(lambda graph: graph), pytest.raises(RuntimeError, match="compiled autograd must"):
        output.backward()
    face.step(wrapped, 0, 0)
    assert wrapped.steps == 1


def test_a_pass_that_steps_two_is_told_once(
    alone: None, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(backward, "_warned", False)
    small = partial(DecentralizedDataParallel, optimizer=SGD)
    generator, judge = small(nn.Linear(2, 3)), small(nn.Linear(3, 1))
    with caplog.at_level(logging.WARNING):
        judge(generator(torch.ones(1, 2)).detach()).sum().backward()
        judge.requires_grad_(False)
        judge(generator(torch.ones(1, 2))).sum().backward()  # the recipe
        judge.requires_grad_(True)
        assert (generator.steps, judge.steps) == (1, 1) and not caplog.messages
        for _ in range(2):
            judge(generator(torch.ones(1, 2))).sum().backward()
    assert (generator.steps, judge.steps) == (3, 3)
    assert len(caplog.messages) == 1 and "steps two wrapped modules" in caplog.text


def test_shared_memory_of_one_rank(alone: None) -> None:
    face.step(wrapper(transport="shared_memory"), 0, 0)


def test_a_backward_pass_in_eval_mode_is_a_step(alone: None) -> None:
    wrapped = wrapper()
    wrapped.eval()
    face.step(wrapped, 0, 0)
    assert wrapped.steps == 1
