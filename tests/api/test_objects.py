"""Experiments made of plain objects: what is accepted, and equal results in this process and in forks of it."""

from __future__ import annotations

import functools
import sys
from pathlib import Path
from typing import Any

import networkx
import numpy as np
import pytest
import torch
from torch import nn

from decentnode import Experiment, objects
from decentnode.data.partition.iid import Iid
from decentnode.data.torch_data import batch_hint
from decentnode.errors import ConfigError, DataError, UsageError
from decentnode.experiment import load
from decentnode.graph import build as build_graph
from decentnode.graph.families import Ring
from decentnode.objects import GivenModel
from decentnode.samplers.cyclon import Cyclon
from decentnode.samples import DataSpec
from decentnode.trackers.csv import CSV
from tests.api.small import Net, Points, batches, experiment, net


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def model_tensors(run: Any) -> list[torch.Tensor]:
    return [value for key in run.models() for value in run.models().state_dict(key).values()]


@pytest.mark.slow
@pytest.mark.skipif("torch.cuda.device_count() > 0", reason="where there is a GPU no fork can compute gradients after "
                    "this process has: tests/gpu/test_objects.py has a process that has not")  # fmt: skip
def test_objects_give_the_same_bits_in_this_process_and_in_forks_of_it() -> None:
    """Before, this process uses autograd and a pool of threads, as a notebook does."""
    nn.Linear(300, 300)(torch.randn(300, 300)).sum().backward()
    torch.rand(4_000_000).sum()
    made = experiment(loss=nn.CrossEntropyLoss(label_smoothing=0.01), optimizer=lambda p: torch.optim.Adam(p, lr=0.03))
    before = torch.get_rng_state()
    in_process = made.run(progress=False)
    assert torch.equal(torch.get_rng_state(), before)
    forked = made.run(progress=False, processes=True)
    assert in_process.summary["accuracy_mean"] > 0.85 and in_process.summary["accuracy_merged"] > 0.85
    assert len(model_tensors(in_process)) == 5 * 4
    assert all(torch.equal(a, b) for a, b in zip(model_tensors(in_process), model_tensors(forked), strict=True))
    assert (forked.path / "summary.json").exists() and forked.status == "finished"


@pytest.mark.slow
def test_a_run_does_not_change_the_module_that_was_given() -> None:
    given = net()
    before = [p.clone() for p in given.parameters()]
    run = experiment(model=given, rounds=1).run(progress=False)
    assert all(torch.equal(a, b) for a, b in zip(before, given.parameters(), strict=True))
    assert not torch.equal(run.models()[0].layers[0].weight, given.layers[0].weight)


@pytest.mark.parametrize("form", ["arrays", "tensors", "tensor_dataset", "list", "loader", "generator", "dataset"])
def test_data_may_be_given_in_every_form(form: str) -> None:
    x = torch.rand(300, 2)
    y = (x.sum(1) > 1).long()
    train: Any = {
        "arrays": (x.numpy(), y.numpy()), "tensors": (x, y), "tensor_dataset": torch.utils.data.TensorDataset(x, y),
        "list": list(zip(x, y, strict=True)), "generator": batches(15), "dataset": Points(300),
        "loader": torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, y), 20),
    }[form]  # fmt: skip
    with objects.bound((made := experiment(train=train, test=None))._objects):
        data = load(None, layers=made._layers).open_data()
        assert (data.dataset().num_train(), data.dataset().num_test()) == (270, 30)
        assert data.spec == DataSpec((2,), num_classes=2)


