"""Models of other libraries: through small fakes of them, and through transformers where it is installed."""

from __future__ import annotations

import importlib.util
import os
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch import Tensor, nn

from decentnode.build import build_in_process, step_all
from decentnode.config.component import load_class
from decentnode.errors import ConfigError, UsageError
from decentnode.experiment import load
from decentnode.models import MODELS
from decentnode.samples import DataSpec

QUICKSTART = Path(__file__).parents[2] / "configs" / "quickstart.yaml"
REVIEWS = DataSpec((12,), "ids", "classification", num_classes=5, vocabulary=40, padding=0)
TEXT = DataSpec((12,), "ids", "next_token", vocabulary=40, target_shape=(12,))
LAST = DataSpec((12,), "ids", "next_token", vocabulary=40)
IMAGES = DataSpec((3, 16, 16), num_classes=10)
SMALL = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8}


def make(name: str, data: DataSpec, **keys: Any) -> nn.Module:
    chosen = load_class(name, MODELS, "model")
    torch.manual_seed(4)
    made: nn.Module = chosen(chosen.Config.model_validate({"name": name, **keys})).make(data)
    return made


# -- a fake of transformers with what the package uses, and a model that sums the embeddings of unmasked tokens

class FakeConfig:
    def __init__(self, **keys: Any) -> None:
        self.max_position_embeddings, self.vocab_size = 8, 9
        self.__dict__.update(keys)


class FakeModel(nn.Module):
    def __init__(self, settings: FakeConfig, outputs: int, kind: str) -> None:
        super().__init__()
        self.settings, self.kind = settings, kind
        self.embedding = nn.Embedding(settings.vocab_size, outputs)

    def forward(self, input_ids: Tensor | None = None, attention_mask: Tensor | None = None,
                pixel_values: Tensor | None = None) -> Any:  # fmt: skip
        if pixel_values is not None:
            return types.SimpleNamespace(logits=self.embedding.weight[:1].expand(len(pixel_values), -1))
        assert input_ids is not None
        seen = self.embedding(input_ids)
        if self.kind == "next_token":
            return types.SimpleNamespace(logits=seen)
        mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask
        return types.SimpleNamespace(logits=(seen * mask[:, :, None]).sum(1))


