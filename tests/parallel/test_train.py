"""Trainings of scripts are recorded as runs (`TrainingRun`): the commands read them, and they can be resumed."""

from __future__ import annotations

import json
import os
import signal
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
    """The folder of two recorded trainings of two ranks, with different seeds."""
    folder = tmp_path_factory.mktemp("recorded") / "runs"
    for seed in (1, 2):
        run_ranks(2, recording.train, str(folder), 3, seed)
    return folder


def invoke(*words: str) -> str:
    done = CliRunner().invoke(main, list(words))
    assert done.exit_code == 0, done.output
    return done.output


def test_each_rank_records_every_epoch(runs: Path) -> None:
    for uid in (0, 1):
        records = list(read(runs / f"script/latest/nodes/{uid:03d}/metrics.jsonl"))
        assert [(record["kind"], record["round"]) for record in records] == [
            ("evaluation", 0), ("round", 0), ("evaluation", 1), ("round", 1), ("evaluation", 2), ("round", 2),
            ("evaluation", 3),
        ]  # fmt: skip
        first, last = records[0], records[-1]
        assert first["consensus_distance"] < 1e-6 < last["consensus_distance"] and last["contributors"] == 2
        assert last["accuracy_merged"] > first["accuracy_merged"] and last["loss_mean"] < first["loss_mean"]
        for number, record in enumerate(record for record in records if record["kind"] == "round"):
            assert record["steps"] == 4 and record["samples"] == 64 and record["lr"] == 0.05
            assert record["data_bytes_sent"] == (4 * number + 5) * 4 * 58, "with the exchange of the initial model"
            assert record["steps_per_second"] == pytest.approx(4 / record["seconds"])
            assert 0 <= record["wait_seconds"] <= record["seconds"]


def test_the_summary_has_the_fields_of_a_nodes_run(runs: Path) -> None:
    summary = json.loads((runs / "script/latest/summary.json").read_text())
    assert (summary["status"], summary["rounds"], summary["num_nodes"]) == ("finished", 3, 2)
    per_node = [summary["nodes"][uid]["accuracy"] for uid in ("0", "1")]
    assert summary["accuracy_mean"] == pytest.approx(sum(per_node) / 2)
    assert summary["bytes_data_total"] == 2 * (4 * 2 + 5) * 4 * 58


@pytest.mark.slow
def test_compare_plot_report_and_trace_read_a_recorded_training(runs: Path, tmp_path: Path) -> None:
    table = invoke("compare", str(runs / "script"), "--run-dir", str(runs))
    assert "script" in table and "accuracy" in table and "2" in table
    invoke("plot", str(runs / "script"), "-o", str(tmp_path / "curves.png"))
    invoke("report", str(runs / "script"), "-o", str(tmp_path / "report.html"))
    invoke("trace", str(runs / "script/latest"), "-o", str(tmp_path / "trace.json"))
    assert (tmp_path / "curves.png").stat().st_size > 1000
    page = (tmp_path / "report.html").read_text()
    assert "script" in page and "accuracy" in page
    spans = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert {span["pid"] for span in spans} == {0, 1} and any(span.get("name") == "train" for span in spans)


@pytest.mark.sampled(one=["variant"])
@pytest.mark.parametrize("variant", ["plain", "decent_dp", "faithful", "stateful rule"])
def test_a_failed_run_is_resumed_with_the_same_bits(variant: str, tmp_path: Path) -> None:
    """Also with the wrapper by Decent-DP's names, whose `state_dict` has the module's entries alone, and with a rule
    that keeps tensors."""
    for results, error in run_ranks(2, recording.stop_and_resume, str(tmp_path), variant):
        (_, all_epochs, whole), (failed_path, first_epochs, _), (path, last_epochs, resumed) = results
        assert all_epochs == [0, 1, 2, 3] and first_epochs == [0, 1, 2] and last_epochs == [2, 3]
        assert path == failed_path and whole == resumed
        assert "seed" in error and "continues with its own config" in error
    for uid in (0, 1):
        records = [list(read(tmp_path / f"{runs}/script/latest/nodes/{uid:03d}/metrics.jsonl"))
                   for runs in ("whole", "parts")]  # fmt: skip
        compared = ("kind", "round", "loss", "accuracy_merged", "consensus_distance", "steps", "lr")
        whole_records, parts = ([{key: record.get(key) for key in compared} for record in run] for run in records)
        assert whole_records == parts
    kept = sorted(folder.name[:8] for folder in (tmp_path / "parts/script/latest/checkpoints").iterdir())
    assert kept == ["00000003", "00000004"]


