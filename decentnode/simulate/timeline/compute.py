"""How long the local work of each round takes on each node."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from decentnode import rng
from decentnode.errors import UsageError
from decentnode.experiment.virtual_time import ComputeConfig
from decentnode.simulate.timeline import availability, traces
from decentnode.simulate.timeline.availability import Availability
from decentnode.simulate.timeline.fluid import FairSharing

TRAINING_BY_INFERENCE = 3.0
"""Duration of a training step relative to an inference on the same samples, for traces of devices that have only the
latter (FedScale)."""


def lognormal(draws: np.random.Generator, spread: float, count: int) -> np.ndarray:
    """Returns lognormal factors [count] with mean 1 and standard deviation `spread`."""
    if not spread:
        return np.ones(count)
    variance = math.log1p(spread * spread)
    return draws.lognormal(-variance / 2, math.sqrt(variance), count)


class Compute:
    """The compute times of N nodes. A pure function of (config, seed, round): rounds may be queried in any order."""

    availability: Availability | None = None

    def __init__(
        self, config: ComputeConfig, machine_of: Sequence[int], *, step_seconds: float, local_steps: int = 1,
        batch_size: int = 1, seed: int = 1, base_dir: Path = Path(),
    ) -> None:
        """machine_of: the machine of each node. step_seconds: duration of one local step, if no trace gives it.
        batch_size: samples of a step, for traces. base_dir: for relative paths. Raises UsageError, and DataError for
        trace files that cannot be read."""
        self.config = config
        self.num_nodes = len(machine_of)
        self._seed = seed
        self.bytes_per_second: np.ndarray | None = None
        """[N] bandwidth of each node for sending and for receiving, if a trace gives it."""
        base = np.full(self.num_nodes, step_seconds * local_steps)
        if config.trace is not None:
            found = traces.devices(base_dir / config.trace, self.num_nodes, seed)
            base = np.array([each.inference_seconds for each in found]) * TRAINING_BY_INFERENCE * batch_size
            base = base * local_steps
            self.bytes_per_second = np.array([each.bytes_per_second for each in found])
        self.base = base * self._fixed_factors()
        """[N] seconds of a round's steps, without what varies from round to round."""
        if config.availability is not None:
            self.availability = traces.availability(base_dir / config.availability, self.num_nodes, seed)
        elif config.churn is not None:
            self.availability = availability.draw_availability(config.churn, self.num_nodes, seed)
        self.machine_of = np.array(machine_of)
        self.num_machines = int(self.machine_of.max()) + 1
        self._straggler_uids = [self._stragglers(index) for index in range(len(config.stragglers))]

    @property
    def varies(self) -> bool:
        """Whether rounds vary randomly."""
        return self.config.spread > 0 or any(each.chance < 1 for each in self.config.stragglers)

    def _fixed_factors(self) -> np.ndarray:
        config, draws = self.config, rng.stream(self._seed, rng.GLOBAL, "device classes")
        if len(config.factors) not in (0, self.num_nodes):
            raise UsageError(f"simulate.compute.factors must have one number for each of the {self.num_nodes} nodes, "
                             f"got {len(config.factors)}")  # fmt: skip
        factors = np.array(config.factors or [1.0] * self.num_nodes)
        if config.classes:
            ends = np.cumsum([each.share for each in config.classes]) * self.num_nodes
            kind = np.searchsorted(ends, np.arange(self.num_nodes) + 0.5)
            kind = np.minimum(kind, len(config.classes) - 1)
            factors = factors * np.array([each.factor for each in config.classes])[draws.permutation(kind)]
        return factors * lognormal(draws, config.node_spread, self.num_nodes)

    def _stragglers(self, index: int) -> np.ndarray:
        """Returns the uids of one entry of `stragglers`."""
        each = self.config.stragglers[index]
        if each.nodes:
            if max(each.nodes) >= self.num_nodes or min(each.nodes) < 0:
                raise UsageError(f"simulate.compute.stragglers must name nodes 0 to {self.num_nodes - 1}, "
                                 f"got {list(each.nodes)}")  # fmt: skip
            return np.array(each.nodes)
        draws = rng.stream(self._seed, rng.GLOBAL, f"stragglers {index}")
        return draws.choice(self.num_nodes, max(1, round(each.fraction * self.num_nodes)), replace=False)

    def seconds(self, round: int) -> np.ndarray:
        """Returns the duration [N] of each node's steps of a round if it has a core to itself and is available
        throughout."""
        found = self.base
        if self.config.spread:
            draws = rng.stream(self._seed, rng.GLOBAL, "spread of compute", round)
            found = found * lognormal(draws, self.config.spread, self.num_nodes)
        for index, (each, nodes) in enumerate(zip(self.config.stragglers, self._straggler_uids, strict=True)):
            if each.chance < 1:
                draws = rng.stream(self._seed, rng.GLOBAL, f"straggling {index}", round)
                nodes = nodes[draws.random(nodes.size) < each.chance]
            found = found.copy()
            found[nodes] *= each.factor
        return found

    def ends(self, begins: np.ndarray, seconds: np.ndarray) -> np.ndarray:
        """Returns when steps that begin at `begins` [N] and take `seconds` [N] end, which is later than their sum if
        cores are shared or the node is away meanwhile."""
        if self.config.cores is not None:
            capacity = np.full(self.num_machines, self.config.cores)
            sharing = FairSharing(self.machine_of[:, None], capacity, seconds, np.ones(self.num_nodes))
            seconds = sharing.ends(begins) - begins
        return self.finish_work(begins, seconds)

    def finish_work(self, begins: np.ndarray, seconds: np.ndarray) -> np.ndarray:
        """Returns the same as `ends`, if `seconds` already takes the sharing of cores into account."""
        return begins + seconds if self.availability is None else self.availability.finish_work(begins, seconds)
