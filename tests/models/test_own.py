"""Torch modules of the user as models: keys are the constructor's arguments; and initial weights from a file."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from decentnode.build import build_in_process
from decentnode.config.component import load_class, section
from decentnode.errors import ConfigError, UsageError
from decentnode.experiment import load
from decentnode.experiment.identity import identity
from decentnode.experiment.initial_model import make_model
from decentnode.models import MODELS
from decentnode.models.base import Model
from decentnode.models.weights import check_weights, load_weights
from decentnode.samples import DataSpec
from tests.models.contract import check_model

DIGITS = DataSpec((1, 8, 8), num_classes=10)


class Net(nn.Module):
    """Layers of one width."""

    def __init__(
        self, input_shape: tuple[int, ...], num_classes: int, width: int = 8, *, depth=1,
        act: Literal["relu", "tanh"] = "relu", scales: list[float] | None = None, **more: Any,
    ) -> None:  # fmt: skip
        super().__init__()
        self.given = (width, depth, act, scales, more)
        layers: list[nn.Module] = [nn.Flatten(), nn.Linear(int(torch.Size(input_shape).numel()), width), nn.ReLU()]
        for _ in range(depth - 1):
            layers += [nn.Linear(width, width), nn.ReLU()]
        self.layers = nn.Sequential(*layers, nn.Linear(width, num_classes))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.layers(x)
        return out


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Flatten(), nn.Linear(64, 4), nn.BatchNorm1d(4), nn.Linear(4, 10))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.layers(x)
        return out


class Recommender(nn.Module):
    def __init__(self, users: int, items: int, factors: int) -> None:
        super().__init__()
        self.size = (users, items, factors)


class Assembled(nn.Module):
    """Has defaults that YAML cannot express, and a default for num_classes, which the data gives."""

    def __init__(
        self, input_shape: tuple[int, ...], num_classes: int = 3, activation=nn.ReLU, dtype=torch.float32,
        scales=(1, 2), norm: nn.Module | None = None, last: Callable[[], nn.Module] = nn.Identity, *, bias=True,
    ) -> None:  # fmt: skip
        super().__init__()
        self.given = (num_classes, activation, dtype, scales, norm, last, bias)
        self.layers = nn.Sequential(nn.Flatten(), nn.Linear(64, num_classes, bias, dtype=dtype), activation(), last())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.layers(x)
        return out


class Broken(nn.Module):
    def __init__(self, width: int) -> None:
        raise ValueError(f"no width {width}")


def make(name: str, **keys: Any) -> Model:
    chosen = load_class(f"{__name__}:{name}", MODELS, "model")
    found: Model = chosen(chosen.Config.model_validate({"name": f"{__name__}:{name}", **keys}))
    return found


def test_a_module_gets_its_arguments_from_keys_and_the_data() -> None:
    check_model(make("Net", width=5, depth=2), DIGITS)
    module = make("Net", width=5, act="tanh", scales=[1, 2.5], other=3).make(DIGITS)
    assert isinstance(module, Net) and module.given == (5, 1, "tanh", [1.0, 2.5], {"other": 3})
    assert load_class(f"{__name__}:Net", MODELS, "model") is load_class(f"{__name__}:Net", MODELS, "model")
    ratings = DataSpec((2,), "ids", "rating", users=7, items=9)
    recommender = make("Recommender", factors=3, items=50).make(ratings)
    assert isinstance(recommender, Recommender) and recommender.size == (7, 50, 3), "written keys win over the data"


BASE = "graph: {name: ring, nodes: 3}\ndata: digits\ntraining: {local_steps: 2}\nnode: {rounds: 2}\n"


@pytest.mark.parametrize("written", ["", ", bias: false, scales: [3]"])
def test_a_resolved_file_makes_the_same_module(tmp_path: Path, written: str) -> None:
    """A resolved file has all keys; those that were not written still come from the data or the constructor."""
    (tmp_path / "a.yaml").write_text(BASE + f"model: {{name: '{__name__}:Assembled'{written}}}\n")
    first = load(tmp_path / "a.yaml")
    (tmp_path / "b.yaml").write_text(first.resolved_yaml())
    again = load(tmp_path / "b.yaml")
    assert again.digest() == first.digest()
    scales, bias = ((3,), False) if written else ((1, 2), True)
    for each in (first, again):
        module = make_model(each, DIGITS)
        assert isinstance(module, Assembled)
        assert module.given == (10, nn.ReLU, torch.float32, scales, None, nn.Identity, bias)


@pytest.mark.parametrize(("model", "text"), [
    ("{name: 'NET', width: wide}", "a.yaml:5:MODEL: model.width must be an integer, got 'wide'"),
    ("{name: 'NET', width: 8, act: rleu}", "model.act must be one of relu, tanh, got 'rleu'"),
    ("{name: 'RECOMMENDER', users: 1, items: 2, fcators: 1}", "model.fcators is not a known key"),
    ("{name: 'RECOMMENDER', users: 1, items: 2}", "model.factors is missing"),
    ("{name: 'RECOMMENDER', factors: 2}", "must be given: Recommender needs it, but this data has none"),
    ("{name: 'BROKEN', width: 3}", "making Broken(width=3) raised ValueError: no width 3 ("),
    ("{name: 'NET', depth: deep}", "model.depth must be an integer, got 'deep'"),
])  # fmt: skip
def test_wrong_arguments_are_errors_with_their_line(tmp_path: Path, model: str, text: str) -> None:
    for name in ("Net", "Recommender", "Broken"):
        model = model.replace(f"'{name.upper()}'", f"'{__name__}:{name}'")
    (tmp_path / "a.yaml").write_text(BASE + f"model: {model}\n")
    with pytest.raises(ConfigError) as caught:
        load(tmp_path / "a.yaml")
    assert text.replace("a.yaml:5:MODEL: ", "") in str(caught.value)
    assert f"{tmp_path / 'a.yaml'}:5:" in str(caught.value)


def test_a_class_that_is_no_module_is_refused() -> None:
    with pytest.raises(UsageError, match="must name a class whose Config is a component"):
        section(MODELS, "model").config_of("pathlib:Path")


@pytest.mark.parametrize("model", ["{name: mlp, hidden: [4]}", f"{{name: '{__name__}:Normed'}}"])
def test_runs_start_from_the_weights_of_a_file(tmp_path: Path, model: str) -> None:
    (tmp_path / "a.yaml").write_text(BASE + f"model: {model}\n")
    first = load(tmp_path / "a.yaml", ["communication=inproc"])
    module = make_model(first, DIGITS)
    for value in module.state_dict().values():
        value.copy_(torch.full_like(value, 3) if not value.is_floating_point() else torch.rand_like(value))
    save_file(module.state_dict(), tmp_path / "w.safetensors")
    (tmp_path / "b.yaml").write_text(BASE + f"model: {model.replace('}', ', init: w.safetensors}')}\n")
    again = load(tmp_path / "b.yaml", ["communication=inproc"])
    assert all(torch.equal(a, b) for a, b in zip(make_model(again, DIGITS).state_dict().values(),
                                                 module.state_dict().values(), strict=True))  # fmt: skip
    flat = [node.training.model.parameters.cpu() for node in build_in_process(again)]
    assert torch.equal(flat[0], flat[2])
    assert torch.equal(flat[0], torch.cat([p.reshape(-1) for p in module.parameters()]))


def test_weights_of_another_model_are_refused_before_the_run(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text(BASE + "model: {name: mlp, hidden: [4], init: w.safetensors}\n")
    with pytest.raises(ConfigError, match=r"model\.init must be a \.safetensors file"):
        load(tmp_path / "a.yaml")
    (tmp_path / "w.safetensors").write_bytes(b"no tensors")
    with pytest.raises(ConfigError, match=r"a\.yaml:5:\d+: model\.init must be a \.safetensors file") as caught:
        load(tmp_path / "a.yaml")
    assert "see data" not in str(caught.value)
    save_file(nn.Linear(3, 2).state_dict(), tmp_path / "w.safetensors")
    with pytest.raises(ConfigError, match=r"model\.init must hold the weights of .*it lacks 1\.bias, 1\.weight"):
        load(tmp_path / "a.yaml")
    module = nn.Linear(3, 5)
    with pytest.raises(UsageError, match=r"weight is \[2, 3\] instead of \[5, 3\]; bias is \[2\] instead of \[5\]"):
        check_weights(module, tmp_path / "w.safetensors")
    before = module.weight.clone()
    with pytest.raises(UsageError):
        load_weights(module, tmp_path / "w.safetensors")
    assert torch.equal(module.weight, before)


def test_the_digest_of_an_experiment_includes_the_content_of_initial_weights(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text(BASE + "model: {name: mlp, hidden: [4]}\n")
    plain, init = load(tmp_path / "a.yaml").digest(), ["model.init=" + str(tmp_path / "w.safetensors")]

    def digest(value: float, name: str = "w.safetensors") -> str:
        module = make_model(load(tmp_path / "a.yaml"), DIGITS)
        save_file({key: torch.full_like(each, value) for key, each in module.state_dict().items()}, tmp_path / name)
        return load(tmp_path / "a.yaml", [f"model.init={tmp_path / name}"]).digest()

    assert len({plain, digest(1.0), digest(2.0)}) == 3
    assert digest(2.0, "other.safetensors") == digest(2.0), "the path must not be part of the digest"
    assert identity(load(tmp_path / "a.yaml", init))["model.init"]
    assert "model.init" not in identity(load(tmp_path / "a.yaml"))
