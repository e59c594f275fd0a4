"""Whole runs whose models lie on a GPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import decentnode
from decentnode.checkpoint.state import decode, encode, to_host
from tests.graph.contract import make
from tests.sharing.contract import RULES, random_models, run_round, set_up_rules

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(240)]
BASE: dict[str, Any] = {
    "name": "on_a_gpu", "graph": {"name": "ring", "nodes": 4}, "mapping": {"nodes_per_machine": 4, "device": "cuda:0"},
    "data": {"name": "digits"}, "model": {"name": "mlp", "hidden": [8]},
    "training": {"batch_size": 16, "local_steps": 2, "cudnn_deterministic": True,
                 "optimizer": {"name": "sgd", "lr": 0.1, "momentum": 0.9}},
    "communication": {"name": "inproc"}, "node": {"rounds": 6, "evaluate_every": 3},
}  # fmt: skip
RESNET: dict[str, Any] = {
    "model": {"name": "resnet", "depth": 8, "widths": [4, 8, 8]},
    "data": {"name": "synthetic", "input_shape": [3, 8, 8], "train_samples": 200, "test_samples": 40},
}


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)  # as in the processes of nodes


def make_experiment(*changes: dict[str, Any]) -> decentnode.Experiment:
    """Returns the experiment BASE with changed sections."""
    experiment = decentnode.Experiment.from_config(BASE)
    for sections in changes:
        experiment = experiment._merged_with(sections)
    return experiment


def run(*changes: dict[str, Any], **options: Any) -> decentnode.Run:
    return make_experiment(*changes).run(progress=False, **{"processes": False, **options})


def states(finished: decentnode.Run) -> dict[str, Tensor]:
    """Returns the tensors of all models of a run."""
    models = finished.models()
    return {f"{key}/{name}": value for key in models for name, value in models.state_dict(key).items()}


def assert_same_models(a: decentnode.Run, b: decentnode.Run, **tolerance: float) -> None:
    """Checks that two runs have the same models, bit for bit unless a tolerance is given."""
    torch.testing.assert_close(states(a), states(b), **(tolerance or {"atol": 0.0, "rtol": 0.0}))


@pytest.mark.parametrize("name", RULES)
def test_the_state_of_every_rule_is_restored_on_the_gpu_from_a_checkpoint(name: str) -> None:
    needs = RULES[name]().requirements
    graph = make("line" if needs.tree else "ring", nodes=4)
    models = [model.cuda() for model in random_models(4, 500)]
    rules = set_up_rules(RULES[name], models)
    for r in range(3):
        run_round(rules, models, graph, r)
    copies = [model.clone() for model in models]
    restored = set_up_rules(RULES[name], copies)
    for old, new in zip(rules, restored, strict=True):
        tensors: dict[str, Tensor] = {}
        tree = encode(old.state_dict(), "rule", tensors, copy=True)
        to_host(tensors)
        assert all(tensor.is_cpu for tensor in tensors.values())
        new.load_state_dict(decode(tree, tensors, models[0].device))
    for r in range(3, 6):
        run_round(rules, models, graph, r)
        run_round(restored, copies, graph, r)
    assert all(torch.equal(a, b) for a, b in zip(models, copies, strict=True))


def test_a_run_is_resumed_from_its_checkpoint_with_the_same_bits() -> None:
    """With states of a rule, an optimizer, a moving average and a loss scale, and with statistics of batch norms."""
    training = {"optimizer": {"name": "sgd", "lr": 0.1, "momentum": 0.9}, "ema": 0.9, "amp": "fp16"}
    more = {"sharing": {"name": "choco"}, "training": training, "node": {"checkpoint": {"every": 3}}, **RESNET}
    assert_same_models(run(more), run(more, resume=run(more, rounds=3)))


@pytest.mark.parametrize("more", [
    {"sharing": {"name": "choco"}}, {"node": {"schedule": "overlapped"}}, {"node": {"schedule": "gossip_async"}},
    {"node": {"buffers": "recompute"}, **RESNET},
], ids=["choco", "overlapped", "gossip_async", "recompute"])  # fmt: skip
def test_a_run_with_nodes_on_a_gpu_and_on_the_cpu_equals_one_on_the_cpu(more: dict[str, Any]) -> None:
    mixed, on_cpu = run(more, mapping={"device": ["cuda:0", "cpu"]}), run(more, mapping={"device": "cpu"})
    assert_same_models(mixed, on_cpu, atol=1e-2, rtol=1e-2)


@pytest.mark.parametrize("transport", [
    {"name": "auto"}, {"name": "shared_memory"}, {"name": "zeromq"}, {"name": "collective", "backend": "gloo"},
], ids=["cuda_ipc", "shared_memory", "zeromq", "gloo"])  # fmt: skip
def test_every_transport_gives_the_bits_of_one_process(transport: dict[str, Any]) -> None:
    rule = {"sharing": {"name": "choco", "compression": {"name": "int8"}}}
    assert_same_models(run(rule), run(rule, {"communication": transport}, processes=True))


def test_convolutions_in_processes_of_their_own_give_the_bits_of_one_process() -> None:
    assert_same_models(run(RESNET), run(RESNET, {"communication": {"name": "auto"}}, processes=True))
