"""The default step (gamma) of rules with error feedback, found by simulating rounds without gradients.

Theory gives a bound for every contracting operator: with E||C(v) - v||^2 <= (1 - omega) ||v||^2, spectral gap delta and
beta = ||W - I||, the step gamma = delta^2 omega / (16 delta + delta^2 + 4 beta^2 + 2 delta beta^2 - 8 delta omega)
contracts (Koloskova, Stich and Jaggi 2019, arXiv 1902.00340, theorem 2). On a ring of 16 with the largest tenth of the
entries (omega 0.1) this is 3e-5, with which nodes train practically without averaging, while 0.4 still contracts. So
steps are tried from large to small in a simulation: nodes with independent normal models exchange for 500 rounds
without gradients, with the graph's mixing matrix, or for large graphs with a small matrix of a similar spectrum. The
spectrum alone does not determine the step: the compression error of a star's hub reaches all nodes at once, so that a
star and a ring with the same spectral gap need different steps. The result is a pure function of compressor, fraction
and matrix, so that all nodes compute the same.
"""

from __future__ import annotations

import functools
import hashlib
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from decentnode import native, user_cache
from decentnode.errors import EnvironmentFault
from decentnode.graph.base import Graph
from decentnode.sharing.operator import Operator

Compress = Callable[[Tensor], Tensor]
"""Maps [N, D] to [N, D]: each row to what receivers decode of it."""
Round = Callable[[Tensor, Tensor, Tensor, float, Compress], None]
"""(models [N, D], state [N, D * state_width], W - I [N, N], step, compress): makes one round of all nodes without
gradients, in place."""

ROUNDS = 500
STEPS = tuple(float(f"{10 ** (-k / 10):.2g}") for k in range(-1, 21))
"""The steps that are tried: 1.3, 1.0, 0.79, 0.63 ... 0.01. The default is the one below the largest that contracts, at
most 1."""
SLACK = 1.25
"""On graphs that mix too slowly to reach `enough` within ROUNDS, a step counts as contracting if the distance that it
leaves is at most this many times that of the best step."""
CONVERGED_AT, DIVERGED_AT = 1e-6, 10.0
"""Fractions of the initial distance at which a simulation ends early, because consensus is certain, or because the
models diverge."""
PATIENCE = 4
"""The search ends after this many consecutive steps that are worse than the best one."""
MODES = 16
"""The number of eigenvalues that represent a larger spectrum, evenly spaced among the sorted ones with both ends
included."""
OWN_MATRIX = 128
"""Graphs of at most this many nodes are simulated with their own matrix."""
ENTRIES = 1 << 14
"""The number of entries of all simulated models together; testing a step then takes some tenths of a second."""
MATRIX_ROUNDS = 32
"""A time-varying graph is simulated with the matrices of at most this many of its first rounds (and at most its period)
in turn."""
MAX_NODES = 512
"""No step is searched for graphs of more nodes, whose eigenvalues take seconds to compute."""


def matrices_of(graph: Graph) -> list[np.ndarray]:
    """Returns the mixing matrices [n, n] of a simulation, used in turn: the graph's own of its first rounds. A static
    symmetric W of more than OWN_MATRIX nodes is replaced by a smaller matrix with a part of its eigenvalues, the
    smallest and the largest included, which mixes as fast in its slowest and in its fastest direction."""
    first = graph.matrix(0)
    if graph.num_nodes > OWN_MATRIX and graph.period == 1 and np.allclose(first, first.T, atol=1e-12):
        return [with_spectrum(np.linalg.eigvalsh(first))]
    return [graph.matrix(r) for r in range(min(graph.period or MATRIX_ROUNDS, MATRIX_ROUNDS))]


def with_spectrum(eigenvalues: np.ndarray) -> np.ndarray:
    """Returns a symmetric matrix whose rows sum to one, with these eigenvalues [n], one of which is 1.

    Its eigenvectors are harmonics: from a ring's eigenvalues it makes the ring's own matrix.
    """
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
    """The search for one rule's step. A step only counts as contracting if the next smaller one contracts as well,
    because a step of 1 may reach consensus just because terms happen to cancel."""

    advance: Round
    operator: Operator
    enough: float = 0.02
    """The fraction of the initial distance to the mean that may be left after ROUNDS."""
    common: float = 0.0
    """The norm of the part that all models have in common, relative to the part in which they differ. It matters for
    rules that compress the models themselves."""
    state_per_matrix: bool = False
    """Whether nodes keep a separate state for each of the graph's matrices."""
    state_width: int = 1
    """The number of columns of the state per column of the models."""
    most: float = 1.0
    """The largest default."""

    def largest(self, matrices: Sequence[np.ndarray]) -> float:
        """Returns the largest of STEPS that contracts, or 0 if none does."""
        if len(matrices[0]) < 2:
            return STEPS[0]
        left = [distance_left(self, matrices, STEPS[0])]
        worse: list[float] = []  # worse[k]: the larger one of the distances left by STEPS[k] and STEPS[k + 1]
        for smaller in STEPS[1:]:
            left.append(distance_left(self, matrices, smaller))
            worse.append(max(left[-2:]))
            if worse[-1] <= self.enough:
                return STEPS[len(worse) - 1]
            if min(worse) < 1 and len(worse) - 1 - worse.index(min(worse)) >= PATIENCE:
                break
        least = min(worse)
        return STEPS[next(k for k, each in enumerate(worse) if each <= SLACK * least)] if least < 1 else 0.0

    def default(self, largest: float) -> float:
        """Returns the next step below the largest that contracts, which leaves a margin of a fifth, at most `most`; the
        smallest of STEPS if none contracts.

        If an operator cannot send every entry several times within ROUNDS, the simulation was too short, and the step
        is at most that of `without_graph`.
        """
        step = min(self.most, next((step for step in STEPS if step < largest), STEPS[-1]))
        return step if self.operator.fraction * ROUNDS >= 5 else min(step, self.without_graph())

    def without_graph(self) -> float:
        """Returns a step for a rule that is created without a graph; it contracts on rings, tori and complete graphs.

        It is a third of omega, the fraction of a normal vector's energy that the operator keeps, times `enough` for
        rules that compress the models themselves.
        """
        kept_fraction = 1 - self.operator.lost()
        return float(f"{max(0.001, kept_fraction / 3 * (self.enough if self.common else 1)):.2g}")


