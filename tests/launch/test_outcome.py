from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from decentnode.launch.children.messages import Failed, Finished
from decentnode.launch.files.run_dir import node_dir, promote_merged_model
from decentnode.launch.reporting.outcome import Durations, Ledger, first_cause, summary
from decentnode.metrics.writer import MetricsWriter
from decentnode.report.closing import closing
from tests.launch.facts import FACTS, FINISHED


def test_the_first_cause_is_the_first_failure_that_does_not_follow_from_another() -> None:
    follower, cause = Failed(1, 5, "peer lost", "", True), Failed(2, 8, "boom", "")
    assert first_cause([follower, cause]) is cause
    assert first_cause([follower]) is follower
    assert first_cause([]) is None


def test_the_summary_has_the_last_reported_figures_of_a_node_that_died() -> None:
    ledger = Ledger()
    ledger.progress(1, {"kind": "round", "round": 3, "data_bytes_sent": 7, "metadata_bytes_sent": 2,
                        "evaluation_bytes_sent": 100})
    ledger.progress(1, {"kind": "evaluation", "round": 4, "accuracy": 0.25})
    ledger.finished[0] = FINISHED
    ledger.failures.append(Failed(1, 8, "boom", "..."))
    found = summary(FACTS, ledger, 8, None, Durations(1.0, 2.0))
    assert (found["status"], found["exit_code"], found["rounds"]) == ("failed", 8, 4)
    assert (found["accuracy_min"], found["bytes_sent_total"], found["bytes_evaluation_total"]) == (0.25, 9, 100)
    assert found["failure"] == {"node": 1, "title": "boom", "exit_code": 8}


def test_totals_include_the_bytes_of_dead_processes() -> None:
    ledger = Ledger()

    def report_round(uid: int, round: int, data: int) -> None:
        ledger.progress(uid, {"kind": "round", "round": round, "data_bytes_sent": data, "evaluation_bytes_sent": 1})

    report_round(0, 2, 300)
    report_round(1, 2, 300)
    ledger.restarted(1)
    report_round(1, 6, 400)  # of the second process of node 1
    report_round(2, 3, 50)
    ledger.progress(0, {"kind": "generation", "members": [0, 1]})
    ledger.finished[0] = Finished(0, {"uid": 0, "rounds": 10, "bytes_data": 1000, "bytes_evaluation": 7}, False)
    ledger.finished[1] = Finished(1, {"uid": 1, "rounds": 10, "bytes_data": 700, "bytes_evaluation": 5}, False)
    found = summary(FACTS, ledger, 0, None, Durations(1.0, 2.0))
    assert sorted(found["nodes"]) == ["0", "1"] and ledger.restarts == {1: 1}
    assert found["bytes_sent_total"] == found["bytes_data_total"] == 1000 + 700 + 300 + 50
    assert found["bytes_evaluation_total"] == 7 + 5 + 1 + 1


def test_figures_of_all_machines_come_from_the_reports_of_node_0() -> None:
    ledger = Ledger()
    reports: dict[str, dict[str, Any]] = {str(uid): {"uid": uid, "rounds": 10} for uid in (0, 1, 2, 3, 5)}
    ledger.finished[0] = replace(FINISHED, reports=reports)
    assert sorted(ledger.figures()) == [0, 1, 2, 3, 5]


def test_the_summary_of_a_stopped_run_has_the_finished_nodes_of_all_generations() -> None:
    """Node 1 was frozen when the run was stopped; later it woke up in a generation of its own and finished alone."""
    ledger = Ledger()
    for uid, members in ((0, [0, 1]), (0, [0, 5]), (5, [0, 5]), (1, [1])):
        ledger.progress(uid, {"kind": "generation", "members": members})
    ledger.progress(2, {"kind": "round", "round": 3})
    assert ledger.members == [1], "not those of the last record"
    for uid in (0, 5, 1):
        ledger.finished[uid] = Finished(uid, {"uid": uid, "rounds": 4 + uid}, True)
    found = summary(FACTS, ledger, 130, None, Durations(1.0, 2.0))
    assert found["members"] == [0, 1, 5] and sorted(found["nodes"]) == ["0", "1", "5"]


def test_bytes_are_added_up_when_a_counter_starts_over_without_a_notice_of_a_restart() -> None:
    """A simulated world kills and restarts nodes without telling the ledger."""
    ledger = Ledger()
    for round, sent in ((3, 400), (4, 500), (9, 100), (10, 200)):
        ledger.progress(0, {"kind": "round", "round": round, "data_bytes_sent": sent})
    ledger.finished[0] = replace(FINISHED, figures={"uid": 0, "rounds": 11, "bytes_data": 200})
    assert summary(FACTS, ledger, 0, None, Durations(1.0, 2.0))["bytes_sent_total"] == 700


def test_an_asynchronous_run_counts_as_stopped_only_if_no_node_made_all_rounds() -> None:
    """Nodes with rounds of their own: the node that made all rounds was in another generation than the others, to which
    its end looks like an order to stop."""
    finished = {0: replace(FINISHED, stopped=True), 1: replace(FINISHED, uid=1)}
    assert Ledger(finished=finished).stopped and not Ledger(own_rounds=True, finished=finished).stopped
    assert Ledger(own_rounds=True, finished={0: finished[0]}).stopped
    assert not Ledger(own_rounds=True).stopped


