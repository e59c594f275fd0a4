from __future__ import annotations

from pathlib import Path

import pytest

from decentnode.errors import EnvironmentFault, UsageError
from decentnode.metrics.writer import MetricsWriter
from decentnode.report.plots import plot
from decentnode.report.runs import AXES, METRICS, load


def fake_run(folder: Path, nodes: int = 3, rounds: int = 6) -> Path:
    """A run of `nodes` with an evaluation every 2 rounds; node i is i hundredths better and 10 ms late."""
    for uid in range(nodes):
        path = folder / "nodes" / f"{uid:03d}"
        path.mkdir(parents=True)
        writer = MetricsWriter(path / "metrics.jsonl")
        for r in range(rounds):
            at = 100.0 + r + 1 + uid / 100
            writer.write({"kind": "round", "round": r, "time": at, "seconds": 1.0, "loss": 2.0 / (r + 1),
                          "data_bytes_sent": 1000 * (r + 1), "metadata_bytes_sent": 10 * (r + 1)})  # fmt: skip
            if r % 2:
                writer.write({"kind": "evaluation", "round": r + 1, "time": at, "accuracy": 0.5 + r / 20 + uid / 100,
                              "consensus_distance": 0.1 / (r + 1)})  # fmt: skip
        writer.close()
    return folder


def test_series_join_nodes_by_round(tmp_path: Path) -> None:
    run = load(fake_run(tmp_path / "exp" / "run"))
    accuracy = run.series("accuracy", "rounds")
    assert accuracy.x == [2, 4, 6]
    assert accuracy.mean == pytest.approx([0.56, 0.66, 0.76])
    assert accuracy.low == pytest.approx([0.55, 0.65, 0.75])
    assert accuracy.high == pytest.approx([0.57, 0.67, 0.77])
    assert run.series("loss", "rounds").x == [1, 2, 3, 4, 5, 6]
    assert run.series("accuracy", "bytes").x == [3 * 2020, 3 * 4040, 3 * 6060]
    assert run.series("accuracy", "seconds").x == pytest.approx([2.02, 4.02, 6.02])
    assert run.label == "exp run"


def test_a_run_without_records_is_refused(tmp_path: Path) -> None:
    (tmp_path / "nodes" / "000").mkdir(parents=True)
    (tmp_path / "nodes" / "000" / "metrics.jsonl").write_text("")
    with pytest.raises(UsageError, match="no metrics"):
        load(tmp_path)


@pytest.mark.parametrize("suffix", [".png", ".pdf", ".svg"])
def test_pictures_of_several_runs(tmp_path: Path, suffix: str) -> None:
    runs = [load(fake_run(tmp_path / name), name) for name in ("a", "b")]
    target = tmp_path / "deep" / f"two{suffix}"
    plot(runs, METRICS, AXES, target)
    start = target.read_bytes()[:8]
    assert start.startswith({".png": b"\x89PNG", ".pdf": b"%PDF", ".svg": b"<?xml"}[suffix])
    if suffix == ".svg":
        text = target.read_text()
        assert "consensus distance" in text and "MB sent" not in text


def test_plot_says_what_is_wrong(tmp_path: Path) -> None:
    run = load(fake_run(tmp_path / "a"))
    with pytest.raises(UsageError, match=r"must end in \.png, \.pdf, \.svg"):
        plot([run], METRICS, AXES, tmp_path / "a.txt")
    with pytest.raises(UsageError, match="nothing to draw"):
        plot([load(fake_run(tmp_path / "b", rounds=1))], ["accuracy"], ["rounds"], tmp_path / "b.png")
    (tmp_path / "file").write_text("")
    with pytest.raises(EnvironmentFault, match="cannot write"):
        plot([run], METRICS, AXES, tmp_path / "file" / "a.png")
