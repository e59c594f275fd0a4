"""A node's share of the samples: the samples of each split, and the order in which the node trains on its own."""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from decentnode import rng
from decentnode.errors import DataError
from decentnode.samples import NodeSamples
from decentnode.tensors import FlatModel, moved
from decentnode.training import statistics
from decentnode.training.augment import Augmentation
from decentnode.training.privacy import draws_seed
from decentnode.training.read_ahead import ReadAhead
from decentnode.training.sampler import PoissonSampler, Sampler
from decentnode.training.source import Source, source_of
from decentnode.training.supervised_config import SupervisedConfig

logger = logging.getLogger(__name__)

GATHER_ELEMENTS = 1 << 21
"""The largest number of input elements (8 MiB) that are gathered and normalized at once, for several steps together."""


class NodeShare:
    """The share of one node. It changes when samples are dealt again: for each epoch with `training.sampling:
    resample`, or when the members change."""

    def __init__(self, config: SupervisedConfig, model: FlatModel, data: NodeSamples, *, seed: int, uid: int) -> None:
        """Raises DataError if the share is too small, possibly only after validation samples are set aside, or if the
        config demands something that the data cannot do."""
        self._config, self._model, self._seed, self._uid = config, model, seed, uid
        self.splits = self._split(data)
        """split -> its source, and the indices [M] of its samples in the source, on the CPU."""
        self.num_samples = len(self.splits["train"][1])
        self._sampler = self._make_sampler() if data.trains else None
        self._deal_among = data.deal_among
        self._deal_again = data.deal_again if config.sampling == "resample" and data.trains else None
        if config.sampling == "resample" and self._deal_again is None and data.trains:
            raise DataError("training.sampling must be fixed for data that cannot be dealt anew, got resample")
        self._augment = Augmentation(config.augment, seed=seed, uid=uid) if config.augment is not None else None
        if config.augment is not None and config.augment.random_resized_crop and data.trains \
                and self.splits["train"][0].images is None:  # fmt: skip
            raise DataError("training.augment.random_resized_crop needs images that are read from their files, as "
                            "data image_folder has them")  # fmt: skip
        self._reader = self._make_reader()

    def _make_reader(self) -> ReadAhead | None:
        """Returns the reader of the training samples; None if they are not image files."""
        images = self.splits["train"][0].images
        if images is None:
            return None
        return ReadAhead(images) if self._augment is None else ReadAhead(images, self._augment.crop)

    def _split(self, data: NodeSamples) -> dict[str, tuple[Source, Tensor]]:
        """Returns split -> its source and the indices [M] of its samples in the source. No sample is in two splits,
        except that samples of "own" may also be in "test"."""
        device = self._model.device
        samples_by_split = {"train": data.train, "test": data.test}
        if data.own is not None:
            samples_by_split["own"] = data.own
        indices = {name: np.arange(len(samples)) for name, samples in samples_by_split.items()}
        sources = {name: Source(samples, device) if name == "train" else source_of(samples, device)
                   for name, samples in samples_by_split.items()}  # fmt: skip
        wanted = self._config.validation
        if wanted is not None and (data.trains or wanted.source == "test"):
            owner = self._uid if wanted.source == "train" else rng.GLOBAL
            order = rng.stream(self._seed, owner, "validation").permutation(len(indices[wanted.source]))
            if problem := self._config.problem_of_validation(len(order)):
                raise DataError(f"node {self._uid}: training.validation.fraction {problem}")
            num_validation = wanted.aside(len(order))
            indices["validation"] = np.sort(order[:num_validation])
            indices[wanted.source] = np.sort(order[num_validation:])
            sources["validation"] = sources[wanted.source]
        return {name: (sources[name], torch.from_numpy(indices[name])) for name in indices}

    # -- the order of the training samples --------------------------------------------------------------------

    @property
    def trains(self) -> bool:
        """Whether the node has training samples; a server has none."""
        return self._sampler is not None

    @property
    def sampler(self) -> Sampler:
        """The order of the training samples and the position in it. Raises DataError if the node has no training
        samples."""
        if self._sampler is None:
            raise DataError(f"node {self._uid} serves others and has no training samples")
        return self._sampler

    @sampler.setter
    def sampler(self, value: Sampler) -> None:
        self._sampler = value

    @property
    def usable(self) -> int:
        """The number of samples in an epoch; 0 if the node has no training samples."""
        return 0 if self._sampler is None else self._sampler.usable

    def _make_sampler(self, purpose: str = "order of samples") -> Sampler:
        """purpose: the name of the random streams from which the orders are drawn."""
        config, step = self._config, self._config.batch_size * self._config.accumulate
        if problem := config.problem_of_steps(self.num_samples):
            raise DataError(f"node {self._uid} has {problem}")
        private = config.privacy
        kind, seed = (Sampler, self._seed) if private is None else (PoissonSampler, draws_seed(private, self._seed))
        return kind(
            self.num_samples, step, seed=seed, uid=self._uid, shuffle=config.shuffle,
            drop_last=config.drop_last, leave_out=self._left_out(), purpose=purpose,
        )  # fmt: skip

    def _left_out(self) -> int:
        """Returns how many samples every epoch leaves out, so that there is no batch of one sample if the model cannot
        train on one.

        Raises DataError if every batch would have a single sample.
        """
        source, members = self.splits["train"]
        if not self._config.leaves_one(self.num_samples):
            return 0
        if not statistics.needs_two_samples(self._model.module, source.take(members[:1])[0]):
            return 0
        if problem := self._config.problem_of_single_sample(self.num_samples):
            raise DataError(f"node {self._uid}: {problem}")
        logger.info("the last batch of every epoch, one of %d samples, is left out: batch normalization needs two",
                    self.num_samples)  # fmt: skip
        return 1

    # -- dealing ----------------------------------------------------------------------------------------------

    def deal(self, epoch: int) -> None:
        """Switch to the share of an epoch and to the epoch's beginning, unless it is the current epoch or shares are
        fixed."""
        if self._deal_again is None or epoch == self.sampler.epoch:
            return
        self._set_training_source(Source(self._deal_again(epoch), self._model.device))
        self._sampler = self._make_sampler()
        self._sampler.epoch = epoch

    def deal_among(self, members: tuple[int, ...], generation: int, first_round: int) -> int:
        """Deal the samples as `Training.deal_among` does. Returns how many of this node's samples belong to nodes that
        are not members. Raises DataError if the samples of other nodes cannot be read on this machine."""
        if self._deal_among is None:
            raise DataError(f"node {self._uid} cannot read the samples of other nodes, and adopts none")
        samples, adopted = self._deal_among(members)
        self._set_training_source(Source(samples, self._model.device))
        named = f", generation {generation} from round {first_round}" if generation or first_round else ""
        self._sampler = self._make_sampler(f"order of samples{named}")
        return adopted

    def _set_training_source(self, source: Source) -> None:
        self.splits["train"] = (source, torch.arange(len(source)))
        self.num_samples = len(source)
        self._reader = self._make_reader()

    # -- batches ----------------------------------------------------------------------------------------------

    def batches(self, steps: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Yields the inputs and targets of the next steps; with `sampling: resample`, each step from its epoch's
        share."""
        while steps:
            num_steps = steps
            if self._deal_again is not None or self._augment is not None:
                self.deal(self.sampler.upcoming)
                num_steps = min(steps, self.sampler.steps_left)
            if self._reader is not None:
                num_steps = 1  # keeps the sampler's position at the batch where reading ahead starts
            epoch = self.sampler.upcoming
            yield from self._gathered_batches(*self.sampler.take(num_steps), epoch)
            steps -= num_steps

    def skip(self, steps: int) -> None:
        """Advance by `steps` batches without taking them."""
        while steps:
            self.deal(self.sampler.upcoming)
            num_steps = min(steps, self.sampler.steps_left)
            self.sampler.skip(num_steps)
            steps -= num_steps

    def move_to(self, epoch: int, cursor: int) -> None:
        """Set the position, so that the next batch starts at `cursor` in `epoch`. Does nothing if the node has no
        training samples."""
        if self._sampler is not None:
            self.deal(epoch)
            self.sampler.epoch, self.sampler.cursor = epoch, cursor

    def _gathered_batches(self, indices: np.ndarray, sizes: list[int], epoch: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Yields the inputs and targets of each step, augmented with the epoch's random numbers. The samples of several
        steps are gathered at once, which is cheaper."""
        source, members = self.splits["train"]
        picked = members[torch.from_numpy(indices)]
        group = max(1, GATHER_ELEMENTS // (source.sample_elements * self.sampler.batch))
        start = 0
        for first in range(0, len(sizes), group):
            group_sizes = sizes[first : first + group]
            chosen = picked[start : start + sum(group_sizes)]
            if not len(chosen):  # steps of a PoissonSampler without samples
                yield from ((torch.empty(0), torch.empty(0)) for _ in group_sizes)
                continue
            if self._reader is None:
                inputs, targets = source.take(chosen)
            else:
                inputs, targets = source.ready(self._reader.take(chosen.numpy(), epoch))
                self._reader.begin(self._upcoming_batches())
            if self._augment is not None:
                inputs = self._augment(inputs, moved(chosen, inputs.device), epoch, source.zero)
            start += sum(group_sizes)
            yield from zip(inputs.split(group_sizes), targets.split(group_sizes), strict=True)

    def _upcoming_batches(self) -> Iterator[tuple[np.ndarray, int]]:
        """Yields the samples and the epoch of each of the next batches, as far as the share that they are from is
        known."""
        sampler, members = copy.copy(self.sampler), self.splits["train"][1]
        while self._deal_again is None or sampler.upcoming == self.sampler.epoch:
            epoch = sampler.upcoming
            yield members[torch.from_numpy(sampler.take(1)[0])].numpy(), epoch
