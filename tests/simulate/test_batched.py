"""The engine `batched` computes the same as the engine `stepped`, which runs nodes one by one."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from decentnode.build import build_in_process, step_all
from decentnode.communication.inproc import Inproc
from decentnode.config.component import load_class
from decentnode.experiment import Experiment, load
from decentnode.metrics.writer import encode
from decentnode.node.node import Node
from decentnode.sharing import SHARINGS
from decentnode.sharing.d2 import D2
from decentnode.sharing.full import Full
from decentnode.sharing.stacked import has_stacked_form
from decentnode.simulate.engines import choice
from decentnode.simulate.engines.batched import Batched, PopulationRound, Sink
from decentnode.simulate.engines.choice import WAYS, choose
from decentnode.simulate.engines.exchange import make_exchange
from decentnode.simulate.engines.forward import Layers, Unsuitable, Vmap, random_part
from decentnode.simulate.engines.population import Population
from decentnode.tensors import FlatModel
from tests.conftest import scale
from tests.data.files import write_pairs

QUICKSTART = str(Path(__file__).parents[2] / "configs" / "quickstart.yaml")
ROUNDS = scale(6, 200)
IMAGES = "data={name: synthetic, input_shape: [1, 12, 12], train_samples: 100, test_samples: 20}"
STACKED = [
    "full", "ac", "d2", "decentlam", "diloco", "elastic", "exact_diffusion", "gradient_tracking", "local_sgd",
    "momentum_tracking", "moshpit", "noloco", "push_sum", "qg_momentum", "slowmo",
]  # fmt: skip
RULES = [
    *STACKED, "{name: gradient_tracking, form: dsgt}", "{name: gradient_tracking, form: atc}",
    "{name: elastic, force: after, every: 2}", "{name: diloco, every: 3}",
]  # fmt: skip
OPTIONS = {
    "uneven epochs, kept parameters": [
        "training={name: supervised, batch_size: 7, local_steps: 4}", "parameters={keep: ['3.*']}"],
    "epochs": ["training={name: supervised, batch_size: 16, local_epochs: 1}", "data.partition=iid"],
    "clipped adam": ["training={name: supervised, batch_size: 8, local_steps: 2, clip_norm: 0.5, optimizer: "
                     "{name: adam, lr: 0.005}, lr_schedule: {name: exponential, gamma: 0.9, every: step}}"],
    "norms of gradients": ["training={name: supervised, batch_size: 8, local_steps: 2, gradient_norm: true}",
                           "sharing=gradient_tracking"],
    "momentum, fresh": ["training={name: supervised, batch_size: 8, local_steps: 2, reset_optimizer: true, optimizer: "
                        "{name: sgd, lr: 0.05, momentum: 0.9, nesterov: true}, label_smoothing: 0.1}"],
    "accumulated, periodic graph": [
        "training={name: supervised, batch_size: 4, accumulate: 3, local_steps: 2}",
        "graph={name: alternating_ring, nodes: 6}", "mapping.nodes_per_machine=6"],
    "validation": ["training={name: supervised, batch_size: 8, validation: {fraction: 0.2}, evaluate_train: 20}"],
    "overlapped": ["node.schedule=overlapped"],
    "rounds that only mix": [
        "node.training_rounds={train: 2, mix: 1}", "training={name: supervised, batch_size: 8, local_steps: 2, "
        "lr_schedule: {name: exponential, gamma: 0.9, every: round}}"],
    "overlapped push-sum": ["node.schedule=overlapped", "sharing=push_sum"],
    "changing graph, sharded test set": ["graph={name: random_matching, nodes: 5}", "data.shard_test=true"],
    "directed graph drawn anew, own test samples": [
        "graph={name: el_local, nodes: 5, degree: 2}", "weights=null", "data.test=both"],
    "push-sum on a graph drawn anew": [
        "graph={name: el_local, nodes: 5, degree: 2}", "weights=null", "sharing=push_sum"],
    "undirected graph drawn anew": ["graph={name: random_regular, nodes: 6, degree: 3}", "mapping.nodes_per_machine=6"],
    "random offsets": ["graph={name: od_equidyn, nodes: 5}", "weights=null"],
    "exact averages between rounds of pairs": [
        "graph={name: gossip_pga, nodes: 5, every: 3, base: {name: ou_equidyn, nodes: 5}}"],
    "compressed": ["sharing={name: full, compression: qsgd}"],
    "two phases of rows": ["sharing={name: hierarchical, groups: [[0, 1], [2, 3]]}", "graph={name: complete, nodes: 4}",
                           "mapping.nodes_per_machine=4"],
    "fragments": ["parameters={fragments: {name: random, count: 2, degree: 1}}"],
    "early stop": ["node.early_stop={figure: accuracy_merged, patience: 1, min_delta: 0.9}"],
}  # fmt: skip


class RecordingSink(Sink):
    """Keeps the rounds and records of a run."""

    def __init__(self) -> None:
        self.rounds: list[PopulationRound] = []
        self.records: list[tuple[int, dict[str, Any]]] = []

    def take_round(self, found: PopulationRound) -> None:
        self.rounds.append(found)

    def take_record(self, uid: int, record: dict[str, Any]) -> None:
        self.records.append((uid, record))

    def tick(self) -> None:
        pass


def experiment(*overrides: str) -> Experiment:
    return load(QUICKSTART, [
        "graph={name: regular, nodes: 5, degree: 2}", "mapping={name: linear, nodes_per_machine: 5, threads: 1}",
        "training={name: supervised, batch_size: 8, local_steps: 2, optimizer: {name: sgd, lr: 0.05}}",
        f"node={{rounds: {ROUNDS}, evaluate_every: 4}}", "model={name: mlp, hidden: [12]}", *overrides,
    ], check=False)  # fmt: skip


def run_stepped(config: Experiment) -> tuple[list[Node], dict[int, list[dict[str, Any]]]]:
    records: dict[int, list[dict[str, Any]]] = {}
    nodes = build_in_process(config, lambda uid, record: records.setdefault(uid, []).append(record))
    step_all(nodes)
    return nodes, records


def run_batched(config: Experiment, way: str, workers: int = 1) -> tuple[Batched, RecordingSink]:
    population = Population(config, workers)
    engine, sink = Batched(population, WAYS[way](population)), RecordingSink()
    engine.run(sink)
    population.close()
    return engine, sink


def compare_engines(config: Experiment, way: str, workers: int = 1, atol: float = 1e-5) -> Batched:
    """Runs both engines, asserts that all models, figures and records are the same, and returns the batched engine.
    atol: for entries of models, and for figures if above theirs: on a CPU a node adds up models of 16 bits in their own
    dtype (`mix_into`), the batched engine in float32; only there do nodes of a complete graph have equal models."""
    nodes, records = run_stepped(config)
    engine, sink = run_batched(config, way, workers)
    for node, row in zip(nodes, engine.population.parameters, strict=True):
        torch.testing.assert_close(row, node.training.model.parameters.detach(), rtol=0, atol=atol)
    for node in nodes:
        assert_close(engine.figures(node.uid), node.figures(), atol)
        own = [record for uid, record in sink.records if uid == node.uid]
        theirs = [record for record in records[node.uid] if record["kind"] != "round"]
        for record, wanted in zip(own, theirs, strict=True):
            assert_close(record, wanted, atol)
        rounds = [record for record in records[node.uid] if record["kind"] == "round"]
        for found, wanted in zip(sink.rounds, rounds, strict=True):
            assert found.local.losses[node.uid] == pytest.approx(wanted["loss"], abs=1e-4, nan_ok=True)
            assert (found.round, found.local.steps[node.uid], found.local.samples[node.uid], found.local.lr) == (
                wanted["round"], wanted["steps"], wanted["samples"], pytest.approx(wanted.get("lr")))
            assert (found.data[node.uid], found.metadata[node.uid], found.evaluation[node.uid]) == tuple(
                wanted[f"{purpose}_bytes_sent"] for purpose in ("data", "metadata", "evaluation"))
            told = found.local.reports[node.uid] if found.local.reports else {}
            assert ("gradient_norm" in told) == ("gradient_norm" in wanted)
            assert told.get("gradient_norm", 0.0) == pytest.approx(wanted.get("gradient_norm", 0.0), rel=1e-3)
            assert json.loads(found.edges[node.uid]) == json.loads(encode(wanted["edges"]))
    return engine


def assert_close(found: dict[str, Any], wanted: dict[str, Any], atol: float = 0.0) -> None:
    assert found.keys() == wanted.keys()
    for key, value in wanted.items():
        if isinstance(value, str):
            assert found[key] == value, key
        elif "seconds" not in key and key != "time":
            # an accuracy may differ by a sample whose two likeliest classes are equally likely
            assert found[key] == pytest.approx(value, rel=1e-3, abs=6e-3 if "accuracy" in key else max(1e-4, atol)), key


def test_the_list_STACKED_names_all_rules_with_a_stacked_form() -> None:
    """A form that mixes the models of all nodes at once."""
    config = experiment()
    for name in SHARINGS:
        rule_class = load_class(name, SHARINGS, "sharing")
        rule = rule_class(rule_class.Config.model_validate({"name": name}))
        assert has_stacked_form(rule) == (name in STACKED), name
    assert config.simulate.engine == "auto"


@pytest.mark.sampled(of=lambda rule: {rule.strip("{}").replace("name: ", "").split(",")[0]})
@pytest.mark.parametrize("rule", RULES)
def test_every_rule_with_a_stacked_form_gives_the_models_of_stepped_nodes(rule: str) -> None:
    engine = compare_engines(experiment(f"sharing={rule}"), "layers")
    assert engine.exchange.name == "stacked"


@pytest.mark.slow
def test_rounding_errors_of_padded_batches_do_not_accumulate() -> None:
    """d2 once repeated each error in every later round: after 200 rounds models differed by 7e-5."""
    config = experiment("sharing=d2", "node.rounds=200")
    assert len({each.num_samples for each in Population(config).trainings}) > 1
    nodes, _ = run_stepped(config)
    engine, _ = run_batched(config, "layers")
    for node, row in zip(nodes, engine.population.parameters, strict=True):
        torch.testing.assert_close(row, node.training.model.parameters, rtol=0, atol=1e-5)


@pytest.mark.sampled(one=["rule"])
@pytest.mark.parametrize("rule", ["choco", "leader", "topk", "powergossip", "secure_aggregation"])
def test_rules_without_a_stacked_form_are_mixed_row_by_row(rule: str) -> None:
    # Few rounds: a difference in the last bit may change which entries are largest, or a sign, and then grows.
    engine = compare_engines(experiment(f"sharing={rule}", "node.rounds=6"), "layers")
    assert engine.exchange.name == "rows" and rule in engine.rows_reason


@pytest.mark.parametrize("option", OPTIONS)
def test_batched_equals_stepped_with_other_options(option: str) -> None:
    compare_engines(experiment(*OPTIONS[option]), "layers")


def test_step_methods_are_checked_without_tf32() -> None:
    """By default a GPU rounds the inputs of some convolutions to ten bits: then no method would pass the check."""
    seen, before = list[bool](), torch.backends.cudnn.allow_tf32
    module = nn.Sequential(nn.Conv2d(3, 2, 3), nn.Flatten())
    module[0].register_forward_pre_hook(lambda *_: seen.append(torch.backends.cudnn.allow_tf32))
    Vmap(FlatModel(module)).check(torch.randn(4, 3, 6, 6))
    assert len(seen) == 3 and not any(seen) and before and torch.backends.cudnn.allow_tf32


@pytest.mark.sampled(one=["model"])
@pytest.mark.parametrize(("way", "model"), [
    ("vmap", "{name: mlp, hidden: [6]}"), ("vmap", "{name: lenet}"), ("rows", "{name: gn_lenet}"),
    ("rows", "{name: gn_lenet, norm: batch}"), ("layers", "logistic"),
    pytest.param("vmap", "{name: resnet, depth: 50, widths: [2, 2, 2, 2], norm: none, stem: small}",
                 marks=pytest.mark.slow),
])  # fmt: skip
def test_every_step_method_equals_stepped(way: str, model: str) -> None:
    images = [IMAGES] if "net" in model else []
    # In the deep net the rounding of an activation that is almost zero changed a whole step, on some processors.
    small = ["training.optimizer.lr=0.001"] if "resnet" in model else []
    config = experiment(f"model={model}", *images, "node.rounds=3", *small)
    engine = compare_engines(config, way, workers=2 if way == "rows" else 1, atol=1e-6 if small else 1e-5)
    assert engine.steps.name == way


def test_dropout_in_adapters_draws_the_same_numbers() -> None:
    config = experiment("model={name: mlp, hidden: [6], lora: {rank: 2, dropout: 0.5}}", "node.rounds=2")
    compare_engines(config, "rows", atol=0)


TRANSFORMERS = {
    "gpt": "{name: gpt, layers: 1, width: 8, heads: 2}",
    "transformer": "{name: transformer, layers: 1, width: 8, heads: 2, dropout: 0}",
}


@pytest.mark.slow
@pytest.mark.parametrize("model", TRANSFORMERS)
def test_transformers_stepped_row_by_row_equal_stepped(model: str, tmp_path: Path) -> None:
    np.random.default_rng(0).integers(0, 50, 600).astype(np.uint16).tofile(tmp_path / "t.bin")
    write_pairs(tmp_path, ["ein Haus und noch eins", "ein Hund", "kein Hund"] * 9, ["a house", "dogs", "no dog"] * 9)
    tokens = "{name: token_file, file: %s/t.bin, test_file: %s/t.bin, window: 12, vocabulary: 50}"
    pairs = ("{name: parallel_text, source: %s/train.de, target: %s/train.en, test_source: %s/test.de.gz, "
             "test_target: %s/test.en.gz, length: 8}")  # fmt: skip
    data = (tokens if model == "gpt" else pairs).replace("%s", str(tmp_path))
    engine = compare_engines(experiment(f"data={data}", f"model={TRANSFORMERS[model]}", "node.rounds=3"), "rows")
    assert engine.steps.name == "rows"


@pytest.mark.slow
@pytest.mark.parametrize(("model", "data"), [
    ("gpt", "{name: token_file, file: %s/t.bin, test_file: %s/t.bin, window: 12, vocabulary: 50}"),
    ("gpt", "{name: text, file: %s/t.txt, window: 12, stride: 5}"),
    ("transformer", "{name: parallel_text, source: %s/train.de, target: %s/train.en, test_source: %s/test.de.gz, "
                    "test_target: %s/test.en.gz, length: 8}"),
], ids=["windows", "text", "unequal"])
def test_transformers_stepped_with_vmap_equal_stepped(
    model: str, data: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Batches of 7 windows do not divide an epoch; texts of unequal length have unequal numbers of tokens, over which
    the loss of a step is a mean."""
    monkeypatch.setenv("DECENTNODE_CACHE", str(tmp_path / "cache"))
    draw = np.random.default_rng(0)
    draw.integers(0, 50, 600).astype(np.uint16).tofile(tmp_path / "t.bin")
    (tmp_path / "t.txt").write_text("".join(draw.choice(list("abc d\n"), 900)))
    write_pairs(tmp_path, ["ein Haus und noch eins", "ein Hund", "kein Hund"] * 9, ["a house", "dogs", "no dog"] * 9)
    config = experiment(f"data={data}".replace("%s", str(tmp_path)), f"model={TRANSFORMERS[model]}", "node.rounds=4",
                        "training={batch_size: 7, local_steps: 3, optimizer: {name: sgd, lr: 0.05}}")  # fmt: skip
    engine = compare_engines(config, "vmap")
    assert engine.steps.name == "vmap"


