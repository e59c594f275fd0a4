"""Models of Hugging Face's transformers: `model: {name: "hf:gpt2"}`. Nothing is downloaded."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

from pydantic import Field
from torch import Tensor, nn

from decentnode.config.component import Config
from decentnode.errors import UsageError, describe_error
from decentnode.models.base import Model, ModelConfig
from decentnode.models.libraries import call_library, import_library
from decentnode.samples import DataSpec

KINDS = {
    "sequence": "AutoModelForSequenceClassification", "next_token": "AutoModelForCausalLM",
    "image": "AutoModelForImageClassification",
}  # fmt: skip
"""By kind of data, the class of transformers that makes the model."""


class HuggingFaceConfig(ModelConfig):
    name: str = "hf:"
    """hf: and a type of model (bert, gpt2, vit ...), the name of a model in the local cache, or a folder with
    config.json; the folder is absolute or relative to where the command runs."""
    pretrained: bool = False
    """Whether weights come from the local cache or the folder, in safetensors' format; otherwise the model is drawn
    from the run's seed, by the configuration of the name. Nothing is downloaded: `hf download NAME` fills the cache."""
    arguments: dict[str, Any] = Field(default_factory=dict)
    """Values of the configuration, such as {num_hidden_layers: 2}. The vocabulary and the number of classes are those
    of the data."""


class HuggingFace(Model):
    """Classifies sequences of tokens, without attending to padding; or predicts the next token at every position of a
    text; or classifies images, as the data requires. Needs transformers (extra `hf`)."""

    Config: ClassVar[type[Config]] = HuggingFaceConfig

    def __init__(self, config: HuggingFaceConfig) -> None:
        self.config = config

    def make(self, data: DataSpec) -> nn.Module:
        name, kind = self.config.name, _kind(self.config.name, data)
        transformers = import_library("transformers", name, "hf")
        settings = self._settings(transformers, kind, data)
        automatic = getattr(transformers, KINDS[kind])
        if self.config.pretrained:
            module = call_library(name, lambda: self._pretrained(automatic, settings))
        else:
            module = call_library(name, lambda: automatic.from_config(settings))
        _check_vocabulary(name, kind, settings, data)
        return HuggingFaceModule(module.float(), kind, data)

    @property
    def _model_id(self) -> str:
        return self.config.name.partition(":")[2]

    def _settings(self, transformers: Any, kind: str, data: DataSpec) -> Any:
        """Returns the configuration of the model, from the folder, the local cache, or, without pretrained weights,
        from a type of model."""
        name, given = self._model_id, {**_of_data(kind, data), **self.config.arguments}
        if self.config.pretrained:  # pretrained weights determine the vocabulary and the number of positions
            given = {key: value for key, value in given.items() if key in ("num_labels", *self.config.arguments)}
        types = getattr(transformers, "CONFIG_MAPPING", {})
        try:
            if not self.config.pretrained and name in types and not Path(name).is_dir():
                settings = transformers.AutoConfig.for_model(name, **given)
            else:
                settings = transformers.AutoConfig.from_pretrained(name, local_files_only=True, **given)
        except Exception as error:
            known = "" if self.config.pretrained else ", nor a type of model such as bert or gpt2"
            text = f"{self.config.name} is neither in the local cache nor a folder with config.json{known}; "
            how = f"`hf download {name}` downloads it on a machine with a network"
            raise UsageError(f"{text}{how}: {describe_error(error)[:300]}") from error
        longest = data.input_shape[0] if kind != "image" else 0
        places = getattr(settings, "max_position_embeddings", None)
        if isinstance(places, int) and longest > places:
            if self.config.pretrained or "max_position_embeddings" in self.config.arguments:
                raise UsageError(f"{self.config.name} takes sequences of up to {places} tokens, got {longest}")
            settings.max_position_embeddings = longest
        return settings

    def _pretrained(self, automatic: Any, settings: Any) -> nn.Module:
        try:
            found: nn.Module = automatic.from_pretrained(
                self._model_id, config=settings, local_files_only=True, use_safetensors=True)
        except (OSError, ValueError) as error:
            text = f"model.pretrained: the weights of {self._model_id} are not in the local cache as safetensors; "
            how = f"`hf download {self._model_id}` downloads them on a machine with a network"
            raise UsageError(f"{text}{how}: {describe_error(error)[:300]}") from error
        return found


class HuggingFaceModule(nn.Module):
    """Returns only the logits: [B, C]; or [B, T, V] for texts, or [B, V] if only the last position predicts a token."""

    def __init__(self, model: nn.Module, kind: str, data: DataSpec) -> None:
        super().__init__()
        self.model = model
        self._image, self._padding = kind == "image", data.padding
        self._last = kind == "next_token" and data.target_shape == ()

    def forward(self, inputs: Tensor) -> Tensor:
        if self._image:
            logits: Tensor = self.model(pixel_values=inputs).logits
            return logits
        mask = None if self._padding is None else (inputs != self._padding).long()
        logits = self.model(input_ids=inputs, attention_mask=mask).logits
        return logits[:, -1] if self._last else logits


def _kind(name: str, data: DataSpec) -> str:
    if data.inputs == "ids" and data.vocabulary is not None and len(data.input_shape) == 1:
        return "sequence" if data.num_classes is not None else "next_token"
    if data.inputs == "values" and len(data.input_shape) == 3 and data.num_classes is not None:
        return "image"
    shape = list(data.input_shape)
    raise UsageError(
        f"model {name} needs sequences of tokens, or images in classes, got {data.task} of samples of shape {shape}")


def _of_data(kind: str, data: DataSpec) -> dict[str, Any]:
    """Returns the parts of the configuration that the data determines.

    The key cache is turned off, because it is for generating texts and not for training.
    """
    if kind == "image":
        channels, height, width = data.input_shape
        return {"num_labels": data.num_classes, "num_channels": channels, "image_size": max(height, width)}
    found: dict[str, Any] = {"vocab_size": data.vocabulary, "use_cache": False}
    if kind == "sequence":
        found["num_labels"] = data.num_classes
    if data.padding is not None:
        found["pad_token_id"] = data.padding
    # The default special tokens of a type of model may be beyond the data's vocabulary
    return {**found, "bos_token_id": None, "eos_token_id": None}


def _check_vocabulary(name: str, kind: str, settings: Any, data: DataSpec) -> None:
    size, wanted = getattr(settings, "vocab_size", None), data.vocabulary
    if wanted is None or not isinstance(size, int):
        return
    if size < wanted or (kind == "next_token" and size != wanted):
        more = "" if kind == "next_token" else " or more"
        raise UsageError(f"{name} has a vocabulary of {size} tokens, the data needs {wanted}{more}")
