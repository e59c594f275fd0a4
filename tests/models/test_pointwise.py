"""Strided 1x1 convolutions of few channels, whose gradients oneDNN would write beyond its workspace."""

from __future__ import annotations

import copy
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from decentnode.models.pointwise import ONEDNN_CHANNELS, subsample_inputs

SCRIPT = """
import decentnode
decentnode.Experiment.from_config({
    "name": "small", "graph": {"name": "ring", "nodes": 3}, "mapping": {"nodes_per_machine": 3},
    "data": {"name": "synthetic", "input_shape": [3, 8, 8], "train_samples": 200, "test_samples": 40},
    "model": {"name": "resnet", "depth": 8, "widths": [4, 8, 8]}, "communication": {"name": "inproc"},
    "training": {"batch_size": 16, "local_steps": 4, **%r}, "node": {"rounds": 6, "evaluate_every": 0},
}).run(progress=False, processes=False)
print("trained")
"""


@pytest.mark.slow
@pytest.mark.parametrize("keys", [{"channels_last": True}, {"compile": True}], ids=str)
def test_a_net_of_few_channels_trains_with_its_channels_last(keys: dict[str, Any], tmp_path: Path) -> None:
    """Training crashed with a damaged heap in each of ten trials. torch.compile chooses channels_last by itself."""
    done = subprocess.run([sys.executable, "-c", SCRIPT % keys], capture_output=True, text=True, check=False,
                          cwd=tmp_path)  # fmt: skip
    assert (done.returncode, done.stdout) == (0, "trained\n"), done.stderr[-3000:]


def output_and_gradients(layer: nn.Module, images: Tensor) -> list[Tensor]:
    own = images.clone().requires_grad_()
    out = layer(own)
    draw = torch.Generator().manual_seed(1)
    out.backward(torch.randn(out.shape, generator=draw, dtype=out.dtype))
    assert own.grad is not None
    return [out.detach(), own.grad, *(p.grad for p in layer.parameters() if p.grad is not None)]


@pytest.mark.parametrize("stride", [2, 3, (1, 2), (2, 1)], ids=str)
@pytest.mark.parametrize("bias", [False, True])
def test_subsampling_inputs_keeps_outputs_and_gradients(stride: Any, bias: bool) -> None:
    layer = nn.Conv2d(3, 5, 1, stride, bias=bias).double()
    for shape in ((2, 3, 7, 8), (3, 5, 5), (1, 3, 1, 1)):
        images = torch.randn(shape, dtype=torch.float64)
        thinned = subsample_inputs(nn.Sequential(copy.deepcopy(layer)))[0]  # type: ignore[index]
        assert thinned.stride == (1, 1)
        expected = output_and_gradients(copy.deepcopy(layer), images)
        torch.testing.assert_close(output_and_gradients(thinned, images), expected)


def test_subsampling_is_idempotent_and_survives_copies() -> None:
    net = nn.Sequential(nn.Conv2d(4, 8, 1, 2))
    images, names = torch.randn(2, 4, 6, 6), list(net.state_dict())
    expected = net(images)
    assert subsample_inputs(net) is net and list(net.state_dict()) == names
    for each in (net, copy.deepcopy(net), pickle.loads(pickle.dumps(net)), subsample_inputs(net)):
        torch.testing.assert_close(each(images), expected)
    torch.testing.assert_close(net[0](input=images), expected)


class SubclassOfConv2d(nn.Conv2d):
    pass


@pytest.mark.parametrize("layer", [
    nn.Conv2d(4, 8, 1), nn.Conv2d(4, 8, 3, 2), nn.Conv2d(4, 8, 1, 2, padding=1), nn.Conv2d(4, 8, 1, 2, groups=2),
    nn.Conv2d(ONEDNN_CHANNELS, 8, 1, 2), SubclassOfConv2d(4, 8, 1, 2),
], ids=str)  # fmt: skip
def test_other_convolutions_stay_unchanged(layer: nn.Conv2d) -> None:
    stride = layer.stride
    subsample_inputs(nn.Sequential(layer))
    assert layer.stride == stride and not layer._forward_pre_hooks
