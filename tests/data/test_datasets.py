from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from decentnode.config.component import load_class
from decentnode.data import DATASETS
from decentnode.data.opened import OpenedData
from decentnode.errors import DataError

from . import files
from .contract import check_dataset
from .test_text import PLAY


@pytest.mark.parametrize("name", DATASETS)
@pytest.mark.parametrize("packed", [False, True])
def test_contract(name: str, packed: bool, tmp_path: Path) -> None:
    section: dict[str, object] = {"name": name}
    if name == "cifar10":
        files.write_cifar10(tmp_path / "d")
        section |= {"folder": "d", "batches": 2}
    elif name == "cifar100":
        files.write_cifar100(tmp_path / "d", python=packed)
        section["folder"] = "d"
    elif name in ("mnist", "idx"):
        files.write_idx(tmp_path / "d", *files.make_samples(), packed=packed)
        section["folder"] = "d"
    elif name == "femnist":
        files.write_femnist(tmp_path / "d")
        section["folder"] = "d"
    elif name == "text":
        (tmp_path / "d.txt").write_text(PLAY)
        section |= {"file": "d.txt", "window": 16, "predict": "last" if packed else "each"}
    elif name == "token_file":
        for part in ("train.bin", "val.bin"):
            (np.arange(200, dtype="uint32" if packed else "uint16") % 50).tofile(tmp_path / part)
        section |= {"file": "train.bin", "test_file": "val.bin", "window": 16}
        section |= {"dtype": "uint32"} if packed else {}
    elif name == "parallel_text":
        files.write_pairs(tmp_path / "d", ["ein Haus", "ein Hund laeuft"], ["a house", "dogs"])
        section |= {"source": "d/train.de", "target": "d/train.en", "test_source": "d/test.de.gz",
                    "test_target": "d/test.en.gz"}
    elif name in ("shakespeare", "movielens"):
        (files.write_shakespeare if name == "shakespeare" else files.write_movielens)(tmp_path / "d")
        section["folder"] = "d"
    elif name == "reddit":
        files.write_reddit(tmp_path / "d", vocabulary=packed)
        section["folder"] = "d/data"
    elif name == "amazon_reviews":
        files.write_reviews(tmp_path / "d", lines=packed)
        section |= {"folder": "d", "length": 6}
    elif name == "celeba":
        files.write_celeba(tmp_path / "d", tmp_path / "img")
        section |= {"folder": "d", "images": "img", "side": 20}
    elif name == "tiny_imagenet":
        files.write_tiny_imagenet(tmp_path / "d")
        section["folder"] = "d"
    elif name == "image_folder":
        files.write_image_folder(tmp_path / "d", test="test" if packed else "val")
        section |= {"folder": "d", "size": 12, **({"test_folder": "test"} if packed else {})}
    elif name == "npz":
        files.write_npz(tmp_path / "d.npz", *files.make_samples(), packed=packed)
        section |= {"file": "d.npz", "scale": 1 / 255}
    elif name == "synthetic":
        section |= {"train_samples": 600, "test_samples": 20, "input_shape": [3, 9, 7]}
    check_dataset(files.open_dataset(section, tmp_path))


def test_digits_are_part_of_the_package() -> None:
    digits = files.open_dataset({"name": "digits"}, Path("/nowhere"))
    targets, test = digits.train_targets(), digits.test()
    assert (len(targets), len(test), digits.input_shape, digits.num_classes) == (1437, 360, (1, 8, 8), 10)
    assert np.bincount(np.concatenate([targets, test.targets])).tolist() == [
        178, 182, 177, 183, 181, 182, 181, 179, 174, 180]  # the counts of the data's description
    assert test.inputs.max() * test.scale == 1 and test.offset == 0


@pytest.mark.slow
def test_reading_data_does_not_import_torch() -> None:
    code = (
        "import sys, pathlib; from decentnode.data import DATASETS; from decentnode.data.opened import OpenedData;"
        "from decentnode.data.digits import DigitsConfig as Digits;"
        "OpenedData(Digits(), DATASETS, pathlib.Path(), [0] * 4, 1).of(2); sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_shares_are_determined_by_the_seed() -> None:
    config = load_class("digits", DATASETS, "data").Config.model_validate({"partition": {"name": "dirichlet"}})
    data, same, another = (OpenedData(config, DATASETS, Path(), [0] * 16, seed) for seed in (1, 1, 2))
    parts, again, other = ([*each.shares().values()] for each in (data, same, another))
    assert all(np.array_equal(a, b) for a, b in zip(parts, again, strict=True))
    assert any(not np.array_equal(a, b) for a, b in zip(parts, other, strict=True))
    assert sum(len(data.of(uid).train) for uid in range(16)) == 1437


def deal(config: Any, folder: Path) -> list[np.ndarray]:
    return [*OpenedData(config, DATASETS, folder, [0, 0], 1).shares().values()]


def test_a_partition_by_key_needs_keys(tmp_path: Path) -> None:
    inputs, targets = files.make_samples(12)
    owners = np.arange(12) // 3
    files.write_npz(tmp_path / "d.npz", inputs, targets, owner=owners)
    chosen = load_class("npz", DATASETS, "data").Config
    section = {"name": "npz", "file": "d.npz", "partition": "by_key"}
    with pytest.raises(DataError, match="needs a dataset whose samples have keys"):
        deal(chosen.model_validate(section), tmp_path)
    parts = deal(chosen.model_validate(section | {"train_keys": "owner"}), tmp_path)
    assert not set(owners[parts[0]]) & set(owners[parts[1]])


def test_synthetic_classes_can_be_told_apart() -> None:
    section = {"name": "synthetic", "train_samples": 4000, "test_samples": 300, "noise": 0.5}
    data = files.open_dataset(section)
    assert np.bincount(data.train_targets(), minlength=10).min() > 300
    train, test = data.train(np.arange(1000)), data.test()
    pixels = train.inputs.reshape(1000, -1).astype(np.float32)
    means = np.stack([pixels[train.targets == c].mean(0) for c in range(10)])
    distances = ((test.inputs.reshape(300, -1)[:, None] - means) ** 2).sum(2)
    assert (distances.argmin(1) == test.targets).mean() > 0.99  # a nearest-mean classifier
    assert 120 < pixels.mean() < 135
    assert len(np.unique(test.inputs.reshape(300, -1), axis=0)) == 300
    other = files.open_dataset(section | {"data_seed": 1})
    assert not np.array_equal(other.train_targets(), data.train_targets())