def test_the_summary_names_the_attackers() -> None:
    """The config may give only their number, and the seed decide which nodes they are."""
    with_attackers, without = (summary(facts, Ledger(), 0, None, Durations(1.0, 2.0))
                      for facts in (replace(FACTS, attackers=[1, 2]), FACTS))  # fmt: skip
    assert with_attackers["attackers"] == [1, 2] and "attackers" not in without


def test_the_summary_lists_the_rounds_in_which_newcomers_came_and_left() -> None:
    ledger = Ledger()
    courses = [(1, 4, [0, 1, 2, 3, 4]), (2, 9, [0, 1, 2, 4]), (3, 12, [0, 1, 2, 3, 4]), (4, 15, [0, 1, 4])]
    for uid in (1, 0):
        for number, round, members in courses:
            ledger.progress(uid, {"kind": "generation", "generation": number, "round": round, "members": members})
    ledger.finished[0] = replace(FINISHED, uid=0)
    found = summary(replace(FACTS, machines=[[0, 1], [2]]), ledger, 0, None, Durations(1.0, 2.0))
    assert found["newcomers"] == {"3": [[4, 9], [12, 15]], "4": [[4, None]]}, "node 2 is in the mapping: no newcomer"
    ledger = Ledger(latest=ledger.latest, _members=ledger._members)
    assert "newcomers" not in summary(FACTS, ledger, 0, None, Durations(1.0, 2.0))


def test_lost_and_left_nodes_of_other_machines_are_in_the_summary() -> None:
    """FACTS has nodes 0 and 1 on this machine, and 2, 3, 5 elsewhere."""
    ledger = Ledger()
    first = {"kind": "generation", "generation": 1, "round": 4, "members": [0, 1, 2], "left": [3, 4]}
    second = {"kind": "generation", "generation": 2, "round": 6, "members": [0, 1, 3], "left": [2], "departed": [2]}
    ended = {"kind": "generation", "generation": 3, "round": 10, "members": [0, 1], "left": [3], "departed": [3]}
    for record in (first, second, ended):
        for uid in (0, 1):
            ledger.progress(uid, record)
    ledger.finished = {uid: replace(FINISHED, uid=uid) for uid in (0, 1)}
    found = summary(replace(FACTS, machines=[[0, 1], [2, 3, 4]]), ledger, 0, None, Durations(1.0, 2.0))
    assert found["lost"] == {"4": "node 4: the others continued without it from round 4"}
    assert found["left"] == {"2": 6}, "node 3 rejoined, and departed only as it had finished"
    assert found["elsewhere"] == [2, 4]
    lines = closing(found)
    assert any("sent by 2 nodes" in line for line in lines), "what nodes on other machines sent is not known here"
    assert "left     node 2 after round 6, on request" in lines


