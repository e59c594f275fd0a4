"""The table of optimizers, those of torch.optim and the project's own, by lower-case name and with their own
arguments."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import pydantic
import torch
from torch import Tensor, nn
from torch.optim import optimizer as torch_optimizer

from decentnode.optim.accum_adam import AccumAdam, AccumAdamW
from decentnode.training.arguments import ArgumentsConfig, check_arguments, class_named, numbers_in, problem_at

REFUSED = {
    "lbfgs": "it evaluates the loss several times per step",
    "sparseadam": "it takes sparse gradients only",
    "muon": "it takes matrices only, and models have vectors too",
}
LARGE_ARGUMENT = 1e9
"""Arguments with larger values are tested in a step. The squares of smaller ones fit into float32 and int64."""
RESERVED = ("params", "capturable", "differentiable")


@functools.cache
def _optimizers() -> dict[str, type[torch.optim.Optimizer]]:
    base = torch.optim.Optimizer
    classes = [cls for cls in vars(torch.optim).values() if isinstance(cls, type) and issubclass(cls, base)]
    found = {cls.__name__.lower(): cls for cls in classes if cls is not base}
    own_optimizers = {"accumadam": AccumAdam, "accumadamw": AccumAdamW}
    return {name: cls for name, cls in found.items() if name not in REFUSED} | own_optimizers


def _class_of(name: str) -> Any:
    return class_named(name, _optimizers(), "optimizer", torch.optim.Optimizer)


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
        check_arguments(
            self.name, found, self.arguments(), RESERVED, lambda given: _check_with_trial_steps(found, given)
        )
        return self


def _as_tuples(arguments: dict[str, Any]) -> dict[str, Any]:
    return {key: tuple(value) if isinstance(value, list) else value for key, value in arguments.items()}


def trial(cls: type[torch.optim.Optimizer], arguments: dict[str, Any]) -> torch.optim.Optimizer:
    """Returns an optimizer of a single number, for checks. Raises what the class's constructor raises."""
    return _constructed(cls, [nn.Parameter(torch.zeros(1))], _as_tuples(arguments))


def _constructed(cls: Any, parameters: Sequence[nn.Parameter], arguments: dict[str, Any]) -> torch.optim.Optimizer:
    """Returns an instance of the class that `_without_compiler` returns. Raises what the class's constructor raises."""
    optimizer: torch.optim.Optimizer = _without_compiler(cls)(parameters, **arguments)
    return optimizer


@functools.cache
def _without_compiler(cls: Any) -> Any:
    """Returns a subclass without the wrappers that torch puts around the methods for its compiler, as optimizer steps
    are not compiled here: the first call of such a wrapper imports torch._dynamo, which takes 75 MB and a fifth of the
    computation of a run before its first round."""
    methods: dict[str, Any] = {}
    for name in ("add_param_group", "state_dict", "load_state_dict"):
        method: Any = getattr(cls, name)
        if getattr(method, "__globals__", {}).get("__name__") == "torch._compile":
            methods[name] = method.__wrapped__
    if cls.__module__.startswith("torch.optim."):
        methods["step"] = _observed_on_demand(inspect.unwrap(cls.step))
    try:
        attributes = {"__module__": cls.__module__, "__qualname__": cls.__qualname__, **methods}
        return type(cls)(cls.__name__, (cls,), attributes)
    except Exception:  # a user's class that cannot be subclassed
        return cls


