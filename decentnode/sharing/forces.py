"""The forces of elastic averaging and of leader SGD, for the rules `elastic` and `leader` and for `CommOptimizer`.

Functions of tensors and numbers alone: who exchanges what with whom, and when, is the callers' matter. As in torch, a
name that ends in an underscore changes its first argument.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from torch import Tensor


def elastic_pull_(model: Tensor, difference: Tensor, strength: float) -> Tensor:
    """The force on a model: x <- x - a (x(t) - c), in place (EASGD, arXiv 1412.6651, equation 5 without the gradient).

    difference: x(t) - c, of the shape of `model`, of the start of the step; `model` is where the local step has led
    since. strength: a.
    """
    return model.add_(difference, alpha=-strength)


def elastic_center_(center: Tensor, differences: Tensor, strength: float) -> Tensor:
    """The force on a center that all p nodes share: c <- c + a sum_i (x_i(t) - c), in place (same paper, equation 6).

    differences: the sum over nodes, of the shape of `center`. With strength a for both forces c + sum_i x_i is kept.
    """
    return center.add_(differences, alpha=strength)


def toward(point: Tensor, target: Tensor, strength: float) -> Tensor:
    """x + s (y - x) for x `point` and y `target` of one shape, in a new tensor.

    It is equation 6 above for the center of a single node, with s = b.
    """
    return point.lerp(target, strength)


def toward_(point: Tensor, target: Tensor, strength: float) -> Tensor:
    """`toward` in place: the force of a leader y on a model x (LSGD, arXiv 1905.10395, section 3)."""
    return point.lerp_(target, strength)


def leader_of(losses: Mapping[int, float]) -> int:
    """The node or rank with the lowest loss, of equal ones the lowest number; one whose loss is no number comes last.

    losses: uid or rank -> its training loss, not empty.
    """
    return min(losses, key=lambda uid: (math.inf if math.isnan(losses[uid]) else losses[uid], uid))
