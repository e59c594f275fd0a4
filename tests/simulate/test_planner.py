"""Plans: rounds to consensus compared with theory and with rules that mix, predictions, ranking, and the command."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

from decentnode.cli import main
from decentnode.errors import UsageError
from decentnode.experiment import load
from decentnode.graph.spectrum import mixing
from decentnode.simulate.planner import consensus
from decentnode.simulate.planner.candidates import Choices, Plan, _label, pareto, ranked
from decentnode.simulate.planner.consensus import Consensus, rule_consensus
from decentnode.simulate.planner.predict import predict, predict_consensus
from decentnode.simulate.traffic import Traffic

ROOT = Path(__file__).parents[2]
TWO_MACHINES = str(ROOT / "configs" / "two_machines.yaml")
CABLE = "machines: [{machines: [0, 1], mbit_per_second: 10, latency_seconds: 0.001}]\n"


def graph_of(text: str, *more: str) -> Any:
    return load(ROOT / "configs" / "quickstart.yaml", [f"graph={text}", *more], check=False).make_graph()


@pytest.mark.parametrize("text", ["{name: full}", "{name: local_sgd, every: 2}"])
def test_measured_rounds_to_consensus_of_mixing_rules_agree_with_the_spectrum(text: str) -> None:
    experiment = load(ROOT / "configs" / "quickstart.yaml", ["graph={name: ring, nodes: 8}", f"sharing={text}"],
                      check=False)  # fmt: skip
    found = rule_consensus(experiment.sharing, [tuple(range(8))], experiment.make_graph(), 1e-2, 1)
    rounds = mixing(experiment.make_graph(), 1e-2)[1]
    assert found is not None and found.measured and found.rounds is not None and rounds is not None
    rests = 2 if "every" in text else 1
    assert found.rounds == pytest.approx(rests * rounds, rel=0.02)


@pytest.mark.parametrize("every", [8, 50])
def test_rules_with_rare_exchanges_are_measured_over_as_many_exchanges(every: int) -> None:
    experiment = load(ROOT / "configs" / "quickstart.yaml", [
        "graph={name: ring, nodes: 6}", f"sharing={{name: local_sgd, every: {every}}}"], check=False)  # fmt: skip
    found = rule_consensus(experiment.sharing, [tuple(range(6))], experiment.make_graph(), 1e-2, 1)
    rounds = mixing(experiment.make_graph(), 1e-2)[1]
    assert found is not None and found.rounds is not None and rounds is not None
    assert found.rounds == pytest.approx(every * rounds, rel=0.02)


@pytest.mark.parametrize("text", ["ring", "line", "alternating_ring", "one_peer_exponential"])
def test_rules_on_graphs_that_mix_slowly_are_not_taken_to_have_stalled(text: str) -> None:
    """Random models seem to: most of their differences are gone after a few rounds, and the slowest are left."""
    experiment = load(ROOT / "configs" / "quickstart.yaml", [
        f"graph={{name: {text}, nodes: 32}}", "weights=null", "sharing={name: push_sum}"], check=False)  # fmt: skip
    found = rule_consensus(experiment.sharing, [tuple(range(32))], experiment.make_graph(), 1e-3, 1)
    rounds = mixing(experiment.make_graph())[1]
    assert found is not None and found.rounds is not None and rounds is not None
    assert found.rounds == pytest.approx(rounds, rel=0.02)


@pytest.mark.parametrize("sharing", ["{name: full}", "{name: local_sgd, every: 8}", "{name: diloco, every: 8}"])
def test_exchanges_count_where_a_graph_is_too_large_to_measure_the_rule(sharing: str) -> None:
    experiment = load(ROOT / "configs" / "quickstart.yaml", [
        "graph={name: complete, nodes: 40}", "mapping.nodes_per_machine=40", f"sharing={sharing}"])  # fmt: skip
    assert predict_consensus(experiment, Traffic(experiment), 1e-3) == Consensus(0.0, 8 if "every" in sharing else 1,
                                                                                 False)  # fmt: skip


def test_the_consensus_of_fragments_is_that_of_the_slowest() -> None:
    def predicted(fragments: str) -> consensus.Consensus:
        experiment = load(ROOT / "configs" / "quickstart.yaml", [
            "graph={name: ring, nodes: 8}", "mapping.nodes_per_machine=8", fragments])  # fmt: skip
        return predict_consensus(experiment, Traffic(experiment), 1e-3)

    whole = predicted("parameters=null")
    found = predicted("parameters.fragments=[{parameters: '*weight', every: 4}, {parameters: '*'}]")
    assert whole.rounds is not None and found.rounds == 4 * whole.rounds
    assert found.rate == pytest.approx(whole.rate ** (1 / 4))
    own_graph = predicted("parameters.fragments=[{parameters: '*weight', every: 40, "
                          "graph: {name: complete, nodes: 8}}, {parameters: '*'}]")  # fmt: skip
    assert own_graph == consensus.Consensus(0.0, 40, False)


@pytest.mark.slow
def test_with_coarse_codecs_consensus_takes_many_rounds_or_is_never_reached() -> None:
    def measured(text: str) -> consensus.Consensus:
        experiment = load(ROOT / "configs" / "quickstart.yaml", ["graph={name: ring, nodes: 8}", f"sharing={text}"],
                          check=False)  # fmt: skip
        found = rule_consensus(experiment.sharing, [tuple(range(8))], experiment.make_graph(), 1e-6, 1)
        assert found is not None
        return found

    assert measured("{name: full, compression: {name: int8}}").rounds is None
    error_feedback = measured("{name: choco, fraction: 0.1, step_size: 0.1}")
    assert error_feedback.rounds is None or error_feedback.rounds > 300


@pytest.mark.slow
def test_a_plan_predicts_bytes_and_seconds_of_candidates_and_ranks_them() -> None:
    plan = Plan(TWO_MACHINES, ["simulate.links={machines: [{machines: [0, 1], mbit_per_second: 10}]}"],
                step_seconds=0.01)  # fmt: skip
    found, skipped = plan.predictions(Choices(("ring", "complete"), compressions=("none", "int8"), local_steps=(1, 4)))
    assert len(found) == 8 and not skipped
    by = {(p.graph, p.compression, p.local_steps): p for p in found}
    model = 19_240
    ring, complete = by["ring", "none", 1], by["complete", "none", 1]
    assert ring.bytes_per_node == 2 * model and complete.bytes_per_node == 7 * model
    assert complete.busiest_link.startswith("machine ") and complete.busiest_bytes == 16 * model
    assert complete.round_seconds == pytest.approx(0.01 + 16 * model / 1.25e6)
    assert complete.busiest_seconds == pytest.approx(16 * model / 1.25e6)
    assert complete.consensus_rounds == 1 and ring.consensus_rounds is not None and ring.consensus_rounds > 20
    assert by["ring", "none", 4].compute_seconds == pytest.approx(0.04)
    assert by["complete", "int8", 1].round_seconds < 0.5 * complete.round_seconds
    assert complete.memory_bytes > ring.memory_bytes > 3 * model
    assert ranked(found, "round_seconds")[0].round_seconds == min(p.round_seconds for p in found)
    assert ranked(found, "samples_per_second")[0].samples_per_second == max(p.samples_per_second for p in found)
    for each, star in zip(found, pareto(found), strict=True):
        beaten = any(o.samples_per_second > each.samples_per_second and (o.consensus_seconds or np.inf)
                     < (each.consensus_seconds or np.inf) for o in found)  # fmt: skip
        assert not (star and beaten)


@pytest.mark.parametrize(("overrides", "trained", "exchanges"), [
    (["node.training_rounds={train: 4, mix: 4}"], 1 / 2, 1), (["node.training_rounds={train: 1, mix: 30}"], 1 / 31, 1),
    (["sharing={name: local_sgd, every: 10}"], 1, 1 / 10), (["sharing={name: diloco, every: 50}"], 1, 1 / 50),
    (["sharing={name: diloco, every: 2000}"], 1, 1 / 2000),
    (["sharing={name: local_sgd, every: 3}", "node.training_rounds={train: 1, mix: 1}"], 1 / 2, 1 / 3),
    (["graph={name: gossip_pga, nodes: 6, every: 6, base: {name: ring, nodes: 6}}", "weights=null"], 1, 15 / 12),
    (["graph={name: gossip_pga, nodes: 6, every: 70, base: {name: ring, nodes: 6}}", "weights=null"], 1, 143 / 140),
    (["graph={name: gossip_pga, nodes: 6, every: 3, base: {name: ring, nodes: 6}}", "weights=null",
      "sharing={name: local_sgd, every: 30}"], 1, 9 / 180),
])  # fmt: skip
def test_the_figures_of_a_candidate_are_means_over_whole_cycles_of_local_steps_exchanges_and_edges(
    overrides: list[str], trained: float, exchanges: float
) -> None:
    """Two local steps take 2 s and 32 samples on each of 6 nodes; an exchange with both neighbors takes 1 s."""
    model = 4 * (64 * 64 + 64 + 64 * 10 + 10)
    links = f"{{node_mbit_per_second: {2 * model * 8 / 1e6}}}"
    experiment = load(ROOT / "configs" / "quickstart.yaml", [
        "graph={name: ring, nodes: 6}", "mapping.nodes_per_machine=6", "training.local_steps=2", *overrides,
        f"simulate={{compute: {{step_seconds: 1, spread: 0}}, links: {links}}}",
    ], check=False)  # fmt: skip
    found = predict(experiment, links=None, step_seconds=None, target=1e-3)
    assert found.bytes_per_node == pytest.approx(exchanges * 2 * model)
    assert found.compute_seconds == pytest.approx(2 * trained)
    assert found.round_seconds == pytest.approx(2 * trained + exchanges, rel=0.01)
    assert found.samples_per_second == pytest.approx(6 * 32 * trained / found.round_seconds)


def test_candidates_that_cannot_run_are_skipped_with_the_reason() -> None:
    plan = Plan(TWO_MACHINES, step_seconds=0.01)
    found, skipped = plan.predictions(Choices(("own", "{name: regular, degree: 20}"), ("own", "relaysgd")))
    assert [each.graph for each in found] == ["regular"]
    assert len(skipped) == 3 and all(each.reason for each in skipped)
    found, skipped = plan.predictions(Choices(("rong",)))
    assert not found and "graph.name must be one of" in skipped[0].reason  # and not the hint below it alone
    with pytest.raises(UsageError, match="not valid YAML"):
        plan.predictions(Choices(("{name: ringx",)))  # its last letter is no bracket


def test_graphs_keep_the_weights_with_which_they_are_exact() -> None:
    """The config sets weights for its own graph."""
    graphs = ("{name: base_k_plus_1, peers: 1}", "{name: d_equistatic, nodes: 12}", "ring")
    plan = Plan(ROOT / "configs" / "quickstart.yaml", [
        "graph={name: ring, nodes: 12}", "mapping.nodes_per_machine=12", "weights={name: uniform}",
    ], step_seconds=0.01)  # fmt: skip
    found, skipped = plan.predictions(Choices(graphs))
    by = {each.graph.split(",")[0]: each for each in found}
    assert not skipped and by["base_k_plus_1"].consensus_rate == 0 and by["base_k_plus_1"].consensus_rounds == 5
    assert ["weights=null" in by[name].overrides for name in ("base_k_plus_1", "d_equistatic", "ring")] == [
        True, True, False]  # fmt: skip


def test_a_graph_within_a_graph_keeps_its_braces_in_the_table() -> None:
    assert _label("{name: gossip_pga, base: {name: ring}}", "own") == "gossip_pga, base: {name: ring}"
    assert (_label("ring", "own"), _label(" {name: torus} ", "own"), _label("own", "regular")) == (
        "ring", "torus", "regular")  # fmt: skip


@pytest.mark.slow
def test_the_command_writes_the_chosen_experiment(tmp_path: Path) -> None:
    links, chosen, picture = tmp_path / "links.yaml", tmp_path / "new" / "chosen.yaml", tmp_path / "plan.pdf"
    links.write_text(CABLE)
    arguments = ["plan", TWO_MACHINES, "--links", str(links), "--step-seconds", "0.01", "-g", "ring", "-g",
                 "one_peer_exponential", "-H", "2", "-H", "8", "--by", "samples_per_second"]  # fmt: skip
    result = CliRunner().invoke(main, [*arguments, "-o", str(chosen), "--picture", str(picture)])
    assert result.exit_code == 0, result.output
    assert "machine 0 -> machine 1" in result.output or "machine 1 -> machine 0" in result.output
    assert picture.stat().st_size > 5_000
    experiment = load(chosen)
    assert experiment.graph.name == "one_peer_exponential" and getattr(experiment.training, "local_steps", 0) == 8
    told = json.loads(CliRunner().invoke(main, [*arguments, "--json"]).output)
    assert len(told["candidates"]) == 4 and told["candidates"][0]["graph"] == "one_peer_exponential"
    assert all(0 < each["busiest_share"] <= 1 for each in told["candidates"])
    for seconds in ("nan", "inf"):
        refused = CliRunner().invoke(main, ["plan", TWO_MACHINES, "--step-seconds", seconds])
        assert refused.exit_code == 2 and "must be more than 0 and finite" in refused.output
    refused = CliRunner().invoke(main, [*arguments, "--choose", "9", "-o", str(chosen)])
    assert refused.exit_code == 2 and "--choose must be at most 4" in refused.output


def test_rounds_with_a_server_are_skipped_with_the_reason() -> None:
    _, skipped = Plan(ROOT / "configs" / "federated.yaml").predictions(Choices(graphs=("own",)))
    assert skipped and all("clients train between two exchanges" in each.reason for each in skipped)


def test_asynchronous_schedules_are_skipped_with_the_reason() -> None:
    _, skipped = Plan(ROOT / "configs" / "asynchronous.yaml").predictions(Choices(graphs=("own",)))
    assert skipped and all("gossip_async, in which nodes are in different rounds" in each.reason for each in skipped)
