from __future__ import annotations

import io
from typing import Any

import pytest
from rich.console import Console

from decentnode.formatting import duration, number, plural, size
from decentnode.metrics.figures import LOSS, Metric, TaskMetrics
from decentnode.report.closing import closing
from decentnode.report.reading.progress import RunProgress
from decentnode.report.table import live_table


def test_sizes_durations_and_numbers_are_formatted() -> None:
    assert [size(n) for n in (0, 999, 1500, 2.5e6, 4e12)] == ["0 B", "999 B", "1.5 kB", "2.5 MB", "4.0 TB"]
    assert [duration(s) for s in (0.212, 14.2, 200, 7500)] == ["212 ms", "14.2 s", "3 min 20 s", "2 h 5 min"]
    assert [duration(s) for s in (0.9996, 59.96, 3599.6)] == ["1.0 s", "1 min 0 s", "1 h 0 min"], "not 1000 ms, 60.0 s"
    assert [size(count) for count in (999, 999_940, 999_960)] == ["999 B", "999.9 kB", "1.0 MB"], "not 1000.0 kB"
    assert (plural(1, "node"), plural(2, "node"), number(None, ".3f"), number(0.5, ".1f")) == (
        "1 node", "2 nodes", "-", "0.5",
    )  # fmt: skip


def progress_of_two_nodes() -> RunProgress:
    """Returns the progress after node 0 has finished 4 rounds and node 1 has finished 5."""
    state = RunProgress.of(10, [0, 1])
    for uid in (0, 1):
        state.update(uid, {"kind": "round", "round": 3 + uid, "loss": 0.5, "seconds": 0.1, "wait_seconds": 0.05,
                           "data_bytes_sent": 900, "metadata_bytes_sent": 100, "waited_for": 1 - uid,
                           "waited_seconds": 0.02 * (uid + 1)})  # fmt: skip
    return state


def test_an_evaluation_is_complete_when_all_nodes_have_reported_it() -> None:
    state = progress_of_two_nodes()
    evaluation: dict[str, Any] = {"kind": "evaluation", "round": 5, "accuracy": 0.8, "accuracy_mean": 0.7,
                                  "accuracy_merged": 0.9, "consensus_distance": 0.013}  # fmt: skip
    assert not state.update(0, evaluation)
    assert state.update(1, {**evaluation, "accuracy": 0.6})
    assert state.latest["worst"] == 0.6
    assert state.evaluation_line() == (
        "round=5/10 loss=0.5000 acc_mean=0.700 acc_min=0.600 acc_merged=0.900 consensus_distance=1.3e-02 sent=2.0kB "
        "wait_max=node1:40ms(for node0)"
    ), "the loss of node 0 in round 4 was lost"


def report_round(
    state: RunProgress, uid: int, round: int, loss: float, sent: int, accuracy: float | None = None
) -> bool:
    """Reports that a node has finished `round` rounds, and with `accuracy` its evaluation after them. Returns whether
    the evaluation is complete."""
    state.update(uid, {"kind": "round", "round": round - 1, "loss": loss, "data_bytes_sent": sent})
    if accuracy is None:
        return False
    return state.update(uid, {"kind": "evaluation", "round": round, "accuracy": accuracy, "accuracy_mean": 0.5})


def test_accuracies_are_shown_with_the_round_of_their_evaluation() -> None:
    state = RunProgress.of(10, [0, 1], evaluate_every=4)
    report_round(state, 0, 4, 0.3, 1000, 0.5)
    report_round(state, 0, 6, 0.1, 3000)  # node 0 runs ahead
    assert report_round(state, 1, 4, 0.5, 1000, 0.5)
    assert state.evaluation_line().startswith("round=4/10 loss=0.4000 acc_mean=0.500 ")
    assert " sent=2.0kB" in state.evaluation_line(), "the bytes that had been sent after round 4"
    report_round(state, 1, 5, 0.3, 2000)
    assert state.line() == "round=5/10 loss=0.2000 sent=5.0kB"
    assert not state.evaluation_due
    report_round(state, 0, 8, 0.1, 5000)
    report_round(state, 1, 8, 0.1, 5000)
    assert state.evaluation_due, "the line of the evaluation will report round 8"
    console = Console(file=io.StringIO(), width=120)
    console.print(live_table(state, 4.0, "", 20))
    assert "0.500 (4)" in console.file.getvalue()  # type: ignore[attr-defined]