def _observed_on_demand(step: Callable[..., Any]) -> Callable[..., Any]:
    """Returns the method `step` without an autograd graph, which it does not need, as `differentiable` is not allowed.
    torch's label for profilers, 40 Python calls per step, is left out while there are no profilers and no hooks."""
    plain = torch.no_grad()(step)
    observed = torch.optim.Optimizer.profile_hook_step(plain)

    @functools.wraps(plain)
    def method(self: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
        hooks = (self._optimizer_step_pre_hooks, self._optimizer_step_post_hooks,
                 torch_optimizer._global_optimizer_pre_hooks, torch_optimizer._global_optimizer_post_hooks)  # fmt: skip
        if any(hooks) or torch.autograd._profiler_enabled():
            return observed(self, *args, **kwargs)
        return plain(self, *args, **kwargs)

    method.hooked = True  # type: ignore[attr-defined]  # or torch's constructor adds the label to the method
    return method


def trial_of(config: OptimizerConfig) -> torch.optim.Optimizer:
    """Returns the configured optimizer for a single number."""
    return trial(_class_of(config.name), config.arguments())


def default_lr(config: OptimizerConfig) -> float | None:
    """Returns the default learning rate of the optimizer's class; None if the config sets one, or if the class has no
    default."""
    found = inspect.signature(_class_of(config.name)).parameters.get("lr")
    if "lr" in config.arguments() or found is None or not isinstance(found.default, int | float):
        return None
    return found.default


def _check_with_trial_steps(cls: type[torch.optim.Optimizer], arguments: dict[str, Any]) -> None:
    """Constructs the optimizer as `trial` does and takes two steps, as torch checks some arguments only in a step, and
    some only in the second. A user's own optimizer does not take these two, as it may not suit the trial's parameter.
    With large arguments, any optimizer also takes a step with the implementation that a run uses (`make_optimizer`):
    torch multiplies arguments, and the products must fit into float32."""
    optimizer = trial(cls, arguments)
    if cls in _optimizers().values():
        for group in optimizer.param_groups:
            group["params"][0].grad = torch.ones(1)
        for _ in range(2):
            _step_on_host(optimizer)
    if max((abs(each) for value in arguments.values() for each in numbers_in(value)), default=0) > LARGE_ARGUMENT:
        number = nn.Parameter(torch.zeros(1))
        number.grad = torch.ones(1)
        _step_on_host(_make_fused_if_supported(cls, [number], arguments))


TRIAL_ELEMENTS = 67
"""Elements of a fused step's trial: whole vectors of every kernel, of at most 64 elements, and some beyond them."""
GPU_CHECK_METHODS = ("_accelerator_graph_capture_health_check", "_cuda_graph_capture_health_check")
"""Methods of torch's optimizers, under the names of several torch versions, that each step calls and that use the
GPU."""


def _step_on_host(optimizer: torch.optim.Optimizer) -> None:
    """Take a step without torch's check for a CUDA graph capture: the check initializes CUDA, which forked processes
    then cannot use."""
    for name in GPU_CHECK_METHODS:
        setattr(optimizer, name, lambda: None)
    optimizer.step()


def try_step(config: OptimizerConfig, parameters: Sequence[nn.Parameter]) -> None:
    """Takes a step, as a run would, with parameters on the CPU that have gradients. Raises what the step raises."""
    _step_on_host(make_optimizer(config, parameters))


def make_optimizer(config: OptimizerConfig, parameters: Sequence[nn.Parameter]) -> torch.optim.Optimizer:
    """Returns the optimizer, with its fused implementation if torch has one for these parameters and the config does
    not choose.

    A fused step makes one pass over parameters, gradients and state instead of one per operation.
    """
    return _make_fused_if_supported(_class_of(config.name), parameters, config.arguments())


@functools.cache
def _arguments_of(cls: type[Any]) -> frozenset[str]:
    """Returns the names of the constructor's arguments. Reading a signature takes as long as making an optimizer."""
    return frozenset(inspect.signature(cls).parameters)


def _make_fused_if_supported(
    found: Any, parameters: Sequence[nn.Parameter], arguments: dict[str, Any]
) -> torch.optim.Optimizer:
    arguments = _as_tuples(arguments)
    optimizer: torch.optim.Optimizer
    supported = _arguments_of(found)
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
"""(class, device, dtype) -> the result of `_steps_fused`."""


def _steps_fused(cls: Any, example: Tensor, arguments: dict[str, Any]) -> bool:
    """Returns whether optimizers of a class have a fused step for parameters with the device and dtype of `example`.
    Some only fail in the first step, such as Adagrad on a GPU in torch versions that have its fused kernel for CPUs
    only. Others leave elements as they were: SGD of torch 2.13, for float16 and bfloat16 on a CPU, all but those
    beyond the last whole vector."""
    key = cls, example.device, example.dtype
    if key not in _fused:
        numbers = nn.Parameter(torch.zeros(TRIAL_ELEMENTS, dtype=example.dtype, device=example.device))
        numbers.grad = torch.ones_like(numbers)
        lr = {"lr": 1.0} if "lr" in _arguments_of(cls) else {}  # that of a warm-up may be 0
        try:
            _step_on_host(_constructed(cls, [numbers], {"fused": True, **arguments, **lr}))
            _fused[key] = bool((numbers == numbers[0]).all())
        except (RuntimeError, ValueError):
            _fused[key] = False
    return _fused[key]


IMPLEMENTATION_OPTIONS = ("fused", "foreach", "capturable")
"""Options that only affect how a step is computed; when a state is loaded, the optimizer keeps its own."""
HOST_STATE_ENTRIES = ("mu_product",)
"""State entries that torch creates on the CPU and reads in every step, but moves to the device when a state is
loaded."""


def load_state(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
    """Load the state of an optimizer that had the same parameters, on any device. State tensors get the device and the
    strides that the optimizer would have given them: those of the parameters (tensors from a file are contiguous, and
    fused steps process parameter and state in memory order). Raises what torch raises for the state of another
    optimizer.
    """
    groups = [
        {key: own[key] if key in IMPLEMENTATION_OPTIONS and key in own else value for key, value in group.items()}
        for group, own in zip(state["param_groups"], optimizer.param_groups, strict=True)
    ]
    optimizer.load_state_dict({**state, "param_groups": groups})
    for group in optimizer.param_groups:
        for p in group["params"]:
            optimizer_state = optimizer.state.get(p, {})
            for name, value in optimizer_state.items():
                if not isinstance(value, Tensor):
                    continue
                if name in HOST_STATE_ENTRIES and not group.get("capturable"):
                    optimizer_state[name] = value.cpu()
                elif value.shape == p.shape and value.stride() != p.stride():
                    optimizer_state[name] = torch.empty_like(p, dtype=value.dtype, requires_grad=False).copy_(value)
