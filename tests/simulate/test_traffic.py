"""The predicted bytes of rules, compared with what the nodes of a run send."""

from __future__ import annotations

from pathlib import Path

import pytest

from decentnode.experiment import load
from decentnode.experiment.initial_model import make_model
from decentnode.launch.one_process.in_process import run_in_process
from decentnode.launch.reporting.header import estimate_traffic
from decentnode.simulate.traffic import Traffic

ROUNDS = 6
STAR = "graph={name: star, nodes: 8}"
SERVERS = "graph={name: star, nodes: 8, servers: {name: ring, nodes: 2}}"
NORM = "model={name: gn_lenet, norm: batch}"
CASES = {
    "full": ["sharing=full"],
    "quantized": ["sharing={name: full, compression: {name: int8}}"],
    "choco": ["sharing={name: choco, fraction: 0.1, step_size: 0.2}"],
    "topk": ["sharing={name: topk, fraction: 0.2}"],
    "every third round": ["sharing={name: local_sgd, every: 3}"],
    "three phases": ["sharing={name: hierarchical, groups: [[0, 1, 2, 3], [4, 5, 6, 7]]}", "graph=complete"],
    "phases of unequal sizes": ["sharing=secure_aggregation"],
    "phases and a part": ["sharing={name: secure_aggregation, fraction: 0.1}"],
    "a graph that changes": ["graph={name: one_peer_exponential, nodes: 8}"],
    "exact averages between": ["graph={name: gossip_pga, nodes: 8, every: 3, base: {name: ring, nodes: 8}}"],
    "random matchings": ["graph={name: random_matching, nodes: 8}"],
    "random subgraphs": ["graph={name: matcha, nodes: 8, base: {name: torus, nodes: 8}}"],
    "groups that are not full": ["sharing={name: moshpit, dimensions: 4}"],
    "some clients": ["sharing={name: fedavg, fraction: 0.4}", STAR],
    "some clients with control variates": ["sharing={name: scaffold, fraction: 0.4}", STAR,
                                           "training.optimizer={name: sgd, lr: 0.1}"],
    "models before changes": ["sharing={name: fedstc, fraction: 0.6}", STAR],
    "several servers": ["sharing={name: fedavg, fraction: 0.5, gossip_every: 2}", SERVERS],
    "several servers, and models before changes": ["sharing={name: fedstc, fraction: 0.6, gossip_every: 2}", SERVERS],
    "buffers": [NORM],
    "buffers that are not averaged": [NORM, "node.buffers=local"],
    "buffers and phases": [NORM, "sharing={name: hierarchical, groups: [[0, 1, 2, 3], [4, 5, 6, 7]]}",
                           "graph=complete"],
    "buffers in groups": [NORM, "sharing=moshpit"],
    "buffers in every round": [NORM, "parameters.fragments={name: random, count: 2, degree: 1, every: 3}"],
}


@pytest.mark.sampled(one=["name"])
@pytest.mark.parametrize("name", CASES)
def test_predicted_bytes_are_those_that_a_run_sends(name: str) -> None:
    text = Path(__file__).parents[2] / "configs" / "quickstart.yaml"
    graph = "{name: complete, nodes: 8}" if "graph=complete" in CASES[name] else "{name: regular, nodes: 8, degree: 4}"
    overrides = [f"graph={graph}", f"node.rounds={ROUNDS}", "communication=inproc", "node.evaluate_every=0",
                 "mapping={name: linear, machines: 1, nodes_per_machine: 8}",
                 *(each for each in CASES[name] if each != "graph=complete")]  # fmt: skip
    traffic = Traffic(load(text, overrides))
    nodes = run_in_process(load(text, overrides))
    sent = [float(node.figures()["bytes_data"]) + float(node.figures()["bytes_metadata"]) for node in nodes]
    predicted = sum(float(each.sizes.sum()) for round in range(ROUNDS) for each in traffic(round))
    tolerance = 1e-9 if "buffers" in name else 0.002 if "phases" in name else 0.03
    assert predicted == pytest.approx(sum(sent), rel=tolerance)
    experiment = load(text, overrides)
    announced = estimate_traffic(experiment, make_model(experiment, experiment.open_data().spec))
    exchanges = 2 if name == "every third round" else ROUNDS
    assert 8 * exchanges * announced.sent == pytest.approx(sum(sent), rel=tolerance)
