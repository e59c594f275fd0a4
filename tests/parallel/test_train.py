"""Runs of scripts are recorded as those of nodes: the commands read them, and they go on where they stopped."""

from __future__ import annotations

import json
from pathlib import Path
from threading import Timer

import pytest
from click.testing import CliRunner

from decentnode.cli import main
from decentnode.metrics.reader import read
from decentnode.parallel.recording.records import lock_folder
from tests.conftest import free_ports
from tests.parallel.job_processes import JobProcesses
from tests.parallel.ranks import run_ranks
from tests.parallel.work import members, recording


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two seeds of one training, each of two ranks."""
    folder = tmp_path_factory.mktemp("recorded") / "runs"
    for seed in (1, 2):
        run_ranks(2, recording.train, str(folder), 3, seed)
    return folder


def invoke(*words: str) -> str:
    done = CliRunner().invoke(main, list(words))
    assert done.exit_code == 0, done.output
    return done.output


def test_a_rank_records_every_epoch(runs: Path) -> None:
    for uid in (0, 1):
        records = list(read(runs / f"script/latest/nodes/{uid:03d}/metrics.jsonl"))
        assert [(each["kind"], each["round"]) for each in records] == [
            ("evaluation", 0), ("round", 0), ("evaluation", 1), ("round", 1), ("evaluation", 2), ("round", 2),
            ("evaluation", 3),
        ]  # fmt: skip
        first, last = records[0], records[-1]
        assert first["consensus_distance"] < 1e-6 < last["consensus_distance"] and last["contributors"] == 2
        assert last["accuracy_merged"] > first["accuracy_merged"] and last["loss_mean"] < first["loss_mean"]
        for number, record in enumerate(each for each in records if each["kind"] == "round"):
            assert record["steps"] == 4 and record["samples"] == 64 and record["lr"] == 0.05
            assert record["data_bytes_sent"] == (4 * number + 5) * 4 * 58, "and the exchange of the initial model"
            assert record["steps_per_second"] == pytest.approx(4 / record["seconds"])
            assert 0 <= record["wait_seconds"] <= record["seconds"]


def test_the_summary_is_that_of_a_run(runs: Path) -> None:
    summary = json.loads((runs / "script/latest/summary.json").read_text())
    assert (summary["status"], summary["rounds"], summary["num_nodes"]) == ("finished", 3, 2)
    per_node = [summary["nodes"][uid]["accuracy"] for uid in ("0", "1")]
    assert summary["accuracy_mean"] == pytest.approx(sum(per_node) / 2)
    assert summary["bytes_data_total"] == 2 * (4 * 2 + 5) * 4 * 58


@pytest.mark.slow
def test_the_commands_read_it(runs: Path, tmp_path: Path) -> None:
    table = invoke("compare", str(runs / "script"), "--run-dir", str(runs))
    assert "script" in table and "accuracy" in table and "2" in table
    invoke("plot", str(runs / "script"), "-o", str(tmp_path / "curves.png"))
    invoke("report", str(runs / "script"), "-o", str(tmp_path / "report.html"))
    invoke("trace", str(runs / "script/latest"), "-o", str(tmp_path / "trace.json"))
    assert (tmp_path / "curves.png").stat().st_size > 1000
    page = (tmp_path / "report.html").read_text()
    assert "script" in page and "accuracy" in page
    spans = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert {each["pid"] for each in spans} == {0, 1} and any(each.get("name") == "train" for each in spans)


@pytest.mark.sampled(one=["there"])
@pytest.mark.parametrize("there", [False, True, "faithful", "remembers"])
def test_a_run_that_failed_goes_on_with_the_same_bits(there: bool | str, tmp_path: Path) -> None:
    """there: with the wrapper by Decent-DP's names, whose `state_dict` has the module's entries alone; or with a rule
    that keeps tensors."""
    for results, told in run_ranks(2, recording.stopped_and_resumed, str(tmp_path), there):
        (_, all_of_them, whole), (failed, before, _), (path, rest, resumed) = results
        assert all_of_them == [0, 1, 2, 3] and before == [0, 1, 2] and rest == [2, 3]
        assert path == failed and whole == resumed
        assert "seed" in told and "continues with its own config" in told
    for uid in (0, 1):
        records = [list(read(tmp_path / f"{runs}/script/latest/nodes/{uid:03d}/metrics.jsonl"))
                   for runs in ("whole", "parts")]  # fmt: skip
        told_of = ("kind", "round", "loss", "accuracy_merged", "consensus_distance", "steps", "lr")
        whole_records, parts = ([{key: each.get(key) for key in told_of} for each in found] for found in records)
        assert whole_records == parts
    kept = sorted(each.name[:8] for each in (tmp_path / "parts/script/latest/checkpoints").iterdir())
    assert kept == ["00000003", "00000004"]


@pytest.mark.slow
def test_a_run_goes_on_with_another_number_of_ranks(tmp_path: Path) -> None:
    """Each from the checkpoint of its rank, and from the newest of all, whatever number of ranks has written it."""
    ends = [end for _, _, end in run_ranks(3, recording.with_other_ranks, str(tmp_path), 2, False)]
    for ranks, trains, epochs in ((2, [2], 3), (4, [3], 4), (1, [4, 5], 6)):
        results = run_ranks(ranks, recording.with_other_ranks, str(tmp_path), epochs, True)
        for rank, (trained, began, _) in enumerate(results):
            assert began == ends[rank % len(ends)] and trained == trains
        ends = [end for _, _, end in results]
        summary = json.loads((tmp_path / "script/latest/summary.json").read_text())
        assert summary["num_nodes"] == ranks and summary["status"] == "finished"
    done = CliRunner().invoke(main, ["compare", str(tmp_path / "script")])
    assert done.exit_code == 0, done.output


@pytest.mark.slow
def test_a_run_that_failed_in_its_first_epoch_begins_anew(tmp_path: Path) -> None:
    for trained, told in run_ranks(2, recording.begun_anew, str(tmp_path)):
        assert trained == [0, 1]
        assert "records of 1 epochs but no checkpoint that all 2 ranks have" in told
    evaluated = [record["round"] for record in read(tmp_path / "script/latest/nodes/000/metrics.jsonl")
                 if record["kind"] == "evaluation"]  # fmt: skip
    assert evaluated == [0, 1, 2]


@pytest.mark.slow
def test_a_checkpoint_goes_when_all_ranks_have_the_next(tmp_path: Path) -> None:
    (first, trained), (second, _) = run_ranks(2, recording.uneven_disks, str(tmp_path))
    assert "rank 1 could not write a checkpoint: OSError: disk full" in first[0] and second == ["OSError: disk full"]
    assert trained == [1, 2]


@pytest.mark.slow
def test_the_generators_of_the_process_go_on(tmp_path: Path) -> None:
    for whole, parts in run_ranks(2, recording.drawing, str(tmp_path)):
        assert whole == parts and len(whole) == 5


@pytest.mark.slow
def test_gradients_that_are_added_up_over_the_end_of_an_epoch_are_kept(tmp_path: Path) -> None:
    for whole, parts in run_ranks(2, recording.added_up, str(tmp_path)):
        assert whole == parts and whole[1] == 5


@pytest.mark.slow
def test_a_run_that_other_processes_still_record_is_theirs(tmp_path: Path) -> None:
    """As of a launcher that was killed alone; rank 1's process is still there."""
    run_ranks(2, recording.train, str(tmp_path), 1)
    before = lock_folder(tmp_path / "script/latest/nodes/001")
    found = run_ranks(2, recording.while_another_does, str(tmp_path), 0.2)
    assert found[0].startswith("AssemblyError: rank 1 could not make the run directory: EnvironmentFault: another")
    assert found[1].startswith("EnvironmentFault: another process still writes to")
    Timer(4.0, before.close).start()
    assert run_ranks(2, recording.while_another_does, str(tmp_path), 60.0) == [[1], [1]]


