"""`sharing.dump`: files and a plot of the parameters that a rule chose to send."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file

from decentnode.cli import main
from decentnode.errors import ConfigError, UsageError
from decentnode.experiment import load
from decentnode.launch.children.messages import Request
from decentnode.launch.reporting.observer import Observer
from decentnode.launch.supervisor import supervise
from decentnode.node.schedules.dumps import Dumps
from decentnode.report.pictures import dumps
from decentnode.sharing.dump import DumpConfig

QUICKSTART = Path(__file__).parents[2] / "configs" / "quickstart.yaml"
ROUNDS = 5


def run_quickstart(folder: Path, sharing: str, *sets: str) -> Path:
    request = Request(str(QUICKSTART), [
        f"run.dir={folder}", "graph={name: ring, nodes: 4}", "mapping={nodes_per_machine: 4}", "communication=inproc",
        "model={name: mlp, hidden: [8]}", f"node={{rounds: {ROUNDS}, evaluate_every: 0}}", f"sharing={sharing}", *sets,
    ])  # fmt: skip
    outcome = supervise(request, Observer(), command="decentnode run quickstart.yaml")
    assert outcome.exit_code == 0 and outcome.run_dir is not None, outcome
    return outcome.run_dir


RULES = [
    ("topk", "fraction: 0.1, compression: int8"), ("topk", "fraction: 0.1, scored: value"),
    ("wavelet", "fraction: 0.1, accumulate: training"), ("jwins", "fractions: [0.1, 1.0]"), ("fft", "fraction: 0.2"),
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(("rule", "keys"), RULES, ids=str)
def test_dumped_positions_have_the_largest_scores_and_dumps_do_not_change_the_run(
    tmp_path: Path, rule: str, keys: str
) -> None:
    run = run_quickstart(tmp_path / "a", f"{{name: {rule}, {keys}, dump: {{scores: true}}}}")
    assert sorted(path.parent.name for path in run.glob("nodes/*/dumps")) == ["000", "001"]
    total: Any = None
    for round in range(ROUNDS):
        found = load_file(run / "nodes" / "001" / "dumps" / f"{round:08d}-0.safetensors")
        scores = found["change"].norm(dim=1) if found["change"].ndim == 2 else found["change"].abs()
        counts = torch.zeros(len(scores), dtype=torch.int32)
        if "sent" in found:
            sent = found["sent"]
            assert sent.dtype == torch.int64 and torch.equal(sent, sent.unique())
            assert float(scores[sent].min()) >= float(np.sort(scores.numpy())[-len(sent)]) - 1e-7
            counts[sent] += 1
        total = counts if total is None else total + counts
        if "scored" in keys:
            assert torch.equal(found["change"], found["value"])
    assert torch.equal(load_file(run / "nodes" / "001" / "dumps" / "counts.safetensors")["0"], total)
    names = json.loads((run / "nodes" / "001" / "dumps" / "parameters.json").read_text())
    assert sum(int(np.prod(parameter["shape"])) for parameter in names) == 64 * 8 + 8 + 8 * 10 + 10
    plain = run_quickstart(tmp_path / "b", f"{{name: {rule}, {keys}}}")
    for path in sorted((plain / "models").glob("*.safetensors")):
        other = load_file(run / "models" / path.name)
        assert all(torch.equal(tensor, other[name]) for name, tensor in load_file(path).items())
    assert not [*plain.glob("nodes/*/dumps")]


@pytest.mark.slow
def test_dumps_of_subsample_with_fragments_have_a_file_per_fragment(tmp_path: Path) -> None:
    parts = "parameters={fragments: [{parameters: '*.weight', every: 2}, {parameters: '*'}]}"
    run = run_quickstart(tmp_path, "{name: subsample, fraction: 0.3, dump: {nodes: all, every: 2}}", parts)
    files = sorted(path.name for path in (run / "nodes" / "003" / "dumps").glob("0*"))
    assert {name.partition("-")[0] for name in files} == {f"{round:08d}" for round in (0, 2, 4)}
    counts = load_file(run / "nodes" / "003" / "dumps" / "counts.safetensors")
    assert [len(counts[name]) for name in ("0", "1")] == [64 * 8 + 8 * 10, 18]
    assert int(counts["1"].max()) <= ROUNDS and int(counts["0"].max()) <= 3
    found = dumps.load(run)
    assert found.round is None and [len(counts) for counts in found.counts.values()] == [610] * 4


def test_dumps_beyond_most_megabytes_are_only_counted(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    made = Dumps(tmp_path / "d", DumpConfig(scores=True, most_megabytes=0.002), [("x", (100,))])
    entries = {"sent": torch.arange(10), "change": torch.ones(100), "value": torch.ones(100)}
    for round in range(9):
        made.take(round, 0, entries, 100)
    made.close()
    made.close()
    assert sorted(path.name for path in (tmp_path / "d").iterdir()) == [
        "00000000-0.safetensors", "00000001-0.safetensors", "counts.safetensors", "parameters.json"]
    assert load_file(tmp_path / "d" / "counts.safetensors")["0"].tolist() == [9] * 10 + [0] * 90
    assert sum("most_megabytes" in record.message for record in caplog.records) == 1


def test_a_dump_that_cannot_be_written_is_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("")
    made = Dumps(tmp_path / "file", DumpConfig(), [("x", (3,))])
    made.take(0, 0, {"sent": torch.arange(2)}, 3)
    made.close()
    assert "a dump could not be written" in caplog.text


@pytest.mark.slow
def test_plot_draws_the_dumps_also_of_a_killed_node(tmp_path: Path) -> None:
    run = run_quickstart(tmp_path, "{name: fft, fraction: 0.2, dump: {scores: true}}")
    result = CliRunner().invoke(main, ["plot", str(run), "--dumps"], catch_exceptions=False)
    assert result.exit_code == 0 and (run / "plots" / "dumps.png").stat().st_size > 10_000
    whole = dumps.load(run)
    (run / "nodes" / "000" / "dumps" / "counts.safetensors").unlink()  # a node that was killed has not written it
    counted = dumps.load(run).counts[0]
    assert counted.tolist() == whole.counts[0][: len(counted)].tolist() and not whole.counts[0][len(counted) :].any()
    with pytest.raises(UsageError, match="has no dumps; sharing"):
        dumps.load(tmp_path)
    with pytest.raises(UsageError, match=r"must end in \.png"):
        dumps.plot(run, tmp_path / "a.txt")


def test_shares_and_ratios_are_those_computed_by_hand() -> None:
    counts = np.array([0] * 95 + [10] * 5)
    assert dumps.shares(counts).tolist() == [0.0] * 19 + [1.0] and dumps.shares(np.zeros(40)).sum() == 0
    change, value = np.array([1.0, 2.0, 3.0, 500.0, 7.0]), np.array([1.0, 1.0, 1.0, 1.0, 0.0])
    assert dumps.ratios(change, value).tolist() == [1.0, 2.0, 3.0, 0.0]


def test_dumping_the_scores_of_a_random_choice_is_refused() -> None:
    with pytest.raises(ConfigError) as caught:
        load(QUICKSTART, ["sharing={name: subsample, dump: {scores: true}}"], {})
    assert "must have dump.scores: false" in "\n".join(caught.value.problems)
