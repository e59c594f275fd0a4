"""Datasets of Hugging Face's library: through a small fake of it, and through the library where it is installed."""

from __future__ import annotations

import importlib.util
import os
import sys
import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from decentnode.build import build_in_process, step_all
from decentnode.data import DATASETS
from decentnode.errors import DataError
from decentnode.experiment import load
from decentnode.samples import Rows

from .contract import check_dataset
from .files import open_dataset

QUICKSTART = Path(__file__).parents[2] / "configs" / "quickstart.yaml"
installed = pytest.mark.skipif(importlib.util.find_spec("datasets") is None, reason="datasets is not installed")


def images(count: int) -> list[Any]:
    return [Image.fromarray(np.full((8, 8), 20 + 200 * (n % 2), np.uint8)) for n in range(count)]


COLUMNS: dict[str, dict[str, list[Any]]] = {
    "images": {"image": images(40), "label": [n % 2 for n in range(40)]},
    "texts": {"text": [("good " * (1 + n % 3)) if n % 2 else "bad book" for n in range(40)],
              "label": [n % 2 for n in range(40)], "writer": [f"w{n % 4}" for n in range(40)]},
    "numbers": {"row": [[float(n % 2), 1.0] for n in range(40)], "kind": [n % 2 for n in range(40)]},
    "heights": {"row": [[float(n), 1.0] for n in range(40)], "kind": [0.5 * n for n in range(40)]},
    "sayings": {"text": ["to be or not to be" if n % 2 else "x" * (n < 2) for n in range(40)],
             "writer": [f"w{n % 4}" for n in range(40)]},
}  # fmt: skip


class FakeSplit:
    """A fake split with what the package uses: columns, features, slices and cache files."""

    cache_files: tuple[Any, ...] = ()

    def __init__(self, columns: dict[str, list[Any]], classes: int | None) -> None:
        self.columns, self.column_names = columns, list(columns)
        self.features = {name: types.SimpleNamespace(num_classes=classes) for name in columns}
        self._fingerprint = str(columns)

    def __len__(self) -> int:
        return len(next(iter(self.columns.values())))

    def __getitem__(self, rows: slice) -> dict[str, list[Any]]:
        return {name: values[rows] for name, values in self.columns.items()}


def fake_splits(columns: dict[str, list[Any]], classes: int | None = None) -> dict[str, FakeSplit]:
    return {"train": FakeSplit({name: values[:30] for name, values in columns.items()}, classes),
            "test": FakeSplit({name: values[30:] for name, values in columns.items()}, classes)}  # fmt: skip


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Any:
    found: Any = types.ModuleType("datasets")
    found.known = {name: fake_splits(columns) for name, columns in COLUMNS.items()}

    def load_dataset(name: str, subset: str | None) -> Any:
        assert os.environ["HF_HUB_OFFLINE"] == "1", "nothing is downloaded"
        if name not in found.known:
            raise FileNotFoundError("not in the cache")
        return found.known[name]

    found.load_dataset = load_dataset
    monkeypatch.setitem(sys.modules, "datasets", found)
    return found


def section(name: str, **keys: Any) -> dict[str, Any]:
    columns = {"input": "row", "target": "kind"} if name in ("numbers", "heights") else {}
    return {"name": f"hf:{name}", **columns, **keys}


def check_size(name: str, data: Any) -> None:
    expected = {"heights": (30, 10, None), "sayings": (15, 5, None)}.get(name, (30, 10, 2))
    assert (data.num_train(), data.num_test(), data.num_classes) == expected


@pytest.mark.parametrize("name", COLUMNS)
def test_contract(library: Any, name: str) -> None:
    data = open_dataset(section(name, **({"key": "writer"} if "writer" in COLUMNS[name] else {})))
    check_dataset(data)
    check_size(name, data)


def test_columns_of_images_texts_and_numbers(library: Any) -> None:
    pictures = open_dataset(section("images")).train(np.arange(4))
    assert pictures.inputs.shape == (4, 1, 8, 8) and pictures.inputs[:, 0, 0, 0].tolist() == [20, 220, 20, 220]  # type: ignore[union-attr,index]
    assert (pictures.scale, pictures.offset) == (2 / 255, -1.0)  # type: ignore[union-attr]
    texts = open_dataset(section("texts", key="writer", length=2))
    rows = texts.train(np.arange(3)).inputs  # type: ignore[union-attr]
    assert isinstance(rows, Rows) and rows.padded().tolist() == [[3, 4], [2, 2], [3, 4]]  # good is the most frequent
    assert texts.spec.padding == 0 and texts.spec.vocabulary == 5 and texts.train_keys().tolist()[:5] == [0, 1, 2, 3, 0]  # type: ignore[union-attr]
    numbers = open_dataset(section("numbers")).train(np.arange(2))
    assert numbers.inputs.tolist() == [[0, 1], [1, 1]] and numbers.inputs.dtype == np.float32  # type: ignore[union-attr]


