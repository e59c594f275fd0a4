"""Mixed precision, compiled steps and memory formats, in every product with accumulation, clipping and schedules."""

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

from .contract import check_training, run
from .small import linear, make, noisy, samples

QUICKSTART = Path(__file__).parents[2] / "configs" / "quickstart.yaml"
EAGER = {"backend": "eager"}
"""Goes through the compiler's front end, and then runs what it found with torch's own kernels."""
STEPS: dict[str, Any] = {"batch_size": 4, "local_steps": 3, "optimizer": {"name": "sgd", "lr": 0.1, "momentum": 0.9}}


def images(count: int = 22, seed: int = 0) -> Samples:
    draw = np.random.default_rng(seed)
    targets = draw.integers(0, 4, count)
    inputs = draw.normal(size=(count, 3, 6, 6)) + targets[:, None, None, None]
    return Samples(inputs.astype(np.float32), targets)


def convolution() -> nn.Module:
    """Without dropout, which draws in the order in which values lie in memory."""
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
    check_training(lambda uid: make(uid, noisy, samples(24, uid), **{**STEPS, **keys}))


@pytest.mark.parametrize("amp", ["bf16", "fp16"])
def test_gradients_are_near_those_of_float32(amp: str) -> None:
    exact, mixed = (make(module=noisy, **STEPS, **keys) for keys in ({}, {"amp": amp}))
    for training in (exact, mixed):
        training.keep_gradient = True
    one, other = (training.local_update(0).last_gradient for training in (exact, mixed))
    assert one is not None and other is not None and other.dtype == torch.float32
    assert not torch.equal(one, other)
    assert float((one - other).norm() / one.norm()) < (0.05 if amp == "bf16" else 0.01)
    assert mixed.model.parameters.dtype == torch.float32


def test_evaluations_are_those_of_float32() -> None:
    exact, mixed = make(module=noisy), make(module=noisy, amp="bf16", compile=EAGER)
    assert mixed.evaluate("test") == exact.evaluate("test")


