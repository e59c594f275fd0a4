from __future__ import annotations

from pathlib import Path
from typing import Any

import pydantic
import pytest
import torch
from torch import nn
from torch.nn import functional

from decentnode.config.component import load_class
from decentnode.errors import UsageError
from decentnode.experiment import load
from decentnode.models import MODELS
from decentnode.models.base import Model
from decentnode.models.resnet import BasicBlock, Bottleneck, PaddedShortcut
from decentnode.samples import DataSpec

from .contract import check_model

CIFAR = (3, 32, 32)
QUICKSTART = Path(__file__).parents[2] / "configs" / "quickstart.yaml"


def make(name: str, **keys: Any) -> Model:
    chosen = load_class(name, MODELS, "model")
    found: Model = chosen(chosen.Config.model_validate({"name": name, **keys}))
    return found


ID_DATA = {
    "gpt": DataSpec((6,), "ids", "next_token", vocabulary=9),
    "transformer": DataSpec((6, 2), "ids", "translation", vocabulary=9, target_shape=(6,), padding=0, pairs=True),
    "lstm": DataSpec((6,), "ids", "next_token", vocabulary=9),
    "shakespeare_lstm": DataSpec((7,), "ids", "next_token", vocabulary=9),
    "reddit_rnn": DataSpec((5,), "ids", "next_token", vocabulary=30),
    "matrix_factorization": DataSpec((2,), "ids", "rating", users=5, items=8),
}
"""Models whose inputs are ids (tokens, users, items), and data for them."""
CHECKED: list[tuple[str, dict[str, Any]]] = [
    *((name, {}) for name in MODELS
      if name not in ("resnet", "wide_resnet", "densenet", "pyramidnet", "vgg", *ID_DATA)),
    ("gn_lenet", {"norm": "batch"}), ("gn_lenet", {"norm": "none"}), ("lenet", {"variant": "caffe"}),
    ("rnet", {"norm": "group", "groups": 4}), ("wide_resnet", {"depth": 10, "widen": 1, "dropout": 0.1}),
    ("wide_resnet", {"depth": 10, "widen": 1, "norm": "group"}),
    ("densenet", {"depth": 10, "growth": 3}), ("densenet", {"depth": 16, "growth": 4, "norm": "group", "dropout": 0.1}),
    ("pyramidnet", {"depth": 14, "alpha": 7}), ("pyramidnet", {"depth": 11, "alpha": 6, "bottleneck": True}),
    ("pyramidnet", {"depth": 8, "alpha": 9, "norm": "group"}), ("pyramidnet", {"depth": 8, "norm": "none"}),
    *(("resnet", {"widths": [4, 6, 8], "norm": norm, "shortcut": shortcut})
      for norm in ("batch", "group") for shortcut in ("auto", "projection")),
    ("resnet", {"depth": 8, "widths": [4, 6, 8]}), ("resnet", {"depth": 18, "widths": [4, 4, 6, 6], "stem": "large"}),
    *(("resnet", {"depth": 50, "widths": [2, 2, 4, 4], "norm": norm}) for norm in ("batch", "group")),
    ("resnet", {"depth": 50, "widths": [2, 2, 4, 4], "stem": "small", "shortcut": "pad", "norm": "none"}),
    ("vgg", {"depth": 11}), ("vgg", {"depth": 11, "norm": "group", "dropout": 0}),
]  # fmt: skip
"""(name, keys) of all other models, with their variants in a small size."""


def test_all_models_are_checked() -> None:
    assert {name for name, _ in CHECKED} | set(ID_DATA) == set(MODELS)


def test_an_lstm_predicts_every_position_from_earlier_tokens_only() -> None:
    torch.manual_seed(0)
    module = make("lstm", hidden=8).make(DataSpec((6,), "ids", "next_token", vocabulary=9, target_shape=(6,)))
    tokens = torch.randint(0, 9, (3, 6))
    outputs, changed = module(tokens), tokens.clone()
    changed[:, 4] = (tokens[:, 4] + 1) % 9
    assert outputs.shape == (3, 6, 9) and torch.equal(module(changed)[:, :4], outputs[:, :4])
    assert not torch.equal(module(changed)[:, 4:], outputs[:, 4:])
    assert torch.allclose(module(tokens[:, :3]), outputs[:, :3], atol=1e-6), "rows may be shorter"


