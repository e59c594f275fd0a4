"""Rules beside their papers' recursions, written down in NumPy once more, also where the learning rate falls."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from decentnode.build import build_in_process, step_all
from decentnode.experiment import load
from decentnode.graph.base import RoundView
from decentnode.graph.topology import Topology
from decentnode.sharing.full import Full
from tests.graph.contract import make
from tests.sharing.contract import bound, one_round, rule

ROOT = Path(__file__).parents[2]
N, SIZE, ROUNDS = 9, 5, 60
DRAWS = np.random.default_rng(4)
CURVATURE, TARGET = DRAWS.uniform(0.5, 1.5, (N, SIZE)), DRAWS.normal(size=(N, SIZE))
START = DRAWS.normal(size=SIZE) + np.zeros((N, SIZE))
FALLS = {"constant": 1.0, "ten": 0.1, "hundred": 0.01}


def gradient(x: np.ndarray) -> np.ndarray:
    return CURVATURE * (x - TARGET)


def rates(fall: float) -> list[float]:
    return [0.05] * (ROUNDS // 2) + [0.05 * fall] * (ROUNDS - ROUNDS // 2)


def qg_momentum(w: np.ndarray, lrs: list[float], b: float = 0.9) -> np.ndarray:
    x, m = START.copy(), np.zeros_like(START)
    for lr in lrs:
        new = w @ (x - lr * (b * m + gradient(x)))
        m = b * m + (1 - b) * (x - new) / lr
        x = new
    return x


def decentlam(w: np.ndarray, lrs: list[float], b: float = 0.5) -> np.ndarray:
    x, m = START.copy(), np.zeros_like(START)
    for lr in lrs:
        m = b * m + (x - w @ (x - lr * gradient(x))) / lr
        x = x - lr * m
    return x


def slowmo(w: np.ndarray, lrs: list[float], b: float = 0.5, every: int = 3, a: float = 0.8) -> np.ndarray:
    x, start, u = START.copy(), START.copy(), np.zeros_like(START)
    for r, lr in enumerate(lrs):
        x = x - lr * gradient(x)
        if (r + 1) % every == 0:
            u = b * u + (start - w @ x) / lr
            start = start - a * lr * u
            x = start.copy()
    return x


def tracking(form: str, b: float) -> Callable[[np.ndarray, list[float]], np.ndarray]:
    """b: decay of the momentum that is tracked; 0 tracks the gradient."""

    def found(w: np.ndarray, lrs: list[float]) -> np.ndarray:
        x = START.copy()
        m = gradient(x)
        y = w @ m if form == "atc" else m.copy()
        for lr in lrs:
            x = w @ x - lr * y if form == "dsgt" else w @ (x - lr * y)
            new = b * m + gradient(x)
            y = w @ (y + new - m) if form == "atc" else w @ y + new - m
            m = new
        return x

    return found


def d2(w: np.ndarray, lrs: list[float]) -> np.ndarray:
    """With the applied updates, so that the mean goes on with the rate that there is."""
    old, u = START.copy(), lrs[0] * gradient(START)
    x = w @ (old - u)
    for lr in lrs[1:]:
        new_u = lr * gradient(x)
        old, x, u = x, w @ (2 * x - old - (new_u - u)), new_u
    return x


def elastic(w: np.ndarray, lrs: list[float], a: float = 0.3, b: float = 0.3) -> np.ndarray:
    x, c = START.copy(), START.copy()
    for lr in lrs:
        x, c = x - lr * gradient(x) - a * (x - c), w @ (c + b * (x - c))
    return x


CASES: dict[str, tuple[dict[str, object], Callable[[np.ndarray, list[float]], np.ndarray]]] = {
    "qg_momentum": ({"name": "qg_momentum", "momentum": 0.9}, qg_momentum),
    "decentlam": ({"name": "decentlam", "momentum": 0.5}, decentlam),
    "slowmo": ({"name": "slowmo", "every": 3, "outer_lr": 0.8, "outer_momentum": 0.5}, slowmo),
    "d2": ({"name": "d2"}, d2),
    "elastic": ({"name": "elastic", "pull": 0.3}, elastic),
} | {
    f"{name} {form}": ({"name": name, "form": form} | ({"momentum": b} if b else {}), tracking(form, b))
    for name, b in (("gradient_tracking", 0.0), ("momentum_tracking", 0.7)) for form in ("semi_atc", "dsgt", "atc")
}  # fmt: skip


def ours(options: dict[str, object], graph: Topology, lrs: list[float]) -> np.ndarray:
    models = [torch.from_numpy(x.copy()) for x in START]
    rules = bound(rule(**options), models)  # type: ignore[arg-type]
    h, c = torch.from_numpy(CURVATURE), torch.from_numpy(TARGET)
    for r, lr in enumerate(lrs):
        def step(uid: int, x: Tensor, lr: float = lr) -> None:
            x.sub_(h[uid] * (x - c[uid]), alpha=lr)

        one_round(rules, models, graph, r, step=step, lr=lr)
    return torch.stack(models).numpy()


@pytest.mark.parametrize("fall", FALLS)
@pytest.mark.parametrize("name", CASES)
def test_a_rule_is_its_paper_s_recursion(name: str, fall: str) -> None:
    graph = make("torus", nodes=N)
    options, recursion = CASES[name]
    lrs = rates(FALLS[fall])
    np.testing.assert_allclose(ours(options, graph, lrs), recursion(graph.matrix(0), lrs), atol=1e-11, rtol=0)


def test_easgd_s_center_and_nodes() -> None:
    """Equations 5 and 6 with one center, alpha = .05 and beta = n alpha, round by round; the form with forces of what
    the local steps made ends elsewhere."""
    graph, a, b, lr = make("complete", nodes=N), 0.05, 0.4, 0.2
    models = [torch.from_numpy(x.copy()) for x in START]
    rules = bound(rule("elastic", pull=a, center_pull=b), models)
    x, c = START.copy(), START[0].copy()
    h, t = torch.from_numpy(CURVATURE), torch.from_numpy(TARGET)
    for r in range(30):
        one_round(rules, models, graph, r, step=lambda u, m: m.sub_(h[u] * (m - t[u]), alpha=lr), lr=lr)
        x, c = x - lr * gradient(x) - a * (x - c), (1 - b) * c + b * x.mean(0)
        np.testing.assert_allclose(torch.stack(models).numpy(), x, atol=1e-12, rtol=0)
        for each in rules:
            np.testing.assert_allclose(each.center.numpy(), c, atol=1e-12, rtol=0)  # type: ignore[attr-defined]
    after = ours({"name": "elastic", "pull": a, "center_pull": b, "force": "after"}, graph, [lr] * 30)
    assert np.abs(after - x).max() > 1e-3


@pytest.mark.parametrize("fall", [0.1, 0.01])
@pytest.mark.parametrize("name", [name for name in CASES if name not in ("d2", "elastic")])
def test_a_rate_that_falls_is_felt_at_once(name: str, fall: float) -> None:
    """On a complete graph the mean goes as much slower as the rate is smaller, momentum and all."""
    options, every = CASES[name][0], 3 if name == "slowmo" else 1
    graph = make("complete", nodes=N)
    means = [ours(options, graph, [0.01] * 12 + [0.01 * fall] * more).mean(0) for more in (0, every)]
    before = ours(options, graph, [0.01] * (12 - every)).mean(0)
    slower = np.linalg.norm(means[1] - means[0]) / np.linalg.norm(means[0] - before)
    assert slower == pytest.approx(fall, rel=0.5)


class Told(Full):
    """Notes what it is told of the learning rate, and by which hook."""

    def __init__(self, config: object) -> None:
        super().__init__(config)  # type: ignore[arg-type]
        self.rates: list[tuple[str, float]] = []

    def begin(self, model: Tensor, view: RoundView) -> None:
        self.rates.append(("begin", view.lr))

    def adjust(self, model: Tensor, view: RoundView, loss: float) -> None:
        self.rates.append(("adjust", view.lr))

    def finish(self, model: Tensor, view: RoundView) -> None:
        self.rates.append(("finish", view.lr))


def test_rules_learn_the_rate_of_the_round(tmp_path: Path) -> None:
    records: list[dict[str, object]] = []
    nodes = build_in_process(load(ROOT / "configs" / "quickstart.yaml", [
        "sharing={name: 'tests.sharing.test_recursions:Told'}", "graph={name: ring, nodes: 4}",
        "mapping.nodes_per_machine=4", "node={rounds: 5, evaluate_every: 0}",
        "training.lr_schedule={name: multistep, milestones: [2, 4], gamma: 0.1, warmup: 1, warmup_factor: 0.0}",
    ]), lambda uid, record: records.append(record) if uid == 0 else None)  # fmt: skip
    step_all(nodes)
    trained = [float(r["lr"]) for r in records if r["kind"] == "round"]  # type: ignore[arg-type]
    assert trained == pytest.approx([0.0, 0.1, 0.1, 0.01, 0.01])
    told = nodes[0].sharing.rates  # type: ignore[attr-defined]
    assert told == [(hook, lr) for lr in trained for hook in ("begin", "adjust", "finish")]


@pytest.mark.parametrize(("sharing", "least"), [
    ("{name: qg_momentum}", 0.8), ("{name: slowmo}", 0.8), ("{name: decentlam}", 0.8),
    ("{name: gradient_tracking}", 0.8), ("{name: gradient_tracking, form: dsgt}", 0.5),
    ("{name: momentum_tracking, form: atc}", 0.8),
])  # fmt: skip
def test_a_rate_of_zero_and_a_rate_that_falls_by_a_hundred_in_a_whole_run(sharing: str, least: float) -> None:
    nodes = build_in_process(load(ROOT / "configs" / "quickstart.yaml", [
        f"sharing={sharing}", "graph={name: ring, nodes: 4}", "mapping.nodes_per_machine=4",
        "node={rounds: 40, evaluate_every: 0}", "training.optimizer={name: sgd, lr: 0.1}",
        "training.lr_schedule={name: multistep, milestones: [20], gamma: 0.01, warmup: 2, warmup_factor: 0.0}",
    ]))  # fmt: skip
    step_all(nodes)
    assert all(bool(node.training.model.parameters.isfinite().all()) for node in nodes)
    assert float(nodes[0].figures()["accuracy_mean"]) > least