@pytest.mark.slow
def test_the_step_method_rows_has_the_bits_of_stepped_nodes() -> None:
    config = experiment("node.rounds=3", "mapping.device=cpu")  # a GPU adds in another order for all nodes at once
    nodes, _ = run_stepped(config)
    engine, _ = run_batched(config, "rows", workers=2)
    for node, row in zip(nodes, engine.population.parameters, strict=True):
        assert torch.equal(row, node.training.model.parameters)


def test_computing_nodes_in_blocks_does_not_change_the_models(monkeypatch: pytest.MonkeyPatch) -> None:
    whole, _ = run_batched(experiment("node.rounds=3"), "layers")
    for kind in ("CPU", "GPU"):
        monkeypatch.setattr(f"decentnode.simulate.engines.stacked_steps.{kind}_BLOCK_BYTES", 60000)
        monkeypatch.setattr(f"decentnode.simulate.engines.evaluation.{kind}_BYTES", 1)
    blocks, _ = run_batched(experiment("node.rounds=3"), "layers")
    assert len(blocks.steps._leaves) > 1  # type: ignore[attr-defined]
    torch.testing.assert_close(blocks.population.parameters, whole.population.parameters, rtol=0, atol=1e-6)
    assert whole.found is not None and blocks.found is not None
    for one, other in zip(whole.found.figures, blocks.found.figures, strict=True):
        assert_close(one, other)