@pytest.mark.slow
def test_a_run_without_its_first_files_begins_anew(tmp_path: Path) -> None:
    """A process was killed while it made the directory."""
    (before, *_), = run_ranks(1, recording.train, str(tmp_path), 1)
    (Path(before) / "task.json").unlink()
    (after, trained, _), = run_ranks(1, recording.train, str(tmp_path), 1, 1, None, True)
    assert before != after and trained == [0]


def test_a_run_that_failed_is_not_finished(tmp_path: Path) -> None:
    run_ranks(1, recording.train, str(tmp_path), 3, 1, 1)
    assert not (tmp_path / "script/latest/summary.json").exists()
    done = CliRunner().invoke(main, ["compare", str(tmp_path / "script")])
    assert done.exit_code != 0 and "not finished" in done.output


@pytest.mark.slow
def test_what_does_not_fit_is_refused(tmp_path: Path) -> None:
    for metrics, keys, keep, config, state, add in run_ranks(2, recording.refusals, str(tmp_path)):
        assert "state.also.odd.lock must be tensors, numbers" in state
        assert "metrics must be accuracy, loss or Metric objects" in metrics
        assert "evaluate must return loss, got accuracy, loss" in keys
        assert "keep 0 or more" in keep and "numbers, text, lists and dicts" in config and "inside `for epoch" in add


