"""Saves and loads gradients that backward passes have accumulated and no step has used yet."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from decentnode.parallel.steps.backward import BackwardWatch


def save_accumulated(named: Sequence[tuple[str, Tensor]], watch: BackwardWatch) -> dict[str, Any]:
    """Returns the gradients that were accumulated and not used by a step yet, and whether the next backward pass adds
    to them. They are not part of a wrapper's state: loading that elsewhere starts a step with none, as in torch.

    named: the exchanged parameters, with their names; watch: of their backward passes.
    """
    gradients = {name: _parts(p.grad) for name, p in named if p.grad is not None}
    return {"gradients": gradients, "goes_on": watch.accumulating}


def restore_accumulated(
    named: Sequence[tuple[str, Tensor]], watch: BackwardWatch, state: Mapping[str, Any]
) -> None:
    """Restores what `save_accumulated` returned; {}: no gradients."""
    gradients = state.get("gradients", {})
    for name, p in named:
        found = gradients.get(name)
        if isinstance(found, Mapping):
            found = torch.sparse_coo_tensor(found["indices"], found["values"], p.shape, check_invariants=True)
        p.grad = None if found is None else found.to(p.device)
    watch.accumulating = bool(state.get("goes_on", watch.accumulating))


def _parts(gradient: Tensor) -> Tensor | dict[str, Tensor]:
    """Returns a gradient as checkpoints store it: a sparse one, as of an Embedding, in its parts, not
    coalesced, because that would change the order of sums."""
    if gradient.layout is torch.strided:
        return gradient
    return {"indices": gradient._indices(), "values": gradient._values()}