def test_batched_equals_stepped_if_the_last_batch_is_short() -> None:
    config = experiment("node.rounds=12", "sharing=d2", "data={name: synthetic, input_shape: [64], "
                        "train_samples: 70, test_samples: 9, partition: iid}")  # fmt: skip
    nodes, _ = run_stepped(config)
    engine, _ = run_batched(config, "layers")
    for node, row in zip(nodes, engine.population.parameters, strict=True):
        torch.testing.assert_close(row, node.training.model.parameters, rtol=0, atol=1e-5)


class OverridesAdjust(D2):
    def adjust(self, model: torch.Tensor, view: Any, loss: float) -> None:
        super().adjust(model, view, loss)


class AddsNothing(D2):
    """Adds nothing."""


class OverridesPlan(Full):
    def plan(self, view: Any) -> Any:
        return view


class ScalesGradientsByUid(Full):
    """Scales gradients by a factor that depends on the uid."""

    requirements = replace(Full.requirements, gradient=True)

    def direction(self, gradient: torch.Tensor, view: Any) -> torch.Tensor:
        return gradient.mul_(1.0 / (1 + view.uid))


@pytest.mark.parametrize("way", ["layers", "rows"])
def test_the_direction_of_a_rule_is_called_for_every_step_of_every_node(way: str) -> None:
    engine = compare_engines(experiment(f"sharing={__name__}:ScalesGradientsByUid", "node.rounds=3"), way)
    assert engine.exchange.name == "rows"