def test_graphs_may_be_given_in_every_form() -> None:
    cycle = networkx.relabel_nodes(networkx.cycle_graph(4), dict(enumerate("dcba")))
    ours = build_graph(Ring.Config(name="ring", nodes=4), None, 1)
    for graph in (cycle, ours, {"name": "ring", "nodes": 4}, Ring.Config(name="ring", nodes=4)):
        made = experiment(graph=graph, nodes=None)
        with objects.bound(made._objects):
            found = load(None, layers=made._layers).make_graph()
        assert [found.neighbors(uid, 0) for uid in range(4)] == [(1, 3), (0, 2), (1, 3), (0, 2)]
    for graph in ("ring", Ring, {"name": Ring}):
        assert experiment(graph=graph, nodes=5)._layers[0]["graph"]["nodes"] == 5
    assert "graph" not in experiment(graph=cycle, nodes=None)._objects  # its edges stand in the experiment
    with pytest.raises(UsageError, match="graph must be undirected"):
        experiment(graph=networkx.DiGraph([(0, 1), (1, 0)]))
    with pytest.raises(UsageError, match="must be connected, got a networkx graph of 2 parts"):
        experiment(graph=networkx.Graph([(0, 1), (2, 3)]))
    with pytest.raises(ConfigError, match="cannot be given together with a graph that has its own"):
        experiment(graph=ours, weights="uniform").check()


def test_classes_that_can_be_imported_become_names_not_objects() -> None:
    made = Experiment.from_objects(
        functools.partial(Net, width=8), Points, graph="ring", nodes=4, loss=nn.MSELoss, rounds=1,
        optimizer=functools.partial(torch.optim.SGD, lr=0.1, momentum=np.float32(0.5)), partition={"name": "iid"},
    )  # fmt: skip
    assert made._objects == {}
    (layer,) = made._layers
    assert layer["model"] == {"name": "tests.api.small:Net", "width": 8}
    assert layer["data"] == {"name": "tests.api.small:Points", "partition": {"name": "iid"}}
    assert layer["training"]["optimizer"] == {"name": "torch.optim.sgd:SGD", "lr": 0.1, "momentum": 0.5}
    assert layer["training"]["loss"] == {"name": "torch.nn.modules.loss:MSELoss"}


def test_a_local_class_becomes_an_object() -> None:
    class Local(Net):
        pass

    made = Experiment.from_config({"graph": {"name": "ring", "nodes": 4}}, model={"name": Local, "width": 4})
    assert made._objects == {"model": Local}
    assert made._layers[1]["model"] == {"name": "decentnode.objects:model", "width": 4}


def test_classes_may_replace_names_everywhere_also_several_in_one_list() -> None:
    class One(Ring):
        pass

    class Other(Ring):
        pass

    cut = [{"parameters": "0.*", "graph": {"name": One, "nodes": 4}}, {"parameters": "*", "graph": Other}]
    made = Experiment.from_config(
        {}, node={"sampler": Cyclon}, run={"trackers": [functools.partial(CSV, every=2)]},
        parameters={"fragments": cut}, data={"name": "digits", "partition": {"name": "only_local", "within": Iid}},
    )  # fmt: skip
    layer = made._layers[1]
    assert layer["node"]["sampler"] == {"name": "decentnode.samplers.cyclon:Cyclon"}
    assert layer["run"]["trackers"] == [{"name": "decentnode.trackers.csv:CSV", "every": 2}]
    assert layer["data"]["partition"]["within"] == {"name": "decentnode.data.partition.iid:Iid"}
    with objects.bound(made._objects):
        graphs = [each["graph"]["name"].partition(":") for each in layer["parameters"]["fragments"]]
        assert [getattr(sys.modules[module], name) for module, _, name in graphs] == [One, Other]
    drawn = Experiment.from_config({}, parameters={"fragments": [{"graph": networkx.cycle_graph(4)}]})
    assert drawn._layers[1]["parameters"]["fragments"][0]["graph"]["nodes"] == 4


def test_a_module_that_a_function_returns_for_every_node_is_copied() -> None:
    whole = net()
    kind, keys = objects.make_model(lambda: whole)
    made = [kind(GivenModel.Config(**keys)).make(DataSpec((2,), num_classes=2)) for _ in range(2)]
    assert made[0] is not made[1]


