"""The section `training.privacy`, and the accountant of what differentially private training has revealed."""

from __future__ import annotations

import functools
import importlib.util
import math
import warnings
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from pydantic import Field

from decentnode import entropy
from decentnode.config.component import Settings
from decentnode.errors import EnvironmentFault
from decentnode.metrics.figures import Metric

NEEDED = "needs opacus, which computes epsilon: pip install 'decentnode[privacy]' (or opacus)"
EPSILON = Metric(
    "epsilon", "1", "the epsilon up to which all that a node has sent is private, at the configured delta", "lower",
    digits=2, samples="", of_merged=False, compared="max",
)  # fmt: skip


class PrivacyConfig(Settings):
    """Differentially private training, DP-SGD (Abadi et al. 2016, arXiv 1607.00133, algorithm 1)."""

    clip: float = Field(1.0, gt=0)
    """Largest 2-norm of the gradient of one sample; a larger one is scaled down to it."""
    noise: float = Field(1.0, ge=0)
    """Standard deviation of the normal noise in the sum of a step's clipped gradients, as a multiple of `clip`. 0:
    gradients are only clipped, and nothing is private."""
    delta: float = Field(1e-5, gt=0, lt=1)
    """The delta at which `epsilon` is computed. Must be below one divided by the number of a node's samples."""
    draws: Literal["seed", "system"] = "seed"
    """Where the noise and the choice of samples come from. seed: the run's seed, which every node knows, so that a run
    repeats to the bit: for research only. system: a new number of the operating system in every process."""


def is_installed() -> bool:
    """Returns whether epsilon can be computed."""
    return importlib.util.find_spec("opacus") is not None


def draws_seed(config: PrivacyConfig, seed: int) -> int:
    """Returns the seed of a node's noise and choice of samples. seed: that of the run."""
    return seed if config.draws == "seed" else int.from_bytes(entropy.draw(16), "big")


class Accountant:
    """Counts the steps of a node, and computes epsilon from them with Opacus (Renyi differential privacy)."""

    def __init__(self, noise: float) -> None:
        self._noise = noise
        self._steps: dict[tuple[float, float], int] = {}
        """(noise multiplier, sampling rate) -> number of steps."""
        self._may_lack_steps = True
        """Whether the node may have made steps that are not counted: in an earlier process, or after the checkpoint
        that was loaded. Not after the first counted step."""

    @property
    def steps(self) -> int:
        """The number of all steps."""
        return sum(self._steps.values())

    def count(self, rate: float, steps: int = 1) -> None:
        """Count steps of which each takes every sample with probability `rate`."""
        key = self._noise, rate
        self._steps[key] = self._steps.get(key, 0) + steps
        self._may_lack_steps = False

    def count_lost(self, rate: float, steps: int | None) -> None:
        """Count steps that the node may have made before it lost its state; does nothing if it has its state. steps:
        None for an unknown number, after which epsilon is infinite."""
        if self._may_lack_steps and steps is not None:
            self.count(rate, steps)
        elif self._may_lack_steps:
            self._steps[0.0, rate] = 1  # one without noise

    def epsilon(self, delta: float) -> float:
        """Returns epsilon of the steps so far. Raises EnvironmentFault without Opacus."""
        return epsilon_of(self._steps, delta)

    def state_dict(self) -> list[list[float]]:
        """Returns the state from which a resumed run continues."""
        return [[*key, steps] for key, steps in self._steps.items()]

    def load_state_dict(self, state: Sequence[Sequence[float]]) -> None:
        """Restores what `state_dict` returned."""
        self._may_lack_steps = True
        self._steps = {(float(noise), float(rate)): int(steps) for noise, rate, steps in state}


def epsilon_of(steps: Mapping[tuple[float, float], int], delta: float) -> float:
    """Returns epsilon of Gaussian mechanisms on Poisson samples; infinity if one of them has no noise.

    steps: (noise multiplier, sampling rate) -> number of steps. Two data sets are neighbors if one has a sample more.
    Raises EnvironmentFault without Opacus.
    """
    made = {key: count for key, count in steps.items() if count}
    if not made:
        return 0.0
    if any(noise == 0 for noise, _ in made):
        return math.inf
    analysis, orders = _opacus()
    spent = sum(count * _rdp_of_step(*key) for key, count in made.items())
    return max(0.0, float(analysis.get_privacy_spent(orders=orders, rdp=spent, delta=delta)[0]))


@functools.lru_cache(maxsize=4096)
def _rdp_of_step(noise: float, rate: float) -> Any:
    """Returns the Renyi divergences of one step, by order. Takes up to 0.2 s."""
    analysis, orders = _opacus()
    return analysis.compute_rdp(q=rate, noise_multiplier=noise, steps=1, orders=orders)


@functools.cache
def _opacus() -> tuple[Any, list[float]]:
    """Returns Opacus' module of Renyi differential privacy and the orders that it uses. Takes three seconds."""
    if not is_installed():
        raise EnvironmentFault(f"training.privacy {NEEDED}")
    from opacus.accountants import RDPAccountant
    from opacus.accountants.analysis import rdp

    warnings.filterwarnings("ignore", "Optimal order is the", module="opacus")  # a larger order is only tighter
    return rdp, RDPAccountant.DEFAULT_ALPHAS
