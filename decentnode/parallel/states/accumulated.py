"""Gradients that backward passes have added up and no step has used yet, as checkpoints keep them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from decentnode.parallel.steps.backward import BackwardWatch


def accumulated(named: Sequence[tuple[str, Tensor]], watch: BackwardWatch) -> dict[str, Any]:
    """The gradients that backward passes have added up and no step has used yet, and whether the next pass adds its own
    to them. They are no part of a wrapper's state: who loads that elsewhere begins a step with none, as in torch.

    named: the exchanged parameters, with their names; watch: of their backward passes.
    """
    gradients = {name: _parts(p.grad) for name, p in named if p.grad is not None}
    return {"gradients": gradients, "goes_on": watch.accumulating}


def take_up_accumulated(
    named: Sequence[tuple[str, Tensor]], watch: BackwardWatch, state: Mapping[str, Any]
) -> None:
    """Puts back what `accumulated` returned; {}: nothing was added up."""
    gradients = state.get("gradients", {})
    for name, p in named:
        found = gradients.get(name)
        if isinstance(found, Mapping):
            found = torch.sparse_coo_tensor(found["indices"], found["values"], p.shape, check_invariants=True)
        p.grad = None if found is None else found.to(p.device)
    watch.accumulating = bool(state.get("goes_on", watch.accumulating))


def _parts(gradient: Tensor) -> Tensor | dict[str, Tensor]:
    """A gradient as checkpoints keep it: a sparse one, as of an Embedding, in its parts, in the order of their sums."""
    if gradient.layout is torch.strided:
        return gradient
    return {"indices": gradient._indices(), "values": gradient._values()}
