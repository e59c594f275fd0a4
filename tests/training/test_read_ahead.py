"""Reading batches ahead: results are unchanged, memory is bounded, and batches that are not needed are cancelled."""

from __future__ import annotations

import functools
import gc
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner

from decentnode.build import build_in_process, step_all
from decentnode.cli import main
from decentnode.errors import SampleFailed
from decentnode.experiment import load
from decentnode.samples import Crop, ImageFiles, Reading, Samples
from decentnode.training import read_ahead
from decentnode.training.read_ahead import AHEAD_BATCHES, ReadAhead
from decentnode.training.source import Source
from tests.data.files import write_image_folder
from tests.launch.test_resume import Folder, models
from tests.training import small

IMAGE_BYTES = 3 * 4 * 4
"""Size of one image of NumberedImages."""


class PendingBatch(Reading):
    """A batch that is read when `result` is called, so that no test here depends on threads."""

    def __init__(self, of: NumberedImages, indices: np.ndarray, crop: Crop | None) -> None:
        self.of, self.indices, self.crop, self.cancelled = of, indices, crop, False

    def result(self) -> Samples:
        if 99 in self.of.indices[self.indices]:
            raise SampleFailed("image 99 is damaged")
        return self.of.fetch(self.indices)

    def cancel(self) -> None:
        self.cancelled = True


class NumberedImages(ImageFiles):
    """Images without files: all pixels of image n have the value n, and image 99 cannot be read."""

    input_shape = (3, 4, 4)
    scale, offset = (0.5, 1.0, 2.0), (0.0, -1.0, 3.0)

    def __init__(self, indices: np.ndarray, threads: int = 1, started: list[PendingBatch] | None = None) -> None:
        self.indices, self.threads = indices, threads
        self.started = [] if started is None else started

    def __len__(self) -> int:
        return len(self.indices)

    def take(self, indices: np.ndarray) -> NumberedImages:
        return NumberedImages(self.indices[indices], self.threads, self.started)

    def fetch(self, indices: np.ndarray) -> Samples:
        own = self.indices[indices]
        images = np.broadcast_to(own.astype(np.uint8)[:, None, None, None], (len(own), 3, 4, 4)).copy()
        return Samples(images, own.astype(np.int64) % 4, self.scale, self.offset)

    def begin(self, indices: np.ndarray, crop: Crop | None = None) -> PendingBatch:
        self.started.append(PendingBatch(self, indices, crop))
        return self.started[-1]


