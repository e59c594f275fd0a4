"""Codecs on models whose layers have scales that differ by 10,000: each layer is coded as precisely as it is alone."""

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
from tests.sharing.contract import rule, run_round, suitable_graph
from tests.sharing.helpers import distance_from_consensus

SHAPES = [(16, 16), (16,), (10, 16), (10,)]
SIZES = [math.prod(shape) for shape in SHAPES]
SCALES = torch.cat([torch.full((size,), 1e-4 if k % 2 else 1.0) for k, size in enumerate(SIZES)])
"""The scale of every entry: 1 for weights, 1e-4 for biases."""
WITHOUT_FEEDBACK: dict[str, dict[str, Any]] = {
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
"""Name -> (the codec's keys, the largest error of a layer relative to its norm)."""
WITH_FEEDBACK: dict[str, dict[str, Any]] = {
    "sign": {"name": "sign", "step_size": 0.8},
    "qsgd": {"name": "qsgd", "step_size": 1.0},
    "choco of all in int4": {"name": "choco", "choose": "all", "compression": {"name": "int4"}, "step_size": 1.0},
    "choco at random in int4": {"name": "choco", "choose": "random", "fraction": 0.3, "compression": {"name": "int4"},
                                "step_size": 0.25},
    "deepsqueeze of all in sign": {"name": "deepsqueeze", "choose": "all", "compression": {"name": "sign"},
                                   "step_size": 0.04},
}  # fmt: skip
"""Rules with error feedback, and their default steps on a ring of 8."""


def set_up_rules_for(models: list[Tensor], options: dict[str, Any]) -> list[Sharing]:
    rules = [rule(**options)() for _ in models]
    for each in rules:
        each.set_machines([range(4), range(4, 8)])
        each.set_parameter_shapes(SHAPES)
        each.payload_schema(len(SCALES), torch.float32)
    return rules


def random_offsets(nodes: int, seed: int) -> Tensor:
    return torch.randn(nodes, len(SCALES), generator=torch.Generator().manual_seed(seed))


def after_one_round(options: dict[str, Any]) -> Tensor:
    """Returns the models, [8, P], after a round before which they differ by about 1e-4 in every entry."""
    common, apart = random_offsets(1, 1) * SCALES, random_offsets(8, 2) * 1e-4
    models = [common.clone().view(-1) for _ in range(8)]
    rules = set_up_rules_for(models, options)
    run_round(rules, models, suitable_graph(rules[0], 8), 0, step=lambda uid, model: model.add_(apart[uid]))
    return torch.stack(models)


@pytest.mark.sampled
@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("name", WITHOUT_FEEDBACK)
def test_the_codec_error_of_a_layer_is_relative_to_its_own_norm(name: str, codec: str) -> None:
    """In one round, compared with the same round without a codec."""
    keys, bound = CODECS[codec]
    plain = after_one_round(WITHOUT_FEEDBACK[name]).split(SIZES, 1)
    coded = after_one_round({**WITHOUT_FEEDBACK[name], "compression": keys}).split(SIZES, 1)
    for layer, (exact, decoded) in enumerate(zip(plain, coded, strict=True)):
        assert float((decoded - exact).norm()) <= bound * float(exact.norm()), f"layer {layer}"


@pytest.mark.slow
@pytest.mark.parametrize("name", WITH_FEEDBACK)
def test_every_layer_approaches_consensus_relative_to_its_norm(name: str) -> None:
    """Without gradients, after the local step of round 0 has moved the models apart."""
    ring = make("ring", nodes=8)
    apart = random_offsets(8, 5) * SCALES
    models = [(random_offsets(1, 6) * SCALES).view(-1).clone() for _ in range(8)]
    rules = set_up_rules_for(models, WITH_FEEDBACK[name])
    for r in range(scale(90, 500)):
        run_round(rules, models, ring, r, pull=0.0,
                  step=(lambda uid, model: model.add_(apart[uid])) if r == 0 else lambda *_: None)  # fmt: skip
    before, after = apart.split(SIZES, 1), torch.stack(models).split(SIZES, 1)
    left = [distance_from_consensus(list(layer)) * float(layer.norm()) / float((start - start.mean(0)).norm())
            for layer, start in zip(after, before, strict=True)]  # fmt: skip
    assert max(left) <= 0.3, left


@pytest.mark.parametrize("name", ["subsample", "topk"])
def test_a_payload_whose_scales_or_counts_do_not_fit_its_positions_is_refused(name: str) -> None:
    options = {**WITHOUT_FEEDBACK[name], "compression": {"name": "int8"}}
    models = [SCALES.clone() for _ in range(8)]
    rules, graph = set_up_rules_for(models, options), make("ring", nodes=8)
    views = [view(graph, uid, 0, 1) for uid in range(8)]
    sent = [each.outgoing(model, round_view) for each, model, round_view in zip(rules, models, views, strict=True)]
    good = sent[1][0]
    decode(rules[0], good, 1, views[0])
    shorter = {**good.tensors, "values.scale": good.tensors["values.scale"][:-1]}
    with pytest.raises(PeerFault):
        decode(rules[0], Payload(shorter, good.scalars), 1, views[0])
    fewer = {**good.scalars, "values.count": good.scalars["values.count"] - 1}
    with pytest.raises(PeerFault, match="values of values instead of"):
        decode(rules[0], Payload(good.tensors, fewer), 1, views[0])
