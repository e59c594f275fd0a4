"""LoRA adapters: the formula, frozen weights, saved files, and runs that resume."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from decentnode.build import build_in_process, step_all
from decentnode.errors import ConfigError, UsageError
from decentnode.experiment import load
from decentnode.launch.files.node_files import save_node
from decentnode.models.lora import LoraConfig, LoraLinear, add_adapters, folded
from tests.launch.test_resume import Folder, models

LORA = Path(__file__).parents[2] / "configs" / "lora.yaml"
QUICKSTART = LORA.parent / "quickstart.yaml"


def with_adapters(module: nn.Module, **keys: Any) -> nn.Module:
    add_adapters(module, LoraConfig.model_validate(keys))
    return module


def randomize_lora_b(module: nn.Module) -> None:
    """Fills the factors B, which are zero at the start, with random values."""
    for name, parameter in module.named_parameters():
        if name.endswith("lora_b"):
            nn.init.normal_(parameter)


def two_layer_net() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Flatten(), nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 4, bias=False))


def test_a_lora_layer_computes_the_formula() -> None:
    layer = with_adapters(nn.Linear(6, 5), rank=2, alpha=3.0)
    assert isinstance(layer, LoraLinear)
    x = torch.randn(7, 6)
    plain = nn.functional.linear(x, layer.weight, layer.bias)
    assert torch.equal(layer(x), plain), "an adapter begins with no effect"
    randomize_lora_b(layer)
    expected = x.double() @ layer.weight.double().T + layer.bias.double()
    expected += 3.0 / 2 * (x.double() @ layer.lora_a.double().T) @ layer.lora_b.double().T
    assert torch.allclose(layer(x).double(), expected, atol=1e-5) and not torch.allclose(layer(x), plain)


def test_only_adapters_and_listed_parameters_are_trained() -> None:
    module = with_adapters(two_layer_net(), rank=3, targets=["1"], train=["3.*"])
    trained = {name: tuple(p.shape) for name, p in module.named_parameters() if p.requires_grad}
    assert trained == {"1.lora_a": (3, 6), "1.lora_b": (5, 3), "3.weight": (4, 5)}
    assert {name for name, p in module.named_parameters() if not p.requires_grad} == {"1.weight", "1.bias"}


def test_adapter_dropout_applies_in_training_only() -> None:
    module = with_adapters(nn.Linear(6, 5), rank=2, dropout=0.5)
    randomize_lora_b(module)
    x = torch.randn(4, 6)
    assert not torch.equal(module(x), module(x))
    module.eval()
    assert torch.equal(module(x), module(x))


def test_folded_weights_compute_the_same_without_adapters() -> None:
    module = with_adapters(two_layer_net(), rank=2)
    randomize_lora_b(module)
    module.eval()
    plain = two_layer_net().eval()
    plain.load_state_dict(folded(module))  # by the same names, and no other
    x = torch.randn(9, 6)
    assert torch.allclose(plain(x), module(x), atol=1e-5) and not torch.allclose(plain(x), two_layer_net()(x))


class TiedOutput(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(9, 6)
        self.inner = nn.Linear(6, 6)
        self.output = nn.Linear(6, 9, bias=False)
        self.output.weight = self.embedding.weight


def test_tied_and_other_layers_get_no_adapter() -> None:
    trained = {name for name, p in with_adapters(TiedOutput()).named_parameters() if p.requires_grad}
    assert trained == {"inner.lora_a", "inner.lora_b"}
    with pytest.raises(UsageError, match=r"lora\.targets must match nn\.Linear layers, got 'output'; names: inner"):
        with_adapters(TiedOutput(), targets=["output"])


@pytest.mark.parametrize("keys, problem", [
    ({"targets": ["7"]}, "lora.targets must match nn.Linear layers, got '7'; names: 1, 3"),
    ({"train": ["7.*"]}, "lora.train must match the names of parameters, got '7.*'; names: 1.weight, 1.bias, 3.weight"),
])
def test_patterns_without_a_match_are_refused(keys: dict[str, Any], problem: str) -> None:
    with pytest.raises(UsageError) as caught:
        with_adapters(two_layer_net(), **keys)
    assert problem in str(caught.value)
    with pytest.raises(UsageError, match="this model has none"):
        with_adapters(nn.Conv2d(1, 1, 3))


def test_adapters_of_a_transformer_layer_apply_in_evaluation() -> None:
    """In evaluation torch computes an encoder layer by a fast path that reads the weights and calls no submodule."""
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
    x = torch.randn(3, 4, 8)
    with torch.no_grad():
        without = copy.deepcopy(layer).eval()(x)
        add_adapters(layer, LoraConfig(targets=["linear*"]))
        randomize_lora_b(layer)
        assert torch.allclose(layer(x), layer.eval()(x), atol=1e-5) and not torch.allclose(layer(x), without, atol=0.01)


# -- runs

def run_lora(*overrides: str) -> list[Any]:
    nodes = build_in_process(load(LORA, ["node.rounds=3", "node.evaluate_every=3", "communication=inproc", *overrides]))
    step_all(nodes)
    return nodes


def test_frozen_weights_are_neither_changed_nor_sent() -> None:
    start = build_in_process(load(LORA))[0].training.model.module.state_dict()
    nodes = run_lora("model.lora={rank: 2, alpha: 2, targets: ['*']}")
    for node in nodes:
        state = node.training.model.module.state_dict()
        frozen = {name for name, p in node.training.model.module.named_parameters() if not p.requires_grad}
        assert frozen == {"1.weight", "1.bias", "3.weight", "3.bias"}
        assert all(torch.equal(state[name], start[name]) for name in frozen)
        assert not torch.equal(state["1.lora_b"], torch.zeros_like(state["1.lora_b"]))
    adapters = 2 * (64 + 64) + 2 * (64 + 10)
    assert [s.elements for s in nodes[0].communication.schemas] == [adapters]
    graph, rounds = load(LORA).make_graph(), 3
    assert nodes[0].figures()["bytes_data"] == 4 * adapters * rounds * len(graph.neighbors(0, 0))


def test_only_the_adapters_of_one_layer_can_be_shared() -> None:
    nodes = run_lora("parameters={share: ['1.lora_*']}")
    assert [s.elements for s in nodes[0].communication.schemas] == [4 * (64 + 64)]
    heads = [node.training.model.module.state_dict()["3.weight"] for node in nodes]
    assert not torch.equal(heads[0], heads[1])


def test_a_pattern_without_a_match_is_a_config_error() -> None:
    with pytest.raises(ConfigError) as caught:
        load(LORA, ["model.lora.targets=[output]"])
    assert "lora.targets must match nn.Linear layers, got 'output'; names: 1, 3" in str(caught.value)


@pytest.mark.slow
def test_saved_adapters_and_folded_weights_can_start_runs(tmp_path: Path) -> None:
    nodes = run_lora()
    module = nodes[0].training.model.module
    (tmp_path / "models").mkdir()
    save_node(nodes[0], tmp_path)  # which leaves the merged model in the node's
    merged, alone, plain = (load_file(tmp_path / "models" / f"{name}.safetensors")
                            for name in ("merged", "adapters", "folded"))  # fmt: skip
    assert sorted(alone) == ["1.lora_a", "1.lora_b", "3.bias", "3.weight"]
    assert all(torch.equal(merged[name], value) for name, value in alone.items())
    expected = merged["1.weight"] + 4 / 4 * merged["1.lora_b"] @ merged["1.lora_a"]
    assert sorted(plain) == ["1.bias", "1.weight", "3.bias", "3.weight"] and torch.allclose(plain["1.weight"], expected)
    x = torch.randn(5, 1, 8, 8, device=nodes[0].training.model.device)
    base = build_in_process(load(QUICKSTART, [f"model.init={tmp_path}/models/folded.safetensors"]))[0]
    assert torch.allclose(base.training.model.module.eval()(x), module.eval()(x), atol=1e-5)
    for name, same in (("merged", True), ("folded", False)):  # with adapters and without
        again = build_in_process(load(LORA, [f"model.init={tmp_path}/models/{name}.safetensors"]))[0]
        state = again.training.model.module.state_dict()
        assert torch.equal(state["1.lora_b"].cpu(), merged["1.lora_b"]) == same
        assert torch.allclose(again.training.model.module.eval()(x), module.eval()(x), atol=1e-5)
    save_file({name: value for name, value in merged.items() if name != "1.lora_a"}, tmp_path / "cut.safetensors")
    with pytest.raises(ConfigError, match=r"it lacks 1\.lora_a"):
        load(LORA, [f"model.init={tmp_path}/cut.safetensors"])


@pytest.mark.slow
def test_a_run_with_adapters_resumes_bit_for_bit(tmp_path: Path) -> None:
    adapters = ["model={name: mlp, hidden: [12], lora: {rank: 2, dropout: 0.2}}"]
    folder, keep = Folder(tmp_path), "node.checkpoint={every: 3}"
    straight = models(folder.run_successfully(*adapters))
    folder.run_successfully(*adapters, "name=a", "node.rounds=5", keep)
    resumed = models(folder.run_successfully(*adapters, "name=a", keep, resume=""))
    assert straight.keys() == resumed.keys() and any("folded" in name for name in straight)
    assert all(torch.equal(tensor, resumed[name]) for name, tensor in straight.items())


@pytest.mark.slow
def test_a_run_with_adapters_learns() -> None:
    nodes = run_lora("node.rounds=30", "node.evaluate_every=30")
    assert float(nodes[0].figures()["accuracy_merged"]) > 0.85