@pytest.fixture
def fake_transformers(monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    found: Any = types.ModuleType("transformers")
    found.CONFIG_MAPPING = {"bert": FakeConfig, "gpt2": FakeConfig}
    found.weights = {}

    class AutoConfig:
        @staticmethod
        def for_model(name: str, **keys: Any) -> FakeConfig:
            return found.CONFIG_MAPPING[name](**keys)  # type: ignore[no-any-return]

        @staticmethod
        def from_pretrained(name: str, local_files_only: bool, **keys: Any) -> FakeConfig:
            assert local_files_only, "nothing is downloaded"
            if name not in found.weights:
                raise OSError("not in the cache")
            return FakeConfig(**{"vocab_size": 40, "max_position_embeddings": 16, **keys})

    def automatic(kind: str) -> type[Any]:
        class Auto:
            @staticmethod
            def from_config(settings: FakeConfig) -> nn.Module:
                outputs = settings.vocab_size if kind == "next_token" else settings.num_labels  # type: ignore[attr-defined]
                return FakeModel(settings, outputs, kind)

            @staticmethod
            def from_pretrained(
                name: str, config: FakeConfig, local_files_only: bool, use_safetensors: bool
            ) -> nn.Module:
                assert local_files_only and use_safetensors, "nothing is downloaded or unpickled"
                if found.weights[name] is None:
                    raise OSError("no model.safetensors")
                made = Auto.from_config(config)
                nn.init.constant_(made.embedding.weight, found.weights[name])  # type: ignore[arg-type]
                return made

        return Auto

    found.AutoConfig = AutoConfig
    found.AutoModelForSequenceClassification = automatic("sequence")
    found.AutoModelForCausalLM = automatic("next_token")
    found.AutoModelForImageClassification = automatic("image")
    monkeypatch.setitem(sys.modules, "transformers", found)
    return found  # type: ignore[no-any-return]


def test_the_head_and_the_sizes_of_a_library_model_follow_the_data(fake_transformers: Any) -> None:
    module: Any = make("hf:bert", REVIEWS, arguments={"width": 3})
    settings = module.model.settings
    assert (settings.num_labels, settings.vocab_size, settings.pad_token_id, settings.width) == (5, 40, 0, 3)
    assert settings.max_position_embeddings == 12, "as many as the data has"
    tokens = torch.randint(1, 40, (3, 12))
    assert module(tokens).shape == (3, 5)
    assert make("hf:gpt2", TEXT)(tokens).shape == (3, 12, 40) and make("hf:gpt2", LAST)(tokens).shape == (3, 40)
    assert make("hf:bert", IMAGES)(torch.zeros(2, 3, 16, 16)).shape == (2, 10)
    with pytest.raises(UsageError, match="needs sequences of tokens, or images in classes, got rating"):
        make("hf:bert", DataSpec((2,), "ids", "rating", users=3, items=4))


def test_padding_is_masked_in_library_models(fake_transformers: Any) -> None:
    module = make("hf:bert", REVIEWS)
    tokens = torch.randint(1, 40, (3, 12))
    padded = tokens.clone()
    padded[:, 7:] = 0
    assert torch.allclose(module(padded), module(tokens[:, :7]), atol=1e-6)
    assert not torch.allclose(module(padded), module(tokens), atol=1e-3)


def test_pretrained_weights_are_loaded_from_local_files_only(fake_transformers: Any) -> None:
    fake_transformers.weights |= {"mine": 2.5, "bare": None}
    weights = [make("hf:mine", REVIEWS, pretrained=known).model.embedding.weight for known in (True, False)]
    assert (weights[0] == 2.5).all() and not (weights[1] == 2.5).any(), "or its configuration alone"
    with pytest.raises(UsageError, match="weights of bare are not in the local cache as safetensors; `hf download"):
        make("hf:bare", REVIEWS, pretrained=True)
    with pytest.raises(UsageError, match=r"hf:other is neither in the local cache nor a folder with .*, nor a type"):
        make("hf:other", REVIEWS)
    with pytest.raises(UsageError, match=r"hf:bert is neither in the local cache nor a folder with config.json; "):
        make("hf:bert", REVIEWS, pretrained=True)


def test_pretrained_models_that_do_not_fit_the_data_are_refused(fake_transformers: Any) -> None:
    fake_transformers.weights["mine"] = 1.0
    with pytest.raises(UsageError, match="takes sequences of up to 16 tokens, got 20"):
        make("hf:mine", DataSpec((20,), "ids", num_classes=2, vocabulary=9), pretrained=True)
    with pytest.raises(UsageError, match="has a vocabulary of 40 tokens, the data needs 50 or more"):
        make("hf:mine", DataSpec((5,), "ids", num_classes=2, vocabulary=50), pretrained=True)
    with pytest.raises(UsageError, match="has a vocabulary of 40 tokens, the data needs 30"):
        make("hf:mine", DataSpec((5,), "ids", "next_token", vocabulary=30), pretrained=True)
    assert make("hf:mine", DataSpec((5,), "ids", num_classes=2, vocabulary=30), pretrained=True) is not None


def test_a_run_with_a_fake_library_model(fake_transformers: Any, tmp_path: Path) -> None:
    text = QUICKSTART.parent / "tasks" / "next_character.yaml"
    experiment = load(text, ["model={name: 'hf:gpt2'}", "node={rounds: 2}", "communication=inproc"])
    nodes = build_in_process(experiment)
    step_all(nodes)
    assert nodes[0].round == 2
    bare = load(text, ["model='hf:gpt2'"], check=False)
    assert bare.model.name == "hf:gpt2" and yaml.safe_load(experiment.resolved_yaml())["model"]["name"] == "hf:gpt2"


# -- timm and torchvision

def fake_vision_library(name: str) -> Any:
    """Returns a fake of timm or torchvision.models with one model, resnet9."""
    found: Any = types.ModuleType(name)

    def resnet9(outputs: int, channels: int) -> nn.Module:
        return nn.Sequential(nn.Conv2d(channels, 2, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(2, outputs))

    def create_model(name: str, *, pretrained: bool, num_classes: int, in_chans: int, **keys: Any) -> nn.Module:
        assert os.environ["HF_HUB_OFFLINE"] == "1", "nothing is downloaded"
        if pretrained:
            raise OSError("cannot find the file on disk")
        if keys.get("fail"):
            raise TypeError("no such argument")
        return resnet9(num_classes, in_chans)

    def get_model(name: str, *, weights: None, num_classes: int, **keys: Any) -> nn.Module:
        assert weights is None
        return resnet9(num_classes, 3)

    found.create_model, found.get_model = create_model, get_model
    found.is_model = lambda name: name == "resnet9"
    found.list_models = lambda *_: ["resnet9"]
    url = "https://download.example/models/resnet9-abc.pth"
    found.get_model_weights = lambda name: types.SimpleNamespace(DEFAULT=types.SimpleNamespace(url=url))
    found.made = resnet9
    return found


class DenseNet(nn.Module):
    """Has the layer names of torchvision's DenseNet; its older weight files call the layer `norm1` `norm.1`."""

    def __init__(self, outputs: int) -> None:
        super().__init__()
        self.denselayer1 = nn.ModuleDict({"norm1": nn.BatchNorm2d(3), "conv1": nn.Conv2d(3, 2, 1)})
        self.classifier, self.beside = nn.Linear(2, outputs), nn.Linear(2, outputs)


def test_models_of_timm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "timm", fake_vision_library("timm"))
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    assert make("timm:resnet9", DataSpec((1, 8, 8), num_classes=4))(torch.zeros(2, 1, 8, 8)).shape == (2, 4)
    assert "HF_HUB_OFFLINE" not in os.environ
    with pytest.raises(UsageError, match="timm has no model 'resnet99'; it has resnet9"):
        make("timm:resnet99", IMAGES)
    with pytest.raises(UsageError, match=r"model\.pretrained: its weights are not in the local cache; making timm"):
        make("timm:resnet9", IMAGES, pretrained=True)
    with pytest.raises(UsageError, match=r"making timm:resnet9 raised TypeError: no such argument"):
        make("timm:resnet9", IMAGES, arguments={"fail": True})
    with pytest.raises(UsageError, match="needs images"):
        make("timm:resnet9", DataSpec((5,), num_classes=4))


def test_models_of_torchvision_and_their_weights(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    stand_in = fake_vision_library("torchvision.models")
    monkeypatch.setitem(sys.modules, "torchvision", types.ModuleType("torchvision"))
    monkeypatch.setitem(sys.modules, "torchvision.models", stand_in)
    monkeypatch.setattr(torch.hub, "get_dir", lambda: str(tmp_path))
    assert make("torchvision:resnet9", IMAGES)(torch.zeros(2, 3, 16, 16)).shape == (2, 10)
    with pytest.raises(UsageError, match="needs images of 3 channels, got 1"):
        make("torchvision:resnet9", DataSpec((1, 8, 8), num_classes=4))
    with pytest.raises(UsageError, match="torchvision has no model 'resnet' that classifies images; it has resnet9"):
        make("torchvision:resnet", IMAGES)
    with pytest.raises(UsageError, match=r"checkpoints/resnet9-abc\.pth does not exist; download it from https"):
        make("torchvision:resnet9", IMAGES, pretrained=True)
    (tmp_path / "checkpoints").mkdir()
    path = tmp_path / "checkpoints" / "resnet9-abc.pth"
    trained = stand_in.made(1000, 3).state_dict()  # of ImageNet's classes
    torch.save(trained, path)
    module = make("torchvision:resnet9", IMAGES, pretrained=True)
    assert torch.equal(module[0].weight, trained["0.weight"]) and module[3].weight.shape == (10, 2)  # type: ignore[index]
    torch.save({"3.weight": trained["3.weight"]}, path)
    with pytest.raises(UsageError, match="has no weights for 0, 3"):
        make("torchvision:resnet9", IMAGES, pretrained=True)
    path.write_bytes(b"nothing")
    with pytest.raises(UsageError, match="cannot be read as weights"):
        make("torchvision:resnet9", IMAGES, pretrained=True)


def test_weight_files_of_older_torchvision_versions_are_loaded(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """They lack num_batches_tracked, and use other names; several layers may depend on the number of classes."""
    stand_in = fake_vision_library("torchvision.models")
    stand_in.get_model = lambda name, weights, num_classes: DenseNet(num_classes)
    monkeypatch.setitem(sys.modules, "torchvision", types.ModuleType("torchvision"))
    monkeypatch.setitem(sys.modules, "torchvision.models", stand_in)
    monkeypatch.setattr(torch.hub, "get_dir", lambda: str(tmp_path))
    trained = DenseNet(1000).state_dict()
    older = {key.replace("norm1", "norm.1").replace("conv1", "conv.1"): value for key, value in trained.items()
             if not key.endswith("num_batches_tracked")}  # fmt: skip
    (tmp_path / "checkpoints").mkdir()
    path = tmp_path / "checkpoints" / "resnet9-abc.pth"
    torch.save(older, path)
    found = make("torchvision:resnet9", IMAGES, pretrained=True).state_dict()
    same = {key for key, value in found.items() if torch.equal(value, trained[key])}
    assert same == {key for key in trained if key.startswith("denselayer1.")}
    torch.save({**older, "denselayer1.conv.1.weight": torch.zeros(4, 3, 1, 1)}, path)
    with pytest.raises(UsageError, match=r"has no weights for denselayer1\.conv1 of"):
        make("torchvision:resnet9", IMAGES, pretrained=True)


@pytest.mark.parametrize("name, package, install", [
    ("hf:bert", "transformers", "'decentnode[hf]' has it"), ("timm:resnet18", "timm", "'decentnode[timm]' has it"),
    ("torchvision:resnet18", "torchvision", "torchvision"),
])
def test_a_missing_library_is_an_error_that_says_how_to_install_it(
    monkeypatch: pytest.MonkeyPatch, name: str, package: str, install: str
) -> None:
    class Missing:
        def find_spec(self, found: str, *_: Any) -> None:
            if found.partition(".")[0] == package:
                raise ModuleNotFoundError(f"No module named {package!r}", name=package)

    for each in [each for each in sys.modules if each.partition(".")[0] == package]:
        monkeypatch.delitem(sys.modules, each)
    monkeypatch.setattr(sys, "meta_path", [Missing(), *sys.meta_path])
    of_images = ["data={name: synthetic, input_shape: [3, 16, 16]}"]
    of_text = QUICKSTART.parent / "tasks" / "next_character.yaml"
    with pytest.raises(ConfigError) as caught:
        load(of_text if name == "hf:bert" else QUICKSTART,
             [f"model={{name: '{name}'}}", *(of_images if name != "hf:bert" else [])])  # fmt: skip
    assert f"{name} needs {package}, which is not installed; pip install {install}" in str(caught.value)


def test_an_unknown_library_prefix_is_refused() -> None:
    with pytest.raises(UsageError, match=r"must be one of mlp, .*, hf:NAME, timm:NAME, torchvision:NAME, or"):
        load_class("hf", MODELS, "model")


# -- the library itself

transformers = pytest.mark.skipif(importlib.util.find_spec("transformers") is None,
                                  reason="transformers is not installed")  # fmt: skip


@transformers
@pytest.mark.parametrize("name, data, keys", [
    ("hf:bert", REVIEWS, SMALL), ("hf:distilbert", REVIEWS, {"dim": 8, "n_heads": 2, "n_layers": 1, "hidden_dim": 8}),
    ("hf:gpt2", TEXT, {"n_embd": 8, "n_layer": 1, "n_head": 2}), ("hf:vit", IMAGES, {**SMALL, "patch_size": 8}),
], ids=["bert", "distilbert", "gpt2", "vit"])  # fmt: skip
def test_models_of_the_real_transformers_library(name: str, data: DataSpec, keys: dict[str, Any]) -> None:
    module, again = make(name, data, arguments=keys), make(name, data, arguments=keys)
    assert all(torch.equal(a, b) for a, b in zip(module.parameters(), again.parameters(), strict=True))
    inputs = torch.randint(1, 40, (3, 12)) if data.inputs == "ids" else torch.randn(3, 3, 16, 16)
    module(inputs).sum().backward()
    module.eval()
    if data is REVIEWS:
        inputs[:, 8:] = 0
        assert torch.allclose(module(inputs), module(inputs[:, :8]), atol=1e-5)
        other = inputs.clone()
        other[:, 3] = other[:, 3] % 39 + 1
        assert not torch.allclose(module(other), module(inputs), atol=1e-7)


@transformers
def test_a_model_saved_by_transformers_is_loaded(tmp_path: Path) -> None:
    made: Any = make("hf:bert", REVIEWS, arguments=SMALL)
    made.model.save_pretrained(tmp_path / "mine")
    found = make(f"hf:{tmp_path / 'mine'}", REVIEWS, pretrained=True)
    assert all(torch.equal(a, b) for a, b in zip(made.parameters(), found.parameters(), strict=True))
    fresh = make(f"hf:{tmp_path / 'mine'}", REVIEWS)
    assert fresh.model.config.hidden_size == 8  # type: ignore[union-attr]
