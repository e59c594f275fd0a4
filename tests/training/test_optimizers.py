"""Optimizers as runs make them: their steps equal torch's, and torch's compiler is not imported."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from decentnode.training.optimizers import OptimizerConfig, _optimizers, load_state, make_optimizer

ARGUMENTS: dict[str, dict[str, Any]] = {"sgd": {"lr": 0.1, "momentum": 0.9, "nesterov": True}, "asgd": {"lr": 0.1}}


class SgdWithClassArgument(torch.optim.SGD):
    """A user's class of which the package cannot make a subclass without arguments."""

    def __init_subclass__(cls, *, name: str) -> None:
        raise AssertionError(name)


class SgdWithCustomStep(torch.optim.Optimizer):
    """A user's optimizer with its own `step`."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})
        self.steps = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        self.steps += 1
        for group in self.param_groups:
            for p in group["params"]:
                p.sub_(p.grad, alpha=group["lr"])


def parameters() -> list[nn.Parameter]:
    torch.manual_seed(1)
    return [nn.Parameter(torch.randn(3, 2)), nn.Parameter(torch.randn(5))]


def run_steps(optimizer: torch.optim.Optimizer, steps: int) -> list[torch.Tensor]:
    every = [p for group in optimizer.param_groups for p in group["params"]]
    for _ in range(steps):
        for p in every:
            p.grad = p.detach().sin()
        optimizer.step()
    return [p.detach().clone() for p in every]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("name", ["sgd", "adam", "adamw", "adagrad"])
def test_a_step_moves_every_element_of_a_long_parameter(name: str, dtype: torch.dtype) -> None:
    # torch 2.13's fused SGD leaves whole vectors of 16-bit elements as they were
    p = nn.Parameter(torch.zeros(133, dtype=dtype))
    for lr in (0.0, 0.25):  # the first one is that of a schedule that warms up
        optimizer = make_optimizer(OptimizerConfig(name=name, lr=lr), [p])
    p.grad = torch.ones_like(p)
    optimizer.step()
    assert torch.allclose(p, torch.full_like(p, -0.25), rtol=1e-3)


@pytest.mark.parametrize("name", sorted(_optimizers()))
def test_steps_equal_those_of_the_torch_optimizer(name: str) -> None:
    of = _optimizers()[name]
    config = OptimizerConfig(name=name, **ARGUMENTS.get(name, {}))
    made = make_optimizer(config, parameters())
    how = {key: made.defaults[key] for key in ("fused", "foreach") if made.defaults.get(key)}
    plain = of(parameters(), **config.arguments(), **how)
    assert isinstance(made, of) and type(made).__name__ == of.__name__
    assert all(map(torch.equal, run_steps(made, 3), run_steps(plain, 3)))

    again = make_optimizer(config, parameters())
    for mine, source in zip(again.param_groups[0]["params"], made.param_groups[0]["params"], strict=True):
        mine.data.copy_(source)
    load_state(again, made.state_dict())
    assert all(map(torch.equal, run_steps(again, 2), run_steps(plain, 2)))


def test_optimizer_steps_are_not_recorded_by_autograd() -> None:
    made = make_optimizer(OptimizerConfig(name="sgd", lr=0.1), parameters())
    assert all(not each.requires_grad for each in run_steps(made, 1))
    assert all(p.is_leaf for p in made.param_groups[0]["params"])


def test_profilers_and_step_hooks_see_the_steps() -> None:
    made, calls = make_optimizer(OptimizerConfig(name="sgd", lr=0.1), parameters()), []
    made.register_step_post_hook(lambda *_: calls.append("stepped"))
    with torch.profiler.profile() as profile:
        run_steps(made, 1)
    assert calls == ["stepped"]
    assert "Optimizer.step#SGD.step" in {each.key for each in profile.key_averages()}


@pytest.mark.parametrize("of", [SgdWithClassArgument, SgdWithCustomStep])
def test_optimizers_of_the_user_step_as_their_class_does(of: type[torch.optim.Optimizer]) -> None:
    config = OptimizerConfig(name=f"{__name__}:{of.__name__}", lr=0.1)
    made = make_optimizer(config, parameters())
    assert isinstance(made, of)
    assert all(map(torch.equal, run_steps(made, 2), run_steps(of(parameters(), lr=0.1), 2)))  # type: ignore[call-arg]


RUN = """
import sys, decentnode
config = {"name": "small", "graph": {"name": "ring", "nodes": 3}, "data": {"name": "digits"},
          "model": {"name": "mlp", "hidden": [4]}, "communication": {"name": "inproc"},
          "training": {"optimizer": {"name": "adam"}, "clip_norm": 1, "lr_schedule": {"name": "cosine", "T_max": 9}},
          "node": {"rounds": 4, "checkpoint": {"every": 2}, "evaluate_every": 2}}
first = decentnode.Experiment.from_config(config).run(progress=False, processes=False, rounds=2)
decentnode.Experiment.from_config(config).run(progress=False, processes=False, resume=first)
sys.exit("torch._dynamo" in sys.modules)
"""


@pytest.mark.slow
def test_a_run_does_not_import_the_compiler(tmp_path: Path) -> None:
    """Importing it costs 75 MB, and a fifth of the time that the fork server takes before it forks nodes."""
    done = subprocess.run([sys.executable, "-c", RUN], cwd=tmp_path, check=False, capture_output=True, text=True,
                          timeout=100)  # fmt: skip
    assert done.returncode == 0, done.stderr


def test_hooks_and_profilers_see_the_steps_of_torch_optimizers() -> None:
    optimizer = make_optimizer(OptimizerConfig(name="sgd"), parameters())
    label, seen = "Optimizer.step#SGD.step", []
    handle = optimizer.register_step_post_hook(lambda *_: seen.append("own"))
    run_steps(optimizer, 1)
    handle.remove()
    handle = register_optimizer_step_pre_hook(lambda *_: seen.append("global"))
    run_steps(optimizer, 1)
    handle.remove()
    assert seen == ["own", "global"]
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        run_steps(optimizer, 2)
    assert [each.count for each in profiler.key_averages() if each.key == label] == [2]


def test_without_hooks_and_profilers_a_step_makes_no_label(monkeypatch: pytest.MonkeyPatch) -> None:
    optimizer, labels = make_optimizer(OptimizerConfig(name="adam"), parameters()), []
    monkeypatch.setattr(torch.autograd.profiler, "record_function", labels.append)
    run_steps(optimizer, 2)
    assert not labels