def test_texts_without_labels_are_windows_for_next_token_prediction(library: Any) -> None:
    data = open_dataset(section("sayings", key="writer", length=3))
    assert (data.spec.task, data.spec.input_shape, data.spec.target_shape) == ("next_token", (3,), (3,))
    assert data.spec.padding is None and data.train_targets() is None
    be, to, others = 2, 3, [4, 5]  # the most frequent words first; texts of one word have nothing that follows
    found = data.train(np.arange(2))
    assert isinstance(found.inputs, Rows) and isinstance(found.targets, Rows)  # type: ignore[union-attr]
    inputs, targets = found.inputs.padded(), found.targets.padded()  # type: ignore[union-attr]
    middle = [each for each in inputs.ravel().tolist() if each not in (to, be)]
    assert inputs.tolist() == [[to, be, middle[0]], [middle[1], to, 0]] and sorted(middle[:2]) == others
    assert targets.tolist() == [[be, middle[0], middle[1]], [to, be, -100]]
    assert data.train_keys().tolist()[:4] == [1, 1, 3, 3]  # type: ignore[union-attr]


def test_float_targets_are_a_regression(library: Any) -> None:
    data = open_dataset(section("heights"))
    assert data.spec.task == "regression" and data.train_targets() is None
    assert data.train(np.arange(3)).targets.tolist() == [0, 0.5, 1]  # type: ignore[union-attr]
    library.known["heights"]["test"].columns["kind"][3] = float("nan")
    library.known["heights"]["test"]._fingerprint = "changed"
    with pytest.raises(DataError, match="hf:heights, test sample 0 on: column kind must have one finite number"):
        open_dataset(section("heights"))


def test_a_dataset_without_a_test_split_sets_a_part_aside(library: Any) -> None:
    del library.known["images"]["test"]
    data = open_dataset(section("images", test_fraction=0.3))
    assert data.num_train() + data.num_test() == 30 and 3 < data.num_test() < 16
    check_dataset(data)


def test_the_number_of_classes_is_that_of_the_column(library: Any) -> None:
    library.known["images"] = fake_splits(COLUMNS["images"], classes=7)
    assert open_dataset(section("images")).num_classes == 7


@pytest.mark.parametrize("name, keys, problem", [
    ("none", {}, r"hf:none is neither in the local cache nor a folder of save_to_disk; .* not in the cache"),
    ("images", {"input": "picture"}, "data.input must be one of the columns image, label, got 'picture'"),
    ("numbers", {"input": None}, "data.input must be one of the columns row, kind, got none of the usual ones"),
    ("texts", {"key": "owner"}, "data.key must be one of the columns text, label, writer, got 'owner'"),
    ("texts", {"target": "writer"}, "labels must be a non-empty list of integers"),
    ("texts", {"train_split": "training"}, "data.train_split must be one of train, test, got 'training'"),
])
def test_wrong_columns_and_splits_are_refused(library: Any, name: str, keys: dict[str, Any], problem: str) -> None:
    with pytest.raises(DataError, match=problem):
        open_dataset(section(name, **keys))


def test_inputs_of_unequal_shapes_are_refused(library: Any) -> None:
    library.known["numbers"]["train"].columns["row"][3] = [1.0]
    library.known["numbers"]["train"]._fingerprint = "changed"
    with pytest.raises(DataError, match=r"inputs must have one shape, got \[2\] and \[1\]"):
        open_dataset(section("numbers"))


def test_a_missing_library_is_an_error_that_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)  # an import of it fails
    with pytest.raises(DataError, match=r"data hf:x needs the package datasets: pip install 'decentnode\[hf\]'"):
        open_dataset({"name": "hf:x"})
    assert "hf" in DATASETS.libraries


@pytest.mark.slow
def test_a_run_on_images_of_the_library(library: Any) -> None:
    experiment = load(QUICKSTART, [
        "graph={name: ring, nodes: 3}", "mapping={machines: 1, nodes_per_machine: 3}", "communication=inproc",
        "data={name: 'hf:images', partition: {name: iid}}", "node={rounds: 5, evaluate_every: 0}"])  # fmt: skip
    nodes = build_in_process(experiment)
    step_all(nodes)
    assert float(nodes[0].figures()["accuracy_merged"]) == 1.0


@installed
@pytest.mark.parametrize("name", COLUMNS)
def test_datasets_saved_by_the_real_library_are_read(tmp_path: Path, name: str) -> None:
    import datasets
    import pyarrow

    kinds = {"image": datasets.Image(), "text": datasets.Value("string"), "writer": datasets.Value("string"),
             "row": datasets.Sequence(datasets.Value("float32")), **(
                 {"kind": datasets.Value("float64")} if name == "heights" else {})}  # fmt: skip
    features = datasets.Features({key: kinds.get(key, datasets.Value("int64")) for key in COLUMNS[name]})
    made = {}
    for part, rows in (("train", slice(30)), ("test", slice(30, 40))):
        encoded = [features.encode_example(dict(zip(COLUMNS[name], row, strict=True)))
                   for row in zip(*(values[rows] for values in COLUMNS[name].values()), strict=True)]  # fmt: skip
        table = pyarrow.Table.from_pylist(encoded, schema=features.arrow_schema)
        info = datasets.DatasetInfo(features=features)
        made[part] = datasets.Dataset(datasets.table.InMemoryTable(table), info=info, fingerprint=f"{name}{part}")
    datasets.DatasetDict(made).save_to_disk(str(tmp_path / name))
    data = open_dataset(section(name), tmp_path)
    check_dataset(data)
    check_size(name, data)
    with pytest.raises(DataError, match="neither in the local cache"):
        open_dataset({"name": "hf:nobody/nothing"}, tmp_path)
