"""Augmentation: against plain Python, and independent of batches, transports and interruptions."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from decentnode import rng
from decentnode.build import build_in_process, step_all
from decentnode.errors import ConfigError
from decentnode.experiment import load
from decentnode.samples import Samples
from decentnode.training.augment import Augmentation, AugmentConfig, cut_out, flipped, shifted
from tests.launch.test_resume import Folder, models
from tests.training import small

QUICKSTART = Path(__file__).parents[2] / "configs" / "quickstart.yaml"
ALL = {"random_crop": 2, "flip": True, "cutout": 3}
MASK = (1 << 64) - 1


def images(count: int = 6, height: int = 7, width: int = 5) -> torch.Tensor:
    return torch.arange(count * 2 * height * width, dtype=torch.float32).view(count, 2, height, width) + 1


def splitmix(key: int, counter: int) -> int:
    """31 random bits, by whole numbers without a sign."""
    x = (counter * 0x9E3779B97F4A7C15 + key) & MASK
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & MASK
    return (x ^ (x >> 31)) >> 33


def expected(image: np.ndarray, sample: int, key: int, config: AugmentConfig, zero: float) -> np.ndarray:
    """Pixel by pixel."""
    numbers = [splitmix(key, sample * 8 + k + 1) for k in range(8)]
    _, height, width = image.shape
    down, right = ((number * (2 * config.random_crop + 1) >> 31) - config.random_crop for number in numbers[:2])
    made = np.full_like(image, zero)
    for y in range(height):
        for x in range(width):
            if 0 <= y + down < height and 0 <= x + right < width:
                made[:, y, x] = image[:, y + down, x + right]
    if config.flip and numbers[2] * 2 >> 31:
        made = made[:, :, ::-1].copy()
    row, column = (number * size >> 31 for number, size in zip(numbers[3:5], (height, width), strict=True))
    half = config.cutout // 2
    for y in range(max(0, row - half), min(height, row - half + config.cutout)):
        for x in range(max(0, column - half), min(width, column - half + config.cutout)):
            made[:, y, x] = 0
    return made


@pytest.mark.parametrize("epoch", [0, 3])
def test_against_plain_python(epoch: int) -> None:
    config = AugmentConfig.model_validate(ALL)
    samples = torch.tensor([0, 1, 5, 123_456_789, 2**40, 7])
    found = Augmentation(config, seed=3, uid=2)(images(), samples, epoch, -0.5)
    key = rng.torch_seed(3, 2, "augmentation", epoch)
    for image, sample, one in zip(images().numpy(), samples.tolist(), found.numpy(), strict=True):
        assert np.array_equal(one, expected(image, sample, key, config, -0.5))


def test_each_part() -> None:
    x = images(2, 3, 3)
    moved = shifted(x, torch.tensor([1, 0]), torch.tensor([0, -1]), 0.0)
    assert torch.equal(moved[0, :, :2], x[0, :, 1:]) and not moved[0, :, 2].any()
    assert torch.equal(moved[1, :, :, 1:], x[1, :, :, :2]) and not moved[1, :, :, 0].any()
    edge = shifted(x, torch.tensor([1, 0]), torch.tensor([0, -1]), None)
    assert torch.equal(edge[0, :, 2], x[0, :, 2]) and torch.equal(edge[1, :, :, 0], x[1, :, :, 0])
    mirrored = flipped(x, torch.tensor([True, False]))
    assert torch.equal(mirrored[0], x[0].flip(2)) and torch.equal(mirrored[1], x[1])
    holes = cut_out(x.clone(), torch.tensor([0, 1]), torch.tensor([0, 1]), 2)
    assert (holes == 0).sum((1, 2, 3)).tolist() == [2 * 1, 2 * 4], "a square may reach beyond the border"


def test_draws_are_spread_evenly() -> None:
    config = AugmentConfig(random_crop=1, flip=True)
    image = torch.zeros(9000, 1, 3, 3)
    image[:, :, 1, 1] = 1
    found = Augmentation(config, seed=1, uid=0)(image, torch.arange(9000), 0, 0.0)
    places = found.sum(0)[0].flatten()
    assert (places - 1000).abs().max() < 5 * 1000**0.5  # five deviations of a binomial
    again = Augmentation(config, seed=1, uid=0)(image, torch.arange(9000), 1, 0.0)
    other = Augmentation(config, seed=1, uid=1)(image, torch.arange(9000), 0, 0.0)
    for each in (again, other):
        assert 0.07 < float((each == found).all(3).all(2).all(1).float().mean()) < 0.15  # 1 in 9 by chance


def test_the_batch_does_not_matter() -> None:
    made = Augmentation(AugmentConfig.model_validate(ALL), seed=1, uid=4)
    samples = torch.arange(6)
    whole = made(images(), samples, 2, 0.0)
    for order in ([3], [5, 0], [4, 4, 1]):
        assert torch.equal(made(images()[order], samples[order], 2, 0.0), whole[order])


def training(seen: list[Any], **keys: Any) -> Any:
    draw = np.random.default_rng(0)
    share = Samples(draw.integers(1, 256, (10, 1, 6, 6), np.uint8), np.arange(10) % 4, scale=1 / 255, offset=-0.5)
    module = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(36, 4))
    made = small.make(0, lambda: module, share, batch_size=4, local_steps=3, **keys)
    module.register_forward_pre_hook(lambda _, args: seen.append(args[0].clone()) if module.training else None)
    return made


def test_epochs_differ_and_repeat_and_evaluation_is_plain() -> None:
    seen: list[Any] = []
    made = training(seen, augment={"random_crop": 2}, shuffle=False)
    for round in range(2):
        made.local_update(round)  # three batches, an epoch
    first, second = torch.cat(seen[:3]), torch.cat(seen[3:])
    assert first.shape == second.shape == (10, 1, 6, 6) and not torch.equal(first, second)
    assert (first == -0.5).any(), "what is beyond the border is black: 0 * scale + offset"
    plain: list[Any] = []
    training(plain, shuffle=False).local_update(0)
    assert not (torch.cat(plain) == -0.5).any() and len(seen) == 6
    before = made.evaluate("train").sums
    assert made.evaluate("train").sums == before
    again: list[Any] = []
    resumed = training(again, augment={"random_crop": 2}, shuffle=False)
    resumed.skip_to(1)
    resumed.local_update(1)
    assert torch.equal(torch.cat(again), second), "without the epoch before"


def test_steps_that_cross_an_epoch_have_the_draws_of_theirs() -> None:
    seen: list[Any] = []
    made = training(seen, augment={"flip": True, "random_crop": 1}, shuffle=False)
    made.config.__dict__["local_steps"] = 5
    made.local_update(0)
    by_epochs: list[Any] = []
    other = training(by_epochs, augment={"flip": True, "random_crop": 1}, shuffle=False)
    for round in range(2):
        other.local_update(round)
    assert all(torch.equal(a, b) for a, b in zip(seen, by_epochs, strict=False)) and len(seen) == 5


@pytest.mark.parametrize("section, problem", [
    ("{random_crop: 8}", "must have random_crop below the 8 pixels of an image, got 8"),
    ("{}", "must have random_crop, flip or cutout"),
    ("{cutout: -1}", "training.augment.cutout"),
])
def test_what_cannot_be_augmented(section: str, problem: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(QUICKSTART, [f"training.augment={section}"])
    assert problem in str(caught.value)
    with pytest.raises(ConfigError, match="needs images"):
        load(QUICKSTART.parent / "tasks" / "next_character.yaml", ["training.augment={flip: true}"])


@pytest.mark.slow
def test_a_run_repeats_over_every_transport_and_after_a_stop(tmp_path: Path) -> None:
    section = ["training.augment={random_crop: 1, flip: true, cutout: 2}"]
    folder, keep = Folder(tmp_path), "node.checkpoint={every: 3}"
    straight = models(folder.done(*section))
    plain = models(folder.done())
    folder.done(*section, "name=a", "node.rounds=5", keep)
    resumed = models(folder.done(*section, "name=a", keep, "communication=auto", resume=""))
    assert straight.keys() == resumed.keys()
    assert all(torch.equal(tensor, resumed[name]) for name, tensor in straight.items())
    assert any(not torch.equal(tensor, plain[name]) for name, tensor in straight.items())


def test_shares_that_are_dealt_anew(tmp_path: Path) -> None:
    nodes = build_in_process(load(QUICKSTART, ["training.augment={flip: true}", "training.sampling=resample",
                                               "node={rounds: 2}", "communication=inproc"]))  # fmt: skip
    step_all(nodes)
    assert nodes[0].round == 2
