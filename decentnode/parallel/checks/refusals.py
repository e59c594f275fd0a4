"""Refuses, with the reason, models and options that ranks cannot train with: mostly at construction."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterable, Sequence
from numbers import Real
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import is_lazy
from torch.optim import LBFGS, Optimizer
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from decentnode.optim.outer import OuterOptimizer
from decentnode.parallel.checks.memory import overlaps, shares_elements
from decentnode.parallel.process_group.shutdown import exchanged_by_wrapper

MAKERS = {
    "optim_fn": "lambda named: torch.optim.SGD([p for _, p in named], lr=0.1)",
    "optimizer": "functools.partial(torch.optim.SGD, lr=0.1)",
    "lr_scheduler_fn": "functools.partial(torch.optim.lr_scheduler.StepLR, step_size=10)",
}
"""Examples of these arguments, for messages."""
CHOICE = "Either wrap the model with DecentralizedDataParallel, or an ordinary optimizer with CommOptimizer"
TRANSPORTS = ("auto", "shared_memory", "collective", "sockets")


def check_options(
    transport: str, bucket_size_in_mb: float, grad_clip_norm: float, timeout_seconds: float,
    local_world_size: int | None,
) -> None:  # fmt: skip
    """Raises ValueError for an unknown transport, and for numbers out of range."""
    if transport not in TRANSPORTS:
        raise ValueError(f"transport must be one of {', '.join(TRANSPORTS)}, got {transport!r}")
    for name, number in (("bucket_size_in_mb", bucket_size_in_mb), ("grad_clip_norm", grad_clip_norm),
                         ("timeout_seconds", timeout_seconds)):  # fmt: skip
        if not isinstance(number, Real):
            raise ValueError(f"{name} must be a number, got {number!r}")
    if not 0 <= bucket_size_in_mb < float("inf"):
        raise ValueError(f"bucket_size_in_mb must be 0 or more, got {bucket_size_in_mb}")
    if not grad_clip_norm >= 0:
        raise ValueError(f"grad_clip_norm must be positive, or 0 for no clipping, got {grad_clip_norm}")
    if local_world_size is not None and local_world_size < 0:
        raise ValueError(f"local_world_size must be positive, got {local_world_size}")
    if not timeout_seconds > 0:
        raise ValueError(f"timeout_seconds must be positive, got {timeout_seconds}")


def check_makers(optim_fn: Any, lr_scheduler_fn: Any, optimizer: Any) -> None:
    """Raises ValueError unless exactly one of `optim_fn` and `optimizer` is given, and every given one is callable."""
    if (optim_fn is None) == (optimizer is None):
        raise ValueError("exactly one of optim_fn and optimizer must be given, such as "
                         f"optimizer={MAKERS['optimizer']}: backward() takes the optimizer's step")
    for name, given in (("optim_fn", optim_fn), ("lr_scheduler_fn", lr_scheduler_fn), ("optimizer", optimizer)):
        if given is not None and not callable(given):
            raise ValueError(f"{name} must be a function that makes one for the wrapper, such as {MAKERS[name]}, got "
                             f"the object {type(given).__name__}")  # fmt: skip


def check_scaler(scaler: Any, step_in_backward: bool) -> None:
    """Raises ValueError for a scaler if the script takes the steps."""
    if scaler is not None and not step_in_backward:
        raise ValueError("scaler must be None with step_in_backward=False: the script steps with "
                         "scaler.step(model.optimizer) and scaler.update()")  # fmt: skip


def check_model(model: Module, wrapper: type[Module], views: bool) -> None:
    """Raises ValueError for a module that is wrapped already, and for parameters and buffers that cannot be exchanged.
    wrapper: the class that wraps. views: whether parameters are moved into the buckets."""
    for name, each in model.named_modules():
        if isinstance(each, wrapper | DistributedDataParallel):
            where = f"its module {name}" if name else "it"
            raise ValueError(f"model must not be wrapped already, {where} is a {type(each).__name__}: give its .module")
    for name, p in model.named_parameters():
        _check_parameter(name, p)
    for name, buffer in model.named_buffers():
        if is_lazy(buffer) or buffer.is_meta or buffer.layout is not torch.strided:
            raise ValueError(f"buffer {name} must be a dense tensor with memory, got {_describe(buffer)}")
    if views:
        _check_shared(model)


def check_exists(name: str, p: Tensor) -> None:
    """Raises ValueError for a parameter without memory, and for one that cannot be changed because of inference mode.
    name: the parameter's, for messages."""
    if is_lazy(p) or p.is_meta:
        raise ValueError(f"{name} must be a dense tensor with memory, got {_describe(p)}")
    if p.is_inference() or torch.is_inference_mode_enabled():
        raise ValueError(f"{name} must be made, and wrapped, outside of torch.inference_mode()")