@pytest.mark.parametrize("name", ID_DATA)
def test_contract_of_ids(name: str) -> None:
    check_model(make(name), ID_DATA[name])
    with pytest.raises(UsageError, match=f"model {name} needs"):
        make(name).make(DataSpec(CIFAR, num_classes=10))
    with pytest.raises(UsageError, match="needs"):
        make("logistic").make(ID_DATA[name])


@pytest.mark.parametrize("name, data, parameters", [
    ("shakespeare_lstm", DataSpec((80,), "ids", "next_token", vocabulary=92), 2_683_708),
    ("reddit_rnn", DataSpec((10,), "ids", "next_token", vocabulary=9_999), 4_317_895),
    ("matrix_factorization", DataSpec((2,), "ids", "rating", users=610, items=9_724), 206_680),
])
def test_numbers_of_parameters_of_models_on_ids(name: str, data: DataSpec, parameters: int) -> None:
    with torch.device("meta"):
        module = make(name).make(data)
    assert sum(p.numel() for p in module.parameters()) == parameters


@pytest.mark.sampled
@pytest.mark.parametrize("shape", [CIFAR, (1, 28, 28), (1, 17, 30)])
@pytest.mark.parametrize("name, keys", CHECKED, ids=str)
def test_contract(name: str, keys: dict[str, Any], shape: tuple[int, ...]) -> None:
    if name == "vgg":  # five poolings
        shape = (shape[0], max(shape[1], 32), max(shape[2], 33))
    check_model(make(name, **keys), DataSpec(shape, num_classes=7))


@pytest.mark.parametrize("name, keys, parameters", [
    ("gn_lenet", {}, 89_834),
    ("gn_lenet", {"norm": "batch"}, 89_834),
    ("gn_lenet", {"norm": "none"}, 89_578),
    ("cnn", {}, 62_006),
    ("logistic", {}, 30_730),
    ("mlp", {"hidden": [325]}, 1_001_985),
    ("mlp", {"hidden": [4096, 3000]}, 24_908_018),
    ("mlp", {"hidden": []}, 30_730),
    ("resnet", {"depth": 8}, 4_932_344 - 20_590),
    ("resnet", {"depth": 18}, 11_173_962),
    ("resnet", {"depth": 20}, 269_722),
    ("resnet", {"depth": 20, "norm": "group"}, 269_722),
    ("resnet", {"depth": 20, "shortcut": "projection"}, 272_474),
    ("resnet", {"depth": 32}, 464_154),
    ("resnet", {"depth": 44}, 658_586),
    ("resnet", {"depth": 56}, 853_018),
    ("resnet", {"depth": 110}, 1_727_962),
    ("vgg", {"depth": 11}, 9_756_426),
    ("vgg", {"depth": 16}, 15_253_578),
    ("vgg", {"depth": 16, "norm": "none"}, 15_245_130),
    ("densenet", {}, 769_162),
    pytest.param("densenet", {"depth": 190, "growth": 40}, 25_624_430, marks=pytest.mark.slow),
    pytest.param("densenet", {"depth": 250, "growth": 24}, 15_324_406, marks=pytest.mark.slow),
    ("pyramidnet", {}, 1_772_706),
    ("pyramidnet", {"alpha": 84}, 3_904_446),
    ("pyramidnet", {"alpha": 270}, 28_485_477),
    ("pyramidnet", {"depth": 200, "alpha": 240, "bottleneck": True}, 26_752_702),
    ("wide_resnet", {}, 36_479_194),
    ("wide_resnet", {"depth": 16, "widen": 4}, 2_748_890),
])
def test_numbers_of_parameters_on_cifar10(name: str, keys: dict[str, Any], parameters: int) -> None:
    assert count_parameters(name, keys, CIFAR, 10) == parameters


