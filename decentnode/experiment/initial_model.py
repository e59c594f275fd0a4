"""Makes the model that every node of an experiment starts from."""

from __future__ import annotations

from contextlib import AbstractContextManager

import torch
from torch import nn

from decentnode import rng
from decentnode.config.component import load_class
from decentnode.errors import UsageError, describe_error
from decentnode.experiment.tree import Experiment
from decentnode.models import MODELS
from decentnode.models.lora import add_adapters
from decentnode.models.pointwise import subsample_inputs
from decentnode.models.weights import load_weights
from decentnode.samples import DataSpec


def make_module(experiment: Experiment, data: DataSpec) -> nn.Module:
    """Returns a new module of the experiment's model, with values from torch's global generators.

    It is on the CPU, or on the meta device if that is torch's default device. Raises UsageError for every error that
    the model raises.
    """
    name = experiment.model.name
    try:
        module = load_class(name, MODELS, "model")(experiment.model).make(data)
    except UsageError:
        raise
    except Exception as error:  # impossible tensor sizes, and whatever a user's own model raises
        raise UsageError(f"making {name} raised {describe_error(error)}") from error
    if not isinstance(module, nn.Module):
        raise UsageError(f"{name} must make a torch.nn.Module, got {type(module).__name__}")
    if (lora := getattr(experiment.model, "lora", None)) is not None:
        add_adapters(module, lora)
    if any(each.device.type not in ("cpu", "meta") for each in (*module.parameters(), *module.buffers())):
        module = module.cpu()  # a user's own model may choose a device itself, but `mapping.device` decides
    return subsample_inputs(module)


def make_model(experiment: Experiment, data: DataSpec) -> nn.Module:
    """Returns the initial model, which is the same on every node. Torch's global generators keep their state.

    Raises UsageError if the initial weights do not fit this model.
    """
    with preserve_generators():
        seed = rng.torch_seed(experiment.seed, rng.GLOBAL, "initial model")
        # In a build of torch without CUDA, torch.manual_seed takes a millisecond to note the seed for each kind of
        # device. This does not ask whether there is a GPU, because forks of a process that asked cannot use the GPU.
        (torch.manual_seed if torch.backends.cuda.is_built() else torch.default_generator.manual_seed)(seed)
        module = make_module(experiment, data)
    init = getattr(experiment.model, "init", None)
    if init is not None:
        load_weights(module, experiment.base_dir / init)
    return module


def module_without_values(experiment: Experiment, data: DataSpec) -> nn.Module:
    """Returns the model on the meta device (shapes without memory); a user's own class that cannot be made there is
    made with values. Raises UsageError."""
    try:
        with torch.device("meta"):
            return make_module(experiment, data)
    except UsageError:
        if ":" not in experiment.model.name:
            raise
    with preserve_generators():
        return make_module(experiment, data)


def preserve_generators() -> AbstractContextManager[None]:
    """Returns a context manager that restores torch's global generators at its end, including those of GPUs that this
    process already uses."""
    return torch.random.fork_rng(devices=range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ())
