"""What each rule promises beyond the contract, on quadratics where every node wants something else."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from decentnode.build import build_in_process, step_all
from decentnode.errors import ConfigError
from decentnode.experiment import load
from decentnode.graph.base import view
from decentnode.graph.topology import Topology
from decentnode.payload import Payload
from decentnode.sharing import SHARINGS
from decentnode.sharing.base import Sharing
from tests.graph.contract import make
from tests.sharing.contract import bound, draw, one_round, rule

ROOT = Path(__file__).parents[2]


def quadratics(name: str, graph: Topology, rounds: int, lr: float, **options: object) -> float:
    """mean ||x_i - x*||^2 after gossip gradient descent on f_i = |a_i (x - b_i)|^2 / 2 with unequal a_i and b_i."""
    n, size = graph.num_nodes, 5
    generator = torch.Generator().manual_seed(1)
    a = torch.rand(n, size, generator=generator, dtype=torch.float64) + 0.5
    b = 2 * torch.randn(n, size, generator=generator, dtype=torch.float64)
    best = (a * a * b).sum(0) / (a * a).sum(0)
    models = [torch.zeros(size, dtype=torch.float64) for _ in range(n)]
    rules = bound(rule(name, **options), models)
    for r in range(rounds):
        one_round(rules, models, graph, r, step=lambda uid, model: model.sub_(a[uid] ** 2 * (model - b[uid]), alpha=lr))
    return float(torch.stack([(model - best).square().sum() for model in models]).mean())


RING = make("ring", nodes=16)


def test_bias_is_corrected_on_a_ring() -> None:
    """Plain gossip is biased, the correcting rules go to the optimum (docs/explanation/algorithms.rst, "Known
    errors")."""
    plain = quadratics("full", RING, 1200, 0.05)
    assert plain > 1e-3
    for name in ("d2", "gradient_tracking"):
        assert quadratics(name, RING, 1200, 0.05) < 1e-10, name
    assert quadratics("momentum_tracking", RING, 1200, 0.01, momentum=0.8) < 1e-10
    lam = [quadratics("decentlam", RING, 1500, lr, momentum=0.5) for lr in (0.02, 0.01)]
    assert lam[1] < lam[0] < plain


def test_tracking_works_on_one_peer_sequences_and_d2_is_refused_there() -> None:
    sequence = make("one_peer_exponential", nodes=16)
    assert quadratics("gradient_tracking", sequence, 400, 0.05) < 1e-9
    assert quadratics("momentum_tracking", sequence, 1000, 0.01, momentum=0.8) < 1e-9
    assert quadratics("qg_momentum", sequence, 400, 0.05) < quadratics("full", sequence, 400, 0.05)
    for name in ("d2", "decentlam"):
        diverged = quadratics(name, sequence, 600, 0.05)
        assert not diverged < 1e-3, "this is why it is refused"


def test_the_tracked_mean_is_the_mean_update() -> None:
    rules: list[Sharing] = [rule("gradient_tracking")() for _ in range(6)]
    models = draw(6, 9, torch.float64)
    for r in range(5):
        before = [m.clone() for m in models]
        one_round(rules, models, make("ring", nodes=6), r)
        updates = torch.stack([0.1 * (x - float(uid)) for uid, x in enumerate(before)])
        tracked = torch.stack([each.tracked for each in rules])  # type: ignore[attr-defined]
        torch.testing.assert_close(tracked.mean(0), updates.mean(0))


@pytest.mark.parametrize("family", ["directed_one_peer_exponential", "exponential", "star"])
def test_push_sum_keeps_mass_and_finds_the_mean(family: str) -> None:
    graph, models = make(family, nodes=8), draw(8, 11, torch.float64)
    mean = torch.stack(models).mean(0)
    rules = [rule("push_sum")() for _ in models]
    for r in range(60):
        one_round(rules, models, graph, r, pull=0.0)
        total = sum(m * each.weight for m, each in zip(models, rules, strict=True))  # type: ignore[attr-defined]
        assert sum(each.weight for each in rules) == pytest.approx(8)  # type: ignore[attr-defined]
        torch.testing.assert_close(total / 8, mean)
    for model in models:
        torch.testing.assert_close(model, mean, atol=1e-6, rtol=0)


def test_push_sum_takes_back_what_did_not_arrive() -> None:
    graph, models = make("ring", nodes=4), draw(4, 5, torch.float64)
    rules = [rule("push_sum")() for _ in models]
    views = [view(graph, uid, 0) for uid in range(4)]
    sent = [each.outgoing(model, seen) for each, model, seen in zip(rules, models, views, strict=True)]
    frozen = [{to: Payload({"x": p.tensors["x"].clone()}, p.scalars) for to, p in out.items()} for out in sent]
    mean = torch.stack(models).mean(0)
    rules[1].undelivered(2, frozen[1][2])
    for uid, each in enumerate(rules):
        received = {j: frozen[j][uid] for j in views[uid].sources if (j, uid) != (1, 2)}
        each.mix(models[uid], received, views[uid])
    total = sum(m * each.weight for m, each in zip(models, rules, strict=True))  # type: ignore[attr-defined]
    torch.testing.assert_close(total / 4, mean)


def test_relays_are_exact_after_the_tree_s_width() -> None:
    graph, models = make("line", nodes=6), draw(6, 7, torch.float64)
    start = [m.clone() for m in models]
    rules = [rule("relaysgd")() for _ in models]
    for r in range(6):
        for model, constant in zip(models, start, strict=True):
            model.copy_(constant)
        one_round(rules, models, graph, r, pull=0.0)
    for model in models:
        torch.testing.assert_close(model, torch.stack(start).mean(0))


@pytest.mark.parametrize(("n", "dimensions"), [(9, 2), (8, 3), (16, 2), (5, 1)])
def test_a_full_grid_agrees_after_its_dimensions(n: int, dimensions: int) -> None:
    models = draw(n, 6, torch.float64)
    mean = torch.stack(models).mean(0)
    rules = [rule("moshpit", dimensions=dimensions)() for _ in models]
    for r in range(dimensions):
        one_round(rules, models, make("complete", nodes=n), r, pull=0.0)
    for model in models:
        torch.testing.assert_close(model, mean)


def run(name: str, rounds: int, **options: object) -> list[Tensor]:
    models = draw(6, 10, torch.float64)
    rules = [rule(name, **options)() for _ in models]
    for r in range(rounds):
        one_round(rules, models, make("complete", nodes=6), r)
    return models


def test_infrequent_rules_reduce_to_each_other() -> None:
    def close(a: list[Tensor], b: list[Tensor]) -> bool:
        return all(torch.allclose(x, y) for x, y in zip(a, b, strict=True))

    assert close(run("local_sgd", 7, every=1), run("full", 7))
    assert close(run("slowmo", 8, every=4, outer_lr=1.0, outer_momentum=0.0), run("local_sgd", 8, every=4))
    assert close(run("diloco", 8, every=2, outer_lr=1.0, outer_momentum=0.0), run("local_sgd", 8, every=2))
    assert not close(run("diloco", 8, every=2), run("slowmo", 8, every=2, outer_lr=0.7, outer_momentum=0.9))
    assert close(run("ac", 5, factor=1.0, final=1.0), run("full", 5))
    rested = run("local_sgd", 3, every=4)
    alone = [m - (1 - 0.9**3) * (m - float(uid)) for uid, m in enumerate(draw(6, 10, torch.float64))]
    assert close(rested, alone)


def test_push_sum_is_not_biased_by_an_irregular_graph() -> None:
    """Updates scaled by the weights would move the optimum, however small the learning rate."""
    star = make("star", nodes=8)
    errors = [quadratics("push_sum", star, rounds, lr) for rounds, lr in ((2000, 0.02), (6000, 0.005))]
    assert errors[1] < errors[0] / 4


@pytest.mark.parametrize("n", [5, 6])
def test_noloco_moves_the_mean_like_one_outer_optimizer(n: int) -> None:
    """Pairing does not matter to the mean: m <- b m + a mean(D), p <- p + m for the means of all."""
    models = draw(n, 4, torch.float64)
    rules = [rule("noloco", every=2, momentum=0.5, pull=0.7)() for _ in models]
    slow = torch.stack(models).mean(0)
    momentum = torch.zeros_like(slow)
    for r in range(8):
        one_round(rules, models, make("ring", nodes=n), r)
        if r % 2 == 0:
            grown = torch.stack(models)
            grown = grown - 0.1 * (grown - torch.arange(float(n), dtype=torch.float64)[:, None])
            continue
        momentum = 0.5 * momentum + 0.7 * (grown.mean(0) - slow)
        slow = slow + momentum
        torch.testing.assert_close(torch.stack(models).mean(0), slow)


def test_elastic_ties_keep_nodes_and_centers() -> None:
    models = draw(6, 8, torch.float64)
    rules = [rule("elastic", every=1, pull=0.3)() for _ in models]
    for each, model in zip(rules, models, strict=True):
        each.begin(model, view(make("ring", nodes=6), 0, 0))
    total = 2 * torch.stack(models).sum(0)
    for r in range(40):
        one_round(rules, models, make("ring", nodes=6), r, pull=0.0)
        centers = torch.stack([each.center for each in rules])  # type: ignore[attr-defined]
        torch.testing.assert_close(torch.stack(models).sum(0) + centers.sum(0), total)
    assert float(torch.stack(models).std(0).max()) < 1e-2


def test_the_leader_of_a_neighborhood_stays() -> None:
    models = draw(4, 5, torch.float64)
    rules = [rule("leader", every=1, pull=0.5, average=0)() for _ in models]
    before = [m.clone() for m in models]
    one_round(rules, models, make("complete", nodes=4), 0, pull=0.0)  # the loss of node u is u
    assert torch.equal(models[0], before[0])
    for uid in (1, 2, 3):
        torch.testing.assert_close(models[uid], (before[uid] + before[0]) / 2)


@pytest.mark.parametrize(("every", "mean"), [(1, 2.0), (2, 1.5), (3, 4.0)])
def test_a_leader_is_chosen_by_the_losses_since_the_last_exchange(every: int, mean: float) -> None:
    each, seen = rule("leader", every=every)(), view(make("ring", nodes=4), 0, 0, 1)
    for loss in (50.0, 9.0, 1.0, 2.0):
        each.adjust(torch.zeros(1), seen, loss)
    (payload,) = {id(p): p for p in each.outgoing(torch.zeros(1), seen).values()}.values()
    assert payload.scalars["loss"] == mean


@pytest.mark.parametrize(("sharing", "graph", "says"), [
    ("d2", "{name: one_peer_exponential, nodes: 8}", "static graph.*name: ring"),
    ("relaysgd", "{name: ring, nodes: 8}", "needs a tree, got 8 edges for 8 nodes"),
    ("decentlam", "{name: random_matching, nodes: 8}", "static"),
])  # fmt: skip
def test_a_graph_that_does_not_suit_is_refused_with_one_that_would(sharing: str, graph: str, says: str) -> None:
    sets = [f"sharing={{name: {sharing}}}", f"graph={graph}", "mapping.nodes_per_machine=8"]
    with pytest.raises(ConfigError, match=says):
        load(ROOT / "configs" / "quickstart.yaml", sets)


@pytest.mark.parametrize("name", ["d2", "exact_diffusion"])
def test_the_smallest_eigenvalue_decides(name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """At -1/3 (rings of even size) with a warning, above in silence, below refused until the weights are lazy."""
    sets = [f"sharing={{name: {name}}}", "mapping={name: linear, nodes_per_machine: 8}"]
    load(ROOT / "configs" / "quickstart.yaml", [*sets, "graph={name: ring, nodes: 8}"])
    assert "smallest eigenvalue of the mixing matrix is -0.333" in caplog.text
    caplog.clear()
    load(ROOT / "configs" / "quickstart.yaml", [*sets, "graph={name: complete, nodes: 8}"])
    assert not caplog.text
    heavy = np.roll(np.eye(8), 1, 0) / 2 + np.roll(np.eye(8), -1, 0) / 2  # eigenvalues cos(2 pi k / 8)
    np.savetxt(tmp_path / "heavy.txt", heavy)
    sets += ["graph={name: ring, nodes: 8}", f"weights={{name: file, path: {tmp_path}/heavy.txt}}"]
    with pytest.raises(ConfigError, match=r"eigenvalues below -0.333, the smallest is -1.000; weights: .*lazy: true"):
        load(ROOT / "configs" / "quickstart.yaml", sets)
    assert ConfigError.exit_code == 2


def test_rules_that_need_the_round_in_order_refuse_to_overlap() -> None:
    with pytest.raises(ConfigError, match="d2 works with schedule: sequential only"):
        load(ROOT / "configs" / "quickstart.yaml", [
            "sharing={name: d2}", "graph={name: ring, nodes: 16}", "node.schedule=overlapped",
        ])  # fmt: skip


@pytest.mark.parametrize("name", [name for name in SHARINGS if name != "full"])
def test_every_rule_trains_the_quickstart_on_a_ring(name: str) -> None:
    """With default options; relays are refused on a ring and take a line."""
    sets = [f"sharing={{name: {name}}}", "graph={name: ring, nodes: 8}", "mapping.nodes_per_machine=8",
            "node={rounds: 30, evaluate_every: 0}"]  # fmt: skip
    if name == "relaysgd":
        with pytest.raises(ConfigError, match="needs a tree"):
            load(ROOT / "configs" / "quickstart.yaml", sets)
        sets[1] = "graph={name: line, nodes: 8}"
    experiment = load(ROOT / "configs" / "quickstart.yaml", sets)
    nodes = build_in_process(experiment)
    step_all(nodes)
    # Elastic averaging lets every node explore: its local models have taken whole local steps since the last pull.
    which = "accuracy_merged" if name == "elastic" else "accuracy"
    accuracy = float(np.mean([node.figures()[which] for node in nodes]))  # type: ignore[arg-type]
    assert accuracy > 0.8, accuracy
