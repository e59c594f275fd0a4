"""Optimizers of torch.optim and of our own by lower-case name, with their own arguments."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import pydantic
import torch
from torch import nn

from decentnode.optim.accum_adam import AccumAdam, AccumAdamW
from decentnode.training.arguments import ArgumentsConfig, check_arguments, chosen, problem_at

REFUSED = {
    "lbfgs": "it evaluates the loss several times per step",
    "sparseadam": "it takes sparse gradients only",
    "muon": "it takes matrices only, and models have vectors too",
}
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
        check_arguments(self.name, found, self.arguments(), RESERVED, lambda given: trial(found, given))
        return self


def _as_tuples(arguments: dict[str, Any]) -> dict[str, Any]:
    return {key: tuple(value) if isinstance(value, list) else value for key, value in arguments.items()}


def trial(of: type[torch.optim.Optimizer], arguments: dict[str, Any]) -> torch.optim.Optimizer:
    """Returns an optimizer of one number, for checks. Raises what the class raises.

    Optimizer.add_param_group is wrapped in something that imports torch._dynamo, 72 MB in a second; reading a config
    does without.
    """
    make: Any = of
    wrapped = torch.optim.Optimizer.add_param_group
    torch.optim.Optimizer.add_param_group = getattr(wrapped, "__wrapped__", wrapped)  # type: ignore[method-assign]
    try:
        optimizer: torch.optim.Optimizer = make([nn.Parameter(torch.zeros(1))], **_as_tuples(arguments))
        return optimizer
    finally:
        torch.optim.Optimizer.add_param_group = wrapped  # type: ignore[method-assign]


def trial_of(config: OptimizerConfig) -> torch.optim.Optimizer:
    """Returns the configured optimizer for one number."""
    return trial(_class_of(config.name), config.arguments())


def make_optimizer(config: OptimizerConfig, parameters: Sequence[nn.Parameter]) -> torch.optim.Optimizer:
    """Returns the optimizer, fused where torch has a fused kernel for these parameters and the config does not choose.

    Fused: one pass over parameter, gradient and state instead of one per operation.
    """
    found: Any = _class_of(config.name)
    arguments = _as_tuples(config.arguments())
    optimizer: torch.optim.Optimizer
    supported = inspect.signature(found).parameters
    if not {"fused", "foreach"} & set(arguments):
        if "fused" in supported:
            try:
                optimizer = found(parameters, fused=True, **arguments)
                return optimizer
            except (RuntimeError, ValueError):  # no fused kernel for this device, dtype or option
                pass
        if "foreach" in supported:
            arguments["foreach"] = True
    optimizer = found(parameters, **arguments)
    return optimizer