@pytest.mark.slow
def test_another_number_of_ranks_resumes_a_run(tmp_path: Path) -> None:
    """Rank r starts from the newest checkpoint of rank r mod n, where n ranks wrote that checkpoint."""
    ends = [end for _, _, end in run_ranks(3, recording.train_with_other_world_size, str(tmp_path), 2, False)]
    for ranks, expected_epochs, epochs in ((2, [2], 3), (4, [3], 4), (1, [4, 5], 6)):
        results = run_ranks(ranks, recording.train_with_other_world_size, str(tmp_path), epochs, True)
        for rank, (trained, before, _) in enumerate(results):
            assert before == ends[rank % len(ends)] and trained == expected_epochs
        ends = [end for _, _, end in results]
        summary = json.loads((tmp_path / "script/latest/summary.json").read_text())
        assert summary["num_nodes"] == ranks and summary["status"] == "finished"
    done = CliRunner().invoke(main, ["compare", str(tmp_path / "script")])
    assert done.exit_code == 0, done.output


@pytest.mark.slow
def test_a_run_that_failed_in_its_first_epoch_starts_over(tmp_path: Path) -> None:
    for trained, error in run_ranks(2, recording.restart_after_failed_first_epoch, str(tmp_path)):
        assert trained == [0, 1]
        assert "records of 1 epochs but no checkpoint that all 2 ranks have" in error
    evaluated = [record["round"] for record in read(tmp_path / "script/latest/nodes/000/metrics.jsonl")
                 if record["kind"] == "evaluation"]  # fmt: skip
    assert evaluated == [0, 1, 2]


@pytest.mark.slow
def test_a_checkpoint_is_deleted_only_when_all_ranks_have_the_next(tmp_path: Path) -> None:
    (errors_0, trained), (errors_1, _) = run_ranks(2, recording.fail_to_write_on_rank_1, str(tmp_path))
    assert "rank 1 could not write a checkpoint: OSError: disk full" in errors_0[0]
    assert errors_1 == ["OSError: disk full"]
    assert trained == [1, 2]


@pytest.mark.slow
def test_a_resumed_run_draws_the_same_random_numbers(tmp_path: Path) -> None:
    for whole, parts in run_ranks(2, recording.draw_random_numbers, str(tmp_path)):
        assert whole == parts and len(whole) == 5


@pytest.mark.slow
def test_gradients_accumulated_across_the_end_of_an_epoch_survive_a_resume(tmp_path: Path) -> None:
    for whole, parts in run_ranks(2, recording.accumulate_across_epochs, str(tmp_path)):
        assert whole == parts and whole[1] == 5


@pytest.mark.slow
def test_a_run_cannot_be_resumed_while_another_process_records_it(tmp_path: Path) -> None:
    """As where the launcher alone was killed: the lock of rank 1's old process is held for four more seconds."""
    run_ranks(2, recording.train, str(tmp_path), 1)
    lock_of_old_process = lock_folder(tmp_path / "script/latest/nodes/001")
    errors = run_ranks(2, recording.train_while_another_records, str(tmp_path), 0.2)
    assert errors[0].startswith("AssemblyError: rank 1 could not make the run directory: EnvironmentFault: another")
    assert errors[1].startswith("EnvironmentFault: another process still writes to")
    Timer(4.0, lock_of_old_process.close).start()
    assert run_ranks(2, recording.train_while_another_records, str(tmp_path), 60.0) == [[1], [1]]


@pytest.mark.slow
def test_a_run_directory_without_its_first_files_is_not_resumed(tmp_path: Path) -> None:
    """Such a directory is left if the process is killed while it makes it."""
    (before, *_), = run_ranks(1, recording.train, str(tmp_path), 1)
    (Path(before) / "task.json").unlink()
    (after, trained, _), = run_ranks(1, recording.train, str(tmp_path), 1, 1, None, True)
    assert before != after and trained == [0]


def test_a_failed_run_has_no_summary_and_compare_reports_it_unfinished(tmp_path: Path) -> None:
    run_ranks(1, recording.train, str(tmp_path), 3, 1, 1)
    assert not (tmp_path / "script/latest/summary.json").exists()
    done = CliRunner().invoke(main, ["compare", str(tmp_path / "script")])
    assert done.exit_code != 0 and "not finished" in done.output


@pytest.mark.slow
def test_invalid_arguments_of_a_training_run_are_refused(tmp_path: Path) -> None:
    for metrics, keys, keep, config, state, add in run_ranks(2, recording.reasons_of_refusals, str(tmp_path)):
        assert "state.also.odd.lock must be tensors, numbers" in state
        assert "metrics must be accuracy, loss or Metric objects" in metrics
        assert "evaluate must return loss, got accuracy, loss" in keys
        assert "keep 0 or more" in keep and "numbers, text, lists and dicts" in config and "inside `for epoch" in add


@pytest.mark.parametrize("words", [["run"], ["validate"], ["evaluate"], ["simulate"]])
def test_commands_that_run_experiments_refuse_the_run_of_a_script(runs: Path, words: list[str]) -> None:
    latest = runs / "script/latest"
    for target in (latest, *([] if words == ["evaluate"] else [latest / "config.resolved.yaml"])):
        done = CliRunner().invoke(main, [*words, str(target)])
        assert done.exit_code == 2 and "is the run of a script: its config is not an experiment" in done.stderr
        assert "not a known key" not in done.stderr and "command.txt" in done.stderr


