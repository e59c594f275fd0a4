"""Statistics of batch normalization measured anew, where the mean of the nodes' own ones would be wrong."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from decentnode.build import schemas_of, step_all
from decentnode.node.config import NodeConfig
from decentnode.node.node import Node
from decentnode.sharing.full import Full
from decentnode.training import statistics
from decentnode.training.supervised import Supervised
from tests.communication.contract import nodes, together
from tests.graph.contract import make as make_graph
from tests.training.small import make, noisy, samples


def normed() -> nn.Module:
    """Normalizes its inputs, so that its statistics are those of the data whatever is learned."""
    return nn.Sequential(nn.Flatten(), nn.BatchNorm1d(6), nn.Linear(6, 4))


def far_apart(uid: int, module: Any = normed, **keys: Any) -> Supervised:
    """Nodes whose inputs lie around -5, +5, +15 ...; `keys` of the training."""
    drawn = samples(40, seed=uid)
    moved = replace(drawn, inputs=drawn.inputs + np.float32(10 * uid - 5))
    return make(uid, module, moved, optimizer={"name": "sgd", "lr": 0.01}, **keys)


def inputs_of(training: Supervised) -> torch.Tensor:
    source, members = training._splits["train"]
    return source.take(members)[0].flatten(1)


def test_moments_of_nodes_add_up_to_those_of_all_their_data() -> None:
    trainings = [far_apart(uid) for uid in range(2)]
    before = trainings[0].model.parameters.clone(), trainings[0].model.buffers.clone()
    moments = [training.measure_statistics() for training in trainings]
    assert torch.equal(trainings[0].model.buffers, before[1]), "measuring changes nothing"
    trainings[0].load_statistics(moments[0] + moments[1])
    everything = torch.cat([inputs_of(training) for training in trainings])
    layer = statistics.normalizations(trainings[0].model.module)[0]
    torch.testing.assert_close(layer.running_mean, everything.mean(0))
    torch.testing.assert_close(layer.running_var, everything.var(0, correction=0), rtol=1e-4, atol=1e-4)
    assert torch.equal(trainings[0].model.parameters, before[0])


def test_measuring_leaves_modes_counters_and_draws_alone() -> None:
    training = make(module=noisy, batch_size=8)
    training.local_update(0)
    module = training.model.module
    module[4].eval()
    modes = [part.training for part in module.modules()]
    counts, draws = module[2].num_batches_tracked.clone(), torch.get_rng_state()
    first, second = training.measure_statistics(), training.measure_statistics()
    assert torch.equal(first, second) and first.numel() == 1 + 2 * 8
    assert [part.training for part in module.modules()] == modes and module[2].track_running_stats
    assert torch.equal(counts, module[2].num_batches_tracked) and torch.equal(draws, torch.get_rng_state())
    assert make().measure_statistics().numel() == 0, "no such layer"


def test_a_node_with_one_sample_can_measure_too() -> None:
    training = make(module=normed, train=samples(1))
    training.load_statistics(training.measure_statistics())
    layer = statistics.normalizations(training.model.module)[0]
    torch.testing.assert_close(layer.running_mean, inputs_of(training)[0])
    assert float(layer.running_var.abs().max()) < 1e-5


def run(buffers: str, transport: str = "inproc") -> list[Node]:
    config = NodeConfig.model_validate({"rounds": 30, "evaluate_every": 20, "buffers": buffers})
    trainings = [far_apart(uid, local_steps=2) for uid in range(2)]
    with nodes(transport, 2, schemas_of(Full(Full.Config()), trainings[0].model)) as made:
        built = [Node(uid, config, make_graph("complete", nodes=2), training, Full(Full.Config()), c, seed=1)
                 for uid, (training, c) in enumerate(zip(trainings, made, strict=True))]  # fmt: skip
        if transport == "inproc":
            step_all(built)
        else:
            together(made, lambda communication: built[communication.uid].run())
    return built


@pytest.mark.parametrize("transport", ["inproc", "shared_memory"])
def test_the_merged_model_gets_the_statistics_of_all_data(transport: str) -> None:
    """Of two nodes whose inputs have means 10 apart, the mean of the variances lacks the 25 between them."""
    everything = torch.cat([inputs_of(far_apart(uid)) for uid in range(2)])
    found = {buffers: run(buffers, transport) for buffers in ("average", "recompute")}
    variances = {}
    for buffers, built in found.items():
        merged = built[0].merged
        assert merged is not None and torch.equal(merged, built[1].merged)  # type: ignore[arg-type]
        layer = statistics.normalizations(built[0].training.model.module)[0]
        variances[buffers] = merged[built[0].training.model.num_parameters :][layer.num_features :]
    torch.testing.assert_close(variances["recompute"], everything.var(0, correction=0), rtol=1e-3, atol=1e-3)
    assert bool((variances["average"] < 0.5 * variances["recompute"]).all()), "this is why they are recomputed"
    own = statistics.normalizations(found["recompute"][1].training.model.module)[0]
    torch.testing.assert_close(own.running_mean, inputs_of(far_apart(1)).mean(0), rtol=1e-4, atol=1e-4)
