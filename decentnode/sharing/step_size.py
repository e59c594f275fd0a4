"""How far nodes may go toward what others told of their models, found by letting nodes do nothing else.

Theory has a bound for every contracting operator: with E||C(v) - v||^2 <= (1 - omega) ||v||^2, spectral gap delta and
beta = ||W - I||, the step gamma = delta^2 omega / (16 delta + delta^2 + 4 beta^2 + 2 delta beta^2 - 8 delta omega)
contracts (Koloskova, Stich and Jaggi 2019, arXiv 1902.00340, theorem 2). On a ring of 16 with the largest tenth of the
entries (omega .1) that is 3e-5, with which nodes learn alone, where .4 still contracts. So steps are tried, from large
to small: nodes that begin with independent normal models exchange for 500 rounds without any gradient, under the
graph's mixing matrix, of large graphs under one with its eigenvalues. These alone do not tell enough: what a star's hub
is off by reaches all others at once, and .79 parts its nodes where .16 brings those of a ring as slow together. All of
it is a pure function of the compressor, its fraction and the matrix.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from decentnode.errors import EnvironmentFault
from decentnode.graph.base import Graph
from decentnode.sharing.operator import Operator

if TYPE_CHECKING:
    from decentnode.sharing.base import Sharing

Compress = Callable[[Tensor], Tensor]
"""[N, D] -> [N, D]: every row as receivers would read it."""
Round = Callable[[Tensor, Tensor, Tensor, float, Compress], None]
"""(models [N, D], what each keeps [N, D], W - I [N, N], step, compress): a round without gradients, in place."""

ROUNDS = 500
STEPS = tuple(float(f"{10 ** (-k / 10):.2g}") for k in range(-1, 21))
"""1.3, 1.0, 0.79, 0.63 ... 0.01: what is tried. A default is the one below the largest that contracts, at most 1."""
SLACK = 1.25
"""Where a graph takes longer than ROUNDS, a step contracts that leaves so much more than the best one."""
SURE, LOST = 1e-6, 10.0
"""Parts of the first distance from which on no further round is looked at."""
PATIENCE = 4
"""Steps in a row that are worse than the best one, after which smaller ones are not tried."""
MODES = 16
"""Eigenvalues that stand for a spectrum of more: evenly spaced ones of the sorted, both ends included."""
OWN_MATRIX = 128
"""Up to so many nodes the graph's own matrix is taken."""
ENTRIES = 1 << 14
"""Entries of all models together, so that a step takes some tenths of a second."""
MATRIX_ROUNDS = 32
"""Of a graph that changes, the matrices of so many rounds are taken in turn, or of its period where that is less."""
MAX_NODES = 512
"""Graphs of more nodes are not looked at: their eigenvalues take seconds."""


def matrices_of(graph: Graph) -> list[np.ndarray]:
    """Mixing matrices [n, n], taken in turn: the graph's own of its first rounds; of a static symmetric W of more than
    OWN_MATRIX nodes one with its eigenvalues, which mixes as fast in its slowest and its fastest directions."""
    first = graph.matrix(0)
    if graph.num_nodes > OWN_MATRIX and graph.period == 1 and np.allclose(first, first.T, atol=1e-12):
        return [with_spectrum(np.linalg.eigvalsh(first))]
    return [graph.matrix(r) for r in range(min(graph.period or MATRIX_ROUNDS, MATRIX_ROUNDS))]


