"""Whole runs are resumed with processes, in one process and from other machines' files, or refuse to resume."""

from __future__ import annotations

import contextlib
import json
import shutil
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file

from decentnode.checkpoint import store
from decentnode.checkpoint.store import Cut, Snapshot
from decentnode.cli import start
from decentnode.errors import DecentnodeError
from decentnode.launch.children.messages import Request
from decentnode.launch.files.resume import ResumableRun, _done_by_all
from decentnode.launch.reporting.outcome import Outcome
from decentnode.launch.supervisor import supervise
from decentnode.metrics.reader import read, read_kind
from decentnode.report.closing import closing
from decentnode.report.reading import repeats
from tests.cli.terminal import wait_until
from tests.commands import started
from tests.launch.faults import experiment
from tests.launch.stand_ins import RecordingObserver


class Folder:
    """A folder with a config and its runs; `observer` has the notices of the last run."""

    def __init__(self, path: Path, **sections: Any) -> None:
        self.path, self.observer = path, RecordingObserver()
        path.mkdir(exist_ok=True)
        given = {"communication": {"name": "inproc"}, "node": {"rounds": 8, "evaluate_every": 4}, **sections}
        (path / "tiny.yaml").write_text(yaml.safe_dump(experiment(**given)))

    def run(self, *overrides: str, resume: str | None = None) -> Outcome:
        request = Request(str(self.path / "tiny.yaml"), [f"run.dir={self.path / 'runs'}", *overrides], resume=resume)
        self.observer = RecordingObserver()
        return supervise(request, self.observer, command="decentnode run tiny.yaml")

    def run_successfully(self, *overrides: str, resume: str | None = None) -> Path:
        """Returns the run directory."""
        outcome = self.run(*overrides, resume=resume)
        assert outcome.exit_code == 0 and outcome.run_dir is not None, outcome
        return outcome.run_dir


def models(run: Path) -> dict[str, torch.Tensor]:
    """Returns the tensors that a run saved, as "FILE/TENSOR"."""
    return {f"{path.stem}/{name}": tensor for path in sorted((run / "models").glob("*.safetensors"))
            for name, tensor in load_file(path).items()}  # fmt: skip


def assert_same_models(one: Path, other: Path) -> None:
    """The runs have the same bits: weight and bias of four nodes and of the merged model."""
    found, expected = models(one), models(other)
    assert found.keys() == expected.keys() and len(found) == 10
    assert all(torch.equal(tensor, expected[name]) for name, tensor in found.items())


@pytest.mark.slow
def test_a_run_may_be_resumed_with_other_faults_and_gives_the_same_models(tmp_path: Path) -> None:
    """Faults are no part of what is computed: the models are those of a run without faults."""
    folder = Folder(tmp_path)
    whole = folder.run_successfully()
    kept = ["node.checkpoint={every: 2}", "node.rounds=4"]
    slow = "faults=[{do: slow, nodes: [1], factor: 1.5, at_round: 1, seconds: 0.5}]"
    struck = folder.run_successfully(*kept, slow)
    assert_same_models(folder.run_successfully("faults=[]", resume=str(struck)), whole)
    assert_same_models(folder.run_successfully(slow, resume=str(folder.run_successfully(*kept))), whole)


@pytest.mark.slow
def test_a_fault_of_a_round_before_the_checkpoint_is_not_injected_again(tmp_path: Path) -> None:
    kill = [{"do": "kill", "nodes": [1], "at_round": 2}]
    node = {"rounds": 6, "evaluate_every": 0, "checkpoint": {"every": 3}, "missing": "regroup"}
    folder = Folder(tmp_path, communication={"name": "auto", "suspect_seconds": 5}, node=node, faults=kill)
    assert folder.run().summary["process_faults"] == {"kill": 1}
    resumed = folder.run("node.rounds=9", resume="")
    assert resumed.exit_code == 0 and resumed.summary["process_faults"] == {} and resumed.summary["rounds"] == 9


