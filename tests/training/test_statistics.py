"""Recomputed statistics of batch normalization, for models for which the average of the nodes' own would be wrong."""

from __future__ import annotations

import logging
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from decentnode.build import schemas_of, step_all
from decentnode.config.component import Config
from decentnode.errors import ConfigError, DataError
from decentnode.experiment import load
from decentnode.models.base import Model, outputs_of
from decentnode.node.config import NodeConfig
from decentnode.node.node import Node, NodeParts
from decentnode.samples import DataSpec
from decentnode.sharing.full import Full
from decentnode.training import statistics
from decentnode.training.supervised import Supervised
from tests.communication.contract import open_nodes, run_on_all
from tests.gpu.resnet import Block
from tests.graph.contract import make as make_graph
from tests.training.small import batch_norm_net, make, make_samples

QUICKSTART = Path(__file__).parents[2] / "configs" / "quickstart.yaml"


def input_norm_net() -> nn.Module:
    """A net that normalizes its inputs: its statistics are those of the data, whatever it has learned."""
    return nn.Sequential(nn.Flatten(), nn.BatchNorm1d(6), nn.Linear(6, 4))


def channel_norm_net() -> nn.Module:
    """A net with two values per channel and sample: it can be trained on one sample at a time."""
    return nn.Sequential(nn.BatchNorm1d(3), nn.Flatten(), nn.Linear(6, 4))


def make_shifted(uid: int, module: Any = input_norm_net, **keys: Any) -> Supervised:
    """Returns the training of a node whose inputs lie around 10 uid - 5. keys: of the training section."""
    drawn = make_samples(40, seed=uid)
    moved = replace(drawn, inputs=drawn.inputs + np.float32(10 * uid - 5))
    return make(uid, module, moved, optimizer={"name": "sgd", "lr": 0.01}, **keys)


def training_inputs(training: Supervised) -> torch.Tensor:
    source, members = training.share.splits["train"]
    return source.take(members)[0].flatten(1)


def test_summed_moments_of_all_nodes_are_the_statistics_of_all_data() -> None:
    trainings = [make_shifted(uid) for uid in range(2)]
    before = trainings[0].model.parameters.clone(), trainings[0].model.buffers.clone()
    moments = [training.measure_statistics() for training in trainings]
    assert torch.equal(trainings[0].model.buffers, before[1]), "measuring must not change the running statistics"
    trainings[0].load_statistics(moments[0] + moments[1])
    everything = torch.cat([training_inputs(training) for training in trainings])
    layer = statistics.normalizations(trainings[0].model.module)[0]
    torch.testing.assert_close(layer.running_mean, everything.mean(0))
    torch.testing.assert_close(layer.running_var, everything.var(0, correction=0), rtol=1e-4, atol=1e-4)
    assert torch.equal(trainings[0].model.parameters, before[0])


def test_measuring_changes_no_mode_no_counter_and_no_generator() -> None:
    training = make(module=batch_norm_net, batch_size=8)
    training.local_update(0)
    module = training.model.module
    module[4].eval()
    modes = [part.training for part in module.modules()]
    counts, draws = module[2].num_batches_tracked.clone(), torch.get_rng_state()
    first, second = training.measure_statistics(), training.measure_statistics()
    assert torch.equal(first, second) and first.numel() == 1 + 2 * 8
    assert [part.training for part in module.modules()] == modes and module[2].track_running_stats
    assert torch.equal(counts, module[2].num_batches_tracked) and torch.equal(draws, torch.get_rng_state())
    assert make().measure_statistics().numel() == 0, "a model without batch normalization has no moments"


def test_statistics_can_be_measured_on_a_single_sample() -> None:
    training = make(module=channel_norm_net, train=make_samples(1))
    training.local_update(0)
    training.load_statistics(training.measure_statistics())
    layer, rows = statistics.normalizations(training.model.module)[0], training_inputs(training).view(3, 2)
    torch.testing.assert_close(layer.running_mean, rows.mean(1))
    torch.testing.assert_close(layer.running_var, rows.var(1, correction=0))


def run(buffers: str, transport: str = "inproc") -> list[Node]:
    config = NodeConfig.model_validate({"rounds": 30, "evaluate_every": 20, "buffers": buffers})
    trainings = [make_shifted(uid, local_steps=2) for uid in range(2)]
    with open_nodes(transport, 2, schemas_of(Full(Full.Config()), trainings[0].model)) as made:
        built = [Node(uid, config, NodeParts(make_graph("complete", nodes=2), training, Full(Full.Config()), c), seed=1)
                 for uid, (training, c) in enumerate(zip(trainings, made, strict=True))]  # fmt: skip
        if transport == "inproc":
            step_all(built)
        else:
            run_on_all(made, lambda communication: built[communication.uid].run())
    return built