def test_the_mean_is_computed_when_nodes_evaluate_only_their_own_models() -> None:
    state = RunProgress.of(10, [0, 1])
    for uid in (0, 1):
        state.update(uid, {"kind": "round", "round": 4, "loss": 0.5})
        state.update(uid, {"kind": "evaluation", "round": 5, "accuracy": 0.5 + 0.2 * uid})
    assert state.evaluation_line() == "round=5/10 loss=0.5000 acc_mean=0.600 acc_min=0.500 sent=0B"


def test_progress_with_own_rounds_is_that_of_the_furthest_node() -> None:
    """The run ends when the first node has made all rounds, so a slow node must not enter the estimate of the end."""
    state = RunProgress.of(100, [0, 1], evaluate_every=10, own_rounds=True)
    report_round(state, 0, 10, 0.5, 0, 0.5)
    report_round(state, 1, 0, 0.5, 0)
    assert state.seconds_left(1.0) is None
    report_round(state, 0, 60, 0.1, 1000, 0.9)
    report_round(state, 1, 10, 0.3, 1000, 0.5)
    assert state.seconds_left(6.0) == 4.0 and not state.evaluation_due
    assert state.line() == "round=10-60/100 loss=0.2000 acc_mean=0.700 acc_min=0.500 sent=2.0kB"
    console = Console(file=io.StringIO(), width=120)
    console.print(live_table(state, 4.0, "", 20))
    assert "round 60/100" in console.file.getvalue()  # type: ignore[attr-defined]


def test_evaluations_before_training_are_not_averaged_with_later_ones() -> None:
    state = RunProgress.of(100, [0, 1], evaluate_every=10, own_rounds=True)
    report_round(state, 0, 0, 0.5, 0, 0.1)
    report_round(state, 1, 0, 0.5, 0, 0.1)
    assert "acc_mean=0.100 acc_min=0.100" in state.line()
    report_round(state, 0, 10, 0.1, 1000, 0.9)
    report_round(state, 1, 9, 0.3, 1000)
    assert state.line() == "round=9-10/100 loss=0.2000 acc_mean=0.900 acc_min=0.900 sent=2.0kB"


def sent_part(line: str) -> str:
    return next(part for part in line.split() if part.startswith("sent="))


def test_bytes_sent_keep_growing_when_a_node_restarts() -> None:
    """A node's new process counts from 0, and bytes of a node that is away stay counted."""
    state = RunProgress.of(20, [0, 1], evaluate_every=4)
    report_round(state, 0, 4, 0.3, 4000, 0.5)
    assert report_round(state, 1, 4, 0.3, 4000, 0.5) and sent_part(state.evaluation_line()) == "sent=8.0kB"
    state.lose(1)
    assert report_round(state, 0, 8, 0.3, 8000, 0.5), "the lost node 1 must not be waited for"
    assert sent_part(state.evaluation_line()) == sent_part(state.line()) == "sent=12.0kB"
    state.restart(1)
    state.update(1, {"kind": "generation", "generation": 2, "members": [0, 1], "joined": [1], "round": 9})
    report_round(state, 1, 10, 0.3, 5000)  # its first report is larger than its last one before the restart
    assert sent_part(state.line()) == "sent=17.0kB" and state.nodes[1].sent_bytes == 9000
    report_round(state, 1, 11, 0.3, 1000)  # a smaller number: another restart, which nothing reported
    assert sent_part(state.line()) == "sent=18.0kB"
    console = Console(file=io.StringIO(), width=120)
    console.print(live_table(state, 4.0, "", 20))
    assert "10.0 kB" in console.file.getvalue()  # type: ignore[attr-defined]