def test_status_reports_whether_ranks_finished_failed_or_died(runs: Path, tmp_path: Path) -> None:
    statuses = json.loads(invoke("status", str(runs / "script/latest"), "--json"))
    assert {uid: (status["doing"], status["round"], status["rounds"]) for uid, status in statuses.items()} == {
        "0": ("finished", 3, 3), "1": ("finished", 3, 3),
    }  # fmt: skip
    run_ranks(1, recording.train, str(tmp_path), 3, 1, 1)
    assert "failed" in invoke("status", str(tmp_path / "script/latest"), "--once")
    path = tmp_path / "script/latest/nodes/000/status.json"
    status = json.loads(path.read_text())
    assert (status["doing"], status["round"], status["rounds"]) == ("failed", 1, 3)
    # a rank that is killed leaves a status like this
    path.write_text(json.dumps({**status, "doing": "trains", "time": status["time"] - 60}))
    assert "gone" in invoke("status", str(tmp_path / "script/latest"), "--once")


@pytest.mark.parametrize(
    ("taken", "first", "epochs"), [(1, 2, (1, 2, 3, 4)), (9, 10, (2, 3, 4)), (10, 10, (3, 4))],
    ids=["first epoch", "last step", "evaluation"],
)  # fmt: skip
def test_a_process_that_joins_takes_part_in_evaluations_that_have_not_begun(
    taken: int, first: int, epochs: tuple[int, ...], tmp_path: Path
) -> None:
    with JobProcesses() as job:
        job.start_founders(2, free_ports(1), members.record_join, str(tmp_path), None, taken)
        addresses = [job.receive(rank) for rank in range(2)]
        job.start(members.record_join, {}, str(tmp_path), addresses[0], taken)
        job.receive(2)
        *founders, newcomer = [job.receive(number) for number in range(3)]
    assert newcomer == {"first": first, "evaluations": [(epoch, 3) for epoch in epochs]}
    for founder in founders:
        assert founder["evaluations"] == [(epoch, 3 if epoch in epochs else 2) for epoch in range(5)]


@pytest.mark.slow
def test_a_process_that_comes_back_as_another_epoch_ends_takes_part_in_its_evaluation(tmp_path: Path) -> None:
    with JobProcesses() as job:
        job.start_founders(3, free_ports(1), members.record_return, str(tmp_path))
        suspended = job.receive(2)
        for rank in range(2):
            job.receive(rank)
        os.kill(suspended, signal.SIGCONT)
        evaluations = [job.receive(rank) for rank in range(3)]
    assert evaluations[0] == evaluations[1] == [(0, 3), (1, 2), (2, 2), (3, 3), (4, 3)]
    assert evaluations[2][-2:] == [(3, 3), (4, 3)]


@pytest.mark.slow
def test_an_elastic_job_is_recorded_and_resumed_with_fewer_ranks(tmp_path: Path) -> None:
    """Rank 1 is killed and uid 3 joins; then ranks 0 and 1 resume what uids 0, 2 and 3 have saved."""
    runs = str(tmp_path)
    with JobProcesses() as job:
        job.start_founders(3, free_ports(1), members.record_training, runs, None, False, None)
        addresses = [job.receive(rank) for rank in range(3)]
        assert job.wait_for_exit(1) == -signal.SIGKILL
        job.start(members.record_training, {}, runs, addresses[0], False, None)
        job.receive(3)
        results = [job.receive(number) for number in (0, 2, 3)]
    (path,) = {result["path"] for result in results}
    assert [result["uid"] for result in results] == [0, 2, 3]
    (last,) = {result["trained"][-1] for result in results}
    joined_at_step = results[2]["first"]
    for result in results:
        uid = result["uid"]
        records = list(read(Path(path) / f"nodes/{uid:03d}/metrics.jsonl"))
        evaluations = {record["round"]: record for record in records if record["kind"] == "evaluation"}
        assert [record["round"] for record in records if record["kind"] == "round"] == result["trained"]
        assert max(evaluations) == last + 1 and evaluations[last + 1]["contributors"] == 3
        # after an epoch, a newcomer evaluates with the others unless they have begun
        assert min(evaluations) in ((0,) if uid != 3 else (-(-joined_at_step // 5), joined_at_step // 5 + 1))
        merged = [evaluations[number]["loss_merged"] for number in sorted(evaluations)]
        if uid != 3:
            assert merged[-1] < 0.7 * merged[0] and evaluations[0]["contributors"] == 3
    assert not (Path(path) / "summary.json").exists()
    with JobProcesses() as job:
        job.start_founders(2, free_ports(1), members.record_training, runs, None, True, last + 3)
        resumed = [[job.receive(rank) for _ in range(2)][1] for rank in range(2)]
    for result in resumed:
        assert result["path"] == path and result["trained"] == [last + 1, last + 2]
    summary = json.loads((Path(path) / "summary.json").read_text())
    assert summary["status"] == "finished" and set(summary["nodes"]) == {"0", "1", "2", "3"}
    invoke("compare", str(tmp_path / "script"), "--run-dir", runs)
