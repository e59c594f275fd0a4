"""The order in which a node uses its training samples, a pure function of (seed, uid, epoch)."""

from __future__ import annotations

import numpy as np

from decentnode import rng


class Sampler:
    """Yields the indices of training samples epoch by epoch. Its state is (epoch, cursor), and continues across
    rounds."""

    def __init__(
        self, num_samples: int, batch: int, *, seed: int, uid: int, shuffle: bool = True, drop_last: bool = False,
        leave_out: int = 0, purpose: str = "order of samples",
    ) -> None:
        """batch: the number of samples of one optimizer step. The last step of an epoch may have fewer, or with
        `drop_last` is left out.

        leave_out: the number of samples at the end of every epoch's order that are not used, other ones in every epoch.
        purpose: the name of the random streams; equal names give equal orders.
        """
        if num_samples < 1:
            raise ValueError(f"num_samples must be at least 1, got {num_samples}")
        if drop_last and num_samples < batch:
            raise ValueError(f"drop_last needs at least one whole batch of {batch} samples, got {num_samples} samples")
        self.num_samples = num_samples
        self.batch = batch
        self.epoch = 0
        self.cursor = 0
        self._seed, self._uid, self._shuffle, self._purpose = seed, uid, shuffle, purpose
        self.usable = num_samples // batch * batch if drop_last else num_samples - leave_out
        """The number of samples that are used in an epoch."""
        self._order: tuple[int, np.ndarray] = (-1, np.empty(0, np.int64))

    @property
    def upcoming(self) -> int:
        """The epoch of the next step."""
        return self.epoch + (self.cursor >= self.usable)

    @property
    def steps_made(self) -> int:
        """The number of steps before the next one."""
        return self.epoch * -(-self.usable // self.batch) + -(-self.cursor // self.batch)

    @property
    def steps_left(self) -> int:
        """The number of steps left in the epoch of the next step."""
        return -(-(self.usable - (self.cursor if self.upcoming == self.epoch else 0)) // self.batch)

    def take(self, steps: int) -> tuple[np.ndarray, list[int]]:
        """Returns the samples of the next `steps` optimizer steps: indices [M] int64, and the number of samples of each
        step."""
        parts: list[np.ndarray] = []
        for _ in range(steps):
            if self.cursor >= self.usable:
                self.epoch, self.cursor = self.epoch + 1, 0
            stop = min(self.cursor + self.batch, self.usable)
            parts.append(self._samples_of_step(stop))
            self.cursor = stop
        return np.concatenate(parts) if parts else np.empty(0, np.int64), [len(part) for part in parts]

    def skip(self, steps: int) -> None:
        """Advance by `steps` steps, at most `steps_left`, without taking their samples."""
        if steps and self.cursor >= self.usable:
            self.epoch, self.cursor = self.epoch + 1, 0
        self.cursor = min(self.cursor + steps * self.batch, self.usable)

    def _samples_of_step(self, stop: int) -> np.ndarray:
        """Returns the samples of the step from the cursor to `stop`."""
        return self._epoch_order()[self.cursor : stop]

    def _epoch_order(self) -> np.ndarray:
        if self._order[0] != self.epoch:
            self._order = (self.epoch, self.order_of(self.epoch))
        return self._order[1]

    def order_of(self, epoch: int) -> np.ndarray:
        """Returns the order [num_samples] int64 of an epoch, of which only the first `usable` samples are used."""
        if not self._shuffle:
            return np.arange(self.num_samples)
        return rng.stream(self._seed, self._uid, self._purpose, epoch).permutation(self.num_samples)


class PoissonSampler(Sampler):
    """Takes every sample with the same probability in every step, independently of other samples and steps, so that
    steps have different numbers of samples, possibly none.

    Epochs and cursors are those of `Sampler`: an epoch has as many steps, and on average takes every sample about once.
    """

    @property
    def rate(self) -> float:
        """The probability that a step takes a sample, so that it takes `batch` samples on average, or all of fewer."""
        return min(1.0, self.batch / self.num_samples)

    def _samples_of_step(self, stop: int) -> np.ndarray:  # noqa: ARG002
        draws = rng.stream(self._seed, self._uid, f"{self._purpose} (Poisson)", self.steps_made)
        return np.flatnonzero(draws.random(self.num_samples) < self.rate)
