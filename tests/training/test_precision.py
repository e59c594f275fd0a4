"""Mixed precision, compiled steps and memory formats, combined with accumulation, clipping and schedules."""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from decentnode.build import build_in_process, step_all
from decentnode.data.base import Samples
from decentnode.errors import CheckpointError, Diverged, EnvironmentFault
from decentnode.experiment import load
from decentnode.samples import Rows
from decentnode.training import compiled as compiling
from decentnode.training import precision
from decentnode.training.compiled import CompileConfig
from tests.conftest import scale

from .contract import check_training, run_rounds
from .small import batch_norm_net, linear_net, make, make_samples

QUICKSTART = Path(__file__).parents[2] / "configs" / "quickstart.yaml"
EAGER = {"backend": "eager"}
"""Runs the compiler's front end only; the graphs that it captures run with torch's own kernels."""
STEPS: dict[str, Any] = {"batch_size": 4, "local_steps": 3, "optimizer": {"name": "sgd", "lr": 0.1, "momentum": 0.9}}


def images(count: int = 22, seed: int = 0) -> Samples:
    draw = np.random.default_rng(seed)
    targets = draw.integers(0, 4, count)
    inputs = draw.normal(size=(count, 3, 6, 6)) + targets[:, None, None, None]
    return Samples(inputs.astype(np.float32), targets)


def convolutional_net() -> nn.Module:
    """A network without dropout, whose draws depend on the memory layout."""
    return nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 4, 3), nn.Flatten(), nn.Linear(16, 4),
    )  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("keys", [
    {"amp": "bf16"}, {"amp": "fp16"}, {"compile": EAGER}, {"amp": "bf16", "compile": EAGER},
    {"amp": "fp16", "clip_norm": 0.5}, {"amp": "bf16", "accumulate": 2},
    {"amp": "fp16", "accumulate": 2, "clip_norm": 0.5, "lr_schedule": {"name": "cosine", "T_max": 9, "every": "step"}},
    {"amp": "fp16", "accumulate": 3, "clip_norm": 0.1, "drop_last": True, "optimizer": {"name": "adam", "lr": 0.01}},
], ids=str)  # fmt: skip
def test_contract(keys: dict[str, Any]) -> None:
    """Repeated rounds, evaluations, resumption and directions, with dropout and running statistics."""
    check_training(lambda uid: make(uid, batch_norm_net, make_samples(24, uid), **{**STEPS, **keys}))


@pytest.mark.parametrize("amp", ["bf16", "fp16"])
def test_gradients_in_16_bits_are_near_those_of_float32(amp: str) -> None:
    exact, mixed = (make(module=batch_norm_net, **STEPS, **keys) for keys in ({}, {"amp": amp}))
    for training in (exact, mixed):
        training.keep_gradient = True
    one, other = (training.local_update(0).last_gradient for training in (exact, mixed))
    assert one is not None and other is not None and other.dtype == torch.float32
    assert not torch.equal(one, other)
    assert float((one - other).norm() / one.norm()) < (0.05 if amp == "bf16" else 0.01)
    assert mixed.model.parameters.dtype == torch.float32


def test_evaluations_are_computed_in_float32_despite_amp() -> None:
    exact, mixed = make(module=batch_norm_net), make(module=batch_norm_net, amp="bf16", compile=EAGER)
    assert mixed.evaluate("test") == exact.evaluate("test")


