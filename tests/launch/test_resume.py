"""Whole runs that are resumed: by processes and in one, from other machines' files, and those that are refused."""

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
from decentnode.launch.reporting.observer import Observer
from decentnode.launch.reporting.outcome import Outcome
from decentnode.launch.supervisor import supervise
from decentnode.metrics.reader import read, read_kind
from decentnode.report.closing import closing
from decentnode.report.reading import repeats
from tests.cli.terminal import wait_until
from tests.commands import started
from tests.launch.faults import experiment


class Told(Observer):
    def __init__(self) -> None:
        self.notices: list[str] = []

    def notice(self, text: str) -> None:
        self.notices.append(text)


class Folder:
    """A folder of runs, and the commands there."""

    def __init__(self, path: Path, **sections: Any) -> None:
        self.path, self.told = path, Told()
        path.mkdir(exist_ok=True)
        given = {"communication": {"name": "inproc"}, "node": {"rounds": 8, "evaluate_every": 4}, **sections}
        (path / "tiny.yaml").write_text(yaml.safe_dump(experiment(**given)))

    def run(self, *overrides: str, resume: str | None = None) -> Outcome:
        request = Request(str(self.path / "tiny.yaml"), [f"run.dir={self.path / 'runs'}", *overrides], resume=resume)
        self.told = Told()
        return supervise(request, self.told, command="decentnode run tiny.yaml")

    def done(self, *overrides: str, resume: str | None = None) -> Path:
        outcome = self.run(*overrides, resume=resume)
        assert outcome.exit_code == 0 and outcome.run_dir is not None, outcome
        return outcome.run_dir


def models(run: Path) -> dict[str, torch.Tensor]:
    return {f"{path.stem}/{name}": tensor for path in sorted((run / "models").glob("*.safetensors"))
            for name, tensor in load_file(path).items()}  # fmt: skip


def check_same(one: Path, other: Path) -> None:
    before, after = models(one), models(other)
    assert before.keys() == after.keys() and len(before) == 10
    assert all(torch.equal(tensor, after[name]) for name, tensor in before.items())


@pytest.mark.slow
def test_a_run_with_faults_goes_on_without_them_and_the_other_way_round(tmp_path: Path) -> None:
    """What goes wrong is no part of what is computed: the models are those of a run that nothing happened to."""
    folder = Folder(tmp_path)
    whole = folder.done()
    kept = ["node.checkpoint={every: 2}", "node.rounds=4"]
    slow = "faults=[{do: slow, nodes: [1], factor: 1.5, at_round: 1, seconds: 0.5}]"
    struck = folder.done(*kept, slow)
    check_same(folder.done("faults=[]", resume=str(struck)), whole)
    check_same(folder.done(slow, resume=str(folder.done(*kept))), whole)


@pytest.mark.slow
def test_a_fault_of_a_round_that_is_over_does_not_strike_again(tmp_path: Path) -> None:
    kill = [{"do": "kill", "nodes": [1], "at_round": 2}]
    node = {"rounds": 6, "evaluate_every": 0, "checkpoint": {"every": 3}, "missing": "regroup"}
    folder = Folder(tmp_path, communication={"name": "auto", "suspect_seconds": 5}, node=node, faults=kill)
    assert folder.run().summary["struck"] == {"kill": 1}
    found = folder.run("node.rounds=9", resume="")
    assert found.exit_code == 0 and found.summary["struck"] == {} and found.summary["rounds"] == 9


