"""Rules beside their papers' recursions, written down in NumPy once more, also where the learning rate falls."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from tests.graph.contract import make
from tests.sharing.helpers import ROUNDS, START, N, gradient, models_after

FALLS = {"constant": 1.0, "ten": 0.1, "hundred": 0.01}


def rates(fall: float) -> list[float]:
    return [0.05] * (ROUNDS // 2) + [0.05 * fall] * (ROUNDS - ROUNDS // 2)


def full(w: np.ndarray, lrs: list[float]) -> np.ndarray:
    x = START.copy()
    for lr in lrs:
        x = w @ (x - lr * gradient(x))
    return x


def ac(w: np.ndarray, lrs: list[float], factor: float = 0.9, final: float = 0.2, rounds: int = 20) -> np.ndarray:
    x = START.copy()
    for r, lr in enumerate(lrs):
        x = x - lr * gradient(x)
        x = x + (factor + (final - factor) * min(1.0, r / rounds)) * (w @ x - x)
    return x


def diloco(w: np.ndarray, lrs: list[float], b: float = 0.9, every: int = 3, a: float = 0.7) -> np.ndarray:
    x, start, v = START.copy(), START.copy(), np.zeros_like(START)
    for r, lr in enumerate(lrs):
        x = x - lr * gradient(x)
        if (r + 1) % every == 0:
            change = start - w @ x
            v = b * v + change
            start = start - a * (change + b * v)
            x = start.copy()
    return x


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


def beer(form: str, step: float) -> Callable[[np.ndarray, list[float]], np.ndarray]:
    """Algorithm 1 of arXiv 2201.13320 with the largest two of five entries of each row, or with the step before the
    exchange. Copies of models begin as the models."""

    def kept(rows: np.ndarray) -> np.ndarray:
        largest = np.argsort(-np.abs(rows), axis=1)[:, :2]
        result = np.zeros_like(rows)
        np.put_along_axis(result, largest, np.take_along_axis(rows, largest, axis=1), axis=1)
        return result

    def found(w: np.ndarray, lrs: list[float]) -> np.ndarray:
        x, h, g = START.copy(), START.copy(), np.zeros_like(START)
        old = gradient(x)
        v, mixing = old.copy(), step * (w - np.eye(N))
        for lr in lrs:
            if form == "semi_atc":
                x = x - lr * v
            h = h + kept(x - h)
            g = g + kept(v - g)
            x = x + mixing @ h - (lr * v if form == "dsgt" else 0.0)
            new = gradient(x)
            v = v + mixing @ g + new - old
            old = new
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
}  # fmt: skip


@pytest.mark.sampled
@pytest.mark.parametrize("fall", FALLS)
@pytest.mark.parametrize("name", CASES)
def test_a_rule_is_its_paper_s_recursion(name: str, fall: str) -> None:
    graph = make("torus", nodes=N)
    options, recursion = CASES[name]
    lrs = rates(FALLS[fall])
    np.testing.assert_allclose(models_after(options, graph, lrs), recursion(graph.matrix(0), lrs), atol=1e-11, rtol=0)


@pytest.mark.parametrize("fall", [0.1, 0.01])
@pytest.mark.parametrize("name", [name for name in CASES if name not in ("d2", "diloco", "elastic")])
def test_a_rate_that_falls_is_felt_at_once(name: str, fall: float) -> None:
    """On a complete graph the mean goes as much slower as the rate is smaller, momentum and all."""
    options, every = CASES[name][0], 3 if name == "slowmo" else 1
    graph = make("complete", nodes=N)
    means = [models_after(options, graph, [0.01] * 12 + [0.01 * fall] * more).mean(0) for more in (0, every)]
    before = models_after(options, graph, [0.01] * (12 - every)).mean(0)
    slower = np.linalg.norm(means[1] - means[0]) / np.linalg.norm(means[0] - before)
    assert slower == pytest.approx(fall, rel=0.5)