def test_a_subclass_has_the_stacked_form_of_its_parent_unless_it_overrides_a_method_that_the_form_replaces() -> None:
    config = D2.Config.model_validate({"name": "d2"})
    assert has_stacked_form(AddsNothing(config)) and not has_stacked_form(OverridesAdjust(config))
    assert has_stacked_form(OverridesPlan(config))


@pytest.mark.parametrize(("module", "reason"), [
    (nn.Sequential(nn.Linear(4, 3), nn.Dropout(0.5)), "Dropout draws random numbers"),
    (nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3)), "float buffers"),
    (nn.Sequential(nn.Conv1d(1, 2, 3)), "Conv1d is not a linear layer"),
])  # fmt: skip
def test_modules_that_the_step_method_layers_cannot_compute_are_refused(module: nn.Module, reason: str) -> None:
    with pytest.raises(Unsuitable, match=reason):
        Layers(FlatModel(module))


@pytest.mark.parametrize(("module", "draws"), [
    ("torchvision.models.resnet", ""), ("torchvision.ops.stochastic_depth", "Block"), ("theirs", "Block"),
])  # fmt: skip
def test_modules_of_unknown_packages_count_as_random(module: str, draws: str) -> None:
    kind = type("Block", (nn.Linear,), {"__module__": module})
    assert random_part(nn.Sequential(kind(2, 2))) == draws
    assert random_part(nn.Sequential(kind(2, 2), nn.Dropout(0.5))) == (draws or "Dropout")