CASES = {
    "auto": ["communication=auto", "node.schedule=overlapped", "training.optimizer={name: adam, lr: 0.01}"],
    "zeromq": ["communication=zeromq", "sharing={name: choco, compression: {name: int8, unbiased: true}}"],
    "several": ["communication=auto", "mapping={nodes_per_machine: 4, nodes_per_process: 2}",
                "training.optimizer={name: adam, lr: 0.01}"],
    "collective": ["communication=collective", "sharing=push_sum", "node.schedule=overlapped"],
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.slow
def test_a_run_of_processes_goes_on_where_one_process_stopped(tmp_path: Path, case: str) -> None:
    """And the other way round: a checkpoint does not know how its payloads came."""
    transport, *others = CASES[case]
    folder = Folder(tmp_path)
    straight = folder.done(*others)
    keep = "node.checkpoint={every: 3}"
    folder.done(*others, "name=a", "node.rounds=5", keep)
    by_processes = folder.done(*others, "name=a", transport, keep, resume="")
    check_same(straight, by_processes)
    assert folder.told.notices == ["continues after round 5"]
    folder.done(*others, "name=b", "node.rounds=5", transport, keep)
    check_same(straight, folder.done(*others, "name=b", keep, resume=""))
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
def test_a_run_without_rounds_in_common_is_killed_and_goes_on(tmp_path: Path, sets: list[str]) -> None:
    """Everything at once by SIGKILL, as if the power failed; each node goes on from a round of its own."""
    training = {**experiment()["training"], "name": "tests.launch.faults:Slow"}
    node = {"rounds": 60, "evaluate_every": 0, "checkpoint": {"every": 3}}
    folder = Folder(tmp_path, communication={"name": "auto"}, node=node, training=training)
    checkpoints = tmp_path / "runs" / "tiny" / "latest" / "checkpoints"

    def whole() -> int:
        return sum(len([*place.glob("*.json")]) == 4 for place in checkpoints.glob("0*"))

    with started(tmp_path, "run", "tiny.yaml", *(f"--set={each}" for each in sets)) as process:
        wait_until(lambda: whole() > 0, "checkpoints of all nodes")
        family = [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]
        for each in family:
            with contextlib.suppress(psutil.NoSuchProcess):  # one that was about to end
                each.kill()
        psutil.wait_procs(family, timeout=60)
    assert not (checkpoints.parent / "summary.json").exists()
    with pytest.raises(DecentnodeError, match=r"(?s)these keys differ:.*graph"):
        folder.run(*sets, "graph={name: ring, nodes: 3}", "mapping.nodes_per_machine=3", resume="")
    with pytest.raises(DecentnodeError, match=r"(?s)these keys differ:.*node\.schedule"):
        folder.run("node.schedule=sequential", resume="")
    run = folder.done(*sets, resume="")
    said = "continues, each node after its own last round"
    assert any(each.startswith(said) for each in folder.told.notices), "partial files may be named behind it"
    rounds = [read_kind(run / f"nodes/{uid:03d}/metrics.jsonl", "round") for uid in range(4)]
    assert all([each["round"] for each in found] == list(range(len(found))) for found in rounds), "none twice"
    found = json.loads((run / "summary.json").read_text())
    assert max(map(len, rounds)) == 60 and found["resumed"]["round"] > 0 and found["own_rounds"]
    losses = [[each["loss"] for each in found] for found in rounds]  # of all nodes: a slow one makes few rounds
    assert sum(sum(each[-10:]) for each in losses) < 0.95 * sum(sum(each[:10]) for each in losses), "it learns"
    outcome = folder.run(*sets, resume="")
    assert outcome.exit_code == 0 and "is finished: it has done 60 of 60 rounds" in folder.told.notices[-1]


@pytest.mark.slow
def test_a_run_that_ends_early_says_why_and_so_does_its_resumption(tmp_path: Path) -> None:
    """By processes and in one, after the same round with the same models."""
    keys = ["node.rounds=60", "node.evaluate_every=1", "node.checkpoint={every: 50, best: accuracy_merged}"]
    stop = "node.early_stop={figure: accuracy_merged, patience: 2}"
    folder = Folder(tmp_path)
    run = folder.done(*keys, stop)
    check_same(run, folder.done(*keys, stop, "name=b", "communication=zeromq"))
    found = json.loads((run / "summary.json").read_text())
    assert found["status"] == "finished" and found["ended"] == "early_stop" and found["rounds"] < 60
    best = found["best"]
    assert best["figure"] == "accuracy_merged" and best["evaluations_since"] == 2
    records = read_kind(run / "nodes/000/metrics.jsonl", "evaluation")
    values = {each["round"]: each["accuracy_merged"] for each in records}
    assert best["value"] == max(values.values()) == values[best["round"]] and best["round"] == found["rounds"] - 2
    mark = json.loads((run / "checkpoints" / "best-003.json").read_text())
    assert mark["round"] == best["round"] and (run / "checkpoints" / mark["cut"] / "003.json").exists()
    lines = closing(found)
    assert lines[0].startswith(f"stopped early after round {found['rounds']} of 60")
    assert lines[1].startswith("best     accuracy_merged") and "not better in 2 evaluations since" in lines[1]
    outcome = folder.run(*keys, stop, resume="tiny")
    assert outcome.exit_code == 0 and len(folder.told.notices) == 1
    assert f"ended early, after {found['rounds']} of 60 rounds: accuracy_merged was best" in folder.told.notices[0]
    longer = folder.done(*keys, "node.early_stop=null", "node.rounds=20", resume="tiny")
    told = json.loads((longer / "summary.json").read_text())
    assert told["rounds"] == 20 and told["ended"] == "rounds" and told["best"]["evaluations_since"] is None


@pytest.mark.slow
def test_fragments_with_a_graph_of_their_own(tmp_path: Path) -> None:
    """And the graph of a fragment belongs to what an experiment computes."""
    def parts(graph: str) -> str:
        named = f"{{name: {graph}, nodes: 4}}"
        return f"parameters={{fragments: [{{parameters: '*.weight', graph: {named}}}, {{parameters: '*', every: 2}}]}}"

    folder = Folder(tmp_path)
    keep = "node.checkpoint={every: 3}"
    straight = folder.done(parts("complete"))
    folder.done(parts("complete"), "name=a", "node.rounds=5", keep)
    check_same(straight, folder.done(parts("complete"), "name=a", keep, resume=""))
    with pytest.raises(DecentnodeError, match="graph"):
        folder.run(parts("star"), "name=a", keep, "node.rounds=9", resume="")


def test_the_metrics_of_the_rounds_before_are_taken_over(tmp_path: Path) -> None:
    folder = Folder(tmp_path, node={"rounds": 8, "evaluate_every": 4, "checkpoint": {"every": 3}})
    first = folder.done()
    for place in (first / "checkpoints").glob("0*"):
        if not place.name.startswith("00000006"):
            shutil.rmtree(place)
    (first / "summary.json").unlink()
    second = folder.done(resume="")
    for uid in range(4):
        name = f"nodes/{uid:03d}/metrics.jsonl"
        assert [each["round"] for each in read_kind(second / name, "round")] == list(range(8))
        assert [each["round"] for each in read_kind(second / name, "evaluation")] == [0, 4, 8]
        kinds = [each["kind"] for each in read(second / name)]
        assert kinds.index("resumed") > kinds.index("round") and kinds.count("resumed") == 1
        losses = [[each["loss"] for each in read_kind(run / name, "round")] for run in (first, second)]
        assert losses[0] == losses[1]
    check_same(first, second)


@pytest.mark.slow
def test_a_finished_run_says_so_and_goes_on_with_more_rounds(tmp_path: Path) -> None:
    folder = Folder(tmp_path, node={"rounds": 4, "evaluate_every": 0, "checkpoint": {"every": 9}})
    first = folder.done()
    outcome = folder.run(resume="")
    assert outcome.exit_code == 0 and outcome.run_dir == first and outcome.summary["rounds"] == 4
    assert folder.told.notices == [
        f"{first} is finished: it has done 4 of 4 rounds; --set node.rounds=N continues it to N"
    ]
    assert len([path for path in first.parent.iterdir() if not path.is_symlink()]) == 1
    more = folder.done("node.rounds=6", resume="")
    straight = folder.done("node={rounds: 6, evaluate_every: 0}", "name=other")
    check_same(straight, more)
    check_same(straight, folder.done("node.rounds=6", resume=str(first)))  # named, though it is not the latest


@pytest.mark.slow
def test_files_of_another_machine_s_share_are_found(tmp_path: Path) -> None:
    """Two machines have a folder each, of another name; one machine goes on with all nodes."""
    folder = Folder(tmp_path)
    straight = folder.done()
    first = folder.done("name=a", "node.rounds=5", "node.checkpoint={every: 3}")
    other = first.with_name(f"{first.name}-machine1")
    for path in sorted((first / "checkpoints").glob("0*/00[23].*")):
        moved = other / path.relative_to(first)
        moved.parent.mkdir(parents=True, exist_ok=True)
        path.rename(moved)
    check_same(straight, folder.done("name=a", resume=str(first)))


def test_a_node_that_was_in_no_mapping_has_no_say_in_what_all_have(tmp_path: Path) -> None:
    """Its files are elsewhere, and a run is resumed without it."""
    cut = Cut("ab", 20, 1, "00" * 12, (0, 1, 2))
    for uid in range(2):
        store.write(tmp_path / "checkpoints", Snapshot(uid, cut, {}, {"progress": {"round": 20 + uid}}, {}))
    newest = store.scan([tmp_path / "checkpoints"], 0)[0][0]
    assert _done_by_all(ResumableRun(tmp_path, (tmp_path,), ("ab",), newest), 2) == 21
    assert _done_by_all(ResumableRun(tmp_path, (tmp_path,), ("ab",), newest), 3) is None


@pytest.mark.slow
def test_nodes_without_files_are_named(tmp_path: Path) -> None:
    folder = Folder(tmp_path, node={"rounds": 4, "evaluate_every": 0, "checkpoint": {"every": 2}})
    first = folder.done()
    for path in (first / "checkpoints").glob("0*/003.*"):
        path.unlink()
    (next(iter((first / "checkpoints").glob("00000004-*"))) / "001.safetensors").write_text("damaged")
    outcome = folder.run("node.rounds=6", resume="")
    assert outcome.exit_code == 0 and outcome.summary["resumed"]["without"] == [3]
    assert "must have" in folder.told.notices[1] and "001.safetensors" in folder.told.notices[1]
    mean = "node 3 has no checkpoint and starts from the mean of the others' models; the sharing rule starts anew"
    assert folder.told.notices[0] == f"continues after round 2; {mean}"


@pytest.mark.slow
def test_another_experiment_is_refused_by_the_names_of_its_keys(tmp_path: Path) -> None:
    folder = Folder(tmp_path, node={"rounds": 2, "checkpoint": {"every": 2}})
    folder.done()
    keys = ["training.optimizer.lr=0.2", "graph={name: complete, nodes: 4}", "seed=7"]
    with pytest.raises(DecentnodeError) as refused:
        folder.run(*keys, "node.rounds=9", resume="")
    text = str(refused.value)
    assert refused.value.exit_code == 2 and "training.optimizer.lr: 0.05 in the checkpoint, 0.2 now" in text
    assert all(key in text for key in ("graph (edges)", "graph.name", "seed")) and "rounds" not in text
    same = ["node.rounds=3", "node.evaluate_every=2", "communication.timeout_seconds=33", "node.checkpoint={every: 1}",
            "mapping={nodes_per_machine: 4, threads: 1}", "node.missing=return_weight"]  # fmt: skip
    folder.done(*same, resume="")


@pytest.mark.slow
def test_other_initial_weights_are_another_experiment(tmp_path: Path) -> None:
    """And a run's folder has the weights that it began with, whatever becomes of the file."""
    def weights(value: float) -> None:
        save_file({"1.weight": torch.full((10, 64), value), "1.bias": torch.zeros(10)}, tmp_path / "w.safetensors")

    weights(0.25)
    model = {"name": "logistic", "init": "w.safetensors"}
    folder = Folder(tmp_path, node={"rounds": 2, "checkpoint": {"every": 2}}, model=model)
    first = folder.done()
    weights(0.5)
    text = r"these keys differ:\nmodel\.init: \"\w+\" in the checkpoint, \"\w+\" now"
    with pytest.raises(DecentnodeError, match=text):
        folder.run("node.rounds=3", resume="")
    other = folder.done()
    again = supervise(Request(str(first / start.RESOLVED), [f"run.dir={tmp_path / 'more'}"]), Told(), command="repeat")
    assert again.exit_code == 0 and again.run_dir is not None
    check_same(first, again.run_dir)
    ran = [repeats.read(each) for each in (first, again.run_dir, other)]
    assert ran[0].config["model.init"] == ran[1].config["model.init"] != ran[2].config["model.init"]
    weights(0.25)
    folder.done("node.rounds=3", resume=str(first))


def test_the_best_must_be_a_figure_of_the_task(tmp_path: Path) -> None:
    folder = Folder(tmp_path, node={"rounds": 2, "checkpoint": {"best": "bleu_mean"}})
    with pytest.raises(DecentnodeError, match=r"checkpoint\.best must be one of accuracy_mean, .*got 'bleu_mean'"):
        folder.run()


def test_without_checkpoints_there_is_nothing_to_resume(tmp_path: Path) -> None:
    folder = Folder(tmp_path, node={"rounds": 2})
    with pytest.raises(DecentnodeError, match="no checkpoint of a run named tiny") as refused:
        folder.run(resume="")
    assert refused.value.exit_code == 7
    folder.done()
    with pytest.raises(DecentnodeError, match=r"node\.checkpoint \(such as {every: 20}\) makes them"):
        folder.run(resume="tiny")
    with pytest.raises(DecentnodeError, match="no run in nowhere"):
        folder.run(resume="nowhere")


def test_what_may_be_typed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
