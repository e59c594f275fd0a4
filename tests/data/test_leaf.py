from __future__ import annotations

import json
import logging
import os
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pydantic
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from decentnode.config.component import load_class
from decentnode.data import DATASETS, leaf
from decentnode.data.leaf import users_of
from decentnode.errors import DataError

from .files import leaf_text, open_dataset, write_celeba, write_femnist, write_image, write_leaf

FEMNIST = {"name": "femnist", "folder": "d"}


def test_femnist_is_read_in_file_order(tmp_path: Path) -> None:
    pixels, labels = write_femnist(tmp_path / "d")
    data = open_dataset(FEMNIST, tmp_path)
    assert np.array_equal(data.train_targets(), labels)
    keys = data.train_keys()
    assert keys is not None and np.bincount(keys).tolist() == [2, 4, 6, 3, 5]
    assert data.index.notes["users"] == ["f0000_00", "f0002_02", "f0004_04", "f0001_01", "f0003_03"]  # type: ignore[attr-defined]
    chosen = np.array([19, 0, 7])
    some = data.train(chosen)
    assert np.array_equal(some.inputs, pixels[chosen]) and some.inputs.dtype == np.uint8
    assert np.allclose(some.inputs * some.scale + some.offset, pixels[chosen] / 255)
    assert len(data.test()) == 5


def test_separate_train_and_test_folders(tmp_path: Path) -> None:
    """decentralizepy's train_dir and test_dir: one file per user."""
    write_femnist(tmp_path / "d")
    os.rename(tmp_path / "d" / "train", tmp_path / "per_user")
    data = open_dataset({"name": "femnist", "train_folder": "per_user", "test_folder": "d/test"}, tmp_path)
    assert len(data.train_targets()) == 20
    with pytest.raises(pydantic.ValidationError, match="must have folder, or both train_folder and test_folder"):
        load_class("femnist", DATASETS, "data").Config.model_validate({"name": "femnist", "train_folder": "x"})


def test_leaf_files_are_converted_once(tmp_path: Path, own_cache: Path, caplog: pytest.LogCaptureFixture) -> None:
    write_femnist(tmp_path / "d")
    caplog.set_level(logging.INFO)
    first = open_dataset(FEMNIST, tmp_path)
    second = open_dataset(FEMNIST, tmp_path)
    assert caplog.text.count("indexing femnist once: 4 files") == 1
    assert np.array_equal(first.train_targets(), second.train_targets())
    inputs = second.test().inputs
    assert isinstance(inputs, np.memmap) and len(list(own_cache.glob("femnist-*"))) == 1
    changed = tmp_path / "d" / "train" / "all_data_0_keep_0_train_9.json"
    os.utime(changed, ns=(1, 1))
    open_dataset(FEMNIST, tmp_path)
    assert caplog.text.count("indexing femnist once") == 2
    open_dataset({**FEMNIST, "cache": "elsewhere"}, tmp_path)
    assert len(list((tmp_path / "elsewhere").glob("femnist-*"))) == 1


@pytest.mark.slow
def test_at_most_one_user_is_in_memory_while_reading(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leaf, "CHUNK", 1 << 14)
    values = [[round(v, 3) for v in np.random.default_rng(0).random(784).tolist()]]
    users = {f"u{n}": (values * 4, [1] * 4) for n in range(120)}
    (tmp_path / "f.json").write_text(leaf_text(users))
    size = (tmp_path / "f.json").stat().st_size
    tracemalloc.start()
    assert sum(1 for _ in users_of(tmp_path / "f.json")) == 120
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert size > 2_000_000 and peak < size / 4


@given(
    st.dictionaries(st.text(max_size=6), st.tuples(st.lists(st.text(max_size=9), max_size=3), st.lists(st.floats(-9, 9),
                                                                                                       max_size=3)),
                    max_size=5),
    st.integers(1, 40), st.sampled_from([None, 1]),
)  # fmt: skip
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_users_are_read_with_any_chunk_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, users: dict[str, Any], chunk: int, indent: int | None
) -> None:
    monkeypatch.setattr(leaf, "CHUNK", chunk)
    text = leaf_text(users, indent)
    (tmp_path / "f.json").write_text(text)
    assert dict(users_of(tmp_path / "f.json")) == json.loads(text)["user_data"]


def test_a_file_truncated_anywhere_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = (
        '{"hierarchies": [1, {"a": null}], "n": -1.5e3, '
        '"user_data": {"a\\u00e9": {"x": [[0.5]], "y": [1]}, "b": {}}} '
    )
    path = tmp_path / "f.json"
    path.write_text(text)
    assert list(users_of(path)) == [("aé", {"x": [[0.5]], "y": [1]}), ("b", {})]
    for chunk in (3, 1000):
        monkeypatch.setattr(leaf, "CHUNK", chunk)
        for end in range(len(text.rstrip())):
            path.write_text(text[:end])
            with pytest.raises(DataError, match="cannot be read as LEAF's JSON"):
                list(users_of(path))


