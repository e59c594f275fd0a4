"""Optimizers of torch.optim and of our own by lower-case name, with their own arguments."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Sequence
from typing import Any

import pydantic
import torch
from torch import Tensor, nn

from decentnode.optim.accum_adam import AccumAdam, AccumAdamW
from decentnode.training.arguments import ArgumentsConfig, check_arguments, chosen, numbers_in, problem_at

REFUSED = {
    "lbfgs": "it evaluates the loss several times per step",
    "sparseadam": "it takes sparse gradients only",
    "muon": "it takes matrices only, and models have vectors too",
}
LARGE = 1e9
"""Arguments beyond it are tried in a step: their squares fit into float32, and into int64."""
RESERVED = ("params", "capturable", "differentiable")


def _optimizers() -> dict[str, type[torch.optim.Optimizer]]:
    base = torch.optim.Optimizer
    classes = [it for it in vars(torch.optim).values() if isinstance(it, type) and issubclass(it, base)]
    found = {it.__name__.lower(): it for it in classes if it is not base}
    ours = {"accumadam": AccumAdam, "accumadamw": AccumAdamW}
    return {name: it for name, it in found.items() if name not in REFUSED} | ours


def _class_of(name: str) -> Any:
    return chosen(name, _optimizers(), "optimizer", torch.optim.Optimizer)


class OptimizerConfig(ArgumentsConfig):
    """`{name: sgd, lr: 0.1, momentum: 0.9}`: further keys are the arguments of the torch.optim class."""

    name: str = "sgd"
    """Class of torch.optim in lower case: sgd, adam, adamw, adagrad, rmsprop, nadam ...; or accumadam, accumadamw; or
    package.module:Class, derived from torch.optim.Optimizer."""

    @pydantic.model_validator(mode="after")
    def _known(self) -> OptimizerConfig:
        if self.name in REFUSED:
            raise problem_at("name", f"must be another optimizer than {self.name}: {REFUSED[self.name]}", self.name)
        found = _class_of(self.name)
        check_arguments(self.name, found, self.arguments(), RESERVED, lambda given: _tried(found, given))
        return self


def _as_tuples(arguments: dict[str, Any]) -> dict[str, Any]:
    return {key: tuple(value) if isinstance(value, list) else value for key, value in arguments.items()}


def trial(of: type[torch.optim.Optimizer], arguments: dict[str, Any]) -> torch.optim.Optimizer:
    """Returns an optimizer of one number, for checks. Raises what the class raises."""
    return _constructed(of, [nn.Parameter(torch.zeros(1))], _as_tuples(arguments))


def _constructed(of: Any, parameters: Sequence[nn.Parameter], arguments: dict[str, Any]) -> torch.optim.Optimizer:
    """Returns an optimizer of a class as `_without_compiler` has it. Raises what the class raises."""
    optimizer: torch.optim.Optimizer = _without_compiler(of)(parameters, **arguments)
    return optimizer


@functools.cache
def _without_compiler(of: Any) -> Any:
    """Returns the class without what torch has around its methods for its compiler, as no step is compiled here: the
    first call of any imports torch._dynamo, 75 MB and a fifth of what a run computes before its first round."""
    methods: dict[str, Any] = {}
    for name in ("add_param_group", "state_dict", "load_state_dict"):
        method: Any = getattr(of, name)
        if getattr(method, "__globals__", {}).get("__name__") == "torch._compile":
            methods[name] = method.__wrapped__
    if of.__module__.startswith("torch.optim."):  # their steps make no graph, as none is `differentiable`
        methods["step"] = torch.no_grad()(inspect.unwrap(of.step))
    try:
        return type(of)(of.__name__, (of,), {"__module__": of.__module__, "__qualname__": of.__qualname__, **methods})
    except Exception:  # a class of one's own that nobody may derive from
        return of


def trial_of(config: OptimizerConfig) -> torch.optim.Optimizer:
    """Returns the configured optimizer for one number."""
    return trial(_class_of(config.name), config.arguments())


def default_lr(config: OptimizerConfig) -> float | None:
    """Returns the learning rate that follows from the default of the optimizer's class; None where one was written, or
    the class has none."""
    found = inspect.signature(_class_of(config.name)).parameters.get("lr")
    if "lr" in config.arguments() or found is None or not isinstance(found.default, int | float):
        return None
    return found.default


def _tried(of: type[torch.optim.Optimizer], arguments: dict[str, Any]) -> None:
    """As `trial`, and takes two steps: torch looks at some arguments in a step alone, and at some in the second. One's
    own optimizer may be for other parameters than the trial's. With large arguments as a run steps, too: torch
    multiplies them, and what comes of it must fit into float32."""
    optimizer = trial(of, arguments)
    if of in _optimizers().values():
        for group in optimizer.param_groups:
            group["params"][0].grad = torch.ones(1)
        for _ in range(2):
            _step_on_host(optimizer)
    if max((abs(each) for value in arguments.values() for each in numbers_in(value)), default=0) > LARGE:
        number = nn.Parameter(torch.zeros(1))
        number.grad = torch.ones(1)
        _step_on_host(_made(of, [number], arguments))


LOOKS_AT_THE_GPU = ("_accelerator_graph_capture_health_check", "_cuda_graph_capture_health_check")
"""Methods of an optimizer, in one version of torch or another, that each step calls."""


def _step_on_host(optimizer: torch.optim.Optimizer) -> None:
    """Take a step without torch's look at whether the GPU records a graph: it uses the GPU, and then forks cannot."""
    for name in LOOKS_AT_THE_GPU:
        setattr(optimizer, name, lambda: None)
    optimizer.step()


