"""Low-rank adapters (LoRA, Hu et al. 2021, arXiv 2106.09685): the model is frozen, and small factors are trained."""

from __future__ import annotations

import fnmatch
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

from pydantic import Field
from torch import Tensor, nn
from torch.nn import functional

from decentnode.config.component import Settings
from decentnode.errors import UsageError

FACTORS = ("lora_a", "lora_b")
"""The names of an adapter's parameters in its layer."""
MAX_LISTED = 6
"""How many layers a message names at most."""


class LoraConfig(Settings):
    """Adapters beside linear layers, whose own parameters are frozen: they are neither trained nor sent.

    Patterns are those of file names, as in `parameters`."""

    rank: int = Field(8, ge=1, le=1 << 16)
    """Rank of an adapter, which has rank * (inputs + outputs) parameters."""
    alpha: float = Field(16.0, gt=0)
    """The output of an adapter is multiplied by alpha / rank."""
    targets: list[str] = Field(default=["*"], min_length=1)
    """Patterns of the names of the `nn.Linear` layers that get an adapter."""
    dropout: float = Field(0.0, ge=0, lt=1)
    """Dropout of an adapter's inputs, in training."""
    train: list[str] = Field(default_factory=list)
    """Patterns of the model's own parameters that are also trained and shared, such as a new output layer."""


class LoraLinear(nn.Linear):
    """A linear layer with its adapter: x W' + bias + alpha / rank (dropout(x) A') B', where ' transposes. Weight and
    bias keep their names, so that a state_dict of the model without adapters fits."""

    lora_a: nn.Parameter  # [rank, inputs]
    lora_b: nn.Parameter  # [outputs, rank]
    lora_scale: float
    lora_dropout: float

    def forward(self, input: Tensor) -> Tensor:
        added = functional.linear(functional.dropout(input, self.lora_dropout, self.training), self.lora_a)
        whole = functional.linear(input, self.weight, self.bias)
        return whole + functional.linear(added, self.lora_b) * self.lora_scale

    @property
    def draws(self) -> bool:
        """Whether it uses random numbers in training (dropout)."""
        return self.lora_dropout > 0

    def folded_weight(self) -> Tensor:
        """Returns a copy [outputs, inputs]: the weight of a plain layer with the same outputs in evaluation."""
        return self.weight.detach() + self.lora_scale * (self.lora_b.detach() @ self.lora_a.detach())


def add_adapters(module: nn.Module, config: LoraConfig) -> None:
    """Freezes the module and adds adapters to its linear layers, in place, without changing the outputs at first. A is
    drawn from torch's global generator, B is zero.

    Layers whose weight is read directly (those inside `nn.MultiheadAttention`) or shared with another module are left
    out. Raises UsageError if a pattern matches nothing.
    """
    layers = dict(_plain_layers(module))
    chosen = {name: layer for name, layer in layers.items() if _matches(name, config.targets)}
    for pattern in config.targets:
        if not any(_matches(name, [pattern]) for name in layers):
            raise UsageError(f"lora.targets must match nn.Linear layers, got {pattern!r}; {_listed(layers)}")
    own = [name for name, _ in module.named_parameters(remove_duplicate=False)]
    for pattern in config.train:
        if not any(_matches(name, [pattern]) for name in own):
            raise UsageError(f"lora.train must match the names of parameters, got {pattern!r}; {_listed(own)}")
    for parameter in module.parameters():
        parameter.requires_grad_(False)
    for name, parameter in module.named_parameters(remove_duplicate=False):
        if _matches(name, config.train):
            parameter.requires_grad_(True)
    for layer in chosen.values():
        _adapt(layer, config)
    for part in module.modules():
        if isinstance(part, nn.TransformerEncoderLayer):
            # Its fused path for evaluation reads weights without calling the layers, unless one of them has a hook
            for layer in (each for each in part.modules() if isinstance(each, LoraLinear)):
                layer.register_forward_pre_hook(_nothing)


def folded(module: nn.Module) -> dict[str, Tensor]:
    """Returns the state_dict of a module without adapters that has the same outputs in evaluation, by adding each
    adapter to its weight."""
    found = {name: value for name, value in module.state_dict().items() if name.rpartition(".")[2] not in FACTORS}
    for name, layer in module.named_modules():
        if isinstance(layer, LoraLinear):
            found[f"{name}.weight" if name else "weight"] = layer.folded_weight()
    return found


def adapter_names(module: nn.Module) -> set[str]:
    """Returns the names of the adapters' parameters in the state_dict."""
    return {f"{name}.{factor}".lstrip(".") for name, layer in module.named_modules() if isinstance(layer, LoraLinear)
            for factor in FACTORS}  # fmt: skip


def _plain_layers(module: nn.Module) -> Iterator[tuple[str, nn.Linear]]:
    """Yields the linear layers whose weight is not shared with another module, by name."""
    uses = Counter(id(parameter) for _, parameter in module.named_parameters(remove_duplicate=False))
    for name, part in module.named_modules():
        if type(part) is nn.Linear and uses[id(part.weight)] == 1:
            yield name, part


def _adapt(layer: nn.Linear, config: LoraConfig) -> None:
    """Turns the layer into a LoraLinear in place, because other objects may refer to it."""
    layer.__class__ = LoraLinear
    assert isinstance(layer, LoraLinear)
    weight = layer.weight
    layer.lora_a = nn.Parameter(weight.new_empty(config.rank, layer.in_features))
    layer.lora_b = nn.Parameter(weight.new_zeros(layer.out_features, config.rank))
    nn.init.kaiming_uniform_(layer.lora_a, a=math.sqrt(5))
    layer.lora_scale, layer.lora_dropout = config.alpha / config.rank, config.dropout


def _nothing(module: nn.Module, inputs: Any) -> None:
    """Does nothing; the hook only needs to be registered."""


def _matches(name: str, patterns: Sequence[str]) -> bool:
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)


def _listed(names: Any) -> str:
    some = [*names]
    if not some:
        return "this model has none"
    return f"names: {', '.join(some[:MAX_LISTED])}" + (", ..." if len(some) > MAX_LISTED else "")