@pytest.mark.parametrize("words", [["run"], ["validate"], ["evaluate"], ["simulate"]])
def test_what_runs_experiments_says_that_it_is_a_scripts(runs: Path, words: list[str]) -> None:
    latest = runs / "script/latest"
    for what in (latest, *([] if words == ["evaluate"] else [latest / "config.resolved.yaml"])):
        done = CliRunner().invoke(main, [*words, str(what)])
        assert done.exit_code == 2 and "is the run of a script: its config is not an experiment" in done.stderr
        assert "not a known key" not in done.stderr and "command.txt" in done.stderr


def test_status_says_what_became_of_the_ranks(runs: Path, tmp_path: Path) -> None:
    told = json.loads(invoke("status", str(runs / "script/latest"), "--json"))
    assert {uid: (each["doing"], each["round"], each["rounds"]) for uid, each in told.items()} == {
        "0": ("finished", 3, 3), "1": ("finished", 3, 3),
    }  # fmt: skip
    run_ranks(1, recording.train, str(tmp_path), 3, 1, 1)
    assert "failed" in invoke("status", str(tmp_path / "script/latest"), "--once")
    path = tmp_path / "script/latest/nodes/000/status.json"
    status = json.loads(path.read_text())
    assert (status["doing"], status["round"], status["rounds"]) == ("failed", 1, 3)
    path.write_text(json.dumps({**status, "doing": "trains", "time": status["time"] - 60}))  # as SIGKILL leaves it
    assert "gone" in invoke("status", str(tmp_path / "script/latest"), "--once")


@pytest.mark.slow
def test_ranks_that_come_and_go_are_recorded_and_the_run_goes_on_with_others(tmp_path: Path) -> None:
    """Rank 1 dies, another joins; then two ranks go on with what three have saved, and one of them was none of them."""
    runs = str(tmp_path)
    with JobProcesses() as job:
        job.start_founders(3, free_ports(1), members.recorded, runs, None, False, None)
        addresses = [job.receive(rank) for rank in range(3)]
        job.wait_for_exit(1)
        job.start(members.recorded, {}, runs, addresses[0], False, None)
        job.receive(3)
        found = [job.receive(number) for number in (0, 2, 3)]
    (path,) = {each["path"] for each in found}
    assert [each["uid"] for each in found] == [0, 2, 3]
    (last,) = {each["trained"][-1] for each in found}
    came = found[2]["first"]
    for each in found:
        records = list(read(Path(path) / f"nodes/{each['uid']:03d}/metrics.jsonl"))
        evaluations = {record["round"]: record for record in records if record["kind"] == "evaluation"}
        assert [record["round"] for record in records if record["kind"] == "round"] == each["trained"]
        assert max(evaluations) == last + 1 and evaluations[last + 1]["contributors"] == 3
        assert min(evaluations) == (0 if each["uid"] != 3 else came // 5 + 1)
        merged = [evaluations[number]["loss_merged"] for number in sorted(evaluations)]
        if each["uid"] != 3:
            assert merged[-1] < 0.7 * merged[0] and evaluations[0]["contributors"] == 3
    assert not (Path(path) / "summary.json").exists()
    with JobProcesses() as job:
        job.start_founders(2, free_ports(1), members.recorded, runs, None, True, last + 3)
        again = [[job.receive(rank) for _ in range(2)][1] for rank in range(2)]
    for each in again:
        assert each["path"] == path and each["trained"] == [last + 1, last + 2]
    summary = json.loads((Path(path) / "summary.json").read_text())
    assert summary["status"] == "finished" and set(summary["nodes"]) == {"0", "1", "2", "3"}
    invoke("compare", str(tmp_path / "script"), "--run-dir", runs)
