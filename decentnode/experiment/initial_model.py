"""The model that every node of an experiment starts from."""

from __future__ import annotations

from contextlib import AbstractContextManager

import torch
from torch import nn

from decentnode import rng
from decentnode.config.component import load_class
from decentnode.errors import UsageError, told
from decentnode.experiment.tree import Experiment
from decentnode.models import MODELS
from decentnode.models.lora import add_adapters
from decentnode.models.pointwise import thin_inputs
from decentnode.models.weights import load_weights
from decentnode.samples import DataSpec


def make_module(experiment: Experiment, data: DataSpec) -> nn.Module:
    """A module of the experiment's model, on the CPU, or on the meta device where that is torch's default, with values
    from torch's global generators. Raises UsageError, whatever the model raises."""
    name = experiment.model.name
    try:
        module = load_class(name, MODELS, "model")(experiment.model).make(data)
    except UsageError:
        raise
    except Exception as error:  # sizes that no tensor can have, and what a model of one's own raises
        raise UsageError(f"making {name} raised {told(error)}") from error
    if not isinstance(module, nn.Module):
        raise UsageError(f"{name} must make a torch.nn.Module, got {type(module).__name__}")
    if (lora := getattr(experiment.model, "lora", None)) is not None:
        add_adapters(module, lora)
    if any(each.device.type not in ("cpu", "meta") for each in (*module.parameters(), *module.buffers())):
        module = module.cpu()  # where a model of one's own put itself, and `mapping.device` may say another place
    return thin_inputs(module)


def make_model(experiment: Experiment, data: DataSpec) -> nn.Module:
    """The initial model: the same on every node. Torch's global generators are left as they were.

    Raises UsageError where the weights to start from are not those of this model.
    """
    with generators_kept():
        seed = rng.torch_seed(experiment.seed, rng.GLOBAL, "initial model")
        # Where torch has no CUDA, its manual_seed takes a millisecond to note that for each kind of device. Whether
        # there is a GPU is not asked: no fork of a process that has asked could use it.
        (torch.manual_seed if torch.backends.cuda.is_built() else torch.default_generator.manual_seed)(seed)
        module = make_module(experiment, data)
    init = getattr(experiment.model, "init", None)
    if init is not None:
        load_weights(module, experiment.base_dir / init)
    return module


def module_without_values(experiment: Experiment, data: DataSpec) -> nn.Module:
    """The model on the meta device: shapes without memory; a class of one's own that cannot be made there with its
    values. Raises UsageError."""
    try:
        with torch.device("meta"):
            return make_module(experiment, data)
    except UsageError:
        if ":" not in experiment.model.name:
            raise
    with generators_kept():
        return make_module(experiment, data)


def generators_kept() -> AbstractContextManager[None]:
    """A block behind which torch's global generators are what they were before, also those of GPUs that this process
    uses already."""
    return torch.random.fork_rng(devices=range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ())
