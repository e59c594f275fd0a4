"""Works around a memory error of oneDNN in the gradients of strided 1x1 convolutions on a CPU."""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import Tensor, nn

ONEDNN_CHANNELS = 16
"""From this many channels on, oneDNN's workspace is large enough: its block of channels, which is 8 without AVX-512."""


def subsample_inputs(module: nn.Module) -> nn.Module:
    """Makes every strided 1x1 convolution of few channels subsample its input before it, and have stride 1 itself,
    which is the same function of the same parameters. Returns the module.

    If images have their channels last in memory (`training.channels_last`, torch.compile on a CPU, models that convert
    them), oneDNN up to 3.14 writes past the end of its workspace for the gradient of such a convolution's weights
    (https://github.com/uxlfoundation/oneDNN/issues/6035). A resnet of 4 channels crashed in its first steps: "corrupted
    double-linked list", "free(): invalid size", or SIGSEGV.
    """
    for part in module.modules():
        if type(part) is nn.Conv2d and _is_affected(part):  # subclasses may use their stride, or the input's size
            part.register_forward_pre_hook(partial(_subsampled, part.stride), with_kwargs=True)
            part.stride = (1, 1)
    return module


def _is_affected(layer: nn.Conv2d) -> bool:
    return (
        layer.kernel_size == (1, 1) and layer.stride != (1, 1) and layer.padding in ((0, 0), "valid")
        and layer.groups == 1 and layer.in_channels < ONEDNN_CHANNELS
    )  # fmt: skip


def _subsampled(
    stride: tuple[int, ...], _: nn.Module, inputs: tuple[Any, ...], named: dict[str, Any]
) -> tuple[tuple[Tensor], dict[str, Any]]:
    images = inputs[0] if inputs else named["input"]  # [B, C, H, W] or [C, H, W]
    return (images[..., :: stride[0], :: stride[1]],), {}
