"""Rules compared with the recursions of their papers in NumPy, also with learning rates that fall during the run."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import numpy as np
import pytest

from decentnode.compression.select import random_positions
from decentnode.graph.base import view
from tests.graph.contract import make
from tests.sharing.helpers import ROUNDS, START, N, all_gradients, models_after_rounds

FALLS = {"constant": 1.0, "ten": 0.1, "hundred": 0.01}
"""Factors of the learning rate in the second half of the rounds."""


def learning_rates(factor: float) -> list[float]:
    return [0.05] * (ROUNDS // 2) + [0.05 * factor] * (ROUNDS - ROUNDS // 2)


# Each function returns the models after a round per learning rate, [N, SIZE]. w: the mixing matrix.


def full(w: np.ndarray, lrs: list[float]) -> np.ndarray:
    x = START.copy()
    for lr in lrs:
        x = w @ (x - lr * all_gradients(x))
    return x


def ac(w: np.ndarray, lrs: list[float], factor: float = 0.9, final: float = 0.2, rounds: int = 20) -> np.ndarray:
    x = START.copy()
    for r, lr in enumerate(lrs):
        x = x - lr * all_gradients(x)
        x = x + (factor + (final - factor) * min(1.0, r / rounds)) * (w @ x - x)
    return x


def diloco(w: np.ndarray, lrs: list[float], b: float = 0.9, every: int = 3, a: float = 0.7) -> np.ndarray:
    x, start, v = START.copy(), START.copy(), np.zeros_like(START)
    for r, lr in enumerate(lrs):
        x = x - lr * all_gradients(x)
        if (r + 1) % every == 0:
            change = start - w @ x
            v = b * v + change
            start = start - a * (change + b * v)
            x = start.copy()
    return x


def qg_momentum(w: np.ndarray, lrs: list[float], b: float = 0.9) -> np.ndarray:
    x, m = START.copy(), np.zeros_like(START)
    for lr in lrs:
        new = w @ (x - lr * (b * m + all_gradients(x)))
        m = b * m + (1 - b) * (x - new) / lr
        x = new
    return x


def decentlam(w: np.ndarray, lrs: list[float], b: float = 0.5) -> np.ndarray:
    x, m = START.copy(), np.zeros_like(START)
    for lr in lrs:
        m = b * m + (x - w @ (x - lr * all_gradients(x))) / lr
        x = x - lr * m
    return x


def slowmo(w: np.ndarray, lrs: list[float], b: float = 0.5, every: int = 3, a: float = 0.8) -> np.ndarray:
    x, start, u = START.copy(), START.copy(), np.zeros_like(START)
    for r, lr in enumerate(lrs):
        x = x - lr * all_gradients(x)
        if (r + 1) % every == 0:
            u = b * u + (start - w @ x) / lr
            start = start - a * lr * u
            x = start.copy()
    return x


def tracking(form: str, b: float) -> Callable[[np.ndarray, list[float]], np.ndarray]:
    """Returns the recursion of gradient_tracking (b = 0) or momentum_tracking. b: the decay of the momentum."""

    def recursion(w: np.ndarray, lrs: list[float]) -> np.ndarray:
        x = START.copy()
        m = all_gradients(x)
        y = w @ m if form == "atc" else m.copy()
        for lr in lrs:
            x = w @ x - lr * y if form == "dsgt" else w @ (x - lr * y)
            new = b * m + all_gradients(x)
            y = w @ (y + new - m) if form == "atc" else w @ y + new - m
            m = new
        return x

    return recursion


def d2(w: np.ndarray, lrs: list[float]) -> np.ndarray:
    """The paper's recursion with the updates that were applied, lr times gradient, so that the mean moves with the
    learning rate of the round; what corrects u falls with the learning rate."""
    old, u = START.copy(), lrs[0] * all_gradients(START)
    x = w @ (old - u)
    for last, lr in itertools.pairwise(lrs):
        new_u = lr * all_gradients(x)
        old, x, u = x, w @ (x - new_u + min(1.0, lr / last) * (x - old + u)), new_u
    return x


def elastic(w: np.ndarray, lrs: list[float], a: float = 0.3, b: float = 0.3) -> np.ndarray:
    x, c = START.copy(), START.copy()
    for lr in lrs:
        x, c = x - lr * all_gradients(x) - a * (x - c), w @ (c + b * (x - c))
    return x


def beer(form: str, step: float) -> Callable[[np.ndarray, list[float]], np.ndarray]:
    """Returns Algorithm 1 of arXiv 2201.13320, which sends the largest two of five entries of each row (form dsgt), or
    the same with the step before the exchange (semi_atc). The copies of the models begin as the models."""

    def compress(rows: np.ndarray) -> np.ndarray:
        largest = np.argsort(-np.abs(rows), axis=1)[:, :2]
        result = np.zeros_like(rows)
        np.put_along_axis(result, largest, np.take_along_axis(rows, largest, axis=1), axis=1)
        return result

    def recursion(w: np.ndarray, lrs: list[float]) -> np.ndarray:
        x, h, g = START.copy(), START.copy(), np.zeros_like(START)
        old = all_gradients(x)
        v, mixing = old.copy(), step * (w - np.eye(N))
        for lr in lrs:
            if form == "semi_atc":
                x = x - lr * v
            h = h + compress(x - h)
            g = g + compress(v - g)
            x = x + mixing @ h - (lr * v if form == "dsgt" else 0.0)
            new = all_gradients(x)
            v = v + mixing @ g + new - old
            old = new
        return x

    return recursion


def lead(step: float, fraction: float = 0.6) -> Callable[[np.ndarray, list[float]], np.ndarray]:
    """Algorithm 1 of arXiv 2007.00232 with gamma = 2 step, alpha = fraction, and the unbiased choice of a part of the
    entries. H begins as the models, and D as zero."""

    def found(w: np.ndarray, lrs: list[float]) -> np.ndarray:
        x, graph = START.copy(), make("torus", nodes=N)
        h, d, gamma, alpha = x.copy(), np.zeros_like(x), 2 * step, fraction
        h_w = w @ h
        for k, eta in enumerate(lrs):
            g = all_gradients(x)
            y = x - eta * g - eta * d
            q = np.zeros_like(y)
            for uid in range(N):
                at = random_positions(fraction, y.shape[1], view(graph, uid, k, 1).rng("compression")).numpy()
                q[uid, at] = (y - h)[uid, at] / fraction
            y_hat, y_hat_w = h + q, h_w + w @ q
            h, h_w = (1 - alpha) * h + alpha * y_hat, (1 - alpha) * h_w + alpha * y_hat_w
            d = d + gamma / (2 * eta) * (y_hat - y_hat_w)
            x = x - eta * g - eta * d
        return x

    return found


CASES: dict[str, tuple[dict[str, object], Callable[[np.ndarray, list[float]], np.ndarray]]] = {
    "full": ({"name": "full"}, full),
    "ac": ({"name": "ac", "factor": 0.9, "final": 0.2, "rounds": 20}, ac),
    "diloco": ({"name": "diloco", "every": 3, "outer_lr": 0.7, "outer_momentum": 0.9}, diloco),
    "qg_momentum": ({"name": "qg_momentum", "momentum": 0.9}, qg_momentum),
    "decentlam": ({"name": "decentlam", "momentum": 0.5}, decentlam),
    "slowmo": ({"name": "slowmo", "every": 3, "outer_lr": 0.8, "outer_momentum": 0.5}, slowmo),
    "d2": ({"name": "d2"}, d2),
    "elastic": ({"name": "elastic", "pull": 0.3}, elastic),
} | {
    f"{name} {form}": ({"name": name, "form": form} | ({"momentum": b} if b else {}), tracking(form, b))
    for name, b in (("gradient_tracking", 0.0), ("momentum_tracking", 0.7)) for form in ("semi_atc", "dsgt", "atc")
} | {
    f"beer {form}": ({"name": "beer", "form": form, "fraction": 0.4, "step_size": 0.3}, beer(form, 0.3))
    for form in ("semi_atc", "dsgt")
} | {"lead": ({"name": "lead", "choose": "random", "fraction": 0.6, "compression": None, "step_size": 0.1}, lead(0.1))
}  # fmt: skip


@pytest.mark.sampled
@pytest.mark.parametrize("fall", FALLS)
@pytest.mark.parametrize("name", CASES)
def test_a_rule_computes_the_recursion_of_its_paper(name: str, fall: str) -> None:
    graph = make("torus", nodes=N)
    options, recursion = CASES[name]
    lrs = learning_rates(FALLS[fall])
    models = models_after_rounds(options, graph, lrs)
    np.testing.assert_allclose(models, recursion(graph.matrix(0), lrs), atol=1e-11, rtol=0)


@pytest.mark.parametrize("fall", [0.1, 0.01])
@pytest.mark.parametrize("name", [name for name in CASES if name not in ("d2", "diloco", "elastic")])
def test_a_smaller_learning_rate_slows_the_mean_down_at_once(name: str, fall: float) -> None:
    """On a complete graph the mean moves slower by the same factor, with momentum too."""
    options, every = CASES[name][0], 3 if name == "slowmo" else 1
    graph = make("complete", nodes=N)

    def mean_after(lrs: list[float]) -> np.ndarray:
        mean: np.ndarray = models_after_rounds(options, graph, lrs).mean(0)
        return mean

    before, middle = mean_after([0.01] * (12 - every)), mean_after([0.01] * 12)
    after = mean_after([0.01] * 12 + [0.01 * fall] * every)
    assert np.linalg.norm(after - middle) / np.linalg.norm(middle - before) == pytest.approx(fall, rel=0.5)