@pytest.mark.parametrize("transport", ["inproc", "shared_memory"])
def test_recomputed_statistics_of_the_merged_model_are_those_of_all_data(transport: str) -> None:
    """The means of the two nodes' inputs are 10 apart: the average of their variances lacks the 25 between them."""
    everything = torch.cat([training_inputs(make_shifted(uid)) for uid in range(2)])
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
    torch.testing.assert_close(own.running_mean, training_inputs(make_shifted(1)).mean(0), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("count", "keys", "expected_batch_sizes"), [
    (17, {"batch_size": 4, "local_epochs": 1}, [4] * 4),
    (18, {"batch_size": 4, "local_epochs": 1}, [4] * 4 + [2]),
    (17, {"batch_size": 4, "accumulate": 2, "local_epochs": 1}, [8, 8]),
    (5, {"batch_size": 4, "local_steps": 3}, [4] * 3),
    (13, {"batch_size": 4, "accumulate": 3, "local_epochs": 2}, [12, 12]),
    (17, {"batch_size": 4, "drop_last": True, "local_epochs": 1}, [4] * 4),
])  # fmt: skip
def test_a_last_batch_of_one_sample_is_left_out_where_the_model_cannot_train_on_it(
    count: int, keys: dict[str, Any], expected_batch_sizes: list[int], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        training = make(module=batch_norm_net, train=make_samples(count), **keys)
        whole = make(module=channel_norm_net, train=make_samples(count), **keys)
        updates = [training.local_update(round) for round in range(4)]
    assert [update.samples for update in updates] == [sum(expected_batch_sizes)] * 4
    assert updates[0].steps == len(expected_batch_sizes)
    assert all(update.steps == training.steps_per_round for update in updates)
    messages = [record.getMessage() for record in caplog.records]
    assert messages == (["the last batch of every epoch, one of "
                     f"{count} samples, is left out: batch normalization needs two"] if count % 4 == 1
                    and not keys.get("drop_last") else [])  # fmt: skip
    if "local_epochs" in keys and not keys.get("drop_last"):
        assert whole.local_update(0).samples == count * keys["local_epochs"], "another model trains on all"


def test_over_epochs_every_sample_is_trained_on_when_each_epoch_leaves_one_out() -> None:
    training = make(module=batch_norm_net, train=make_samples(9), batch_size=4, local_epochs=1)
    epochs = [set(training.sampler.take(2)[0].tolist()) for _ in range(40)]
    assert all(len(epoch) == 8 for epoch in epochs) and set.intersection(*epochs) == set()
    assert set.union(*epochs) == set(range(9))


def test_a_convolution_with_batch_normalization_trains_on_one_image() -> None:
    """In a residual block each channel has many values even for one image."""
    made = nn.Sequential(nn.Conv2d(3, 64, 3, 1, 1), Block(64, 64, 1), nn.AdaptiveAvgPool2d(1), nn.Flatten(),
                         nn.Linear(64, 10))  # fmt: skip
    image = torch.randn(1, 3, 8, 8)
    before = {name: tensor.clone() for name, tensor in made.state_dict().items()}
    assert not statistics.needs_two_samples(made, image)
    assert statistics.needs_two_samples(nn.Sequential(made, nn.BatchNorm1d(10)), image)
    assert all(torch.equal(tensor, before[name]) for name, tensor in made.state_dict().items())
    assert all(part.training for part in made.modules())


class FrozenBatchNorm(nn.Sequential):
    """A net whose batch normalization always is in evaluation mode."""

    def train(self, mode: bool = True) -> FrozenBatchNorm:
        super().train(mode)
        self[2].eval()
        return self


def test_batch_normalization_in_evaluation_mode_trains_on_one_sample() -> None:
    assert not statistics.needs_two_samples(FrozenBatchNorm(*batch_norm_net()), torch.randn(1, 3, 2))
    training = make(module=lambda: FrozenBatchNorm(*batch_norm_net()), train=make_samples(5), batch_size=4,
                    local_epochs=1)  # fmt: skip
    assert training.local_update(0).samples == 5


@pytest.mark.parametrize(("count", "keys", "text"), [
    (1, {}, "node 3: the number of training samples must be at least 2 for a model with batch normalization"),
    (8, {"batch_size": 1}, "node 3: training.batch_size must be at least 2 for a model with batch normalization"),
    (2, {"validation": {"fraction": 0.5}}, "node 3: the number of training samples must be at least 2"),
])  # fmt: skip
def test_a_node_without_a_batch_of_two_samples_is_refused(count: int, keys: dict[str, Any], text: str) -> None:
    with pytest.raises(DataError, match=text):
        make(3, batch_norm_net, make_samples(count), **keys)
    make(3, channel_norm_net, make_samples(count), **keys).local_update(0)


class LinearBatchNorm(Model):
    """A model of an experiment: a linear layer, batch normalization, and a linear output layer."""

    def __init__(self, config: Config) -> None:
        pass

    def make(self, data: DataSpec) -> nn.Module:
        layers = (nn.Linear(math.prod(data.input_shape), 8), nn.BatchNorm1d(8), nn.ReLU())
        return nn.Sequential(nn.Flatten(), *layers, nn.Linear(8, outputs_of("normed", data)))


def test_an_experiment_without_a_batch_of_two_is_refused() -> None:
    def load_experiment(*sets: str) -> None:
        load(QUICKSTART, ["model={name: 'tests.training.test_statistics:LinearBatchNorm'}", *sets])

    with pytest.raises(ConfigError, match=r"training\.batch_size must be at least 2 .* got 1"):
        load_experiment("training.batch_size=1")
    few = "data={name: synthetic, input_shape: [8], train_samples: 17, test_samples: 4, partition: {name: iid}}"
    with pytest.raises(ConfigError, match=r"data\.partition: node \d+: the number of training samples must be"):
        load_experiment(few)
    load_experiment(few.replace("17", "32"))
    load(QUICKSTART, [few])