def numbered_batches(batches: int, size: int = 4, first: int = 0) -> list[tuple[np.ndarray, int]]:
    return [(np.arange(n * size, (n + 1) * size), n // 3) for n in range(first, batches)]


def test_read_ahead_returns_the_requested_batches_and_reads_each_once() -> None:
    images = NumberedImages(np.arange(40))
    reader = ReadAhead(images)
    for place, (samples, epoch) in enumerate(numbered_batches(10)):
        assert np.array_equal(reader.take(samples, epoch).inputs[:, 0, 0, 0], samples)  # type: ignore[index]
        assert len(images.started) == min(10, place + AHEAD_BATCHES) if place else True
        reader.begin(iter(numbered_batches(10, first=place + 1)))
    assert len(images.started) == 10 and not any(each.cancelled for each in images.started)


def test_the_number_of_batches_read_ahead_is_bounded() -> None:
    images = NumberedImages(np.arange(400))
    reader = ReadAhead(images)
    endless = ((np.arange(4) + n, 0) for n in itertools.count())
    reader.begin(endless)
    assert len(images.started) == AHEAD_BATCHES and reader.bytes == AHEAD_BATCHES * 4 * IMAGE_BYTES
    one_by_one = NumberedImages(np.arange(400), threads=4)
    ReadAhead(one_by_one).begin((np.array([n]), 0) for n in itertools.count())
    assert len(one_by_one.started) == 8, "at least two batches for each thread, if batches are small"


@pytest.mark.slow
def test_all_readers_of_a_process_share_one_bound_in_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    gc.collect()  # readers of other tests
    before = sum(each.bytes for each in read_ahead._all)
    monkeypatch.setattr(read_ahead, "AHEAD_BYTES", before + 3 * 4 * IMAGE_BYTES)
    images = [NumberedImages(np.arange(400)) for _ in range(3)]
    readers = [ReadAhead(each) for each in images]
    for reader in readers:
        reader.begin(numbered_batches(9))
    assert [len(each.started) for each in images] == [2, 1, 0]
    unbegun = readers[2].take(*numbered_batches(1)[0])
    assert unbegun.targets.tolist() == [0, 1, 2, 3], "read when it is requested"  # type: ignore[union-attr]
    del reader
    readers[0] = readers[2]
    gc.collect()
    readers[2].begin(numbered_batches(9))
    assert len(images[2].started) == 1 + 2, "the bytes of a deleted reader are free again"


@pytest.mark.parametrize("other", [(np.arange(4) + 1, 0), (np.arange(4), 1), (np.arange(3), 0)])
def test_batches_that_are_not_requested_next_are_cancelled(other: tuple[np.ndarray, int]) -> None:
    images = NumberedImages(np.arange(40))
    reader = ReadAhead(images)
    reader.begin(numbered_batches(2))
    found = reader.take(*other)
    assert np.array_equal(found.inputs[:, 0, 0, 0], other[0]) and reader.bytes == 0  # type: ignore[index]
    assert [each.cancelled for each in images.started] == [True, True, False]


def test_an_unreadable_image_fails_only_its_batch() -> None:
    reader = ReadAhead(NumberedImages(np.array([0, 1, 99])))
    batches = [(np.array([place]), 0) for place in range(3)]
    reader.begin(batches)
    for batch in batches[:2]:
        reader.take(*batch)
    with pytest.raises(SampleFailed, match="image 99"):
        reader.take(*batches[2])


def test_a_source_normalizes_each_channel_and_takes_batches_in_order() -> None:
    source = Source(NumberedImages(np.arange(10)), torch.device("cpu"))
    inputs, targets = source.take(torch.tensor([3]))
    assert inputs[0, :, 0, 0].tolist() == [1.5, 2.0, 9.0] and targets.tolist() == [3]
    assert source.zero.flatten().tolist() == [0.0, -1.0, 3.0] and source.sample_elements == 48  # type: ignore[union-attr]
    for size in (1, 4, 20):
        found = [*source.batches(torch.arange(9, -1, -1).split(size))]
        assert torch.cat([y for _, y in found]).tolist() == [n % 4 for n in range(9, -1, -1)]
        assert max(len(y) for _, y in found) == min(size, 10)
    assert [*source.batches(torch.arange(0).split(4))] == []


def inputs_of_steps(images: Any, rounds: Iterator[int], **keys: Any) -> list[torch.Tensor]:
    """Trains with a learning rate of 0, and returns the inputs of every step."""
    found: list[torch.Tensor] = []
    module = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(48, 4))
    still = {"name": "sgd", "lr": 0.0}
    made = small.make(0, lambda: module, images, batch_size=4, local_steps=2, optimizer=still, **keys)
    module.register_forward_pre_hook(lambda _, args: found.append(args[0].clone()))
    first = next(rounds)
    made.skip_to(first)
    for round in itertools.chain([first], rounds):
        made.local_update(round)
    return found


@pytest.mark.parametrize("keys", [{}, {"augment": {"flip": True}}, {"drop_last": True}, {"shuffle": False}], ids=str)
def test_training_on_image_files_sees_the_same_batches_as_on_arrays(keys: dict[str, Any]) -> None:
    images = NumberedImages(np.arange(1, 11))
    arrays = images.fetch(np.arange(10))
    found, expected = (inputs_of_steps(each, iter(range(5)), **keys) for each in (images, arrays))
    assert len(found) == len(expected) == 10 and all(map(torch.equal, found, expected))
    steps = 10 + AHEAD_BATCHES  # each batch is read once, also across the ends of epochs
    assert len(images.started) == steps and not any(each.cancelled for each in images.started)
    again = inputs_of_steps(NumberedImages(np.arange(1, 11)), iter(range(2, 5)), **keys)
    assert len(again) == 6 and all(map(torch.equal, found[4:], again)), "resumed"


def test_training_requests_the_same_crops_with_and_without_read_ahead() -> None:
    images = NumberedImages(np.arange(1, 11))
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(read_ahead, "AHEAD_BATCHES", 0)
        plain = NumberedImages(np.arange(1, 11), threads=0)
        inputs_of_steps(plain, iter(range(3)), augment={"random_resized_crop": True})
    inputs_of_steps(images, iter(range(3)), augment={"random_resized_crop": True})
    assert len(plain.started) == 6

    def boxes(started: list[PendingBatch]) -> list[Any]:
        return [[each.crop(place, 300, 200) for place in range(len(each.indices))] for each in started if each.crop]

    assert boxes(images.started)[:6] == boxes(plain.started), "crops must not depend on reading ahead"
    different = {box for batch in boxes(plain.started) for box in batch}
    assert len(different) == 2 * 4 * 2 + 2 * 2, "each epoch must have new crops"


# -- whole runs

SECTIONS: dict[str, Any] = {
    "seed": 3,
    "graph": {"name": "ring", "nodes": 2},
    "mapping": {"machines": 1, "nodes_per_machine": 2},
    "data": {"name": "image_folder", "folder": "d", "size": 8, "threads": 2},
    "model": {"name": "resnet", "depth": 8, "widths": [2, 2, 2], "norm": "group"},
    "training": {"batch_size": 3, "local_steps": 2, "optimizer": {"name": "sgd", "lr": 0.05, "momentum": 0.9},
                 "augment": {"random_resized_crop": {"scale": [0.3, 1]}, "flip": True}},
    "node": {"rounds": 6, "evaluate_every": 3},
}  # fmt: skip


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Folder:
    """Writes 20 images of two classes, and the config of a run of two nodes on them."""
    monkeypatch.setenv("DECENTNODE_CACHE", str(tmp_path / "cache"))
    write_image_folder(tmp_path / "d", classes=2, per_class=10)
    return Folder(tmp_path, **SECTIONS)


def train_stepped(folder: Folder, *overrides: str) -> list[torch.Tensor]:
    nodes = build_in_process(load(folder.path / "tiny.yaml", overrides))
    step_all(nodes)
    return [node.training.model.parameters.clone() for node in nodes]


@pytest.mark.slow
def test_a_run_repeats_bit_for_bit_with_and_without_read_ahead(folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    first, again = train_stepped(folder), train_stepped(folder)
    monkeypatch.setattr(read_ahead, "AHEAD_BYTES", 0)
    alone = train_stepped(folder, "data.threads=1")
    assert len(first) == 2 and all(map(torch.equal, first, again)) and all(map(torch.equal, first, alone))
    assert not torch.equal(first[0], train_stepped(folder, "training.augment={flip: true}")[0])


def test_a_run_on_image_files_learns_to_tell_brightness(folder: Folder) -> None:
    longer = ["model=logistic", "node={rounds: 25, evaluate_every: 25}"]
    nodes = build_in_process(load(folder.path / "tiny.yaml", longer))
    step_all(nodes)
    assert nodes[0].figures()["accuracy_mean"] == 1.0


@pytest.mark.slow
def test_processes_one_process_and_the_simulator_train_the_same_models(folder: Folder) -> None:
    """Runs twice in one process, in two, with two nodes per process, simulated, and resumed. The model is linear:
    convolutions add in another order on another number of threads, which a process of two nodes has."""
    made = functools.partial(folder.run_successfully, "model=logistic")
    straight = models(made())
    assert straight
    found = {
        "again": made(), "by processes": made("communication=auto"),
        "by one process of two": made("communication=auto", "mapping.nodes_per_process=2"),
    }
    words = ["simulate", str(folder.path / "tiny.yaml"), "--run-dir", str(folder.path / "runs"), "--name", "simulated",
             "--set", "model=logistic"]  # fmt: skip
    assert CliRunner().invoke(main, words).exit_code == 0
    found["simulated"] = folder.path / "runs" / "simulated" / "latest"
    made("name=stopped", "node.rounds=3", "node.checkpoint={every: 3}")
    found["resumed"] = made("name=stopped", "node.checkpoint={every: 3}", "communication=auto", resume="")
    for how, run in found.items():
        same = models(run)
        assert same.keys() == straight.keys(), how
        assert all(torch.equal(tensor, same[name]) for name, tensor in straight.items()), how


@pytest.mark.slow
def test_a_run_names_the_image_that_is_damaged(folder: Folder) -> None:
    path = folder.path / "d" / "train" / "n01" / "train_4.JPEG"
    path.write_bytes(path.read_bytes()[:300])
    outcome = folder.run("communication=auto", "node.rounds=8")
    assert outcome.exit_code == 8 and f"{path}: cannot be read as a JPEG or PNG image" in str(outcome.failure)
