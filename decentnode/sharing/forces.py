"""The forces of elastic averaging and of leader SGD, for the rules `elastic` and `leader` and for `CommOptimizer`.

These are functions of tensors and numbers; the callers handle the exchange. As in torch, a function whose name ends in
an underscore changes its first argument.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from torch import Tensor


def elastic_pull_(model: Tensor, difference: Tensor, strength: float) -> Tensor:
    """Applies the elastic force on a model: x <- x - a (x(t) - c), in place (EASGD, arXiv 1412.6651, equation 5 without
    the gradient).

    difference: x(t) - c at the start of the step, of the shape of `model`; `model` is the result of the local step.
    strength: a.
    """
    return model.add_(difference, alpha=-strength)


def elastic_center_(center: Tensor, differences: Tensor, strength: float) -> Tensor:
    """Applies the elastic force on a center that all nodes share: c <- c + a sum_i (x_i(t) - c), in place (same paper,
    equation 6).

    differences: the sum of x_i(t) - c over nodes, of the shape of `center`. With the same strength for both forces, c +
    sum_i x_i is preserved.
    """
    return center.add_(differences, alpha=strength)


def toward(point: Tensor, target: Tensor, strength: float) -> Tensor:
    """Returns x + s (y - x) in a new tensor, for x `point`, y `target` of the same shape, and s `strength`.

    This is equation 6 above for the center of a single node, with s = b.
    """
    return point.lerp(target, strength)


def toward_(point: Tensor, target: Tensor, strength: float) -> Tensor:
    """Computes `toward` in place: the force of a leader y on a model x (LSGD, arXiv 1905.10395, section 3)."""
    return point.lerp_(target, strength)


def leader_of(losses: Mapping[int, float]) -> int:
    """Returns the node or rank with the lowest loss, the lowest number among equal losses; NaN counts as infinity.

    losses: uid or rank -> its training loss, not empty.
    """
    return min(losses, key=lambda uid: (math.inf if math.isnan(losses[uid]) else losses[uid], uid))