def test_the_minimum_over_the_nodes_of_one_machine_is_labelled_here() -> None:
    state = RunProgress.of(20, [2, 3], evaluate_every=4, elsewhere=True)
    report_round(state, 2, 4, 0.5, 1000, 0.9)
    report_round(state, 3, 4, 0.5, 1000, 0.8)
    assert " acc_mean=0.500 acc_min_here=0.800 " in state.evaluation_line()


def test_the_progress_line_of_a_run_whose_nodes_are_all_lost() -> None:
    state = RunProgress.of(10, [0, 1])
    report_round(state, 0, 4, 0.3, 1000, 0.5)
    for uid in (0, 1):
        state.lose(uid)
    assert state.line() == "round=0/10 sent=1.0kB" and not state.evaluation_due and state.round == 0
    assert state.seconds_left(1.0) is None and state.left_text(2.0) == ""
    state.update(1, {"kind": "evaluation", "round": 5, "accuracy": 0.5})


def test_each_side_of_a_network_partition_has_its_own_figures() -> None:
    """No mean is taken over nodes of different sides."""
    state = RunProgress.of(20, range(4), evaluate_every=4)
    for uid in range(4):
        report_round(state, uid, 4, 0.5, 1000, 0.5)
    for uid in range(4):
        members = [0, 1] if uid < 2 else [2, 3]
        state.update(uid, {"kind": "generation", "generation": 1, "members": members, "left": [], "round": 5})
    report_round(state, 0, 8, 0.1, 2000, 0.9)
    assert report_round(state, 1, 8, 0.3, 2000, 0.9)
    assert state.evaluation_line().startswith("nodes=0-1 round=8/20 loss=0.2000 acc_mean=0.500 acc_min=0.900 ")
    report_round(state, 2, 7, 0.7, 1500)
    report_round(state, 3, 6, 0.9, 1500)
    assert state.line() == "nodes=0-1 round=8/20 loss=0.2000, nodes=2-3 round=6/20 loss=0.8000 sent=7.0kB"
    report_round(state, 2, 8, 0.6, 2000, 0.2)
    report_round(state, 3, 8, 0.6, 2000)
    assert state.evaluation_due, "the evaluation of the second side is not complete"
    assert report_round(state, 3, 8, 0.6, 2000, 0.2) and not state.evaluation_due
    assert state.evaluation_line().startswith("nodes=2-3 round=8/20 loss=0.6000 acc_mean=0.500 acc_min=0.200 ")
    console = Console(file=io.StringIO(), width=120)
    console.print(live_table(state, 4.0, "", 20))
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert "nodes 0-1 after round 8: mean accuracy" in text and "nodes 2-3 after round 8: mean accuracy" in text
    late = {"kind": "generation", "generation": 0, "members": [0, 1, 2, 3], "round": 5}
    state.update(3, late)
    assert len(state.parts()) == 2, "the record of an earlier generation must be ignored"
    state.update(0, {**late, "generation": 2, "round": 9})
    assert state.line().startswith("round=8/20 loss=")


def test_the_progress_line_before_the_first_record() -> None:
    assert RunProgress.of(10, [0, 1]).line() == "round=0/10 sent=0B"


@pytest.mark.parametrize("max_rows", [1, 20])
def test_the_live_table_is_limited_to_its_rows_and_counts_hidden_nodes(max_rows: int) -> None:
    console = Console(file=io.StringIO(), width=100, force_terminal=False)
    console.print(live_table(progress_of_two_nodes(), 4.0, "a note", max_rows))
    assert isinstance(console.file, io.StringIO)
    text = console.file.getvalue()
    assert "round 4/10" in text and "a note" in text
    assert ("1 more nodes" in text) == (max_rows == 1)