def test_the_sides_of_a_network_that_never_healed_are_summarized_separately() -> None:
    ledger = Ledger()
    for uid, members in ((0, [0, 1]), (1, [0, 1]), (2, [2, 3]), (3, [2, 3])):
        ledger.progress(uid, {"kind": "generation", "members": members})
    ledger.progress(4, {"kind": "generation", "members": [0, 1, 4]})  # it has been frozen since
    ledger.finished[0] = replace(FINISHED, uid=0)
    ledger.finished[1] = replace(FINISHED, uid=1)
    assert ledger.excluded_nodes(range(5)) == {4} and ledger.disjoint_generations == []
    assert not ledger.excluded_nodes(range(5), True), "node 4 may still agree with others on a generation"
    for uid in (2, 3):
        ledger.finished[uid] = replace(FINISHED, uid=uid)
    for uid, report in ledger.finished.items():
        ledger.finished[uid] = replace(report, figures={
            "uid": uid, "rounds": 10 - uid // 2, "accuracy": 0.5 + 0.1 * uid, "evaluated_round": 10 - uid // 2,
            "accuracy_merged": 0.6 + 0.1 * (uid // 2), "consensus_distance": 0.01 * (1 + uid // 2),
        })  # fmt: skip
    found = summary(FACTS, ledger, 0, None, Durations(1.0, 2.0))
    assert found["apart"] == [[0, 1], [2, 3]] and found["members"] == [0, 1, 2, 3]
    assert found["accuracy_mean"] == pytest.approx(0.65), "the mean over each node's own model"
    assert found["accuracy_merged"] is None and found["consensus_distance"] is None, "there is none of both sides"
    assert [side["accuracy_merged"] for side in found["sides"]] == [0.6, 0.7]
    assert [side["rounds"] for side in found["sides"]] == [10, 9] and found["rounds"] == 9
    lines = closing(found)
    assert lines[:4] == [
        "done in 2.0 s, in 2 parts that ended separately",
        "apart    nodes 0-1; nodes 2-3 ended in generations of their own; the merged model is that of nodes 0-1",
        "         nodes 0-1 after round 10: mean test accuracy 0.550 (min 0.500 node 0, max 0.600 node 1), "
        "merged model 0.600, consensus distance 1.0e-02",
        "         nodes 2-3 after round 9: mean test accuracy 0.750 (min 0.700 node 2, max 0.800 node 3), "
        "merged model 0.700, consensus distance 2.0e-02",
    ]


def test_the_merged_model_of_the_side_with_the_lowest_uid_becomes_the_merged_model_of_the_run(tmp_path: Path) -> None:
    for uid in ("001", "003"):
        (tmp_path / "models" / f"apart-{uid}" / "ema").mkdir(parents=True)
        (tmp_path / "models" / f"apart-{uid}" / "merged.safetensors").write_text(uid)
        (tmp_path / "models" / f"apart-{uid}" / "ema" / "merged.safetensors").write_text(f"ema {uid}")
    promote_merged_model(tmp_path)
    models = tmp_path / "models"
    assert (models / "merged.safetensors").read_text() == "001"
    assert (models / "ema" / "merged.safetensors").read_text() == "ema 001"
    assert not (models / "apart-001").exists() and (models / "apart-003" / "merged.safetensors").exists()
    promote_merged_model(tmp_path)
    assert (models / "merged.safetensors").read_text() == "001", "a second call changed it"


def write_round_records(folder: Path, uid: int, rounds: range, data: int) -> list[dict[str, Any]]:
    """Writes and returns records of rounds, in each of which the node sends `data` bytes and misses node 3."""
    node_dir(folder, uid).mkdir(parents=True, exist_ok=True)
    writer = MetricsWriter(node_dir(folder, uid) / "metrics.jsonl")
    records = [{"kind": "round", "round": round, "data_bytes_sent": data * (index + 1), "lost": [3]}
               for index, round in enumerate(rounds)]  # fmt: skip
    for record in records:
        writer.write(record)
    writer.close()
    return records


def test_rounds_and_bytes_that_did_not_reach_the_supervisor_are_read_from_files(tmp_path: Path) -> None:
    """Those of a restarted node, too, whose second process counts bytes from 0 and sends more than the first."""
    ledger = Ledger(tmp_path)
    ledger.progress(0, write_round_records(tmp_path, 0, range(9), 100)[0])
    ledger.progress(1, write_round_records(tmp_path, 1, range(3), 100)[0])
    ledger.restarted(1)
    ledger.progress(1, write_round_records(tmp_path, 1, range(5, 8), 1000)[0])
    ledger.failures.append(Failed(1, 8, "boom", "..."))
    found = summary(FACTS, ledger, 8, tmp_path, Durations(1.0, 2.0))
    assert (found["rounds"], found["rounds_without_total"], found["losses"]) == (8, 9 + 3 + 3, {"3": 15})
    assert found["bytes_sent_total"] == 9 * 100 + 3 * 100 + 3 * 1000
    assert summary(FACTS, ledger, 8, tmp_path, Durations(1.0, 2.0)) == found


def test_reported_records_count_if_files_are_older_or_damaged(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path)
    write_round_records(tmp_path, 0, range(2), 100)  # then the disk was full
    ledger.progress(0, {"kind": "round", "round": 6, "data_bytes_sent": 700})
    ledger.progress(1, {"kind": "round", "round": 4, "data_bytes_sent": 500})
    ledger.progress(2, {"kind": "round", "round": 4, "data_bytes_sent": 500})
    node_dir(tmp_path, 2).mkdir()
    (node_dir(tmp_path, 2) / "metrics.jsonl").write_bytes(b'{"kind": "rou')
    ledger.catch_up()
    assert [ledger.latest[uid]["bytes_data"] for uid in range(3)] == [700, 500, 500]


def test_samples_of_dead_and_restarted_nodes_are_listed_by_generation() -> None:
    ledger = Ledger()
    dealt = {"kind": "dealt", "generation": 0, "first_round": 0, "samples": 300, "adopted": 0, "trained": 0}
    ledger.progress(1, dealt)
    ledger.progress(1, {"kind": "round", "round": 0, "samples": 200})
    ledger.progress(1, {"kind": "round", "round": 1, "samples": 200})
    ledger.progress(1, {**dealt, "generation": 1, "first_round": 2, "samples": 400, "adopted": 100})
    ledger.progress(1, {"kind": "round", "round": 2, "samples": 50})
    before_restart = ledger.samples()
    assert before_restart == {"1": [
        {"generation": 0, "from_round": 0, "samples": 300, "adopted": 0, "trained": 400, "epochs": 1,
         "of_last_epoch": 100},
        {"generation": 1, "from_round": 2, "samples": 400, "adopted": 100, "trained": 50, "epochs": 0,
         "of_last_epoch": 50},
    ]}  # fmt: skip
    ledger.restarted(1)
    ledger.finished[1] = replace(FINISHED, uid=1, figures={"uid": 1, "dealt": "2:5:300:0:90 0:0:300:0:200"})
    assert ledger.samples()["1"][:2] == before_restart["1"] and ledger.samples()["1"][2]["trained"] == 90
    ledger.finished[2] = replace(FINISHED, uid=2, figures={"uid": 2})
    assert "2" not in ledger.samples()
