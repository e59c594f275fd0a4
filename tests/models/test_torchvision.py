"""Models of the real torchvision: shapes, auxiliary outputs, weights from its cache, and a whole run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch import nn

from decentnode.config.component import load_class
from decentnode.errors import UsageError
from decentnode.models import MODELS
from decentnode.samples import DataSpec, NodeSamples, Samples
from decentnode.simulate.engines.choice import cores, workers_for
from decentnode.simulate.engines.forward import random_part
from decentnode.tasks.classification import Classification, ClassificationConfig
from decentnode.tensors import FlatModel
from decentnode.training.supervised import Supervised
from decentnode.training.supervised_config import SupervisedConfig
from tests.commands import run
from tests.data.files import write_image_folder
from tests.real_torchvision import torchvision
from tests.simulate.test_batched import compare_engines, experiment

vision = torchvision()
SMALL = ("squeezenet1_1", "shufflenet_v2_x0_5", "mobilenet_v3_small")
LARGE = ("resnet18", "vgg11", "densenet121", "efficientnet_b0", "swin_t", "convnext_tiny", "vit_b_16")
AUXILIARY = [("googlenet", 32, 0.3, 2), ("inception_v3", 299, 0.4, 1)]  # which has none in training for smaller images


def make(name: str, side: int = 32, classes: int = 10, **keys: Any) -> nn.Module:
    chosen = load_class(f"torchvision:{name}", MODELS, "model")
    torch.manual_seed(4)
    config = chosen.Config.model_validate({"name": f"torchvision:{name}", **keys})
    made: nn.Module = chosen(config).make(DataSpec((3, side, side), num_classes=classes))
    return made


@pytest.mark.parametrize("name", [*SMALL, *(pytest.param(name, marks=pytest.mark.slow) for name in LARGE)])
def test_a_gradient_reaches_every_parameter(name: str) -> None:
    module = make(name, arguments={"image_size": 32} if name == "vit_b_16" else {})
    outputs = module(torch.randn(2, 3, 32, 32))
    assert outputs.shape == (2, 10)
    outputs.square().sum().backward()
    assert all(p.grad is not None for p in module.parameters())


@pytest.mark.parametrize("name, keys, draws", [
    ("shufflenet_v2_x0_5", {}, ""), ("mobilenet_v3_small", {}, "Dropout"),
    ("mobilenet_v3_small", {"arguments": {"dropout": 0.0}}, ""),
    ("squeezenet1_1", {}, "Dropout"), ("resnet18", {}, ""), ("densenet121", {}, "DenseNet"),
    ("efficientnet_b0", {"arguments": {"dropout": 0.0}}, "StochasticDepth"), ("swin_t", {}, "SwinTransformer"),
])  # fmt: skip
def test_random_part_names_the_layer_that_draws_random_numbers(name: str, keys: dict[str, Any], draws: str) -> None:
    """Simulations step models that draw random numbers node by node, as torch has one generator per process."""
    with torch.device("meta"):
        assert random_part(make(name, **keys)) == draws


@pytest.mark.slow
@pytest.mark.parametrize("name", ["shufflenet_v2_x0_5", "resnet18"])
def test_batched_simulation_equals_stepped_nodes_bit_for_bit(name: str) -> None:
    config = experiment(f"model={{name: 'torchvision:{name}'}}", "data={name: synthetic, input_shape: [3, 16, 16], "
                        "train_samples: 100, test_samples: 20}", "node={rounds: 2, evaluate_every: 1}")  # fmt: skip
    assert workers_for(config) == min(cores(), 5)
    engine = compare_engines(config, "rows", workers=2, atol=0)
    assert engine.population.forks


def test_torchvision_models_that_do_not_classify_images_are_refused() -> None:
    """Some of them would download weights of a part when they are made."""
    for name in ("fcn_resnet50", "fasterrcnn_resnet50_fpn", "r3d_18", "raft_small"):
        with pytest.raises(UsageError, match=f"torchvision has no model '{name}' that classifies images"):
            make(name)
    with pytest.raises(UsageError, match=r"'resnet' that classifies images; it has .*resnet18"):
        make("resnet")


@pytest.mark.slow
@pytest.mark.parametrize("name, side, weight, heads", AUXILIARY)
def test_the_losses_of_auxiliary_outputs_are_added(name: str, side: int, weight: float, heads: int) -> None:
    keys: dict[str, Any] = {"dropout": 0.0} | ({"dropout_aux": 0.0} if name == "googlenet" else {})
    draw = torch.Generator().manual_seed(3)
    inputs, targets = torch.randn(2, 3, side, side, generator=draw), torch.tensor([1, 4])
    module = make(name, side, arguments=keys)
    assert module.transform_input is False and module.auxiliary_weight == weight
    given = module(inputs)
    losses = [nn.functional.cross_entropy(each, targets) for each in given]
    assert len(losses) == 1 + heads
    expected = losses[0] + weight * torch.stack(losses[1:]).sum()
    grads = torch.autograd.grad(expected, list(module.parameters()))
    model = FlatModel(make(name, side, arguments=keys))
    before = model.parameters.clone()
    share = NodeSamples(Samples(inputs.numpy(), targets.numpy()), Samples(inputs.numpy(), targets.numpy()))
    config = SupervisedConfig.model_validate(
        {"name": "supervised", "batch_size": 2, "local_steps": 1, "optimizer": {"name": "sgd", "lr": 1.0}})
    task = Classification(ClassificationConfig(), DataSpec((3, side, side), num_classes=10))
    training = Supervised(config, model, task, share, seed=1, uid=0)
    training.local_update(0)
    stepped = before - model.parameters
    wanted = torch.cat([each.flatten() for each in grads])
    assert torch.linalg.vector_norm(stepped - wanted) < 1e-3 * torch.linalg.vector_norm(wanted)
    assert 0 <= training.evaluate("test").sums["correct"] <= 2, "evaluated by the last layer alone"


# -- weights


def cache_weights(monkeypatch: pytest.MonkeyPatch, folder: Path, name: str, state: dict[str, Any]) -> None:
    """Writes weights into the folder in which torchvision keeps its downloads."""
    monkeypatch.setattr(torch.hub, "get_dir", lambda: str(folder))
    url: str = vision.models.get_model_weights(name).DEFAULT.url
    (folder / "checkpoints").mkdir(exist_ok=True)
    torch.save(state, folder / "checkpoints" / url.rpartition("/")[2])


@pytest.mark.parametrize("name, old", [
    ("shufflenet_v2_x0_5", False), ("mobilenet_v3_small", True), pytest.param("resnet18", True, marks=pytest.mark.slow),
    pytest.param("densenet121", True, marks=pytest.mark.slow),
])
def test_weights_of_1000_classes_are_loaded_as_torchvision_loads_them(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str, old: bool
) -> None:
    """Older files count no batches of norms, and name layers of DenseNet in another way."""
    trained = vision.models.get_model(name, num_classes=1000)
    for buffer in trained.buffers():
        if buffer.is_floating_point():
            buffer.normal_()
    state = trained.state_dict()
    if old:
        state = {key.replace("norm1.", "norm.1.").replace("norm2.", "norm.2.").replace("conv1.", "conv.1.")
                 .replace("conv2.", "conv.2.") if "denselayer" in key else key: value
                 for key, value in state.items() if not key.endswith("num_batches_tracked")}  # fmt: skip
    cache_weights(monkeypatch, tmp_path, name, state)
    theirs = vision.models.get_model(name, weights="DEFAULT").state_dict()
    ours = make(name, pretrained=True).state_dict()
    other = {key for key, value in ours.items() if not torch.equal(value, theirs[key])}
    assert other and all(ours[key].shape[0] == 10 and theirs[key].shape[0] == 1000 for key in other), other
    whole = make(name, classes=1000, pretrained=True).state_dict()
    assert all(torch.equal(value, theirs[key]) for key, value in whole.items())


@pytest.mark.slow
@pytest.mark.parametrize("name, side, weight, heads", AUXILIARY)
def test_pretrained_models_with_auxiliary_outputs(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str, side: int, weight: float, heads: int
) -> None:
    trained = vision.models.get_model(name, num_classes=1000, init_weights=True)
    cache_weights(monkeypatch, tmp_path, name, trained.state_dict())
    theirs = vision.models.get_model(name, weights="DEFAULT")
    ours = make(name, side, classes=1000, pretrained=True)
    x = torch.randn(2, 3, side, side)
    assert torch.equal(ours.eval()(x), theirs.eval()(x)), "inputs are transformed as its weights want them"
    for classes in (10, 1000):
        made = make(name, side, classes=classes, pretrained=True, arguments={"aux_logits": False})
        assert made(x).shape == (2, classes)
    assert make(name, side, pretrained=True)(x)[-1].shape == (2, 10)


def test_weights_of_other_layers_are_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    state = vision.models.get_model("squeezenet1_1", num_classes=1000).state_dict()
    without_layer = {k: v for k, v in state.items() if "features.3.squeeze" not in k}
    cache_weights(monkeypatch, tmp_path, "squeezenet1_1", without_layer)
    with pytest.raises(UsageError, match=r"has no weights for features\.3\.squeeze of torchvision:squeezenet1_1"):
        make("squeezenet1_1", pretrained=True)
    cache_weights(monkeypatch, tmp_path, "squeezenet1_1", state | {"features.0.weight": torch.zeros(64, 1, 3, 3)})
    with pytest.raises(UsageError, match=r"has no weights for features\.0 of"):
        make("squeezenet1_1", pretrained=True)


# -- whole runs


def write_config(folder: Path, **sections: Any) -> Path:
    write_image_folder(folder / "d", classes=2, per_class=8)
    config = {
        "graph": {"name": "ring", "nodes": 3}, "node": {"rounds": 2, "evaluate_every": 2}, "communication": "inproc",
        "data": {"name": "image_folder", "folder": "d", "size": 32, "cache": str(folder / "cache")},
        "model": {"name": "torchvision:shufflenet_v2_x0_5"}, "run": {"dir": str(folder / "runs")},
        "training": {"batch_size": 2, "local_steps": 1, "augment": {"random_resized_crop": True, "flip": True}},
        **sections,
    }  # fmt: skip
    (folder / "c.yaml").write_text(yaml.safe_dump(config))
    return folder / "c.yaml"


@pytest.mark.slow
@pytest.mark.parametrize("command", [["run", "--set", "communication=auto"], ["simulate"]])
def test_a_run_with_a_torchvision_model(tmp_path: Path, command: list[str]) -> None:
    code, output, errors = run(tmp_path, command[0], str(write_config(tmp_path)), *command[1:])
    assert code == 0 and "accuracy" in output, output + errors