def make_summary(**changes: Any) -> dict[str, Any]:
    return {
        "status": "finished", "rounds": 10, "rounds_planned": 10, "wall_seconds": 14.2, "accuracy_mean": 0.75,
        "accuracy_merged": 0.8, "consensus_distance": 0.003, "round_seconds_median": 0.1, "bytes_sent_total": 4000,
        "bytes_evaluation_total": 3e6, "bytes_protocol_total": 700, "bytes_control_total": 0,
        "nodes": {"0": {"accuracy": 0.7}, "1": {"accuracy": 0.8}},
        "waiting": {"share": 0.31, "seconds_total": 1.0, "node": 1, "for": 0, "seconds": 0.5}, **changes,
    }  # fmt: skip


def test_the_closing_counts_nodes_that_left_or_were_lost_among_the_senders() -> None:
    text = "\n".join(closing(make_summary(left={"2": 7}, lost={"1": "killed", "3": "killed"})))
    assert "4.0 kB of payloads sent by 4 nodes, 1.0 kB each" in text


def test_the_closing_says_who_waited_for_whom() -> None:
    text = "\n".join(closing(make_summary()))
    assert text.startswith("done in 14.2 s: mean test accuracy 0.750 (min 0.700 node 0, max 0.800 node 1)")
    assert "4.0 kB of payloads sent by 2 nodes, 2.0 kB each; 10 rounds of 100 ms" in text
    assert "other    3.0 MB evaluation, 700 B protocol, 0 B control" in text
    again = "\n".join(closing(make_summary(bytes_resent_total=300)))
    assert "other    3.0 MB evaluation, 700 B protocol (300 B of it sent again), 0 B control" in again
    assert "31 % of the nodes' time; longest was node 1 for node 0: 500 ms" in text


def test_the_closing_of_a_failed_run_says_after_which_round_it_was_evaluated() -> None:
    failed = make_summary(status="failed", rounds=7, evaluated_round=5)
    assert closing(failed)[0].startswith("failed after round 7 of 10, 14.2 s: after round 5 mean test accuracy 0.750 ")
    assert ": mean test accuracy" in closing(make_summary(evaluated_round=10))[0]


def test_the_closing_names_the_nodes_that_rounds_went_on_without() -> None:
    found = closing(make_summary(rounds_without_total=27, losses={"3": 26, "1": 1}))
    assert found[-1] == "losses   27 rounds of nodes continued without node 3 (26 times), node 1"
    many = closing(make_summary(rounds_without_total=28, losses={str(uid): 4 for uid in range(7)}))
    assert many[-1].endswith("node 4 (4 times) and 2 others")
    assert not any("losses" in line for line in closing(make_summary()))


def test_the_closing_of_a_run_that_failed_early() -> None:
    early = make_summary(status="failed", rounds=0, accuracy_mean=None, nodes={}, waiting={"share": 0.0})
    assert closing(early) == ["failed after round 0 of 10, 14.2 s"]


RATING = TaskMetrics("rating", (Metric("rmse", "stars", "the root", "lower", word="RMSE"), LOSS))


def test_progress_table_and_closing_show_the_metrics_of_the_task() -> None:
    state = RunProgress.of(10, [0, 1], measured=RATING)
    for uid, rmse in ((0, 1.25), (1, 1.5)):
        state.update(uid, {"kind": "evaluation", "round": 4, "rmse": rmse, "rmse_mean": 1.375, "rmse_merged": 1.125})
    line = state.evaluation_line()
    assert " rmse_mean=1.375 rmse_max=1.500 rmse_merged=1.125 " in line, "the worst is the largest"
    assert "acc" not in line
    console = Console(file=io.StringIO(), width=120)
    console.print(live_table(state, 4.0, "", 20))
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert "RMSE (after)" in text and "1.250 (4)" in text and "mean RMSE 1.375" in text
    ended = make_summary(task=RATING.plain(), rmse_mean=1.375, rmse_merged=1.125, nodes={"0": {"rmse": 1.25}, "3": {}})
    assert "mean test RMSE 1.375 (min 1.250 node 0, max 1.250 node 0), merged model 1.125" in closing(ended)[0]
    assert "accuracy" not in closing(ended)[0]