@pytest.mark.parametrize("name, keys, shape, classes, parameters", [
    ("logistic", {}, (1, 28, 28), 62, 48_670),
    ("femnist_cnn", {}, (1, 28, 28), 62, 1_690_046),
    ("rnet", {}, (1, 28, 28), 62, 2_811_678),
    ("rnet", {"norm": "group"}, (1, 28, 28), 62, 2_811_678),
    ("celeba_cnn", {}, (3, 84, 84), 2, 30_242),
    ("lenet", {}, (1, 28, 28), 10, 61_706),
    ("lenet", {"variant": "caffe"}, (1, 28, 28), 10, 431_080),
    ("resnet", {"depth": 18, "stem": "large"}, (3, 224, 224), 1000, 11_689_512),
    ("resnet", {"depth": 34, "stem": "large"}, (3, 224, 224), 1000, 21_797_672),
    ("resnet", {"depth": 50}, (3, 224, 224), 1000, 25_557_032),
    ("resnet", {"depth": 50, "norm": "group", "groups": 32}, (3, 224, 224), 1000, 25_557_032),
    ("resnet", {"depth": 101}, (3, 224, 224), 1000, 44_549_160),
    ("resnet", {"depth": 152}, (3, 224, 224), 1000, 60_192_808),
])
def test_numbers_of_parameters_on_the_data_of_the_papers(
    name: str, keys: dict[str, Any], shape: tuple[int, ...], classes: int, parameters: int
) -> None:
    assert count_parameters(name, keys, shape, classes) == parameters


DEEP = ("densenet", "pyramidnet")


@pytest.mark.parametrize("name", [
    pytest.param(name, marks=pytest.mark.slow if name in DEEP else ()) for name in MODELS if name not in ID_DATA])
def test_an_experiment_with_every_model_is_valid(name: str) -> None:
    data = "{name: synthetic, input_shape: [3, 32, 32], train_samples: 640, test_samples: 16}"
    experiment = load(QUICKSTART, [f"model={{name: {name}}}", f"data={data}"])
    assert experiment.model.name == name


def count_parameters(name: str, keys: dict[str, Any], shape: tuple[int, ...], classes: int) -> int:
    with torch.device("meta"):
        module = make(name, **keys).make(DataSpec(shape, num_classes=classes))
    return sum(p.numel() for p in module.parameters())


def test_rnet_equals_the_resnet_that_it_stands_for() -> None:
    keys = {"depth": 18, "widths": [32, 64, 128, 256], "stem": "large"}
    outputs = []
    for model in (make("rnet"), make("resnet", **keys)):
        torch.manual_seed(3)
        outputs.append(model.make(DataSpec((1, 28, 28), num_classes=62))(torch.ones(2, 1, 28, 28)))
    assert torch.equal(*outputs)


def test_a_bottleneck_halves_the_image_in_its_middle_convolution() -> None:
    module: Any = make("resnet", depth=50, widths=[2, 2, 4, 4]).make(DataSpec((3, 64, 64), num_classes=5))
    blocks = [part for part in module if isinstance(part, Bottleneck)]
    assert [tuple(block.conv2.stride) for block in blocks].count((2, 2)) == 3
    assert all(block.conv1.stride == block.conv3.stride == (1, 1) for block in blocks)
    assert module[0].stride == (2, 2) and isinstance(module[3], nn.MaxPool2d), "the large stem"
    images = nn.Sequential(*list(module)[:-3])(torch.zeros(2, 3, 64, 64))
    assert images.shape == (2, 16, 2, 2), "a 32nd of each side, four times the width"


def test_the_default_stem_depends_on_the_depth() -> None:
    stems = [make("resnet", depth=depth, **keys).config.stem  # type: ignore[attr-defined]
             for depth, keys in ((50, {}), (50, {"stem": "small"}), (18, {}), (20, {"stem": "large"}))]  # fmt: skip
    assert stems == ["large", "small", "small", "large"]


@pytest.mark.parametrize("keys", [{"depth": 50, "widths": [2, 2, 4, 4], "norm": "group"}, {"depth": 20}])
def test_blocks_with_zero_init_start_as_their_shortcuts(keys: dict[str, Any]) -> None:
    data = DataSpec(CIFAR, num_classes=5)
    module: Any = make("resnet", zero_init=True, **keys).make(data)
    block = next(part for part in module if isinstance(part, Bottleneck | BasicBlock))
    x = torch.rand(2, next(block.parameters()).shape[1], 8, 8)
    assert torch.equal(block(x), functional.relu(block.shortcut(x)))
    plain: Any = make("resnet", **keys).make(data)
    assert not torch.equal(plain[3 + (keys["depth"] == 50)](x), functional.relu(block.shortcut(x)))
    with pytest.raises(pydantic.ValidationError, match="must have a norm with zero_init"):
        make("resnet", zero_init=True, **{**keys, "norm": "none"})


