"""Applies one module with the parameters of many nodes at once."""

from __future__ import annotations

import abc
import contextlib
import warnings
from collections.abc import Iterator, Sequence
from typing import ClassVar

import torch
from torch import Tensor, nn

from decentnode.tensors import FlatModel

ACTIVATIONS = (nn.ReLU, nn.Tanh, nn.GELU, nn.Sigmoid, nn.ELU, nn.SiLU, nn.LeakyReLU, nn.Softplus, nn.Identity)
"""Layers without parameters that work elementwise, and Identity."""


KNOWN_MODULES = ("torch.nn.", "decentnode.", "torchvision.ops.misc", *(f"torchvision.models.{each}" for each in (
    "alexnet", "convnext", "efficientnet", "googlenet", "inception", "mnasnet", "mobilenet", "regnet", "resnet",
    "shufflenet", "squeezenet", "vgg", "vision_transformer",
)))  # fmt: skip
"""Prefixes of modules whose classes draw random numbers only in classes of torch.nn, or declare that they draw.
DenseNet and Swin are left out: they call functions of torch that may draw."""


class Unsuitable(Exception):
    """A method or engine cannot compute the given model or run; the text says why."""


class Forward(abc.ABC):
    """Computes the outputs of N nodes, each from its own row of parameters."""

    name: ClassVar[str]

    def __init__(self, model: FlatModel) -> None:
        """Raises Unsuitable if the model has float buffers or draws random numbers."""
        if model.buffers.numel():
            raise Unsuitable("the model has float buffers, as batch normalization has")
        if draws := random_part(model.module):
            raise Unsuitable(f"{draws} draws random numbers")
        self.model = model

    @abc.abstractmethod
    def __call__(self, parameters: Sequence[Tensor], inputs: Tensor) -> Tensor:
        """Returns outputs [N, B, ...]. parameters: [N, *shape] each, in the order of the flat model. inputs: [N, B,
        ...], or [1, B, ...] if all nodes have the same."""

    def check(self, inputs: Tensor) -> None:
        """Raises Unsuitable if the outputs differ from those of the module. inputs: some samples [B, ...]."""
        module, stacked = self.model.module, [p.detach()[None].expand(2, *p.shape) for p in self.model.trainable]
        try:
            with torch.no_grad(), _full_precision():
                wanted = module(inputs)
                for given in (inputs[None], inputs[None].expand(2, *inputs.shape)):
                    found = self(stacked, given)
                    if not torch.allclose(found[1], wanted, rtol=1e-3, atol=1e-4):
                        raise Unsuitable("its outputs are not those of the model")
        except (RuntimeError, ValueError, TypeError, NotImplementedError) as error:
            raise Unsuitable(str(error).split("\n")[0][:200]) from error


@contextlib.contextmanager
def _full_precision() -> Iterator[None]:
    """A block in which GPU convolutions use all bits of their inputs. By default some kernels round inputs to ten bits
    of mantissa (TF32) and others do not, and convolutions of all nodes at once use different kernels."""
    try:
        before = torch.backends.cudnn.allow_tf32
    except RuntimeError:  # it was set through torch's newer API, which cannot be mixed with this one
        yield
        return
    torch.backends.cudnn.allow_tf32 = False
    try:
        yield
    finally:
        torch.backends.cudnn.allow_tf32 = before


class Layers(Forward):
    """Computes linear layers as batched matrix products, with elementwise layers between them."""

    name = "layers"

    def __init__(self, model: FlatModel) -> None:
        super().__init__(model)
        known = {id(p): place for place, p in enumerate(model.trainable)}
        module = model.module
        self._layers: list[nn.Module] = [*module] if isinstance(module, nn.Sequential) else [module]
        self._parameter_indices: list[tuple[int, ...]] = []
        """For each layer, the indices of its weight and bias among the parameters."""
        for layer in self._layers:
            kind = type(layer)
            if isinstance(layer, nn.Linear) and kind is nn.Linear:
                own = [p for p in (layer.weight, layer.bias) if p is not None]
                if not all(id(p) in known for p in own):
                    raise Unsuitable("a part of a linear layer is not trained")
                self._parameter_indices.append(tuple(known[id(p)] for p in own))
            elif kind in ACTIVATIONS or (isinstance(layer, nn.Flatten) and (layer.start_dim, layer.end_dim) == (1, -1)):
                self._parameter_indices.append(())
            else:
                raise Unsuitable(f"{kind.__name__} is not a linear layer")
        if len({place for places in self._parameter_indices for place in places}) != len(model.trainable):
            raise Unsuitable("parameters are used twice")

    def __call__(self, parameters: Sequence[Tensor], inputs: Tensor) -> Tensor:
        count, x = len(parameters[0]), inputs
        for layer, places in zip(self._layers, self._parameter_indices, strict=True):
            if places:
                weight = parameters[places[0]].transpose(1, 2)
                x = x.expand(count, *x.shape[1:])
                x = torch.baddbmm(parameters[places[1]].unsqueeze(1), x, weight) if len(places) > 1 else x @ weight
            else:
                x = x.flatten(2) if isinstance(layer, nn.Flatten) else layer(x)
        return x


class Vmap(Forward):
    """Computes any module by torch.func.vmap; convolutions become grouped convolutions."""

    name = "vmap"

    def __init__(self, model: FlatModel) -> None:
        super().__init__(model)
        self._names = [name for name, _ in model.named_shapes]

    def __call__(self, parameters: Sequence[Tensor], inputs: Tensor) -> Tensor:
        module, names = self.model.module, self._names

        def one(given: Sequence[Tensor], x: Tensor) -> Tensor:
            found: Tensor = torch.func.functional_call(module, dict(zip(names, given, strict=True)), (x,))
            return found

        shared = len(inputs) == 1
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # operations without a batching rule are slow, which the timing shows
            return torch.func.vmap(one, in_dims=(0, None if shared else 0))(
                list(parameters), inputs[0] if shared else inputs
            )


def random_part(module: nn.Module) -> str:
    """Returns the class name of a part of the module that may draw random numbers in training; "" if none does, as far
    as is known for the classes of torch.nn, torchvision and this project (those that call torch's functions declare
    `draws`)."""
    for part in module.modules():
        kind = type(part)
        draws = isinstance(part, nn.modules.dropout._DropoutNd | nn.RReLU) and getattr(part, "p", True)
        draws = draws or getattr(part, "draws", False)
        if draws or (isinstance(part, nn.RNNBase | nn.MultiheadAttention) and part.dropout) \
                or not kind.__module__.startswith(KNOWN_MODULES):  # fmt: skip
            return kind.__name__
    return ""