class SearchableRule(Protocol):
    """A rule class, which may have a `step_search`."""

    @classmethod
    def step_search(cls, config: Any) -> Search | None:
        """See `Hooks.step_search`."""
        ...


def largest_step(rule: type[SearchableRule], config: Any, graph: Graph) -> float | None:
    """Returns the largest step with which a rule contracts on a graph, 0 if none does, computed once per process.

    Returns None for rules without a `step_search`, graphs of more than MAX_NODES nodes, and codecs whose library is
    missing.
    """
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
        # the simulated matrix with the same spectrum has no hubs
        return min(largest, max(search.without_graph(), STEPS[-1]))
    return largest


@functools.lru_cache(64)
def _largest(rule: type[SearchableRule], config: Any, shape: tuple[int, ...], raw: bytes) -> float:
    """Returns the step for mixing matrices given as a shape and float64 bytes. It is stored in the user's cache, as
    every process of a run needs it and a search takes seconds."""
    name = _cache_file_name(rule, config, shape, raw)
    cached = user_cache.read(name) if name else None
    if cached is not None and cached in map(repr, (*STEPS, 0.0)):
        return float(cached)
    search = rule.step_search(config)
    assert search is not None
    found = search.largest(list(np.frombuffer(raw).reshape(shape)))
    if name:
        user_cache.keep(name, repr(found))
    return found


def _cache_file_name(rule: type[SearchableRule], config: Any, shape: tuple[int, ...], raw: bytes) -> str | None:
    """Returns the name of the cached file, a hash of everything that the step depends on. None if the rule or one of
    its components is a user's own class, whose source is not in the hash."""
    settings = config.model_dump_json()
    if not rule.__module__.startswith("decentnode.") or re.search(r"[\w.]:[A-Za-z_]", settings):
        return None
    what = f"{rule.__module__}:{rule.__qualname__} {settings} {shape} {torch.__version__} {_sources()}".encode()
    return f"step-{hashlib.sha256(what + raw).hexdigest()[:24]}"


@functools.cache
def _sources() -> str:
    """Returns a hash of the source files on which a search depends."""
    here = Path(__file__).parent
    files = sorted([*here.rglob("*.py"), *here.with_name("compression").rglob("*.py")])
    return hashlib.sha256(b"\0".join(path.read_bytes() for path in files)).hexdigest()


def distance_left(search: Search, matrices: Sequence[np.ndarray], step: float) -> float:
    """Returns the fraction of the distance to the mean that is left after ROUNDS; infinity if it grew beyond
    DIVERGED_AT."""
    n, compress = len(matrices[0]), search.operator.compressor()
    # a thread pool that is started here would not work in processes that are forked later
    with native.torch_threads(1), torch.no_grad(), torch.device("cpu"):
        generator = torch.Generator().manual_seed(0)
        models = torch.randn(n, max(64, ENTRIES // n), generator=generator, dtype=torch.float32)
        models += search.common * torch.randn(1, models.shape[1], generator=generator, dtype=torch.float32)
        pulls = [torch.from_numpy(w - np.eye(n)).to(torch.float32) for w in matrices]
        states = [models.new_zeros(n, search.state_width * models.shape[1])
                  for _ in (pulls if search.state_per_matrix else pulls[:1])]  # fmt: skip
        start = remaining = _distance(models)
        for r in range(ROUNDS):
            search.advance(models, states[r % len(states)], pulls[r % len(pulls)], step, compress)
            if r % 25 == 24:
                remaining = _distance(models) / start
                if not remaining <= DIVERGED_AT:
                    return math.inf
                if remaining <= CONVERGED_AT:
                    break
    return remaining


def _distance(models: Tensor) -> float:
    return float((models - models.mean(0)).norm())
