"""Measures the statistics of batch normalization layers from data, to replace their running statistics."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm


def normalizations(module: nn.Module) -> list[_BatchNorm]:
    """Returns the batch normalization layers that keep running statistics, in the order of the module."""
    return [part for part in module.modules() if isinstance(part, _BatchNorm) and part.running_mean is not None]


def needs_two_samples(module: nn.Module, sample: Tensor) -> bool:
    """Returns whether a batch normalization layer gets only one value per channel for one sample [1, ...], as after a
    linear layer: torch refuses to train such a layer on a batch of one. The module is not changed."""
    has_one_value: list[bool] = []

    def record_shape(layer: nn.Module, inputs: tuple[Tensor, ...]) -> None:  # noqa: ARG001
        has_one_value.append(inputs[0].numel() == inputs[0].shape[1])

    modes = [(part, part.training) for part in module.modules()]
    module.train()  # a user's module may keep some layers in evaluation mode
    trained = [part for part in module.modules() if isinstance(part, _BatchNorm) and part.training]
    hooks = [part.register_forward_pre_hook(record_shape) for part in trained]
    module.eval()
    try:
        if hooks:
            with torch.no_grad():
                module(sample)
    except ValueError:  # a layer without running statistics refuses a batch of one even in evaluation mode
        if not any(has_one_value):
            raise
    finally:
        for hook in hooks:
            hook.remove()
        for part, mode in modes:
            part.training = mode
    return any(has_one_value)


def measure(module: nn.Module, batches: Iterable[Tensor]) -> Tensor:
    """Returns the moments of the inputs of every batch normalization layer over `batches`, float64 [sum (1 + 2 C)].

    For each layer with C channels these are the number of values per channel, their sums [C] and the sums of their
    squares [C], so that moments of several data sets may be added or averaged. As in training, layers normalize by the
    batch; as in evaluation, there is no dropout. Parameters, running statistics and modes are not changed. A batch of
    one sample is normalized by the running statistics. Empty for a module without such layers.
    """
    layers = normalizations(module)
    if not layers:
        return torch.zeros(0, dtype=torch.float64)
    moments = [layer.running_mean.new_zeros(1 + 2 * layer.num_features, dtype=torch.float64)  # type: ignore[union-attr]
               for layer in layers]  # fmt: skip
    modes = [(part, part.training) for part in module.modules()]
    hooks = [layer.register_forward_pre_hook(_hook_adding_to(total))
             for layer, total in zip(layers, moments, strict=True)]  # fmt: skip
    module.eval()
    try:
        with torch.no_grad():
            for batch in batches:
                for layer in layers:  # the layer then neither uses nor changes its running statistics
                    layer.training, layer.track_running_stats = len(batch) > 1, len(batch) == 1
                module(batch)
    finally:
        for hook in hooks:
            hook.remove()
        for layer in layers:
            layer.track_running_stats = True
        for part, mode in modes:
            part.training = mode
    return torch.cat(moments)


def _hook_adding_to(total: Tensor) -> Callable[[nn.Module, tuple[Tensor, ...]], None]:
    def hook(layer: nn.Module, inputs: tuple[Tensor, ...]) -> None:  # noqa: ARG001
        x = inputs[0].transpose(0, 1).flatten(1).double()  # [C, values]
        total[0] += x.shape[1]
        total[1 : 1 + len(x)] += x.sum(1)
        total[1 + len(x) :] += x.square().sum(1)

    return hook


def load(module: nn.Module, moments: Tensor) -> None:
    """Set the running statistics to the mean and variance of `moments` (from `measure`), in place. Layers without
    values keep theirs, such as those of auxiliary outputs, which are only computed in training."""
    for layer, part in _parts(module, moments):
        channels, has_values = layer.num_features, part[0] > 0
        mean = part[1 : 1 + channels] / part[0]
        variance = (part[1 + channels :] / part[0] - mean.square()).clamp(min=0)
        assert layer.running_mean is not None and layer.running_var is not None
        for kept, found in ((layer.running_mean, mean), (layer.running_var, variance)):
            # decided on the device, so that the host need not wait for it
            kept.copy_(torch.where(has_values, found, kept))


def _parts(module: nn.Module, moments: Tensor) -> Iterator[tuple[_BatchNorm, Tensor]]:
    start = 0
    for layer in normalizations(module):
        stop = start + 1 + 2 * layer.num_features
        yield layer, moments[start:stop]
        start = stop
