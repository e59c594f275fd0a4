"""Layers whose scales are 10,000 apart: a codec treats each as it would alone, whatever lies beside it."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from decentnode.errors import PeerFault
from decentnode.graph.base import view
from decentnode.payload import Payload
from decentnode.sharing.base import Sharing
from decentnode.sharing.decoding import decode
from tests.conftest import scale
from tests.graph.contract import make
from tests.sharing.contract import one_round, rule, suited
from tests.sharing.helpers import spread

SHAPES = [(16, 16), (16,), (10, 16), (10,)]
SIZES = [math.prod(shape) for shape in SHAPES]
SCALES = torch.cat([torch.full((size,), 1e-4 if k % 2 else 1.0) for k, size in enumerate(SIZES)])
"""Weights, and biases of a ten-thousandth of their size."""
ONCE: dict[str, dict[str, Any]] = {
    "full": {"name": "full"},
    "push_sum": {"name": "push_sum"},
    "gradient_tracking": {"name": "gradient_tracking"},
    "hierarchical": {"name": "hierarchical"},
    "local_sgd": {"name": "local_sgd", "every": 1},
    "subsample": {"name": "subsample", "fraction": 0.5},
    "subsample by layers": {"name": "subsample", "fraction": 0.5, "layerwise": True},
    "topk": {"name": "topk", "fraction": 0.5},
    "topk of all": {"name": "topk", "fraction": 1.0},
}
CODECS: dict[str, tuple[dict[str, Any], float]] = {
    "int8": ({"name": "int8"}, 0.01), "int4": ({"name": "int4"}, 0.2), "sign": ({"name": "sign"}, 0.8),
    "qsgd": ({"name": "qsgd", "levels": 127}, 0.1), "zlib of int8": ({"name": "zlib", "of": {"name": "int8"}}, 0.01),
}  # fmt: skip
"""And the largest error of a layer, relative to its size."""
FEEDBACK: dict[str, dict[str, Any]] = {
    "sign": {"name": "sign", "step_size": 0.8},
    "qsgd": {"name": "qsgd", "step_size": 1.0},
    "choco of all in int4": {"name": "choco", "choose": "all", "compression": {"name": "int4"}, "step_size": 1.0},
    "choco at random in int4": {"name": "choco", "choose": "random", "fraction": 0.3, "compression": {"name": "int4"},
                                "step_size": 0.25},
    "deepsqueeze of all in sign": {"name": "deepsqueeze", "choose": "all", "compression": {"name": "sign"},
                                   "step_size": 0.04},
}  # fmt: skip
"""With the default steps on a ring of 8."""


def rules_for(models: list[Tensor], options: dict[str, Any]) -> list[Sharing]:
    rules = [rule(**options)() for _ in models]
    for each in rules:
        each.set_machines([range(4), range(4, 8)])
        each.set_parameter_shapes(SHAPES)
        each.payload_schema(len(SCALES), torch.float32)
    return rules


def noise(nodes: int, seed: int) -> Tensor:
    return torch.randn(nodes, len(SCALES), generator=torch.Generator().manual_seed(seed))


def after_one_round(options: dict[str, Any]) -> Tensor:
    """[8, P]: models that differ by as much in every entry, after a round."""
    common, apart = noise(1, 1) * SCALES, noise(8, 2) * 1e-4
    models = [common.clone().view(-1) for _ in range(8)]
    rules = rules_for(models, options)
    one_round(rules, models, suited(rules[0], 8), 0, step=lambda uid, model: model.add_(apart[uid]))
    return torch.stack(models)


@pytest.mark.sampled
@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("name", ONCE)
def test_a_coded_layer_is_off_by_a_part_of_its_own_size(name: str, codec: str) -> None:
    """One round with a codec against the same round without."""
    keys, bound = CODECS[codec]
    plain = after_one_round(ONCE[name]).split(SIZES, 1)
    coded = after_one_round({**ONCE[name], "compression": keys}).split(SIZES, 1)
    for layer, (exact, found) in enumerate(zip(plain, coded, strict=True)):
        assert float((found - exact).norm()) <= bound * float(exact.norm()), f"layer {layer}"


@pytest.mark.slow
@pytest.mark.parametrize("name", FEEDBACK)
def test_layers_come_together_alike(name: str) -> None:
    """Without gradients: no layer stays further apart, for its size, than the others."""
    ring = make("ring", nodes=8)
    apart = noise(8, 5) * SCALES
    models = [(noise(1, 6) * SCALES).view(-1).clone() for _ in range(8)]
    rules = rules_for(models, FEEDBACK[name])
    for r in range(scale(90, 500)):
        one_round(rules, models, ring, r, pull=0.0,
                  step=(lambda uid, model: model.add_(apart[uid])) if r == 0 else lambda *_: None)  # fmt: skip
    before, after = apart.split(SIZES, 1), torch.stack(models).split(SIZES, 1)
    left = [spread(list(each)) * float(each.norm()) / float((start - start.mean(0)).norm())
            for each, start in zip(after, before, strict=True)]  # fmt: skip
    assert max(left) <= 0.3, left


@pytest.mark.parametrize("name", ["subsample", "topk"])
def test_scales_that_fit_other_entries_are_refused(name: str) -> None:
    """A peer whose values are of other tensors than its positions say."""
    options = {**ONCE[name], "compression": {"name": "int8"}}
    models = [SCALES.clone() for _ in range(8)]
    rules, graph = rules_for(models, options), make("ring", nodes=8)
    views = [view(graph, uid, 0, 1) for uid in range(8)]
    sent = [each.outgoing(model, seen) for each, model, seen in zip(rules, models, views, strict=True)]
    good = sent[1][0]
    decode(rules[0], good, 1, views[0])
    shorter = {**good.tensors, "values.scale": good.tensors["values.scale"][:-1]}
    with pytest.raises(PeerFault):
        decode(rules[0], Payload(shorter, good.scalars), 1, views[0])
    fewer = {**good.scalars, "values.count": good.scalars["values.count"] - 1}
    with pytest.raises(PeerFault, match="values of values instead of"):
        decode(rules[0], Payload(good.tensors, fewer), 1, views[0])
