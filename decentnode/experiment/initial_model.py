"""The model that every node of an experiment starts from."""

from __future__ import annotations

import torch
from torch import nn

from decentnode import rng
from decentnode.config.component import load_class
from decentnode.errors import UsageError, told
from decentnode.experiment.tree import Experiment
from decentnode.models import MODELS
from decentnode.models.lora import add_adapters
from decentnode.models.weights import load_weights
from decentnode.samples import DataSpec


def make_module(experiment: Experiment, data: DataSpec) -> nn.Module:
    """A module of the experiment's model, on torch's default device, with values from its global generator. Raises
    UsageError, whatever the model raises."""
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
    return module


def make_model(experiment: Experiment, data: DataSpec) -> nn.Module:
    """The initial model: the same on every node. Torch's global generator is left as it was.

    Raises UsageError where the weights to start from are not those of this model.
    """
    with torch.random.fork_rng(devices=[]):
        seed = rng.torch_seed(experiment.seed, rng.GLOBAL, "initial model")
        # where there is no other device, torch.manual_seed takes a millisecond to note that for each kind of device
        (torch.manual_seed if torch.accelerator.is_available() else torch.default_generator.manual_seed)(seed)
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
    with torch.random.fork_rng(devices=[]):
        return make_module(experiment, data)
