"""Image models of timm and of torchvision: `model: {name: "timm:resnet18"}`. Nothing is downloaded."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, ClassVar

import torch
from pydantic import Field
from torch import nn

from decentnode.config.component import Config
from decentnode.errors import UsageError, describe_error
from decentnode.models.base import Model, ModelConfig, image_shape, outputs_of
from decentnode.models.libraries import call_library, import_library
from decentnode.samples import DataSpec
from decentnode.system import hub_offline

AUXILIARY = {"googlenet": 0.3, "inception_v3": 0.4}
"""Models of torchvision with auxiliary outputs in training, and the weights of their losses: Szegedy et al. 2015, arXiv
1409.4842, section 5; and TensorFlow's slim, from which torchvision has its pretrained weights."""
OLDER_KEY = re.compile(r"(denselayer\d+\.(?:norm|relu|conv))\.([12]\.)")
"""Names of DenseNet's layers in weight files, which are older than torchvision's classes."""

class VisionConfig(ModelConfig):
    pretrained: bool = False
    """Whether weights come from the library's local cache; otherwise the initial weights are drawn from the run's seed.
    Nothing is downloaded."""
    arguments: dict[str, Any] = Field(default_factory=dict)
    """Arguments of the library's constructor, such as {drop_rate: 0.1}."""


class TimmConfig(VisionConfig):
    name: str = "timm:"
    """timm: and one of its models, such as timm:resnet18."""


class Timm(Model):
    """A model of timm with as many outputs as the data has classes. Needs timm (extra `timm`)."""

    Config: ClassVar[type[Config]] = TimmConfig

    def __init__(self, config: TimmConfig) -> None:
        self.config = config

    def make(self, data: DataSpec) -> nn.Module:
        name, config = self.config.name, self.config
        channels, outputs = image_shape(name, data, 1)[0], outputs_of(name, data)
        timm = import_library("timm", name, "timm")
        chosen = name.partition(":")[2]
        if not timm.is_model(chosen):
            near = ", ".join(timm.list_models(f"*{chosen}*")[:5])
            raise UsageError(f"timm has no model {chosen!r}" + (f"; it has {near}" if near else ""))
        with hub_offline():
            try:
                module: nn.Module = timm.create_model(
                    chosen, pretrained=config.pretrained, num_classes=outputs, in_chans=channels, **config.arguments)
            except Exception as error:
                why = "model.pretrained: its weights are not in the local cache; " if config.pretrained else ""
                raise UsageError(f"{why}making {name} raised {describe_error(error)}") from error
        return module


class TorchvisionConfig(VisionConfig):
    name: str = "torchvision:"
    """torchvision: and one of its models, such as torchvision:resnet18."""


class Torchvision(Model):
    """A model of torchvision with as many outputs as the data has classes. Needs a torchvision that goes with the
    installed torch."""

    Config: ClassVar[type[Config]] = TorchvisionConfig

    def __init__(self, config: TorchvisionConfig) -> None:
        self.config = config

    def make(self, data: DataSpec) -> nn.Module:
        name, config = self.config.name, self.config
        channels, outputs = image_shape(name, data, 1)[0], outputs_of(name, data)
        if channels != 3:
            raise UsageError(f"model {name} needs images of 3 channels, got {channels}")
        models: Any = import_library("torchvision.models", name)
        chosen = name.partition(":")[2]
        known = models.list_models(models)  # only classifiers: others (segmentation...) may download a backbone
        if chosen not in known:
            near = ", ".join(each for each in known if chosen in each)
            raise UsageError(f"torchvision has no model {chosen!r} that classifies images"
                             + (f"; it has {near}" if near else ""))  # fmt: skip
        given = config.arguments
        if chosen in AUXILIARY:  # as for torchvision's pretrained weights, and to avoid a warning about defaults
            given = {"transform_input": config.pretrained, "init_weights": True, **given}
        module = call_library(name, lambda: models.get_model(chosen, weights=None, num_classes=outputs, **given))
        if chosen in AUXILIARY:
            module.auxiliary_weight = AUXILIARY[chosen]  # type: ignore[assignment]
        if config.pretrained:
            _load_pretrained(module, models.get_model_weights(chosen), name, outputs)
        return module


def _load_pretrained(module: nn.Module, weights: Any, name: str, outputs: int) -> None:
    """Copies the library's default weights from its local cache, except for layers with another number of classes.

    Raises UsageError if the weights are missing, unreadable or do not fit.
    """
    url: str = weights.DEFAULT.url
    path = Path(torch.hub.get_dir()) / "checkpoints" / url.rpartition("/")[2]
    try:
        found = torch.load(path, map_location="cpu", weights_only=True)
    except FileNotFoundError as error:
        raise UsageError(f"model.pretrained: {path} does not exist; download it from {url}") from error
    except Exception as error:
        reason = describe_error(error)[:300]
        raise UsageError(f"model.pretrained: {path} cannot be read as weights: {reason}") from error
    found = {OLDER_KEY.sub(r"\1\2", key): value for key, value in found.items()}
    own = module.state_dict()
    fitting = {key: value for key, value in found.items() if key in own and own[key].shape == value.shape}
    of_classes = {key for key in found.keys() & own.keys() - fitting.keys()
                  if own[key].shape[0] == outputs and own[key].shape[1:] == found[key].shape[1:]}  # fmt: skip
    # load_state_dict does not report missing num_batches_tracked of norms, which older files do not have
    missing = set(module.load_state_dict(fitting, strict=False).missing_keys) - of_classes
    if missing:
        layers = sorted({key.rpartition(".")[0] or key for key in missing})
        raise UsageError(f"model.pretrained: {path} has no weights for {', '.join(layers[:5])} of {name}")