def try_step(config: OptimizerConfig, parameters: Sequence[nn.Parameter]) -> None:
    """Changes parameters that have gradients, on the CPU, as a step of a run would. Raises what the step raises."""
    _step_on_host(make_optimizer(config, parameters))


def make_optimizer(config: OptimizerConfig, parameters: Sequence[nn.Parameter]) -> torch.optim.Optimizer:
    """Returns the optimizer, fused where torch has a fused kernel for these parameters and the config does not choose.

    Fused: one pass over parameter, gradient and state instead of one per operation.
    """
    return _made(_class_of(config.name), parameters, config.arguments())


def _made(found: Any, parameters: Sequence[nn.Parameter], arguments: dict[str, Any]) -> torch.optim.Optimizer:
    arguments = _as_tuples(arguments)
    optimizer: torch.optim.Optimizer
    supported = inspect.signature(found).parameters
    if not {"fused", "foreach"} & set(arguments):
        if "fused" in supported:
            try:
                optimizer = _constructed(found, parameters, {"fused": True, **arguments})
                if _steps_fused(found, parameters[0], arguments):
                    return optimizer
            except (RuntimeError, ValueError):  # no fused kernel for this option
                pass
        if "foreach" in supported:
            arguments["foreach"] = True
    return _constructed(found, parameters, arguments)


_fused: dict[tuple[Any, torch.device, torch.dtype], bool] = {}
"""By class, device and dtype, what `_steps_fused` has found."""


def _steps_fused(of: Any, like: Tensor, arguments: dict[str, Any]) -> bool:
    """Whether optimizers of a class have a fused step for parameters of such a device and dtype. Some say so at the
    first step alone, as Adagrad on a GPU in versions of torch that have its kernel for CPUs only."""
    key = of, like.device, like.dtype
    if key not in _fused:
        number = nn.Parameter(torch.zeros(1, dtype=like.dtype, device=like.device))
        number.grad = torch.zeros_like(number)
        try:
            _step_on_host(_constructed(of, [number], {"fused": True, **arguments}))
            _fused[key] = True
        except (RuntimeError, ValueError):
            _fused[key] = False
    return _fused[key]


OF_THE_DEVICE = ("fused", "foreach", "capturable")
"""Options that say how a step is computed, not what: those of the optimizer at hand stay when a state is loaded."""
ON_HOST = ("mu_product",)
"""Entries of a state that torch makes in the host's memory and reads in every step, but loads to the device."""


def load_state(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
    """Load the state of an optimizer of such parameters on any device. Its tensors come to lie where the optimizer
    would have made them: on its device, in memory in the order of the parameters (a file has rows, and fused steps take
    parameter and state in the order in which they lie). Raises what torch raises for the state of another.
    """
    groups = [
        {key: own[key] if key in OF_THE_DEVICE and key in own else value for key, value in group.items()}
        for group, own in zip(state["param_groups"], optimizer.param_groups, strict=True)
    ]
    optimizer.load_state_dict({**state, "param_groups": groups})
    for group in optimizer.param_groups:
        for p in group["params"]:
            known = optimizer.state.get(p, {})
            for name, value in known.items():
                if not isinstance(value, Tensor):
                    continue
                if name in ON_HOST and not group.get("capturable"):
                    known[name] = value.cpu()
                elif value.shape == p.shape and value.stride() != p.stride():
                    known[name] = torch.empty_like(p, dtype=value.dtype, requires_grad=False).copy_(value)