def test_a_function_that_makes_the_model_gets_facts_of_the_data() -> None:
    kind, keys = objects.make_model(lambda num_classes: nn.Linear(2, num_classes))
    assert kind(GivenModel.Config(**keys)).make(DataSpec((2,), num_classes=7)).out_features == 7


@pytest.mark.parametrize(("arguments", "message"), [
    ({"optimizer": torch.optim.SGD(net().parameters(), lr=0.1)}, "functools.partial.torch.optim.SGD, lr=...."),
    ({"model": 3}, "model must be a torch.nn.Module, or a function that makes one, got int"),
    ({"train": 3}, "train must be a Dataset, .inputs, targets. or an iterable of batches, got int"),
    ({"train": (np.ones((3, 2)), np.ones(2))}, "train must have as many inputs as targets"),
    ({"train": []}, "train has no sample"),
    ({"loss": 1.5}, "loss must be a function of outputs and targets, got float"),
    ({"run": {"trackers": ["csv", type("Own", (CSV,), {})]}}, "trackers.1 must be a class from a module, because "),
    ({"sharing": {"name": "full", "x": object()}}, "sharing.x must be plain data or a component's class, got <object"),
], ids=["optimizer", "model", "train", "lengths", "empty", "loss", "tracker", "key"])  # fmt: skip
def test_a_wrong_argument_is_refused_by_its_name(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        experiment(**arguments)


def test_objects_that_cannot_be_sent_to_another_machine_are_refused_by_name() -> None:
    hosts = {"machines": 2, "nodes_per_machine": 2, "addresses": ["10.0.0.1", "10.0.0.2"], "base_port": 20000}
    for processes in (True, False):
        with pytest.raises(UsageError, match="data, model are objects of this process, which cannot be sent to"):
            experiment(mapping=hosts).run(processes=processes, progress=False)
    with pytest.raises(UsageError, match="data, model are objects"):
        experiment().run(machine=0, progress=False)


def test_processes_are_refused_after_this_process_has_used_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    with pytest.raises(UsageError, match="this process uses CUDA, after which its forks cannot; processes=False runs"):
        experiment().run(processes=True, progress=False)


@pytest.mark.slow
def test_the_resolved_file_of_a_run_of_objects_is_refused_elsewhere() -> None:
    run = experiment(rounds=0).run(progress=False)
    with pytest.raises(ConfigError, match="model was an object of the program that made this experiment"):
        load(run.path / "config.resolved.yaml")
    assert "Net with 82 parameters" in (run.path / "config.yaml").read_text()


def test_samples_of_different_shapes_are_refused() -> None:
    with pytest.raises(UsageError, match="must have one shape"):
        experiment(train=[(torch.ones(2), 0)] * 30 + [(torch.ones(3), 1)] * 10, test=None).run(progress=False)


def make_batches(size: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    draws = torch.rand(400, 2, generator=torch.Generator().manual_seed(1))
    return [(x, (x.sum(1) > 1).long()) for x in draws.split(size)]


def test_a_list_of_batches_is_refused_and_an_iterator_of_them_accepted() -> None:
    with pytest.raises(DataError, match=r"\(\[64, 2\], \[64\]\) first and \(\[16, 2\], \[16\]\) last; if each"):
        experiment(train=make_batches(64), test=None)
    with pytest.raises(ConfigError) as caught:
        experiment(train=make_batches(20), test=None).check()
    assert "if each item is a batch, of 20 samples the first, give iter(...) of the list" in str(caught.value)
    for size in (20, 64):
        experiment(train=iter(make_batches(size)), test=None).check()


@pytest.mark.parametrize("pair", [
    (torch.ones(2), 0), (torch.ones(4, 2), torch.ones(3)), (torch.arange(8), torch.arange(8)),
    (torch.ones(1, 2), torch.ones(1)), (torch.ones(3), torch.tensor(1)),
])  # fmt: skip
def test_samples_in_a_list_are_not_taken_for_batches(pair: tuple[Any, Any]) -> None:
    assert not batch_hint([pair] * 5) and not batch_hint(Points(5))
