from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

from decentnode.cli import main
from tests.report.test_runs import write_run


@pytest.mark.slow
def test_the_picture_is_written_into_the_run_folder(tmp_path: Path) -> None:
    run = write_run(tmp_path / "exp" / "run")
    result = CliRunner().invoke(main, ["plot", str(run)])
    assert result.exit_code == 0, result.output
    assert Path(result.output.strip()) == run / "plots" / "overview.png"
    assert (run / "plots" / "overview.png").stat().st_size > 10_000


def test_axes_metrics_and_several_runs_in_one_figure(tmp_path: Path) -> None:
    a, b = write_run(tmp_path / "a"), write_run(tmp_path / "b")
    out = tmp_path / "out.svg"
    chosen = ["--x", "seconds", "--metric", "accuracy", "--label", "first", "--label", "second", "-o", str(out)]
    result = CliRunner().invoke(main, ["plot", str(a), str(b), *chosen])
    assert result.exit_code == 0, result.output
    assert out.stat().st_size > 5_000
    result = CliRunner().invoke(main, ["plot", str(a), str(b), "--metric", "loss", "--x", "bytes"])
    assert Path(result.output.strip()).name == "loss_by_bytes_2_runs.png"


@pytest.mark.slow
def test_repeats_are_averaged_failed_runs_marked_and_paper_figures_are_pdf(tmp_path: Path) -> None:
    for k in (1, 2, 3):
        write_run(tmp_path / "exp" / f"r{k}", nodes=1, seed=k, status="failed" if k == 3 else "finished")
    out = tmp_path / "out.svg"
    chosen = ["--all-runs", "--metric", "accuracy", "-o", str(out)]
    result = CliRunner().invoke(main, ["plot", str(tmp_path / "exp"), *chosen])
    assert result.exit_code == 0, result.output
    assert "exp (2 seeds)" in out.read_text() and "exp (failed after round 6 of 6)" in out.read_text()
    result = CliRunner().invoke(main, ["plot", str(tmp_path / "exp" / "r1"), "--paper"])
    assert Path(result.stdout.strip()) == tmp_path / "exp" / "r1" / "plots" / "accuracy_by_rounds_paper.pdf"
    result = CliRunner().invoke(main, ["plot", str(tmp_path / "exp" / "r1"), "--paper", "-o", str(tmp_path / "x.png")])
    assert result.exit_code == 2 and ".pdf" in result.output


def test_a_missing_run_is_refused(tmp_path: Path) -> None:
    result = CliRunner().invoke(main, ["plot", str(tmp_path / "none")])
    assert result.exit_code == 2
    assert "no run in" in result.output


@pytest.mark.parametrize("options, message", [
    (["-o", "x.gif"], "must end in .png, .pdf, .svg, got x.gif"),
    (["--paper", "-o", "x.png"], "must end in .pdf, .svg with --paper, got x.png"),
    (["--preset", "merged", "-o", "x.csv"], "must end in .png, .pdf, .svg, got x.csv"),
])  # fmt: skip
def test_a_wrong_name_is_refused_before_runs_are_read(tmp_path: Path, options: list[str], message: str) -> None:
    result = CliRunner().invoke(main, ["plot", str(tmp_path / "none"), *options])
    assert result.exit_code == 2 and message in result.output, result.output
