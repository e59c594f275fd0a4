"""Normalization layers by name, and the initial values that deep convolutional nets need."""

from __future__ import annotations

from typing import Literal

from torch import nn

from decentnode.errors import UsageError

Norm = Literal["batch", "group", "none"]
"""What follows a convolution. Batch normalization has running statistics, which `node.buffers` says how to treat."""


def make_norm(norm: Norm, channels: int, groups: int, *, zero: bool = False) -> nn.Module:
    """Returns the layer for [B, channels, H, W]. zero: its scale starts at zero, and its outputs with it. Raises
    UsageError when groups do not divide the channels."""
    if norm == "none":
        return nn.Identity()
    if norm == "group" and channels % groups:
        raise UsageError(f"model.groups must divide the widths of the layers, got {groups} for {channels} channels")
    made = nn.BatchNorm2d(channels) if norm == "batch" else nn.GroupNorm(groups, channels)
    if zero:
        nn.init.zeros_(made.weight)
    return made


def he_normal(module: nn.Module) -> nn.Module:
    """Draws the weights of convolutions anew, from a normal of variance 2 / fan-out, their biases zero (He et al. 2015,
    arXiv 1502.01852), with which signals keep their size through many layers. Returns the module."""
    for part in module.modules():
        if isinstance(part, nn.Conv2d):
            nn.init.kaiming_normal_(part.weight, mode="fan_out", nonlinearity="relu")
            if part.bias is not None:
                nn.init.zeros_(part.bias)
    return module
