"""Properties of many rules: documented errors on quadratics, symmetries, centralized training as a limit, dtypes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from decentnode.build import build_in_process, step_all
from decentnode.config.component import Config
from decentnode.errors import ConfigError
from decentnode.experiment import load
from decentnode.models.base import Model, outputs_of
from decentnode.samples import DataSpec
from decentnode.sharing import WITH_SERVERS
from tests.conftest import scale
from tests.graph.contract import make
from tests.sharing.contract import (
    RULES,
    codec_of,
    random_models,
    rule,
    rule_name,
    rule_traits,
    run_round,
    set_up_rules,
    suitable_graph,
)
from tests.sharing.helpers import Quadratics

ROOT = Path(__file__).parents[2]
RING = make("ring", nodes=16)


@pytest.mark.slow
@pytest.mark.parametrize(("options", "lr", "low", "high"), [
    ({"name": "full"}, 0.05, 0.22, 0.23),
    ({"name": "gradient_tracking"}, 0.05, 0.0, 1e-20),
    ({"name": "d2"}, 0.05, 0.0, 1e-20),
    ({"name": "qg_momentum", "momentum": 0.9}, 0.005, 6.0e-3, 6.2e-3),
    ({"name": "decentlam", "momentum": 0.9}, 0.005, 6.0e-3, 6.2e-3),
    ({"name": "momentum_tracking", "momentum": 0.9}, 0.005, 0.0, 1e-20),
])  # fmt: skip
def test_documented_errors_on_a_ring(options: dict[str, object], lr: float, low: float, high: float) -> None:
    """docs/explanation/algorithms.rst, "Known errors": after 3000 rounds (--stress). The default run makes fewer rounds
    and allows larger errors."""
    rounds = scale(1200, 3000)
    slack = 1.0 if rounds == 3000 else 1e8 if high < 1e-10 else 1.3
    error = Quadratics().error(rule(**options), RING, rounds, lr)  # type: ignore[arg-type]
    assert low / slack <= error <= high * slack


def test_the_overlapped_recursion_of_full_has_a_larger_bias_than_the_sequential_one() -> None:
    """x <- W x - lr g(x) (docs/explanation/round.rst, "Overlapped"): 0.283 where the sequential recursion has 0.226."""
    quadratics, w = Quadratics(), torch.from_numpy(RING.matrix(0))
    x = torch.zeros_like(quadratics.target)
    for _ in range(3000):
        x = w @ x - 0.05 * quadratics.curvature * (x - quadratics.target)
    assert float((x - quadratics.optimum).square().sum(1).mean()) == pytest.approx(0.283, abs=5e-4)


@pytest.mark.slow
def test_documented_errors_on_one_peer_graphs() -> None:
    """docs/explanation/algorithms.rst, "Known errors", last column: full has 3.5e-2, gradient_tracking finds the
    optimum, and rules that need a static graph are refused."""
    hypercube, quadratics = make("one_peer_exponential", nodes=16), Quadratics()
    assert quadratics.error(rule("full"), hypercube, 400, 0.05) == pytest.approx(3.5e-2, rel=0.1)
    assert quadratics.error(rule("gradient_tracking"), hypercube, 800, 0.05) < 1e-12
    for name in ("d2", "exact_diffusion", "decentlam", "choco", "stc", "qsgd", "sign", "relaysgd"):
        with pytest.raises(ConfigError, match="static"):
            load(ROOT / "configs" / "quickstart.yaml", [
                f"sharing={{name: {name}}}", "graph={name: one_peer_exponential, nodes: 16}",
            ])  # fmt: skip


@pytest.mark.parametrize("options", [
    {"name": "full"}, {"name": "push_sum"}, {"name": "gradient_tracking"}, {"name": "d2"},
    {"name": "ac", "rounds": 9999}, {"name": "local_sgd", "every": 1},
    {"name": "slowmo", "every": 1, "outer_momentum": 0.0}, {"name": "moshpit", "dimensions": 1},
    {"name": "topk", "fraction": 1.0}, {"name": "fft", "fraction": 1.0},
    {"name": "choco", "choose": "all", "step_size": 1.0}, {"name": "deepsqueeze", "choose": "all", "step_size": 1.0},
    {"name": "hierarchical"}, {"name": "exact_diffusion"}, {"name": "qg_momentum", "momentum": 0.0},
    {"name": "decentlam", "momentum": 0.0}, {"name": "momentum_tracking", "momentum": 0.0},
    {"name": "diloco", "every": 1, "outer_lr": 1.0, "outer_momentum": 0.0}, {"name": "wavelet", "fraction": 1.0},
    {"name": "jwins", "fractions": [1.0]}, {"name": "subsample", "fraction": 1.0},
])  # fmt: skip
def test_on_a_complete_graph_rules_equal_sgd_on_the_mean_gradient(options: dict[str, object]) -> None:
    """From a common start."""
    quadratics = Quadratics(6, 7)
    models = [torch.zeros(7, dtype=torch.float64) for _ in range(6)]
    rules, graph = set_up_rules(rule(**options), models), make("complete", nodes=6)  # type: ignore[arg-type]
    central = torch.zeros(7, dtype=torch.float64)

    def step(uid: int, x: Tensor) -> None:
        x.sub_(quadratics.curvature[uid] * (x - quadratics.target[uid]), alpha=0.05)

    for r in range(12):
        run_round(rules, models, graph, r, step=step)
        central -= 0.05 * (quadratics.curvature * (central - quadratics.target)).mean(0)
    for model in models:
        torch.testing.assert_close(model, central, atol=1e-3 if options["name"] == "ac" else 1e-10, rtol=0)


DEPENDS_ON_UIDS = ("noloco", "subsample", "jwins", "moshpit", "powergossip", "leader", "hierarchical",
                 *WITH_SERVERS)  # fmt: skip
"""Rules whose result depends on uids, which seed their draws or choose the owner of a shard."""


@pytest.mark.sampled(of=rule_traits)
@pytest.mark.parametrize("name", [n for n in RULES if rule_name(RULES[n]) not in DEPENDS_ON_UIDS])
def test_numbering_the_nodes_of_a_line_backwards_reverses_the_models(name: str) -> None:
    each = set_up_rules(RULES[name], random_models(1, 30))[0]
    codec = codec_of(each)
    if (codec is not None and codec.unbiased) or getattr(getattr(each, "operator", None), "choose", "") == "random":
        pytest.skip("the uid seeds the draws of the codec or of the chosen entries")
    graph = suitable_graph(each, 6, "line")
    runs = []
    for backwards in (False, True):
        models = random_models(6, 30, torch.float64)
        models = models[::-1] if backwards else models
        rules = set_up_rules(RULES[name], models)
        targets = list(range(6))[::-1] if backwards else list(range(6))
        for r in range(4):
            run_round(rules, models, graph, r, step=lambda u, x, t=targets: x.sub_(x - float(t[u]), alpha=0.1))
        runs.append(models[::-1] if backwards else models)
    for a, b in zip(*runs, strict=True):
        torch.testing.assert_close(a, b, atol=1e-9, rtol=0)


@pytest.mark.sampled(of=rule_traits)
@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_models_in_half_precision_keep_their_dtype_and_stay_finite(name: str, dtype: torch.dtype) -> None:
    models = random_models(4, 77, dtype)
    graph = suitable_graph(RULES[name](), 4)
    rules = set_up_rules(RULES[name], models)
    for r in range(3):
        run_round(rules, models, graph, r)
    for model in models:
        assert model.dtype == dtype and bool(model.isfinite().all())


class BatchNormalized(Model):
    """A perceptron with batch normalization, whose statistics are buffers."""

    Config = Config

    def __init__(self, config: Config) -> None:
        self.config = config

    def make(self, data: DataSpec) -> nn.Module:
        layers = (nn.Linear(64, 17), nn.BatchNorm1d(17), nn.ReLU())
        return nn.Sequential(nn.Flatten(), *layers, nn.Linear(17, outputs_of("normed", data)))


@pytest.mark.sampled(one=["sharing"])
@pytest.mark.parametrize("sharing", ["{name: choco}", "{name: jwins}", "{name: powergossip}", "{name: stc}",
                                     "{name: full, compression: {name: int8}}",
                                     "{name: gradient_tracking}"])  # fmt: skip
def test_models_with_batch_normalization_learn_and_their_statistics_stay_close(sharing: str) -> None:
    """Statistics are buffers, which nodes average uncompressed, whatever the rule does with the parameters."""
    sets = [f"sharing={sharing}", "graph={name: ring, nodes: 4}", "mapping.nodes_per_machine=4",
            "data.partition={name: iid}", "model={name: 'tests.sharing.test_invariants:BatchNormalized'}",
            "node={rounds: 25, evaluate_every: 0}"]  # fmt: skip
    nodes = build_in_process(load(ROOT / "configs" / "quickstart.yaml", sets))
    step_all(nodes)
    buffers: list[Tensor] = [node.training.model.buffers for node in nodes]
    assert buffers[0].numel() == 34 and all(bool(b.isfinite().all()) for b in buffers)
    assert float((buffers[0] - buffers[1]).abs().max()) < 1
    assert float(nodes[0].figures()["accuracy_mean"]) > 0.5