def _check_parameter(name: str, p: Tensor) -> None:
    check_exists(f"parameter {name}", p)
    if p.layout is not torch.strided or is_traceable_wrapper_subclass(p):
        raise ValueError(f"parameter {name} must be a dense tensor with memory, got {_describe(p)}")
    if p.requires_grad:
        _check_elements(f"parameter {name}", p)


def _check_elements(name: str, p: Tensor) -> None:
    if shares_elements(p):
        raise ValueError(f"{name} must have memory for each of its elements, got strides {p.stride()} for the shape "
                         f"{tuple(p.shape)}: clone() it first")  # fmt: skip


def check_separate_memory(named: Sequence[tuple[str, Tensor]]) -> None:
    """Raises ValueError for parameters that share memory, which would be pulled twice. named: (name, parameter)."""
    for name, p in named:
        _check_elements(name, p)
    pair = overlaps(named, [])
    if pair is not None:
        raise ValueError(f"parameters must not share memory with others, {pair[0]} shares memory with {pair[1]}, "
                         "which would be pulled twice: use one Parameter in both places")  # fmt: skip


def _describe(tensor: Tensor) -> str:
    if is_lazy(tensor):
        return "one without a shape yet: run a forward pass first"
    if tensor.is_meta:
        return "one on the device meta"
    return type(tensor).__name__ if tensor.layout is torch.strided else str(tensor.layout)


def _check_shared(model: Module) -> None:
    trained = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    others = [*((name, p) for name, p in model.named_parameters() if not p.requires_grad), *model.named_buffers()]
    pair = overlaps(trained, others)
    if pair is not None:
        raise ValueError(f"parameters must not share memory with other parameters or buffers, {pair[0]} shares memory "
                         f"with {pair[1]}, and buckets would separate them: use one Parameter in both places, or "
                         "param_as_bucket_view=False")  # fmt: skip


def check_optimizer(optimizer: Optimizer, scheduler: Any) -> None:
    """Raises ValueError for an optimizer or scheduler whose step needs what is not known when a backward pass ends."""
    check_steps_alone(optimizer)
    if isinstance(scheduler, ReduceLROnPlateau):
        raise ValueError("lr_scheduler_fn must make a scheduler that steps without a metric, got ReduceLROnPlateau: "
                         "create it with wrapper.optimizer, and step it after each evaluation with a metric that is "
                         "the same on all ranks")  # fmt: skip


def check_steps_alone(optimizer: Optimizer) -> None:
    """Raises ValueError for an optimizer that exchanges with other ranks itself, or that evaluates the loss several
    times in a step."""
    if isinstance(optimizer, OuterOptimizer):
        raise ValueError(f"optimizer must not exchange with other ranks itself, got a {type(optimizer).__name__}: "
                         f"ranks would exchange twice. {CHOICE}")  # fmt: skip
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    if isinstance(optimizer, LBFGS) or (closure is not None and closure.default is inspect.Parameter.empty):
        raise ValueError(f"optimizer must step without a closure: {type(optimizer).__name__} evaluates the loss "
                         "several times in a step, between which ranks cannot exchange")  # fmt: skip


def check_not_wrapped(params: Iterable[Tensor]) -> None:
    """Raises ValueError for parameters of a wrapped model, which are exchanged and stepped by its wrapper."""
    if exchanged_by_wrapper(params):
        raise ValueError("parameters must not be those of a model that DecentralizedDataParallel wraps, which "
                         f"exchanges and steps them itself. {CHOICE}, or close() the wrapper first")  # fmt: skip


def refuse_unfrozen(name: str) -> None:
    """Raises RuntimeError for a parameter that was frozen when wrapped, is trained now and cannot be exchanged."""
    raise RuntimeError(f"parameter {name} was frozen when the model was wrapped, so ranks would train it without "
                       "exchanging it: wrap the model while all parameters that will be trained require gradients, "
                       "and freeze them afterwards")


def refuse_averaged_gradients(wrapper: Module) -> None:
    """Raises RuntimeError if torch's DistributedDataParallel, around the wrapper, runs this forward pass."""
    around = DistributedDataParallel._get_active_ddp_module()
    if around is not None and any(each is wrapper for each in around.modules()):
        raise RuntimeError("the wrapped model must not be inside torch's DistributedDataParallel, which averages the "
                           "gradients of all ranks: do not let a framework wrap it again "
                           "(docs/howto/own_script.rst)")  # fmt: skip


def refuse_compiled_autograd() -> None:
    """Raises RuntimeError while compiled autograd is on: it drops the callbacks at the end of a backward pass."""
    loaded = sys.modules.get("torch._dynamo.compiled_autograd")
    config = sys.modules.get("torch._dynamo.config")
    if any((getattr(loaded, "compiled_autograd_enabled", False), getattr(loaded, "in_compiled_autograd_region", False),
            getattr(config, "compiled_autograd", False))):  # fmt: skip
        raise RuntimeError("compiled autograd must be off (torch._dynamo.config.compiled_autograd = False): it does "
                           "not report the end of a backward pass, at which the wrapper steps")  # fmt: skip
