"""The tables of docs/results.rst: every config of configs/tables learns from files in the real formats, and the
arithmetic of the tables."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from decentnode.experiment import load
from tests.data.files import write_cifar10, write_pairs

ROOT = Path(__file__).parents[1]
CONFIGS = sorted((ROOT / "configs" / "tables").glob("*.yaml"))


@pytest.fixture(scope="module")
def modules() -> Iterator[tuple[ModuleType, ModuleType]]:
    """Yields eval/benchmarks/tables.py and table_data.py, which are not in a package."""
    sys.path.insert(0, str(ROOT / "eval" / "benchmarks"))
    import table_data
    import tables

    yield tables, table_data
    sys.path.remove(str(ROOT / "eval" / "benchmarks"))


@pytest.fixture(scope="module")
def data(modules: tuple[ModuleType, ModuleType], tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    draw = np.random.default_rng(0)
    words = ["sea", "lamp", "ship", "wind", "tea"]
    speeches = [f"SPEAKER {n % 9}:\n" + " ".join(draw.choice(words, 60)) for n in range(90)]
    (folder / "plays.txt").write_text("\n\n".join(speeches))
    modules[1].write(folder, folder / "plays.txt", scale=0.05)
    write_cifar10(folder / "cifar-10-batches-bin", per_file=256, files=1, tests=32)
    write_pairs(folder / "multi30k", ["ein Haus", "ein Hund laeuft", "kein Hund"] * 50, ["a house", "dogs", "no"] * 50)
    return folder


@pytest.fixture(autouse=True)
def cache(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DECENTNODE_CACHE", str(data / "cache"))


def overrides(name: str, data: Path) -> tuple[str, ...]:
    if name == "multi30k":
        files = {"source": "train.de", "target": "train.en", "test_source": "test.de.gz", "test_target": "test.en.gz"}
        return tuple(f"data.{key}={data}/multi30k/{file}" for key, file in files.items())
    folder = data / ("cifar-10-batches-bin" if name.startswith("cifar") else name)
    return (f"data.folder={folder}", *([f"data.images={folder}/img_align_celeba"] if name == "celeba" else []))


@pytest.mark.parametrize("path", CONFIGS, ids=lambda p: p.stem)
@pytest.mark.slow
def test_every_config_of_a_table_runs(path: Path, data: Path, modules: tuple[ModuleType, ModuleType]) -> None:
    tables = modules[0]
    point = tables.Point(path.stem, (*overrides(path.stem, data), "node.rounds=2", "training.local_steps=1"))
    reached = tables.run(point)
    task = load(path, list(point.overrides)).make_task()
    assert reached.metric == task.metrics[0].name and math.isfinite(reached.local) and math.isfinite(reached.merged)
    assert (reached.megabytes > 0) == (path.stem != "cifar_central")
    if path.stem in tables.TASKS:
        alone = tables.centralized(point)
        nodes, batch = (load(path, list(each.overrides)) for each in (point, alone))
        assert nodes.make_mapping().num_nodes * nodes.training.batch_size == batch.training.batch_size  # type: ignore[attr-defined]
        assert math.isfinite(tables.run(alone).merged)
        known = tables.untrained(point, reached.metric)
        assert {"accuracy": 0 <= known < 0.7, "perplexity": 5 < known < 400, "rmse": 0.5 < known < 1.5}[reached.metric]


@pytest.mark.slow
def test_a_model_learns_from_the_generated_movielens_data(data: Path, modules: tuple[ModuleType, ModuleType]) -> None:
    tables = modules[0]
    point = tables.Point("movielens", (*overrides("movielens", data), "node.rounds=60"))
    assert tables.run(point).merged < 0.95 * tables.untrained(point, "rmse")


@pytest.mark.slow
def test_the_paired_table_has_the_confidence_interval_of_the_mean_difference(
    monkeypatch: pytest.MonkeyPatch, modules: tuple[ModuleType, ModuleType]
) -> None:
    """Differences of 1, 2, 3, 4, 5 points: mean 3, deviation 1.5811, 2.776 * 1.5811 / sqrt(5) = 1.963."""
    tables = modules[0]

    def run_points(points: list[Any], _store: object) -> dict[Any, Any]:
        def merged(point: Any) -> float:
            seed = int(next(each for each in point.overrides if each.startswith("seed=")).removeprefix("seed="))
            return 0.4 if point.config == "cifar_central" else 0.4 + 0.01 * seed

        return {point: tables.PointResult("accuracy", 0.5, merged(point), 1.0, 1.0) for point in points}

    monkeypatch.setattr(tables, "run_points", run_points)
    monkeypatch.setattr(tables, "with_enough_tests", lambda folder: folder)
    rows = tables.paired_table(Path("x"), 5, [], None)
    assert rows[-1] == ["mean", "43.00", "40.00", "+3.00 [+1.04, +4.96]"]


@pytest.mark.slow
def test_points_in_the_store_are_not_run_again(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, modules: tuple[ModuleType, ModuleType]
) -> None:
    tables = modules[0]
    monkeypatch.setattr(tables, "STORE", tmp_path)
    point, reached = tables.Point("femnist", ("seed=1",)), tables.PointResult("accuracy", 0.5, 0.6, 1.0, 2.0)
    tables.Store("abc").append(point, reached)
    assert tables.run_points([point, point], tables.Store("abc")) == {point: reached}
    assert tables.Store("abd").found == {}


@pytest.mark.slow
def test_training_images_become_test_images_where_there_are_too_few(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, modules: tuple[ModuleType, ModuleType]
) -> None:
    tables = modules[0]
    monkeypatch.setattr(tables, "STORE", tmp_path / "store")
    monkeypatch.setattr(tables, "MIN_TEST_IMAGES", 3)
    images = [bytes([label]) * tables.IMAGE for label in range(6)]
    for name, part in (("data_batch_1.bin", images[:4]), ("test_batch.bin", images[4:])):
        (tmp_path / name).write_bytes(b"".join(part))
    other = tables.with_enough_tests(tmp_path)
    assert (other / "data_batch_1.bin").read_bytes() == b"".join(images[:3])
    assert (other / "test_batch.bin").read_bytes() == b"".join(images[3:])
    assert tables.with_enough_tests(other) == other
