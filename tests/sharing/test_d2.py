"""Properties of d2, which is also called exact_diffusion, beyond the contract."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch

from decentnode.errors import ConfigError
from decentnode.experiment import load
from tests.conftest import scale
from tests.graph.contract import make
from tests.sharing.contract import random_models, rule, run_round, set_up_rules
from tests.sharing.helpers import Quadratics

ROOT = Path(__file__).parents[2]
RING = make("ring", nodes=16)


@pytest.mark.parametrize("name", ["d2", "exact_diffusion"])
def test_a_mixing_matrix_with_an_eigenvalue_below_minus_one_third_is_refused(
    name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """At -1/3 (rings of even size) there is a warning, above it none."""
    sets = [f"sharing={{name: {name}}}", "mapping={name: linear, nodes_per_machine: 8}"]
    load(ROOT / "configs" / "quickstart.yaml", [*sets, "graph={name: ring, nodes: 8}"])
    assert "smallest eigenvalue of the mixing matrix is -0.333" in caplog.text
    caplog.clear()
    load(ROOT / "configs" / "quickstart.yaml", [*sets, "graph={name: complete, nodes: 8}"])
    assert not caplog.text
    heavy = np.roll(np.eye(8), 1, 0) / 2 + np.roll(np.eye(8), -1, 0) / 2  # eigenvalues cos(2 pi k / 8)
    np.savetxt(tmp_path / "heavy.txt", heavy)
    sets += ["graph={name: ring, nodes: 8}", f"weights={{name: file, path: {tmp_path}/heavy.txt}}"]
    refusal = r"eigenvalues below -0.333, the smallest is -1.000; use .*lazy: true"
    with pytest.raises(ConfigError, match=refusal) as caught:
        load(ROOT / "configs" / "quickstart.yaml", sets)
    assert caught.value.exit_code == 2
    load(ROOT / "configs" / "quickstart.yaml", [*sets[:-1], "weights={name: metropolis_hastings, lazy: true}"])


def test_d2_refuses_the_overlapped_schedule() -> None:
    with pytest.raises(ConfigError, match="d2 works with schedule: sequential only"):
        load(ROOT / "configs" / "quickstart.yaml", [
            "sharing={name: d2}", "graph={name: ring, nodes: 16}", "node.schedule=overlapped",
        ])  # fmt: skip


@pytest.mark.parametrize("options", [{}, {"compression": {"name": "bfloat16"}}, {"compression": {"name": "int8"}}],
                         ids=["whole", "bfloat16", "int8"])  # fmt: skip
def test_rounding_and_codec_errors_do_not_move_the_mean(options: dict[str, object]) -> None:
    """Without gradients. When the rule computed 2 x_t - x_{t-1}, the mean moved by 4e-3 of its norm in these rounds,
    and with the codecs by 0.4 and by 22 times its norm: each error moved the mean again in every later round."""
    graph, models = make("complete", nodes=7), random_models(7, 200)
    rules = set_up_rules(rule("d2", **options), models)
    before = torch.stack(models).double().mean(0)
    for r in range(400):
        run_round(rules, models, graph, r, step=lambda uid, model: None)
    after = torch.stack(models).double().mean(0)
    assert (after - before).norm() / before.norm() < 1e-4


def worst_after_optimum(rule_name: str, schedule: list[float], momentum: float = 0.0) -> tuple[float, float]:
    """Returns the largest distance from consensus and the largest error of the mean in rounds with these learning
    rates, after 300 rounds at the first of them."""
    problem, settled, worst = Quadratics(), 300, (0.0, 0.0)
    models, velocities = ([torch.zeros_like(target) for target in problem.target] for _ in range(2))
    rules = set_up_rules(rule(rule_name), models)
    for r, lr in enumerate([schedule[0]] * settled + schedule):
        def step(uid: int, x: torch.Tensor, lr: float = lr) -> None:
            gradient = problem.curvature[uid] * (x - problem.target[uid])
            x.sub_(velocities[uid].mul_(momentum).add_(gradient), alpha=lr)

        run_round(rules, models, RING, r, step=step, lr=lr)
        stacked = torch.stack(models)
        mean = stacked.mean(0)
        if r >= settled:
            apart, error = float((stacked - mean).norm(dim=1).max()), float((mean - problem.optimum).norm())
            worst = (max(worst[0], apart), max(worst[1], error))
    return worst


@pytest.mark.parametrize("schedule", [
    [0.1] * 10 + [0.01] * 40 + [0.001] * 40,
    [0.05 * (1 + math.cos(math.pi * t / 100)) for t in range(101)] + [0.0] * 40,
    [0.1] + [0.0, 0.1] * 30 + [0.0] * 30,
], ids=["steps", "cosine to 0", "rounds of 0"])  # fmt: skip
@pytest.mark.parametrize("momentum", [0.0, 0.5])
def test_models_at_the_optimum_stay_there_when_the_learning_rate_falls(schedule: list[float], momentum: float) -> None:
    """When the correction did not fall with the rate, nodes moved .03 to 2 apart, and the mean by 2e-3 to 6e-2."""
    apart, error = worst_after_optimum("d2", schedule, momentum)
    assert apart < 1e-5 and error < 1e-5


def test_a_rise_of_the_learning_rate_moves_nodes_no_further_apart_than_a_new_start() -> None:
    """A correction that rose with the rate amplified what it held of past rates: nodes moved 3 apart."""
    cycle = [0.05 * (1 + math.cos(math.pi * t / 100)) for t in range(100)]
    apart, _ = worst_after_optimum("d2", [*cycle, *cycle, *cycle])
    assert apart < 0.6


def test_at_a_constant_rate_the_rate_is_not_in_the_bits() -> None:
    found = []
    for lr in (0.3, 1.0):
        models = random_models(7, 50)
        rules = set_up_rules(rule("d2"), models)
        for r in range(6):
            run_round(rules, models, make("ring", nodes=7), r, lr=lr)
        found.append(torch.stack(models))
    assert torch.equal(*found)


def test_a_checkpoint_without_the_rate_loads_and_the_correction_stays_as_it_was() -> None:
    """Checkpoints of earlier versions have no `lr`."""
    models, others = random_models(6, 20), random_models(6, 20)
    rules, resumed = set_up_rules(rule("d2"), models), set_up_rules(rule("d2"), others)
    for r in range(3):
        run_round(rules, models, make("ring", nodes=6), r)
    for old, new, model, other in zip(rules, resumed, models, others, strict=True):
        state = old.state_dict()
        assert state.pop("lr") == 1.0 and set(state) == {"correction"}
        new.load_state_dict(state)
        other.copy_(model)
    for each, of in ((rules, models), (resumed, others)):
        run_round(each, of, make("ring", nodes=6), 3)
    assert all(torch.equal(x, y) for x, y in zip(models, others, strict=True))


def test_a_resumed_run_scales_the_correction_by_the_rate_of_the_round_before() -> None:
    make_rule, graph = rule("d2"), make("ring", nodes=6)
    models, others = random_models(6, 20), random_models(6, 20)
    rules, resumed = set_up_rules(make_rule, models), set_up_rules(make_rule, others)
    for r in range(3):
        run_round(rules, models, graph, r)
    for old, new, model, other in zip(rules, resumed, models, others, strict=True):
        new.load_state_dict(old.state_dict())
        other.copy_(model)
    for each, of in ((rules, models), (resumed, others)):
        run_round(each, of, graph, 3, lr=0.1)
    assert all(torch.equal(x, y) for x, y in zip(models, others, strict=True))


@pytest.mark.slow
def test_exact_diffusion_with_momentum_is_exact() -> None:
    """EDM: the error is 1.6e-10 after 3000 rounds (--stress), and at most 1e-7 after the 600 of the default run."""
    rounds = scale(600, 3000)
    error = Quadratics().error(rule("exact_diffusion"), RING, rounds, 0.005, momentum=0.9)
    assert error <= (1.7e-10 if rounds == 3000 else 1e-7)


@pytest.mark.parametrize("name", ["d2", "exact_diffusion", "lead"])
def test_nodes_that_would_have_unequal_learning_rates_are_refused(name: str) -> None:
    """Their corrections become smaller by unequal factors, so that they no longer cancel in the sum over the nodes: on
    the quadratics, with rates that fall from round 10 on, the mean stayed 8e-3 from the optimum."""
    sets = [f"sharing={{name: {name}}}", "graph={name: ring, nodes: 16}",
            "training={local_steps: null, local_epochs: 1}",
            "data.partition={name: dirichlet, alpha: 0.3, balanced: false}"]  # fmt: skip
    fall = "training.lr_schedule={name: exponential, gamma: 0.9}"
    with pytest.raises(ConfigError, match=f"every must be round with local_epochs and {name}"):
        load(ROOT / "configs" / "quickstart.yaml", [*sets, fall, "training.lr_schedule.every=step"])
    load(ROOT / "configs" / "quickstart.yaml", [*sets, fall])
    load(ROOT / "configs" / "quickstart.yaml", [*sets, "training.lr_schedule={name: constant, every: step}"])