@pytest.mark.parametrize("text, problem", [
    ("[]", "expected '{', got '\\['"),
    ('{"users": []}', "has no 'user_data'"),
    ('{"user_data": {}} x', "there is more text after its end"),
    ('{"user_data": {1: {}}}', "a key must be a text, got 1"),
    ('{"user_data": {"a": {}, }}', "an invalid value"),
    ('{"user_data" {}}', "expected ':', got '{'"),
    ('{"user_data": {"a": ' + "[" * 100_000, "cut short|recursion"),
    ('{"user_data": {"a": ' + "9" * 9000 + "}}", "integer string conversion"),
    ('{"user_data": {"a": nonsense}}', "Expecting value"),
    ("", "cut short"),
])
def test_malformed_leaf_json_is_refused(tmp_path: Path, text: str, problem: str) -> None:
    (tmp_path / "f.json").write_text(text)
    with pytest.raises(DataError, match=problem):
        list(users_of(tmp_path / "f.json"))


def test_a_user_with_too_many_characters_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leaf, "MAX_CHARACTERS", 2000)
    monkeypatch.setattr(leaf, "CHUNK", 100)
    (tmp_path / "f.json").write_text('{"user_data": {"a": [' + "0, " * 5000)
    with pytest.raises(DataError, match="one user has more than 2000 characters"):
        list(users_of(tmp_path / "f.json"))


@pytest.mark.parametrize("x, y, problem", [
    ([[0.5] * 784], [1, 2], "has 1 inputs and 2 targets"),
    ("no", [1], "must have lists 'x' and 'y'"),
    ([[0.5] * 783], [1], "inputs must be lists of 784 numbers"),
    ([["a"] * 784], [1], "inputs must be lists of 784 numbers"),
    ([[0.5] * 784], [1], "inputs must be multiples of 1/255"),
    ([[float("nan")] * 784], [1], "inputs must be multiples of 1/255"),
    ([[2.0] * 784], [1], "inputs must be multiples of 1/255"),
    ([[1.0] * 784], [62], r"labels must lie in 0\.\.61, got 62"),
    ([[1.0] * 784], [1.5], "labels must be whole numbers"),
    ([[1.0] * 784], [True], "labels must be whole numbers"),
])
def test_invalid_femnist_samples_are_refused(tmp_path: Path, own_cache: Path, x: Any, y: Any, problem: str) -> None:
    write_leaf(tmp_path / "d", {"me": (x, y)}, {"me": ([[0.0] * 784], [1])}, files=1)
    with pytest.raises(DataError, match=rf"train_9\.json: user 'me': {problem}"):
        open_dataset(FEMNIST, tmp_path)
    assert not [path for path in own_cache.iterdir() if path.is_dir()]  # nothing half made is left


def test_folders_without_users_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"d/train: no such folder; expected LEAF's files of users"):
        open_dataset(FEMNIST, tmp_path)
    (tmp_path / "d" / "train").mkdir(parents=True)
    with pytest.raises(DataError, match=r"d/train: no \.json file in it"):
        open_dataset(FEMNIST, tmp_path)
    write_leaf(tmp_path / "d", {"a": ([], [])}, {"a": ([], [])}, files=1)
    with pytest.raises(DataError, match=r"d/train: no sample in 1 files"):
        open_dataset(FEMNIST, tmp_path)


CELEBA = {"name": "celeba", "folder": "d", "images": "img"}


def test_celeba_images_are_resized_and_scaled(tmp_path: Path) -> None:
    write_celeba(tmp_path / "d", tmp_path / "img")
    data = open_dataset(CELEBA, tmp_path)
    train = data.train(np.arange(12))
    assert train.inputs.shape == (12, 3, 84, 84) and data.input_shape == (3, 84, 84)
    bright = (train.inputs * train.scale).mean((1, 2, 3))
    assert np.allclose(bright, (40 + 180 * train.targets) / 255, atol=0.02)
    assert np.bincount(data.train_keys()).tolist() == [4, 4, 4]  # type: ignore[arg-type]
    raw = open_dataset({**CELEBA, "pixels": "raw"}, tmp_path).test()
    assert raw.scale == 1.0 and raw.inputs.max() > 200


@pytest.mark.parametrize("name, problem", [
    ("000000.jpg", r"img/000000\.jpg: no such image"),
    ("../secret.jpg", "inputs must be names of images, got '../secret.jpg'"),
    (7, "inputs must be names of images, got 7"),
    ("text.jpg", r"text\.jpg: cannot be read as a JPEG or PNG image"),
    ("cut.jpg", r"cut\.jpg: cannot be read as a JPEG or PNG image"),
])
def test_unreadable_celeba_images_are_refused(tmp_path: Path, name: Any, problem: str) -> None:
    write_image(tmp_path / "img" / "cut.jpg", np.full((218, 178, 3), 9))
    whole = (tmp_path / "img" / "cut.jpg").read_bytes()
    (tmp_path / "img" / "cut.jpg").write_bytes(whole[: len(whole) // 3])
    (tmp_path / "img" / "text.jpg").write_text("hello")
    write_leaf(tmp_path / "d", {"1": ([name], [1])}, {"1": ([name], [1])})
    with pytest.raises(DataError, match=problem):
        open_dataset(CELEBA, tmp_path)


def test_a_missing_folder_of_celeba_images_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="img: no such folder; expected CelebA's images"):
        open_dataset(CELEBA, tmp_path)