@pytest.mark.parametrize("keys", [{}, {"accumulate": 2, "clip_norm": 0.3}], ids=str)
def test_a_step_that_overflows_is_repeated_and_leaves_no_trace(
    keys: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Dropout and running statistics are undone, too: the run equals one that begins with the scale that fits."""
    keys_of_run = {**STEPS, **keys, "amp": "fp16", "local_steps": 1, "optimizer": {"name": "adam", "lr": 0.01}}
    monkeypatch.setattr(precision, "FIRST_SCALE", 2.0**120)
    overflowing = make(module=batch_norm_net, **keys_of_run)
    found = [overflowing.local_update(0)]
    fitting = found[0].report["loss_scale"]
    assert found[0].report["repeated_steps"] == 120 - math.log2(fitting) > 50
    monkeypatch.setattr(precision, "FIRST_SCALE", fitting)
    plain = make(module=batch_norm_net, **keys_of_run)
    expected = [plain.local_update(0)]
    assert expected[0].report == {**found[0].report, "repeated_steps": 0.0}
    for round in range(1, 6):
        found.append(overflowing.local_update(round))
        expected.append(plain.local_update(round))
    assert [(each.steps, each.samples, each.loss) for each in found] == [
        (each.steps, each.samples, each.loss) for each in expected
    ]
    assert torch.equal(plain.model.parameters, overflowing.model.parameters)
    assert torch.equal(plain.model.buffers, overflowing.model.buffers)
    assert int(plain.model.module[2].num_batches_tracked) == int(overflowing.model.module[2].num_batches_tracked)


def test_the_loss_scale_grows_after_steps_without_overflow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(precision, "GROWTH_STEPS", 4)
    monkeypatch.setattr(precision, "FIRST_SCALE", 2.0**3)
    training = make(**STEPS, amp="fp16")
    scales = [training.local_update(round).report["loss_scale"] for round in range(4)]
    assert scales == [2.0**3, 2.0**4, 2.0**5, 2.0**6]  # after 4, 8 and 12 steps of 3 per round
    monkeypatch.setattr(precision, "LARGEST_SCALE", 2.0**6)
    assert [training.local_update(round).report["loss_scale"] for round in range(4, 7)] == [2.0**6] * 3


def test_a_gradient_that_is_not_finite_at_any_scale_raises_diverged() -> None:
    class InfiniteGradient(nn.Module):
        """The square root at 0: its value is finite, its gradient is not."""

        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(6, 4)
            nn.init.zeros_(self.linear.weight)
            nn.init.zeros_(self.linear.bias)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.linear(x.flatten(1)).float().abs().sqrt()

    training = make(3, InfiniteGradient, amp="fp16", **STEPS)
    with pytest.raises(Diverged, match=r"node 3: a gradient is not finite in fp16, whatever the loss scale"):
        training.local_update(0)


def test_an_fp16_training_refuses_a_state_without_a_loss_scale() -> None:
    with pytest.raises(CheckpointError, match="loss_scale"):
        make(amp="fp16").load_state_dict(make().state_dict())


# -- the compiler ---------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_compiled_steps_equal_plain_steps_after_parameters_move() -> None:
    plain, made = make(module=batch_norm_net, **STEPS), make(module=batch_norm_net, **STEPS, compile=EAGER)
    for round in range(6):
        if round == 3:  # as when the model moves to a slot of shared memory
            made.model.rebind(made.model.parameters.clone())
        storage = made.model.parameters
        plain.local_update(round)
        made.local_update(round)
        assert made.model.parameters is storage
        assert torch.equal(plain.model.parameters, made.model.parameters), round
    assert {*made.model.module.state_dict()} == {*plain.model.module.state_dict()}


@pytest.mark.skipif(not scale(0, 1), reason="compiles for ten seconds or more")
@pytest.mark.timeout(600)
@pytest.mark.parametrize("keys", [{}, {"amp": "bf16"}, {"dynamic": True}], ids=str)
def test_inductor_is_near_plain_steps_and_deterministic(keys: dict[str, Any]) -> None:
    """Runs under --stress only. The generated code is near the plain steps, and repeats bit for bit."""
    compile = {"dynamic": True} if "dynamic" in keys else True
    amp = keys.get("amp")
    trainings = [make(module=convolutional_net, train=images(), **STEPS, amp=amp, compile=each)
                 for each in (False, compile, compile)]  # fmt: skip
    plain, one, other = (run_rounds(each, range(1)) for each in trainings)
    assert float((plain - one).norm() / plain.norm()) < (5e-3 if amp else 1e-5)
    assert torch.equal(one, other)
    assert torch.equal(*(run_rounds(each, range(1, 6)) for each in trainings[1:]))


def test_a_missing_compiler_is_an_error_that_names_what_was_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setattr(compiling.shutil, "which", lambda _: None)
    with pytest.raises(EnvironmentFault, match=r"training\.compile needs a C\+\+ compiler on a CPU, .*tried g\+\+"):
        make(compile=True)
    monkeypatch.setenv("CXX", "there-is-none")
    with pytest.raises(EnvironmentFault, match="tried CXX=there-is-none"):
        make(compile={"mode": "max-autotune"})
    monkeypatch.setattr(compiling.importlib.util, "find_spec", lambda _: None)
    with pytest.raises(EnvironmentFault, match="needs triton for a GPU"):
        compiling.compiled(linear_net(), CompileConfig(dynamic=False), torch.device("cuda"))


@pytest.mark.slow
def test_models_that_cannot_be_compiled_are_errors_of_the_environment() -> None:
    with pytest.raises(EnvironmentFault, match=r"training\.compile\.backend must be one of .*inductor.*, got 'tensor'"):
        make(compile={"backend": "tensor"})

    class Branches(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(6, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            found: torch.Tensor = self.linear(x.flatten(1))
            return -found if float(x.sum()) > 1e9 else found

    make(module=Branches, compile=EAGER).local_update(0)  # compiled as two graphs, before and after the branch
    torch._dynamo.reset()  # the graphs of this class would be used again
    with pytest.raises(EnvironmentFault, match=r"training\.compile: this model cannot be compiled here: ."):
        make(module=Branches, compile={**EAGER, "fullgraph": True}).local_update(0)


@pytest.fixture
def recompile_limit() -> Iterator[Callable[[int], object]]:
    """Sets the limit for one test. monkeypatch would delete the option in its undo, because torch does not keep it in
    the module's dict, and every later compilation of the process would fail."""
    with contextlib.ExitStack() as until_the_end:
        yield lambda limit: until_the_end.enter_context(torch._dynamo.config.patch(cache_size_limit=limit))
        torch._dynamo.reset()
    assert torch._dynamo.config.cache_size_limit >= 8


@pytest.mark.slow
def test_each_compiled_model_has_a_shape_limit_of_its_own(recompile_limit: Callable[[int], object]) -> None:
    """All models are of the class nn.Sequential, each has batches of two shapes. Nodes with equal models share code."""
    recompile_limit(2)
    torch._dynamo.reset()
    compiled, alive = [], []
    for width in (4, 4, 8, 9):
        alive.append(make(module=functools.partial(net_of_width, width), batch_size=5, local_epochs=1, compile=EAGER))
        before = torch._dynamo.utils.counters["stats"]["unique_graphs"]
        alive[-1].local_update(0)
        compiled.append(torch._dynamo.utils.counters["stats"]["unique_graphs"] - before)
    assert compiled == [2, 0, 2, 2]


def net_of_width(width: int) -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(6, width), nn.Linear(width, 4))


