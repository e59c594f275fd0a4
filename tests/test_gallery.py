"""bash eval/gallery.sh: every line of every figure can be run, and figures and tables are made."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

from decentnode.experiment import load

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "eval" / "benchmarks"


@pytest.fixture(scope="module")
def gallery() -> ModuleType:
    sys.path.insert(0, str(FOLDER))
    try:
        spec = importlib.util.spec_from_file_location("gallery", FOLDER / "gallery.py")
        assert spec is not None and spec.loader is not None
        module = sys.modules["gallery"] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    finally:
        sys.path.remove(str(FOLDER))
    return module


def test_every_line_of_a_figure_is_another_experiment_and_every_config_has_a_figure(gallery: ModuleType) -> None:
    assert {path.stem for path in (ROOT / "configs" / "gallery").glob("*.yaml")} == gallery.FIGURES.keys()
    for name, shown in gallery.FIGURES.items():
        path = ROOT / "configs" / "gallery" / f"{name}.yaml"
        digests = [load(path, list(arm.overrides), {}, check=False).digest() for arm in shown.arms]
        assert len({*digests}) == len(digests) > 1, name
        page = (ROOT / "docs" / "gallery.rst").read_text()
        assert f"pictures/gallery_{name}.png" in page and f"tables/gallery_{name}.txt" in page


@pytest.mark.slow
def test_a_figure_is_made_once_with_a_table_of_its_conditions(
    gallery: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    made: list[str] = []

    def run_in_this_process(wanted: list[object], jobs: int) -> None:
        for point in wanted:
            if not gallery.is_done(point):
                gallery.run(point)
                made.append(str(point))

    monkeypatch.setattr(gallery, "run_all", run_in_this_process)
    words = ["--only", "dpsgd", "--seeds", "2", "--rounds", "2", "--docs", str(tmp_path), "--store", str(tmp_path)]
    gallery.main(words)
    assert len(made) == 4
    gallery.main(words)
    assert len(made) == 4, "finished points are not run again"
    table = (tmp_path / "tables" / "gallery_dpsgd.txt").read_text()
    assert table in capsys.readouterr().out and "minus best" in table
    assert "D-PSGD, ring" in table and "seeds 1 to 2" in table and "commit" in table and "cores" in table
    assert (tmp_path / "pictures" / "gallery_dpsgd.png").stat().st_size > 20_000
