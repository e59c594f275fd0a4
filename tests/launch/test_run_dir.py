from __future__ import annotations

from pathlib import Path

import pytest

from decentnode.errors import EnvironmentFault, UsageError
from decentnode.launch.files import run_dir


def test_the_latest_link_names_the_newest_run(tmp_path: Path) -> None:
    first = run_dir.create(tmp_path, "ring", local=[0, 3])
    second = run_dir.create(tmp_path, "ring", local=[0])
    assert first != second
    assert (first / "nodes" / "003").is_dir()
    assert (tmp_path / "ring" / "latest").resolve() == second
    assert sorted(p.name for p in first.iterdir()) == ["models", "nodes", "plots"]
    assert not list(tmp_path.glob("ring/.latest*"))


def test_run_folders_of_other_machines_have_names_and_latest_links_of_their_own(tmp_path: Path) -> None:
    zero = run_dir.create(tmp_path, "ring", 0, [0])
    one = run_dir.create(tmp_path, "ring", 1, [1])
    alone = run_dir.create(tmp_path / "apart", "ring", 2, [2])
    assert run_dir.resolve(alone.parent) == alone and run_dir.resolve(zero.parent) == zero
    assert one.name.endswith("-machine1")
    assert (tmp_path / "ring" / "latest").resolve() == zero
    assert (tmp_path / "ring" / "latest-machine1").resolve() == one


def test_a_run_folder_that_cannot_be_made_is_named_with_the_option_to_change_it(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(EnvironmentFault, match=r"cannot make the run directory .*--run-dir"):
        run_dir.create(tmp_path / "file", "ring")


def test_runs_are_found_by_directory_name_and_latest(tmp_path: Path) -> None:
    run = run_dir.create(tmp_path / "runs", "ring", local=[0])
    for given in (run, run.parent, tmp_path / "runs" / "ring" / "latest"):
        assert run_dir.resolve(given) == run
    assert run_dir.resolve("ring", tmp_path / "runs") == run
    assert run_dir.resolve("latest", tmp_path / "runs") == run
    with pytest.raises(UsageError, match="has none of that name; did you mean 'ring'"):
        run_dir.resolve("rign", tmp_path / "runs")
    with pytest.raises(UsageError, match="no run in"):
        run_dir.resolve("torus", tmp_path / "runs")


def test_without_the_link_the_newest_run_is_the_latest(tmp_path: Path) -> None:
    """The link dangles once its run was removed or renamed, and is not there in a folder that was copied run by run."""
    runs = tmp_path / "runs"
    for name in ("2026-11-27T10-00-00-aaaa", "2026-11-28T10-00-00-bbbb"):
        run_dir.create(runs, "ring", local=[0], folder=name)
    torus = run_dir.create(runs, "torus", local=[0])
    newest = runs / "ring" / "2026-11-28T10-00-00-bbbb"
    newest.rename(runs / "ring" / "best")
    assert run_dir.resolve("ring", runs) == runs / "ring" / "2026-11-27T10-00-00-aaaa", "the link dangles"
    assert run_dir.resolve("latest", runs) == torus
    (runs / "ring" / "latest").unlink()
    assert run_dir.resolve(runs / "ring") == runs / "ring" / "2026-11-27T10-00-00-aaaa"
    (runs / "torus" / "latest").unlink()
    assert run_dir.resolve("latest", runs) == torus
    with pytest.raises(UsageError, match="did you mean 'ring'"):
        run_dir.resolve("rign", runs)


def test_a_sweep_resolves_to_the_latest_run_of_each_point(tmp_path: Path) -> None:
    points = tmp_path / "runs" / "ring" / "sweep" / "points"
    _, again, other = (run_dir.create(points / key, "ring", local=[0]) for key in ("b", "b", "a"))
    for given in ("ring", "ring/sweep"):
        assert {*run_dir.resolve_all(given, tmp_path / "runs")} == {again, other}, "not the latest run of each point"
        with pytest.raises(UsageError, match=r"ring/sweep is a sweep: name a run in .*points, or use --all-runs"):
            run_dir.resolve(given, tmp_path / "runs")
    alone = run_dir.create(tmp_path / "runs", "ring", local=[0])
    assert run_dir.resolve_all("ring", tmp_path / "runs") == [alone]