def test_more_shapes_than_the_limit_are_an_error(recompile_limit: Callable[[int], object]) -> None:
    recompile_limit(1)
    torch._dynamo.reset()
    training = make(batch_size=5, local_epochs=1, compile=EAGER)  # 23 samples: the last batch has 3
    with pytest.raises(EnvironmentFault, match="batches have more than 1 shapes; dynamic: true makes one code for all"):
        training.local_update(0)


class MeanOfEmbeddings(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.last = nn.Embedding(9, 6), nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.last(self.embedding(x).mean(1))
        return found


@pytest.mark.parametrize("dynamic", [None, False], ids=str)
def test_rows_of_unequal_length_compile_once_unless_dynamic_is_false(
    dynamic: bool | None, recompile_limit: Callable[[int], object]
) -> None:
    """Nine rounds have nine lengths; the batches of one round are padded to one length."""
    recompile_limit(2)
    torch._dynamo.reset()
    lengths = np.arange(2, 20)
    rows = Rows(np.arange(200) % 9, np.arange(18), lengths)
    share = Samples(rows, np.arange(18) % 4, ids=True)
    plain, training = (
        make(module=MeanOfEmbeddings, train=share, batch_size=2, shuffle=False, compile=each)
        for each in (False, {**EAGER, "dynamic": dynamic})
    )
    if dynamic is None:
        assert torch.equal(run_rounds(training, range(9)), run_rounds(plain, range(9)))
    else:
        with pytest.raises(EnvironmentFault, match="dynamic: true makes one code for all"):
            run_rounds(training, range(9))


# -- memory formats, and the whole run ------------------------------------------------------------------------------


def test_channels_last_training_is_near_the_default_layout() -> None:
    def channels_last() -> nn.Module:
        return convolutional_net().to(memory_format=torch.channels_last)  # type: ignore[call-overload,no-any-return]

    plain = make(module=convolutional_net, train=images(), **STEPS)
    other = make(module=channels_last, train=images(), **STEPS, channels_last=True)
    seen: list[bool] = []
    first = other.model.module[0]
    first.register_forward_pre_hook(lambda _, x: seen.append(x[0].is_contiguous(memory_format=torch.channels_last)))
    for round in range(3):
        plain.local_update(round)
        other.local_update(round)
    assert seen and all(seen)
    assert first.weight.is_contiguous(memory_format=torch.channels_last)
    assert not torch.equal(plain.model.parameters, other.model.parameters)
    for one, two in zip(plain.model.module.parameters(), other.model.module.parameters(), strict=True):
        assert torch.allclose(one, two, atol=1e-4)


PRODUCTS = list(itertools.product([None, "bf16", "fp16"], ["full", "gradient_tracking", "choco", "qg_momentum"]))


@pytest.mark.sampled
@pytest.mark.parametrize(("amp", "rule"), PRODUCTS)
def test_runs_with_mixed_precision_and_stateful_rules_repeat_bit_for_bit(amp: str | None, rule: str) -> None:
    """Accumulation, clipping and a schedule with rules that keep a state, with mixed precision or without."""
    def train() -> torch.Tensor:
        sets = [
            "graph={name: ring, nodes: 4}", "mapping={nodes_per_machine: 4}", "data.partition=iid", "model=mlp",
            "node={rounds: 3, evaluate_every: 0}",
            "training={batch_size: 4, accumulate: 2, local_steps: 2, clip_norm: 1.0, "
            f"lr_schedule: {{name: step, step_size: 2}}, amp: {amp or 'null'}}}",
            f"sharing={{name: {rule}}}" if rule != "choco" else "sharing={name: choco, step_size: 0.3}",
        ]  # fmt: skip
        nodes = build_in_process(load(QUICKSTART, sets, {}))
        step_all(nodes)
        return torch.stack([node.training.model.parameters.clone() for node in nodes])

    found = train()
    assert bool(found.isfinite().all()) and torch.equal(found, train())


class LinearWithoutFp16(nn.Module):
    """Raises in fp16 as oneDNN's LSTM does on a CPU."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 4)

    def forward(self, inputs: Tensor) -> Tensor:
        found: Tensor = self.layer(inputs.flatten(1))
        if found.dtype == torch.float16:
            raise RuntimeError("could not create a primitive descriptor for an LSTM forward propagation primitive")
        return found


def test_a_layer_without_an_fp16_kernel_is_an_error_that_suggests_bf16() -> None:
    with pytest.raises(EnvironmentFault, match=r"training.amp: .* in fp16 on cpu; try bf16, or leave the key out"):
        make(module=LinearWithoutFp16, amp="fp16", **STEPS).local_update(0)
    make(module=LinearWithoutFp16, amp="bf16", **STEPS).local_update(0)

    class Raises(LinearWithoutFp16):
        def forward(self, inputs: Tensor) -> Tensor:
            raise RuntimeError("an error of the module itself")

    with pytest.raises(RuntimeError, match="an error of the module itself"):
        make(module=Raises, amp="fp16", **STEPS).local_update(0)