class WrongOutputs(Vmap):
    def __call__(self, parameters: Any, inputs: torch.Tensor) -> torch.Tensor:
        return super().__call__(parameters, inputs) + 1


def test_a_step_method_whose_outputs_differ_from_the_models_is_refused() -> None:
    model = FlatModel(nn.Linear(4, 3))
    Vmap(model).check(torch.randn(2, 4))
    with pytest.raises(Unsuitable, match="outputs are not those"):
        WrongOutputs(model).check(torch.randn(2, 4))


@pytest.mark.parametrize(("overrides", "reason"), [
    (["node.training_rounds.probability=.5"], "probability"),
    (["node.checkpoint={every: 2}"], "node.checkpoint"), (["training.ema=0.9"], "training.ema"),
    (["simulate.steps=layers", "training.amp=bf16"], "amp"),
    (["sharing=choco", "node.schedule=overlapped"], "overlapped"),
    (["simulate.steps=layers", "model={name: lenet}", IMAGES], "Conv2d is not a linear layer"),
])  # fmt: skip
def test_experiments_that_batched_cannot_compute_are_stepped_and_the_reason_is_given(
    overrides: list[str], reason: str
) -> None:
    chosen = choose(experiment("simulate={engine: batched, steps: rows}", *overrides))
    assert chosen.name == "stepped" and chosen.batched is None and reason in chosen.reason