@pytest.mark.parametrize("keys", [{}, {"accumulate": 2, "clip_norm": 0.3}], ids=str)
def test_a_step_that_overflows_is_made_again_and_leaves_no_trace(
    keys: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Dropout and running statistics among what is undone: the run is that which began with the scale that fits."""
    makes = {**STEPS, **keys, "amp": "fp16", "local_steps": 1, "optimizer": {"name": "adam", "lr": 0.01}}
    monkeypatch.setattr(precision, "FIRST_SCALE", 2.0**120)
    overflowing = make(module=noisy, **makes)
    found = [overflowing.local_update(0)]
    fitting = found[0].report["loss_scale"]
    assert found[0].report["repeated_steps"] == 120 - math.log2(fitting) > 50
    monkeypatch.setattr(precision, "FIRST_SCALE", fitting)
    plain = make(module=noisy, **makes)
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


def test_the_scale_grows_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(precision, "GROWTH_STEPS", 4)
    monkeypatch.setattr(precision, "FIRST_SCALE", 2.0**3)
    training = make(**STEPS, amp="fp16")
    scales = [training.local_update(round).report["loss_scale"] for round in range(4)]
    assert scales == [2.0**3, 2.0**4, 2.0**5, 2.0**6]  # after 4, 8 and 12 steps of 3 per round
    monkeypatch.setattr(precision, "LARGEST_SCALE", 2.0**6)
    assert [training.local_update(round).report["loss_scale"] for round in range(4, 7)] == [2.0**6] * 3


def test_a_gradient_that_is_never_finite_ends_the_run() -> None:
    class Steep(nn.Module):
        """Its value is finite, its gradient is not."""

        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(6, 4)
            nn.init.zeros_(self.linear.weight)
            nn.init.zeros_(self.linear.bias)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.linear(x.flatten(1)).float().abs().sqrt()

    training = make(3, Steep, amp="fp16", **STEPS)
    with pytest.raises(Diverged, match=r"node 3: a gradient is not finite in fp16, whatever the loss scale"):
        training.local_update(0)


def test_a_state_without_the_scale_is_refused() -> None:
    with pytest.raises(CheckpointError, match="loss_scale"):
        make(amp="fp16").load_state_dict(make().state_dict())


# -- the compiler ---------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_compiled_steps_are_those_of_the_module_wherever_its_parameters_lie() -> None:
    plain, made = make(module=noisy, **STEPS), make(module=noisy, **STEPS, compile=EAGER)
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
def test_inductor(keys: dict[str, Any]) -> None:
    """Under --stress. Real code: near the plain steps, and the same bits again."""
    compile = {"dynamic": True} if "dynamic" in keys else True
    amp = keys.get("amp")
    trainings = [make(module=convolution, train=images(), **STEPS, amp=amp, compile=each)
                 for each in (False, compile, compile)]  # fmt: skip
    plain, one, other = (run(each, range(1)) for each in trainings)
    assert float((plain - one).norm() / plain.norm()) < (5e-3 if amp else 1e-5)
    assert torch.equal(one, other)
    assert torch.equal(*(run(each, range(1, 6)) for each in trainings[1:]))


def test_no_compiler_is_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setattr(compiling.shutil, "which", lambda _: None)
    with pytest.raises(EnvironmentFault, match=r"training\.compile needs a C\+\+ compiler on a CPU, .*tried g\+\+"):
        make(compile=True)
    monkeypatch.setenv("CXX", "there-is-none")
    with pytest.raises(EnvironmentFault, match="tried CXX=there-is-none"):
        make(compile={"mode": "max-autotune"})
    monkeypatch.setattr(compiling.importlib.util, "find_spec", lambda _: None)
    with pytest.raises(EnvironmentFault, match="needs triton for a GPU"):
        compiling.compiled(linear(), CompileConfig(dynamic=False), torch.device("cuda"))


@pytest.mark.slow
def test_what_the_compiler_refuses_is_a_sentence() -> None:
    with pytest.raises(EnvironmentFault, match=r"training\.compile\.backend must be one of .*inductor.*, got 'tensor'"):
        make(compile={"backend": "tensor"})

    class Branches(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(6, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            found: torch.Tensor = self.linear(x.flatten(1))
            return -found if float(x.sum()) > 1e9 else found

    make(module=Branches, compile=EAGER).local_update(0)  # in two pieces
    torch._dynamo.reset()  # which are of the class, and would do
    with pytest.raises(EnvironmentFault, match=r"training\.compile: this model cannot be compiled here: ."):
        make(module=Branches, compile={**EAGER, "fullgraph": True}).local_update(0)


@pytest.fixture
def recompile_limit() -> Iterator[Callable[[int], object]]:
    """Sets the limit for one test. monkeypatch would delete the option when it is undone, as torch keeps it elsewhere
    than in the module, and then every later compilation of the process fails."""
    with contextlib.ExitStack() as until_the_end:
        yield lambda limit: until_the_end.enter_context(torch._dynamo.config.patch(cache_size_limit=limit))
        torch._dynamo.reset()
    assert torch._dynamo.config.cache_size_limit >= 8


@pytest.mark.slow
def test_other_models_of_a_process_do_not_use_up_the_shapes_of_one(recompile_limit: Callable[[int], object]) -> None:
    """All are of the class nn.Sequential; each has two shapes of batches. Nodes with one model share its code."""
    recompile_limit(2)
    torch._dynamo.reset()
    compiled, alive = [], []
    for width in (4, 4, 8, 9):
        alive.append(make(module=functools.partial(of_width, width), batch_size=5, local_epochs=1, compile=EAGER))
        before = torch._dynamo.utils.counters["stats"]["unique_graphs"]
        alive[-1].local_update(0)
        compiled.append(torch._dynamo.utils.counters["stats"]["unique_graphs"] - before)
    assert compiled == [2, 0, 2, 2]


def of_width(width: int) -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(6, width), nn.Linear(width, 4))


def test_more_shapes_than_are_kept_are_an_error_and_not_other_bits(recompile_limit: Callable[[int], object]) -> None:
    recompile_limit(1)
    torch._dynamo.reset()
    training = make(batch_size=5, local_epochs=1, compile=EAGER)  # 23 samples: the last batch has 3
    with pytest.raises(EnvironmentFault, match="batches have more than 1 shapes; dynamic: true makes one code for all"):
        training.local_update(0)


class Marks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.last = nn.Embedding(9, 6), nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.last(self.embedding(x).mean(1))
        return found


@pytest.mark.parametrize("dynamic", [None, False], ids=str)
def test_rows_of_unequal_length_have_one_code_unless_told_otherwise(
    dynamic: bool | None, recompile_limit: Callable[[int], object]
) -> None:
    """Nine rounds of nine lengths; the steps of one are padded together."""
    recompile_limit(2)
    torch._dynamo.reset()
    lengths = np.arange(2, 20)
    rows = Rows(np.arange(200) % 9, np.arange(18), lengths)
    plain, training = (
        make(module=Marks, train=Samples(rows, np.arange(18) % 4, ids=True), batch_size=2, shuffle=False, compile=each)
        for each in (False, {**EAGER, "dynamic": dynamic})
    )
    if dynamic is None:
        assert torch.equal(run(training, range(9)), run(plain, range(9)))
    else:
        with pytest.raises(EnvironmentFault, match="dynamic: true makes one code for all"):
            run(training, range(9))


# -- memory formats, and the whole run ------------------------------------------------------------------------------


def test_channels_last_is_another_order_of_the_same_numbers() -> None:
    def last() -> nn.Module:
        return convolution().to(memory_format=torch.channels_last)  # type: ignore[call-overload,no-any-return]

    plain = make(module=convolution, train=images(), **STEPS)
    other = make(module=last, train=images(), **STEPS, channels_last=True)
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
def test_products_repeat_bit_for_bit_in_a_run(amp: str | None, rule: str) -> None:
    """Accumulation, clipping and a schedule with rules that keep a state, with mixed precision or without."""
    def models() -> torch.Tensor:
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

    found = models()
    assert bool(found.isfinite().all()) and torch.equal(found, models())


class Halves(nn.Module):
    """A layer that has no 16-bit form, as oneDNN's LSTM on a CPU."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 4)

    def forward(self, inputs: Tensor) -> Tensor:
        found: Tensor = self.layer(inputs.flatten(1))
        if found.dtype == torch.float16:
            raise RuntimeError("could not create a primitive descriptor for an LSTM forward propagation primitive")
        return found


def test_a_layer_without_a_form_in_16_bits_is_told_with_what_to_change() -> None:
    with pytest.raises(EnvironmentFault, match=r"training.amp: .* in fp16 on cpu; try bf16, or leave the key out"):
        make(module=Halves, amp="fp16", **STEPS).local_update(0)
    make(module=Halves, amp="bf16", **STEPS).local_update(0)
    with pytest.raises(RuntimeError, match="mine"):
        unknown = type("Unknown", (Halves,), {"forward": lambda *_: (_ for _ in ()).throw(RuntimeError("mine"))})
        make(module=unknown, amp="fp16", **STEPS).local_update(0)