def with_spectrum(eigenvalues: np.ndarray) -> np.ndarray:
    """A symmetric matrix whose rows sum to one, with these eigenvalues [n], one of which is 1, on harmonics: of a ring
    it is the ring's own."""
    modes = np.sort(eigenvalues)[:-1][::-1]  # slow ones first
    if len(modes) > MODES:
        modes = modes[np.linspace(0, len(modes) - 1, MODES).round().astype(int)]
    n = len(modes) + 1
    angles = 2 * np.pi * np.arange(n) / n
    waves = [wave(k * angles) for k in range(1, n // 2 + 1) for wave in (np.cos, np.sin)][: n - 1]
    basis = np.array([wave / np.linalg.norm(wave) for wave in waves]).reshape(n - 1, n)
    return np.full((n, n), 1.0 / n) + (basis.T * modes) @ basis


@dataclass(frozen=True)
class Search:
    """What is tried for one rule. A step contracts when it and the next smaller one do: at 1 things may just cancel."""

    advance: Round
    operator: Operator
    enough: float = 0.02
    """The part of the distance to the mean that may be left."""
    common: float = 0.0
    """Size of what all models share, relative to how far they are apart: it matters where models are compressed."""

    def largest(self, matrices: Sequence[np.ndarray]) -> float:
        """The largest of STEPS that contracts; the least of them where none does."""
        if len(matrices[0]) < 2:
            return STEPS[0]
        left = [distance_left(self, matrices, STEPS[0])]
        worse: list[float] = []  # of a step and the next smaller one
        for smaller in STEPS[1:]:
            left.append(distance_left(self, matrices, smaller))
            worse.append(max(left[-2:]))
            if worse[-1] <= self.enough:
                return STEPS[len(worse) - 1]
            if min(worse) < 1 and len(worse) - 1 - worse.index(min(worse)) >= PATIENCE:
                break
        least = min(worse)
        return STEPS[next(k for k, each in enumerate(worse) if each <= SLACK * least)] if least < 1 else STEPS[-1]

    def default(self, largest: float) -> float:
        """The step below the largest that contracts, a fifth of it as a margin. An operator that cannot send all
        entries several times within ROUNDS was not seen to the end: it takes no more than `without_graph`."""
        step = min(1.0, next((step for step in STEPS if step < largest), STEPS[-1]))
        return step if self.operator.fraction * ROUNDS >= 5 else min(step, self.without_graph())

    def without_graph(self) -> float:
        """A step for a rule that is made without a graph: a third of what the operator takes of a normal vector's
        energy, and of that `enough` where models are compressed. On rings, tori and complete graphs that contracts."""
        with _one_thread():
            vector = torch.randn(1, ENTRIES // MODES, generator=torch.Generator().manual_seed(0))
            lost = float((self.operator.compressor()(vector) - vector).square().sum() / vector.square().sum())
        return float(f"{max(0.001, (1 - lost) / 3 * (self.enough if self.common else 1)):.2g}")


def largest_step(rule: type[Sharing], config: Any, graph: Graph) -> float | None:
    """The largest step of a rule with `step_search` that contracts on a graph; None for other rules, graphs that are
    too large to look at, and codecs whose library is missing. Computed once per process."""
    if graph.num_nodes > MAX_NODES:
        return None
    try:
        if rule.step_search(config) is None:
            return None
    except EnvironmentFault:
        return None
    matrices = np.stack(matrices_of(graph)).astype(np.float64)
    config = config.model_copy(update={"step_size": None})
    largest = _largest(rule, config, matrices.shape, matrices.tobytes())
    if graph.num_nodes > OWN_MATRIX and len({len(graph.neighbors(uid, 0)) for uid in range(graph.num_nodes)}) > 1:
        search = rule.step_search(config)
        assert search is not None
        return min(largest, max(search.without_graph(), STEPS[-1]))  # eigenvalues do not tell of hubs
    return largest


@functools.lru_cache(64)
def _largest(rule: type[Sharing], config: Any, shape: tuple[int, ...], raw: bytes) -> float:
    search = rule.step_search(config)
    assert search is not None
    return search.largest(list(np.frombuffer(raw).reshape(shape)))


def distance_left(search: Search, matrices: Sequence[np.ndarray], step: float) -> float:
    """The part of the distance to the mean that is left after ROUNDS; infinity where it has grown beyond LOST."""
    n, compress = len(matrices[0]), search.operator.compressor()
    with _one_thread():
        draws = torch.Generator().manual_seed(0)
        models = torch.randn(n, max(64, ENTRIES // n), generator=draws)
        models += search.common * torch.randn(1, models.shape[1], generator=draws)
        kept = torch.zeros_like(models)
        pulls = [torch.from_numpy(w - np.eye(n)).to(torch.float32) for w in matrices]
        start = now = _distance(models)
        for r in range(ROUNDS):
            search.advance(models, kept, pulls[r % len(pulls)], step, compress)
            if r % 25 == 24:
                now = _distance(models) / start
                if not now <= LOST:
                    return math.inf
                if now <= SURE:
                    break
    return now


def _distance(models: Tensor) -> float:
    return float((models - models.mean(0)).norm())


@contextlib.contextmanager
def _one_thread() -> Iterator[None]:
    """Processes that are forked later must not find that torch's pool of threads was begun here."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with torch.no_grad():
            yield
    finally:
        torch.set_num_threads(threads)