def test_auto_chooses_the_fastest_method_and_reports_the_times(monkeypatch: pytest.MonkeyPatch) -> None:
    times = {"layers": 3.0, "vmap": 2.0, "rows": 4.0, "stepped": 5.0}
    monkeypatch.setattr(choice, "time_method", lambda _, name: {choice.StepMethod(name, 1): times[name]})
    chosen = choose(experiment())
    assert chosen.batched is not None and chosen.batched.steps.name == "vmap"
    assert "local steps by vmap" in chosen.reason and "stepped 5000000 us" in chosen.reason
    times["stepped"] = 1.0
    chosen = choose(experiment())
    assert chosen.name == "stepped" and "vmap 2000000 us" in chosen.reason
    assert choose(experiment("simulate.engine=batched")).name == "batched"
    assert choose(experiment(), resume=True).reason == "batched cannot compute --resume"


def test_time_method_measures_positive_seconds() -> None:
    times = choice.time_method(experiment(), "layers")
    assert times and all(seconds > 0 and method.name == "layers" for method, seconds in times.items())


def test_a_stop_ends_the_run_after_the_current_round() -> None:
    config = experiment("node.rounds=100")
    population = Population(config)

    class Stops(RecordingSink):
        def tick(self) -> None:
            if len(self.rounds) == 2:
                engine.ask_stop()

    engine, sink = Batched(population, WAYS["layers"](population)), Stops()
    engine.run(sink)
    assert engine.round == 2 and not engine.over and engine.evaluated == 2
    assert engine.figures(0)["round_seconds_median"] == pytest.approx(engine.figures(0)["round_seconds_total"] / 2)


def test_a_node_that_diverges_is_named() -> None:
    with pytest.raises(Exception, match=r"node \d: the training loss is nan|holds NaN") as raised:
        run_batched(experiment("training.optimizer.lr=1e30", "node.rounds=4"), "layers")
    assert raised.value.uid in range(5)  # type: ignore[attr-defined]


def test_rules_with_a_stacked_form_use_no_transport(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Inproc, "exchange", None)
    run_batched(experiment("node.rounds=1"), "layers")


@pytest.mark.parametrize("graph", [
    "{name: el_local, nodes: 40, degree: 6}", "{name: random_regular, nodes: 40, degree: 5}"])
@pytest.mark.parametrize("rule", ["full", "push_sum"])
def test_mixing_with_the_graphs_table_of_targets_equals_mixing_with_a_view_per_node(
    graph: str, rule: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Models and records have the same bits. Of 40 nodes some draw each other."""
    options = [f"graph={graph}", "weights=null", f"sharing={rule}", "mapping.nodes_per_machine=40",
               "model={name: logistic}"]  # fmt: skip
    population = Population(load(QUICKSTART, options, {}))
    exchange, why = make_exchange(population)
    assert not why
    results = []
    for _ in range(2):  # with the table, then without
        population.rows.copy_(torch.randn(population.rows.shape, generator=torch.Generator().manual_seed(1)))
        exchange.begin(3, 0.1)
        exchange.adjust(np.zeros(40))
        sent = exchange.mix()
        results.append((population.rows.clone(), sent.data.tolist(), sent.metadata.tolist(), sent.edges))
        monkeypatch.setattr(type(population.graph), "targets_table", lambda *_: None)
        exchange, _ = make_exchange(population)
    assert torch.equal(results[0][0], results[1][0]) and results[0][1:] == results[1][1:]
