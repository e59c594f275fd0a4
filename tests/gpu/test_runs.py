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
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)  # as many as the processes of nodes have


def experiment(*changed: dict[str, Any]) -> decentnode.Experiment:
    given = decentnode.Experiment.from_config(BASE)
    for sections in changed:
        given = given._merged_with(sections)
    return given


def run(*changed: dict[str, Any], **options: Any) -> decentnode.Run:
    return experiment(*changed).run(progress=False, **{"processes": False, **options})


def states(found: decentnode.Run) -> dict[str, Tensor]:
    models = found.models()
    return {f"{key}/{name}": value for key in models for name, value in models.state_dict(key).items()}


def alike(a: decentnode.Run, b: decentnode.Run, **tolerance: float) -> None:
    torch.testing.assert_close(states(a), states(b), **(tolerance or {"atol": 0.0, "rtol": 0.0}))


@pytest.mark.parametrize("name", RULES)
def test_what_a_checkpoint_has_of_a_rule_comes_back_to_the_gpu(name: str) -> None:
    needs = RULES[name]().requirements
    graph = make("line" if needs.tree else "ring", nodes=4)
    models = [model.cuda() for model in random_models(4, 500)]
    rules = set_up_rules(RULES[name], models)
    for r in range(3):
        run_round(rules, models, graph, r)
    again = [model.clone() for model in models]
    restored = set_up_rules(RULES[name], again)
    for old, new in zip(rules, restored, strict=True):
        kept: dict[str, Tensor] = {}
        tree = encode(old.state_dict(), "rule", kept, copy=True)
        to_host(kept)
        assert all(tensor.is_cpu for tensor in kept.values())
        new.load_state_dict(decode(tree, kept, models[0].device))
    for r in range(3, 6):
        run_round(rules, models, graph, r)
        run_round(restored, again, graph, r)
    assert all(torch.equal(a, b) for a, b in zip(models, again, strict=True))


def test_a_run_goes_on_from_its_checkpoint() -> None:
    """A rule with a state, an optimizer and a moving average with one, statistics, a loss that is scaled."""
    training = {"optimizer": {"name": "sgd", "lr": 0.1, "momentum": 0.9}, "ema": 0.9, "amp": "fp16"}
    more = {"sharing": {"name": "choco"}, "training": training, "node": {"checkpoint": {"every": 3}}, **RESNET}
    alike(run(more), run(more, resume=run(more, rounds=3)))


@pytest.mark.parametrize("more", [
    {"sharing": {"name": "choco"}}, {"node": {"schedule": "overlapped"}}, {"node": {"schedule": "gossip_async"}},
    {"node": {"buffers": "recompute"}, **RESNET},
], ids=["choco", "overlapped", "gossip_async", "recompute"])  # fmt: skip
def test_nodes_on_a_gpu_and_on_the_cpu_are_one_run(more: dict[str, Any]) -> None:
    alike(run(more, mapping={"device": ["cuda:0", "cpu"]}), run(more, mapping={"device": "cpu"}), atol=1e-2, rtol=1e-2)


@pytest.mark.parametrize("transport", [
    {"name": "auto"}, {"name": "shared_memory"}, {"name": "zeromq"}, {"name": "collective", "backend": "gloo"},
], ids=["cuda_ipc", "shared_memory", "zeromq", "gloo"])  # fmt: skip
def test_every_transport_gives_the_bits_of_one_process(transport: dict[str, Any]) -> None:
    rule = {"sharing": {"name": "choco", "compression": {"name": "int8"}}}
    alike(run(rule), run(rule, {"communication": transport}, processes=True))


def test_convolutions_in_processes_of_their_own_give_the_bits_of_one_process() -> None:
    alike(run(RESNET), run(RESNET, {"communication": {"name": "auto"}}, processes=True))
