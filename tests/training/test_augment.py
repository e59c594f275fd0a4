"""Augmentation: against plain Python, and independent of batches, transports and interruptions."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from decentnode import rng
from decentnode.build import build_in_process, step_all
from decentnode.errors import ConfigError, DataError
from decentnode.experiment import load
from decentnode.samples import Samples
from decentnode.training.augment import (
    Augmentation,
    AugmentConfig,
    ResizedCropConfig,
    cut_out,
    drawn_box,
    flipped,
    shifted,
)
from tests.launch.test_resume import Folder, models
from tests.training import small

QUICKSTART = Path(__file__).parents[2] / "configs" / "quickstart.yaml"
ALL_KINDS = {"random_crop": 2, "flip": True, "cutout": 3}
MASK = (1 << 64) - 1


def numbered_images(count: int = 6, height: int = 7, width: int = 5) -> torch.Tensor:
    return torch.arange(count * 2 * height * width, dtype=torch.float32).view(count, 2, height, width) + 1


def splitmix(key: int, counter: int) -> int:
    """Returns 31 random bits; computed with Python integers modulo 2^64, as the package does with tensors."""
    x = (counter * 0x9E3779B97F4A7C15 + key) & MASK
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & MASK
    return (x ^ (x >> 31)) >> 33


def augment_pixel_by_pixel(image: np.ndarray, sample: int, key: int, config: AugmentConfig, zero: float) -> np.ndarray:
    """Augments one image with loops over its pixels. zero: the value of pixels beyond the border."""
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
def test_augmentation_equals_plain_python_pixel_by_pixel(epoch: int) -> None:
    config = AugmentConfig.model_validate(ALL_KINDS)
    samples = torch.tensor([0, 1, 5, 123_456_789, 2**40, 7])
    found = Augmentation(config, seed=3, uid=2)(numbered_images(), samples, epoch, -0.5)
    key = rng.torch_seed(3, 2, "augmentation", epoch)
    for image, sample, one in zip(numbered_images().numpy(), samples.tolist(), found.numpy(), strict=True):
        assert np.array_equal(one, augment_pixel_by_pixel(image, sample, key, config, -0.5))


def test_shift_flip_and_cutout_separately() -> None:
    x = numbered_images(2, 3, 3)
    moved = shifted(x, torch.tensor([1, 0]), torch.tensor([0, -1]), 0.0)
    assert torch.equal(moved[0, :, :2], x[0, :, 1:]) and not moved[0, :, 2].any()
    assert torch.equal(moved[1, :, :, 1:], x[1, :, :, :2]) and not moved[1, :, :, 0].any()
    edge = shifted(x, torch.tensor([1, 0]), torch.tensor([0, -1]), None)
    assert torch.equal(edge[0, :, 2], x[0, :, 2]) and torch.equal(edge[1, :, :, 0], x[1, :, :, 0])
    mirrored = flipped(x, torch.tensor([True, False]))
    assert torch.equal(mirrored[0], x[0].flip(2)) and torch.equal(mirrored[1], x[1])
    holes = cut_out(x.clone(), torch.tensor([0, 1]), torch.tensor([0, 1]), 2)
    assert (holes == 0).sum((1, 2, 3)).tolist() == [2 * 1, 2 * 4], "a square may reach beyond the border"


def test_draws_of_shifts_are_uniform_and_independent() -> None:
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


def test_augmentation_does_not_depend_on_the_batch() -> None:
    made = Augmentation(AugmentConfig.model_validate(ALL_KINDS), seed=1, uid=4)
    samples = torch.arange(6)
    whole = made(numbered_images(), samples, 2, 0.0)
    for order in ([3], [5, 0], [4, 4, 1]):
        assert torch.equal(made(numbered_images()[order], samples[order], 2, 0.0), whole[order])


def make_training(seen: list[Any], **keys: Any) -> Any:
    draw = np.random.default_rng(0)
    share = Samples(draw.integers(1, 256, (10, 1, 6, 6), np.uint8), np.arange(10) % 4, scale=1 / 255, offset=-0.5)
    module = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(36, 4))
    made = small.make(0, lambda: module, share, batch_size=4, local_steps=3, **keys)
    module.register_forward_pre_hook(lambda _, args: seen.append(args[0].clone()) if module.training else None)
    return made


def test_augmentation_differs_between_epochs_repeats_after_a_resume_and_spares_evaluation() -> None:
    seen: list[Any] = []
    made = make_training(seen, augment={"random_crop": 2}, shuffle=False)
    for round in range(2):
        made.local_update(round)  # three batches, an epoch
    first, second = torch.cat(seen[:3]), torch.cat(seen[3:])
    assert first.shape == second.shape == (10, 1, 6, 6) and not torch.equal(first, second)
    assert (first == -0.5).any(), "pixels beyond the border are black: 0 * scale + offset"
    plain: list[Any] = []
    make_training(plain, shuffle=False).local_update(0)
    assert not (torch.cat(plain) == -0.5).any() and len(seen) == 6
    before = made.evaluate("train").sums
    assert made.evaluate("train").sums == before
    again: list[Any] = []
    resumed = make_training(again, augment={"random_crop": 2}, shuffle=False)
    resumed.skip_to(1)
    resumed.local_update(1)
    assert torch.equal(torch.cat(again), second), "skipping the first epoch changes no draw of the second"


def test_steps_after_the_end_of_an_epoch_use_the_draws_of_the_next() -> None:
    seen: list[Any] = []
    made = make_training(seen, augment={"flip": True, "random_crop": 1}, shuffle=False)
    made.config.__dict__["local_steps"] = 5
    made.local_update(0)
    by_epochs: list[Any] = []
    other = make_training(by_epochs, augment={"flip": True, "random_crop": 1}, shuffle=False)
    for round in range(2):
        other.local_update(round)
    assert all(torch.equal(a, b) for a, b in zip(seen, by_epochs, strict=False)) and len(seen) == 5


@pytest.mark.parametrize("section, problem", [
    ("{random_crop: 8}", "must have random_crop below the 8 pixels of an image, got 8"),
    ("{}", "must have random_resized_crop, random_crop, flip or cutout"),
    ("{cutout: -1}", "training.augment.cutout"),
])
def test_invalid_augmentation_is_refused(section: str, problem: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(QUICKSTART, [f"training.augment={section}"])
    assert problem in str(caught.value)
    with pytest.raises(ConfigError, match="needs images"):
        load(QUICKSTART.parent / "tasks" / "next_character.yaml", ["training.augment={flip: true}"])


@pytest.mark.slow
def test_augmented_runs_repeat_over_transports_and_after_a_resume(tmp_path: Path) -> None:
    section = ["training.augment={random_crop: 1, flip: true, cutout: 2}"]
    folder, keep = Folder(tmp_path), "node.checkpoint={every: 3}"
    straight = models(folder.run_successfully(*section))
    plain = models(folder.run_successfully())
    folder.run_successfully(*section, "name=a", "node.rounds=5", keep)
    resumed = models(folder.run_successfully(*section, "name=a", keep, "communication=auto", resume=""))
    assert straight.keys() == resumed.keys()
    assert all(torch.equal(tensor, resumed[name]) for name, tensor in straight.items())
    assert any(not torch.equal(tensor, plain[name]) for name, tensor in straight.items())


def test_augmentation_runs_with_resampled_shares(tmp_path: Path) -> None:
    nodes = build_in_process(load(QUICKSTART, ["training.augment={flip: true}", "training.sampling=resample",
                                               "node={rounds: 2}", "communication=inproc"]))  # fmt: skip
    step_all(nodes)
    assert nodes[0].round == 2


# -- random resized crops


def torchvision_box(
    draws: list[float], width: int, height: int, scale: tuple[float, float], ratio: tuple[float, float]
) -> tuple[int, int, int, int] | None:
    """Returns the first box within the image, as RandomResizedCrop.get_params of torchvision; None for its fallback.

    draws: in [0, 1), two for each try, then those of the row and the column.
    """
    for k in range(10):
        area = height * width * (scale[0] + (scale[1] - scale[0]) * draws[2 * k])
        aspect = math.exp(math.log(ratio[0]) + (math.log(ratio[1]) - math.log(ratio[0])) * draws[2 * k + 1])
        w, h = round(math.sqrt(area * aspect)), round(math.sqrt(area / aspect))
        if 0 < w <= width and 0 < h <= height:
            top, left = int(draws[20] * (height - h + 1)), int(draws[21] * (width - w + 1))
            return left, top, left + w, top + h
    return None


@pytest.mark.parametrize("width, height", [(500, 375), (40, 300), (1, 1), (7, 3)])
@pytest.mark.parametrize("keys", [{}, {"scale": [0.5, 1]}, {"scale": [1, 1], "ratio": [1, 1]}])
def test_crop_boxes_equal_those_of_torchvision_for_equal_draws(width: int, height: int, keys: dict[str, Any]) -> None:
    config = ResizedCropConfig.model_validate(keys)
    draw = np.random.default_rng(5)
    num_fallbacks = 0
    for _ in range(50):
        numbers = draw.integers(0, 1 << 31, 22).tolist()
        found = drawn_box(numbers, width, height, config)
        draws = [number / (1 << 31) for number in numbers]
        expected = torchvision_box(draws, width, height, config.scale, config.ratio)
        left, upper, right, lower = found
        assert 0 <= left < right <= width and 0 <= upper < lower <= height
        if expected is None:
            num_fallbacks += 1
            narrow, wide = config.ratio  # the fallback: the largest centered box within the ratios
            w, h = min(width, round(height * wide)), min(height, round(width / narrow))
            assert (right - left, lower - upper) == (w, h) and (left, upper) == ((width - w) // 2, (height - h) // 2)
        else:
            assert found == expected
    if not keys and width > 30:
        assert (num_fallbacks == 0) == (width == 500), "a box of such a ratio has at most a sixth of a narrow image"


def test_areas_and_ratios_of_crop_boxes_are_uniform() -> None:
    made = Augmentation(AugmentConfig(random_resized_crop=True), seed=1, uid=0)
    crop = made.crop(np.arange(4000), 0)
    assert crop is not None
    boxes = np.array([crop(place, 400, 400) for place in range(4000)])
    width, height = (boxes[:, 2] - boxes[:, 0]).astype(float), (boxes[:, 3] - boxes[:, 1]).astype(float)
    area, ratio = width * height / 160_000, np.log(width / height)
    inside = area < 0.7  # larger ones do not fit in each ratio
    for values, span in ((area[inside], (0.08, 0.7)), (ratio[inside], (math.log(3 / 4), math.log(4 / 3)))):
        assert np.abs(np.histogram(values, 5, span)[0] / inside.sum() - 0.2).max() < 0.03
    assert area.min() > 0.079 and ratio.min() > math.log(3 / 4) - 0.03 and ratio.max() < math.log(4 / 3) + 0.03


def test_a_crop_box_depends_only_on_seed_node_epoch_and_image() -> None:
    def boxes(samples: list[int], seed: int = 1, uid: int = 0, epoch: int = 0) -> list[Any]:
        made = Augmentation(AugmentConfig(random_resized_crop=True), seed=seed, uid=uid)
        crop = made.crop(np.array(samples), epoch)
        assert crop is not None
        return [crop(place, 300, 200) for place in range(len(samples))]

    plain = boxes([4, 9, 2])
    assert boxes([2, 4]) == [plain[2], plain[0]] and len(set(plain)) == 3
    for keys in ({"seed": 2}, {"uid": 1}, {"epoch": 1}):
        assert not set(plain) & set(boxes([4, 9, 2], **keys))
    assert Augmentation(AugmentConfig(flip=True), seed=1, uid=0).crop(np.arange(2), 0) is None


def test_random_resized_crop_is_refused_for_data_in_arrays() -> None:
    with pytest.raises(ConfigError, match="random_resized_crop needs images that are read from their files, got digi"):
        load(QUICKSTART, ["training.augment={random_resized_crop: true}"])
    with pytest.raises(DataError, match="needs images that are read from their files, as data image_folder has them"):
        make_training([], augment={"random_resized_crop": True})
    for section in ("{scale: [0, 1]}", "{scale: [0.5, 0.2]}", "{ratio: [2, 1]}"):
        with pytest.raises(ConfigError, match=r"training\.augment\.random_resized_crop must have 0 < "):
            load(QUICKSTART, [f"training.augment.random_resized_crop={section}"])


def test_shifted_in_pixels_have_the_black_value_of_their_channel() -> None:
    x = numbered_images(2, 3, 3)
    black = torch.tensor([-1.0, -2.0])[:, None, None]
    found = shifted(x, torch.tensor([1, 0]), torch.tensor([0, 0]), black)
    assert torch.equal(found[0, :, 2], torch.tensor([[-1.0] * 3, [-2.0] * 3])) and torch.equal(found[1], x[1])
