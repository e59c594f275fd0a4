"""Any torch module as a model: `model: {name: package.module:Class, ...}`."""

from __future__ import annotations

import functools
from typing import Any, ClassVar

from torch import nn

from decentnode.config import component
from decentnode.config.signature import arguments, config_of, parameters_of
from decentnode.errors import UsageError, describe_error
from decentnode.models.base import Model, ModelConfig
from decentnode.samples import FACTS, DataSpec


class OwnModel(Model):
    """Makes modules of a user's class that need not know decentnode. Its constructor gets the remaining keys and, if it
    takes arguments of these names, the input_shape, num_classes, vocabulary, users and items of the data."""

    Config: ClassVar[type[component.Config]] = ModelConfig
    adapted_class: ClassVar[type[nn.Module]]
    """The class of the modules."""

    def __init__(self, config: component.Config) -> None:
        self.config = config

    def make(self, data: DataSpec) -> nn.Module:
        made, given = type(self).adapted_class, arguments(self.config, type(self).adapted_class, FACTS)
        known = data.facts()
        for name, parameter in parameters_of(made).items():
            if name in given or name not in FACTS:
                continue
            if name in known:
                given[name] = known[name]
            elif parameter.default is parameter.empty:
                raise UsageError(f"{name} must be given: {made.__name__} needs it, but this data has none")
        try:
            module: nn.Module = made(**given)
        except Exception as error:  # a user's own constructor may raise anything
            written = ", ".join(f"{key}={value!r}" for key, value in given.items())
            raise UsageError(f"making {made.__name__}({written}) raised {describe_error(error)}") from error
        return module


@functools.cache
def adapted(chosen: type[Any]) -> type[Model] | None:
    """Returns the model that makes modules of a class; None if the class is not a module."""
    if not issubclass(chosen, nn.Module):
        return None
    filled = FACTS & parameters_of(chosen).keys()
    config = config_of(chosen, ModelConfig, filled)
    return type(chosen.__name__, (OwnModel,), {"Config": config, "adapted_class": chosen, "__doc__": chosen.__doc__,
                                               "__module__": chosen.__module__})  # fmt: skip