@pytest.mark.slow
def test_deep_nets_start_with_outputs_of_moderate_size() -> None:
    """Deep nets that start with vanishing or exploding outputs do not learn."""
    for name, keys in (("resnet", {"depth": 110}), ("resnet", {"depth": 56, "norm": "group"}), ("vgg", {"depth": 19})):
        torch.manual_seed(0)
        outputs = make(name, **keys).make(DataSpec(CIFAR, num_classes=10))(torch.randn(4, *CIFAR))
        assert 1e-2 < float(outputs.detach().std()) < 1e2, name


def test_a_padded_shortcut_keeps_every_other_pixel() -> None:
    found = PaddedShortcut(2, 3)(torch.arange(32.0).reshape(1, 2, 4, 4))
    assert found.shape == (1, 5, 2, 2) and not found[0, [0, 3, 4]].any()
    assert found[0, 1:3].tolist() == [[[0, 2], [8, 10]], [[16, 18], [24, 26]]]


@pytest.mark.parametrize("name, keys, rule", [
    ("resnet", {"depth": 8, "widths": [1, 2]}, "must have 3 widths at depth 8, got 2"),
    ("resnet", {"depth": 21}, "Input should be 8, 18"),
    ("wide_resnet", {"depth": 12}, r"must be 6 n \+ 4 .* got 12"),
])
def test_invalid_depths_and_widths_are_refused(name: str, keys: dict[str, Any], rule: str) -> None:
    with pytest.raises(pydantic.ValidationError, match=rule):
        make(name, **keys)


def test_groups_that_do_not_divide_the_widths_are_refused() -> None:
    with pytest.raises(UsageError, match=r"model\.groups must divide the widths of the layers, got 3 for 16 channels"):
        make("resnet", norm="group", groups=3).make(DataSpec(CIFAR, num_classes=10))


class _Reference(nn.Module):
    """GN-LeNet in decentralizepy's order: ReLU before pooling, on contiguous images."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.of = module

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for n in "123":
            x = getattr(self.of, "norm" + n)(getattr(self.of, "conv" + n)(x))
            x = functional.max_pool2d(functional.relu(x), 2)
        return self.of.output(torch.flatten(x, 1))


def test_gn_lenet_equals_decentralizepys_reference() -> None:
    torch.manual_seed(0)
    module = make("gn_lenet").make(DataSpec(CIFAR, num_classes=10)).double()
    inputs, targets = torch.randn(4, *CIFAR, dtype=torch.float64), torch.tensor([1, 2, 3, 4])
    gradients = []
    for one in (module, _Reference(module)):
        module.zero_grad()
        loss = functional.cross_entropy(one(inputs), targets)
        loss.backward()
        gradients.append([loss.detach(), *[p.grad for p in module.parameters()]])
    for ours, theirs in zip(*gradients, strict=True):
        assert torch.allclose(ours, theirs, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("name, shape", [
    ("gn_lenet", (1, 7, 8)), ("gn_lenet", (64,)), ("cnn", (3, 15, 32)), ("lenet", (1, 11, 28)), ("resnet", (3, 3, 4)),
    ("wide_resnet", (32, 32)), ("vgg", (3, 31, 32)), ("femnist_cnn", (1, 3, 28)), ("rnet", (784,)),
    ("celeba_cnn", (3, 84, 15)),
])
def test_inputs_that_a_model_cannot_take_are_refused(name: str, shape: tuple[int, ...]) -> None:
    with pytest.raises(UsageError, match=rf"model {name} needs images .* got samples of shape \["):
        make(name).make(DataSpec(shape, num_classes=10))


@pytest.mark.parametrize("name, shape", [
    ("gn_lenet", (1, 8, 8)), ("cnn", (3, 16, 16)), ("lenet", (1, 12, 12)), ("resnet", (3, 4, 4)), ("vgg", (1, 32, 32)),
    ("femnist_cnn", (1, 4, 4)), ("rnet", (1, 16, 16)), ("celeba_cnn", (3, 16, 16)),
])
def test_the_smallest_images_that_models_accept(name: str, shape: tuple[int, ...]) -> None:
    assert make(name).make(DataSpec(shape, num_classes=10))(torch.zeros(2, *shape)).shape == (2, 10)


@pytest.mark.parametrize("activation", ["relu", "tanh", "gelu"])
def test_mlp_layers(activation: str) -> None:
    module = make("mlp", hidden=[5, 4], activation=activation).make(DataSpec((2, 3), num_classes=2))
    assert [type(layer).__name__.lower() for layer in module.children()] == [
        "flatten", "linear", activation, "linear", activation, "linear"]
