"""Normalization layers by name, and the initial values that deep convolutional nets need."""

from __future__ import annotations

from typing import Literal

from torch import nn

from decentnode.errors import UsageError

Norm = Literal["batch", "group", "none"]
"""The normalization after a convolution. Batch normalization has running statistics, which `node.buffers` handles."""


def make_norm(norm: Norm, channels: int, groups: int, *, zero: bool = False) -> nn.Module:
    """Returns the layer for [B, channels, H, W]. Raises UsageError if the groups do not divide the channels.

    zero: initialize its scale, and so its outputs, to zero.
    """
    if norm == "none":
        return nn.Identity()
    if norm == "group" and channels % groups:
        raise UsageError(f"model.groups must divide the widths of the layers, got {groups} for {channels} channels")
    made = nn.BatchNorm2d(channels) if norm == "batch" else nn.GroupNorm(groups, channels)
    if zero:
        nn.init.zeros_(made.weight)
    return made


def he_normal(module: nn.Module) -> nn.Module:
    """Initializes the weights of convolutions from a normal distribution of variance 2 / fan-out, and their biases to
    zero (He et al. 2015, arXiv 1502.01852), so that signals keep their magnitude through many layers. Returns the
    module."""
    for part in module.modules():
        if isinstance(part, nn.Conv2d):
            nn.init.kaiming_normal_(part.weight, mode="fan_out", nonlinearity="relu")
            if part.bias is not None:
                nn.init.zeros_(part.bias)
    return module