CASES = {
    "auto": ["communication=auto", "node.schedule=overlapped", "training.optimizer={name: adam, lr: 0.01}"],
    "zeromq": ["communication=zeromq", "sharing={name: choco, compression: {name: int8, unbiased: true}}"],
    "several": ["communication=auto", "mapping={nodes_per_machine: 4, nodes_per_process: 2}",
                "training.optimizer={name: adam, lr: 0.01}"],
    "collective": ["communication=collective", "sharing=push_sum", "node.schedule=overlapped"],
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.slow
def test_a_run_of_one_process_is_resumed_with_processes_and_the_reverse(tmp_path: Path, case: str) -> None:
    """A checkpoint does not depend on the transport."""
    transport, *others = CASES[case]
    folder = Folder(tmp_path)
    straight = folder.run_successfully(*others)
    keep = "node.checkpoint={every: 3}"
    folder.run_successfully(*others, "name=a", "node.rounds=5", keep)
    by_processes = folder.run_successfully(*others, "name=a", transport, keep, resume="")
    assert_same_models(straight, by_processes)
    assert folder.observer.notices == ["continues after round 5"]
    folder.run_successfully(*others, "name=b", "node.rounds=5", transport, keep)
    assert_same_models(straight, folder.run_successfully(*others, "name=b", keep, resume=""))
    found = json.loads((by_processes / "summary.json").read_text())
    plain = json.loads((straight / "summary.json").read_text())
    assert found["resumed"]["round"] == 5 and found["rounds"] == 8 and len(found["resumed"]["runs"]) == 1
    assert found["bytes_sent_total"] == plain["bytes_sent_total"] and found["accuracy_mean"] == plain["accuracy_mean"]
    assert found["checkpoints_kept"] == len([*(by_processes / "checkpoints").glob("0*/000.json")])
    assert found["checkpoints"] == 2 and found["checkpoint_copy_seconds"] > 0 and found["checkpoint_cpu_seconds"] > 0


@pytest.mark.slow
@pytest.mark.parametrize("sets", [
    ["node.schedule=gossip_async", "sharing=push_sum"], ["node.schedule=ad_psgd"], ["node.schedule=epidemic"],
], ids=["push_sum", "ad_psgd", "epidemic"])  # fmt: skip
def test_a_killed_run_whose_nodes_count_their_own_rounds_is_resumed(tmp_path: Path, sets: list[str]) -> None:
    """SIGKILL ends all processes at once, as a power failure does; each node continues from its own last round."""
    training = {**experiment()["training"], "name": "tests.launch.faults:Slow"}
    node = {"rounds": 60, "evaluate_every": 0, "checkpoint": {"every": 3}}
    folder = Folder(tmp_path, communication={"name": "auto"}, node=node, training=training)
    checkpoints = tmp_path / "runs" / "tiny" / "latest" / "checkpoints"

    def has_checkpoint_of_all_nodes() -> bool:
        return any(len([*folder.glob("*.json")]) == 4 for folder in checkpoints.glob("0*"))

    with started(tmp_path, "run", "tiny.yaml", *(f"--set={override}" for override in sets)) as process:
        wait_until(has_checkpoint_of_all_nodes, "checkpoints of all nodes")
        processes = [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]
        for running in processes:
            with contextlib.suppress(psutil.NoSuchProcess):  # it was about to end
                running.kill()
        psutil.wait_procs(processes, timeout=60)
    assert not (checkpoints.parent / "summary.json").exists()
    with pytest.raises(DecentnodeError, match=r"(?s)these keys differ:.*graph"):
        folder.run(*sets, "graph={name: ring, nodes: 3}", "mapping.nodes_per_machine=3", resume="")
    with pytest.raises(DecentnodeError, match=r"(?s)these keys differ:.*node\.schedule"):
        folder.run("node.schedule=sequential", resume="")
    run = folder.run_successfully(*sets, resume="")
    expected = "continues, each node after its own last round"  # partial files may be named after it
    assert any(notice.startswith(expected) for notice in folder.observer.notices)
    rounds = [read_kind(run / f"nodes/{uid:03d}/metrics.jsonl", "round") for uid in range(4)]
    assert all([record["round"] for record in of_node] == list(range(len(of_node))) for of_node in rounds)
    found = json.loads((run / "summary.json").read_text())
    assert max(map(len, rounds)) == 60 and found["resumed"]["round"] > 0 and found["own_rounds"]
    losses = [[record["loss"] for record in of_node] for of_node in rounds]
    last, first = (sum(sum(of_node[part]) for of_node in losses) for part in (slice(-10, None), slice(10)))
    assert last < 0.95 * first, "the loss, summed over all nodes, as a slow node makes few rounds, does not decrease"
    outcome = folder.run(*sets, resume="")
    assert outcome.exit_code == 0 and "is finished: it has done 60 of 60 rounds" in folder.observer.notices[-1]


@pytest.mark.slow
def test_an_early_stopped_run_says_why_and_so_does_its_resumption(tmp_path: Path) -> None:
    """Runs with processes and in one process stop after the same round with the same models."""
    keys = ["node.rounds=60", "node.evaluate_every=1", "node.checkpoint={every: 50, best: accuracy_merged}"]
    stop = "node.early_stop={figure: accuracy_merged, patience: 2}"
    folder = Folder(tmp_path)
    run = folder.run_successfully(*keys, stop)
    assert_same_models(run, folder.run_successfully(*keys, stop, "name=b", "communication=zeromq"))
    found = json.loads((run / "summary.json").read_text())
    assert found["status"] == "finished" and found["ended"] == "early_stop" and found["rounds"] < 60
    best = found["best"]
    assert best["figure"] == "accuracy_merged" and best["evaluations_since"] == 2
    records = read_kind(run / "nodes/000/metrics.jsonl", "evaluation")
    values = {record["round"]: record["accuracy_merged"] for record in records}
    assert best["value"] == max(values.values()) == values[best["round"]] and best["round"] == found["rounds"] - 2
    mark = json.loads((run / "checkpoints" / "best-003.json").read_text())
    assert mark["round"] == best["round"] and (run / "checkpoints" / mark["cut"] / "003.json").exists()
    lines = closing(found)
    assert lines[0].startswith(f"stopped early after round {found['rounds']} of 60")
    assert lines[1].startswith("best     accuracy_merged") and "not better in 2 evaluations since" in lines[1]
    outcome = folder.run(*keys, stop, resume="tiny")
    assert outcome.exit_code == 0 and len(folder.observer.notices) == 1
    assert f"ended early, after {found['rounds']} of 60 rounds: accuracy_merged was best" in folder.observer.notices[0]
    longer = folder.run_successfully(*keys, "node.early_stop=null", "node.rounds=20", resume="tiny")
    summary = json.loads((longer / "summary.json").read_text())
    assert summary["rounds"] == 20 and summary["ended"] == "rounds" and summary["best"]["evaluations_since"] is None


@pytest.mark.slow
def test_a_run_with_graphs_per_fragment_is_resumed_with_the_same_graphs_only(tmp_path: Path) -> None:
    """The graph of a fragment belongs to what an experiment computes."""
    def fragments(graph: str) -> str:
        weights = f"{{parameters: '*.weight', graph: {{name: {graph}, nodes: 4}}}}"
        return f"parameters={{fragments: [{weights}, {{parameters: '*', every: 2}}]}}"

    folder = Folder(tmp_path)
    keep = "node.checkpoint={every: 3}"
    straight = folder.run_successfully(fragments("complete"))
    folder.run_successfully(fragments("complete"), "name=a", "node.rounds=5", keep)
    assert_same_models(straight, folder.run_successfully(fragments("complete"), "name=a", keep, resume=""))
    with pytest.raises(DecentnodeError, match="graph"):
        folder.run(fragments("star"), "name=a", keep, "node.rounds=9", resume="")


def test_the_metrics_of_earlier_rounds_are_copied_into_the_resumed_run(tmp_path: Path) -> None:
    folder = Folder(tmp_path, node={"rounds": 8, "evaluate_every": 4, "checkpoint": {"every": 3}})
    first = folder.run_successfully()
    for place in (first / "checkpoints").glob("0*"):
        if not place.name.startswith("00000006"):
            shutil.rmtree(place)
    (first / "summary.json").unlink()
    second = folder.run_successfully(resume="")
    for uid in range(4):
        name = f"nodes/{uid:03d}/metrics.jsonl"
        assert [record["round"] for record in read_kind(second / name, "round")] == list(range(8))
        assert [record["round"] for record in read_kind(second / name, "evaluation")] == [0, 4, 8]
        kinds = [record["kind"] for record in read(second / name)]
        assert kinds.index("resumed") > kinds.index("round") and kinds.count("resumed") == 1
        losses = [[record["loss"] for record in read_kind(run / name, "round")] for run in (first, second)]
        assert losses[0] == losses[1]
    assert_same_models(first, second)


@pytest.mark.slow
def test_resuming_a_finished_run_says_that_it_is_finished_and_continues_only_with_more_rounds(tmp_path: Path) -> None:
    folder = Folder(tmp_path, node={"rounds": 4, "evaluate_every": 0, "checkpoint": {"every": 9}})
    first = folder.run_successfully()
    outcome = folder.run(resume="")
    assert outcome.exit_code == 0 and outcome.run_dir == first and outcome.summary["rounds"] == 4
    assert folder.observer.notices == [
        f"{first} is finished: it has done 4 of 4 rounds; --set node.rounds=N continues it to N"
    ]
    assert len([path for path in first.parent.iterdir() if not path.is_symlink()]) == 1
    more = folder.run_successfully("node.rounds=6", resume="")
    straight = folder.run_successfully("node={rounds: 6, evaluate_every: 0}", "name=other")
    assert_same_models(straight, more)
    not_the_latest = str(first)
    assert_same_models(straight, folder.run_successfully("node.rounds=6", resume=not_the_latest))


@pytest.mark.slow
def test_a_run_is_resumed_with_checkpoints_from_the_run_folder_of_another_machine(tmp_path: Path) -> None:
    """Two machines have a run folder each, with different names; one machine continues with all nodes."""
    folder = Folder(tmp_path)
    straight = folder.run_successfully()
    first = folder.run_successfully("name=a", "node.rounds=5", "node.checkpoint={every: 3}")
    other = first.with_name(f"{first.name}-machine1")
    for path in sorted((first / "checkpoints").glob("0*/00[23].*")):
        moved = other / path.relative_to(first)
        moved.parent.mkdir(parents=True, exist_ok=True)
        path.rename(moved)
    assert_same_models(straight, folder.run_successfully("name=a", resume=str(first)))


def test_rounds_done_by_all_do_not_depend_on_a_newcomer(tmp_path: Path) -> None:
    """A newcomer's checkpoints are on its own machine, and a run is resumed without it."""
    cut = Cut("ab", 20, 1, "00" * 12, (0, 1, 2))
    for uid in range(2):
        store.write(tmp_path / "checkpoints", Snapshot(uid, cut, {}, {"progress": {"round": 20 + uid}}, {}))
    newest = store.scan([tmp_path / "checkpoints"], 0)[0][0]
    assert _done_by_all(ResumableRun(tmp_path, (tmp_path,), ("ab",), newest), 2) == 21
    assert _done_by_all(ResumableRun(tmp_path, (tmp_path,), ("ab",), newest), 3) is None


@pytest.mark.slow
def test_nodes_without_a_usable_checkpoint_are_named(tmp_path: Path) -> None:
    folder = Folder(tmp_path, node={"rounds": 4, "evaluate_every": 0, "checkpoint": {"every": 2}})
    first = folder.run_successfully()
    for path in (first / "checkpoints").glob("0*/003.*"):
        path.unlink()
    (next(iter((first / "checkpoints").glob("00000004-*"))) / "001.safetensors").write_text("damaged")
    outcome = folder.run("node.rounds=6", resume="")
    assert outcome.exit_code == 0 and outcome.summary["resumed"]["without"] == [3]
    assert "must have" in folder.observer.notices[1] and "001.safetensors" in folder.observer.notices[1]
    mean = "node 3 has no checkpoint and starts from the mean of the others' models; the sharing rule starts anew"
    assert folder.observer.notices[0] == f"continues after round 2; {mean}"


@pytest.mark.slow
def test_resuming_with_a_changed_experiment_is_refused_and_names_the_changed_keys(tmp_path: Path) -> None:
    folder = Folder(tmp_path, node={"rounds": 2, "checkpoint": {"every": 2}})
    folder.run_successfully()
    keys = ["training.optimizer.lr=0.2", "graph={name: complete, nodes: 4}", "seed=7"]
    with pytest.raises(DecentnodeError) as refused:
        folder.run(*keys, "node.rounds=9", resume="")
    text = str(refused.value)
    assert refused.value.exit_code == 2 and "training.optimizer.lr: 0.05 in the checkpoint, 0.2 now" in text
    assert all(key in text for key in ("graph (edges)", "graph.name", "seed")) and "rounds" not in text
    harmless = ["node.rounds=3", "node.evaluate_every=2", "communication.timeout_seconds=33",
                "node.checkpoint={every: 1}", "mapping={nodes_per_machine: 4, threads: 1}",
                "node.missing=return_weight"]  # fmt: skip
    folder.run_successfully(*harmless, resume="")


@pytest.mark.slow
def test_resuming_with_other_initial_weights_is_refused(tmp_path: Path) -> None:
    """A run folder keeps a copy of the initial weights, so that the run can be repeated after the file has changed."""
    def write_weights(value: float) -> None:
        save_file({"1.weight": torch.full((10, 64), value), "1.bias": torch.zeros(10)}, tmp_path / "w.safetensors")

    write_weights(0.25)
    model = {"name": "logistic", "init": "w.safetensors"}
    folder = Folder(tmp_path, node={"rounds": 2, "checkpoint": {"every": 2}}, model=model)
    first = folder.run_successfully()
    write_weights(0.5)
    text = r"these keys differ:\nmodel\.init: \"\w+\" in the checkpoint, \"\w+\" now"
    with pytest.raises(DecentnodeError, match=text):
        folder.run("node.rounds=3", resume="")
    other = folder.run_successfully()
    request = Request(str(first / start.RESOLVED), [f"run.dir={tmp_path / 'more'}"])
    again = supervise(request, RecordingObserver(), command="repeat")
    assert again.exit_code == 0 and again.run_dir is not None
    assert_same_models(first, again.run_dir)
    inits = [repeats.read(run).config["model.init"] for run in (first, again.run_dir, other)]
    assert inits[0] == inits[1] != inits[2]
    write_weights(0.25)
    folder.run_successfully("node.rounds=3", resume=str(first))


def test_checkpoint_best_must_be_a_figure_of_the_task(tmp_path: Path) -> None:
    folder = Folder(tmp_path, node={"rounds": 2, "checkpoint": {"best": "bleu_mean"}})
    with pytest.raises(DecentnodeError, match=r"checkpoint\.best must be one of accuracy_mean, .*got 'bleu_mean'"):
        folder.run()


def test_without_checkpoints_there_is_nothing_to_resume(tmp_path: Path) -> None:
    folder = Folder(tmp_path, node={"rounds": 2})
    with pytest.raises(DecentnodeError, match="no checkpoint of a run named tiny") as refused:
        folder.run(resume="")
    assert refused.value.exit_code == 7
    folder.run_successfully()
    with pytest.raises(DecentnodeError, match=r"node\.checkpoint \(such as {every: 20}\) makes them"):
        folder.run(resume="tiny")
    with pytest.raises(DecentnodeError, match="no run in nowhere"):
        folder.run(resume="nowhere")


def test_run_and_resume_take_a_config_or_a_run_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.yaml").write_text("")
    (tmp_path / "runs" / "a").mkdir(parents=True)
    assert start.config_and_resume("a.yaml", None) == ("a.yaml", None)
    assert start.config_and_resume("a.yaml", "") == ("a.yaml", "")
    assert start.config_and_resume("a.yaml", "runs/a") == ("a.yaml", "runs/a")
    assert start.config_and_resume(None, "a.yaml") == ("a.yaml", "")  # run --resume a.yaml
    assert start.config_and_resume(None, "runs/a") == ("runs/a", "runs/a")
    assert start.config_and_resume("runs/a", "") == ("runs/a", "runs/a")
    assert start.config_and_resume(None, "") == (None, "")
