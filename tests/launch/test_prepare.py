"""The child that loads the experiment sends facts and then the header, or one failure."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from decentnode.cli.validate import check_machine
from decentnode.errors import ConfigError, EnvironmentFault, NodeFailed, UsageError
from decentnode.experiment import load
from decentnode.launch.children.messages import ChildMessage, Facts, Failed, Header, Request
from decentnode.launch.loading import load_request
from decentnode.launch.supervising import prepare
from decentnode.launch.supervising.local_nodes import LocalNodes
from decentnode.launch.supervising.prepare import facts, files_to_copy, load_and_send
from decentnode.sharing import step_size
from tests.launch.faults import experiment


class RecordingChannel:
    def __init__(self) -> None:
        self.sent: list[ChildMessage] = []

    def send(self, message: ChildMessage) -> None:
        self.sent.append(message)


def write_config(folder: Path, **sections: Any) -> str:
    path = folder / "tiny.yaml"
    path.write_text(yaml.safe_dump({**experiment(), **sections}))
    return str(path)


def load_and_record(request: Request) -> tuple[int, list[ChildMessage]]:
    """Returns the exit code of the child and the messages it sends."""
    channel = RecordingChannel()
    return load_and_send(request, channel), channel.sent  # type: ignore[arg-type]


def test_the_facts_come_before_the_header(tmp_path: Path) -> None:
    """The supervisor starts nodes as soon as it has the facts; the header takes longer."""
    code, (first, second) = load_and_record(Request(write_config(tmp_path), ["seed=4"]))
    assert code == 0 and isinstance(first, Facts) and isinstance(second, Header)
    assert first.num_nodes == len(first.local) and first.rounds == experiment()["node"]["rounds"]
    assert yaml.safe_load(first.resolved_text)["seed"] == 4 and second.lines
    assert load(write_resolved(tmp_path, first), []).digest() == first.digest


def write_resolved(folder: Path, first: Facts) -> str:
    path = folder / "copy.yaml"
    path.write_text(first.resolved_text)
    return str(path)


def test_a_step_size_is_searched_for_once_per_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nodes use the step size that the loading process found; it does not change the experiment's digest."""
    asked, started = Request(write_config(tmp_path, sharing={"name": "stc", "fraction": 0.3})), []
    found = facts(load_request(asked), asked)
    assert 0 < found.found["sharing.step_size"] < 1
    monkeypatch.setattr("decentnode.launch.supervising.local_nodes.start_node", lambda _, task: started.append(task))
    monkeypatch.setattr(step_size, "largest_step", lambda *_: pytest.fail("searched again"))
    LocalNodes(asked, found, None).start(None)  # type: ignore[arg-type]
    assert len(started) == len(found.processes) > 1
    for task in started:
        experiment = load_request(task.request, check=False)
        assert experiment.digest() == found.digest and experiment.origin("sharing.step_size") == "derived"
    assert load_request(started[0].request).digest() == found.digest, "the checks searched again"


def test_the_facts_have_no_step_size_if_none_was_searched_for(tmp_path: Path) -> None:
    for sharing in ({"name": "full"}, {"name": "stc", "fraction": 0.3, "step_size": 0.25}):
        asked = Request(write_config(tmp_path, sharing=sharing))
        assert facts(load_request(asked), asked).found == {}


def test_an_invalid_config_is_reported_without_a_traceback_and_with_its_exit_code(tmp_path: Path) -> None:
    code, (failed,) = load_and_record(Request(write_config(tmp_path), ["node.rounds=-1"]))
    assert isinstance(failed, Failed) and code == failed.exit_code == ConfigError.exit_code
    assert failed.title == "ConfigError" and "node.rounds" in failed.text and "Traceback" not in failed.text


def test_a_bug_of_the_package_is_reported_with_its_traceback(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise ZeroDivisionError("a defect")

    monkeypatch.setattr(prepare, "facts", broken)
    code, (failed,) = load_and_record(Request(write_config(tmp_path)))
    assert isinstance(failed, Failed) and code == failed.exit_code == NodeFailed.exit_code
    assert "a defect" in failed.title and "Traceback" in failed.text and "broken" in failed.text


def test_only_a_run_with_regrouping_can_be_joined(tmp_path: Path) -> None:
    request = Request(write_config(tmp_path), join=True)
    with pytest.raises(UsageError, match=r"--join needs node\.missing: regroup"):
        facts(load(request.config, []), request)


def test_in_process_runs_have_one_machine(tmp_path: Path) -> None:
    """A dry run of an experiment for two machines takes all nodes here; communication inproc for two is refused."""
    n = experiment()["graph"]["nodes"]
    two = {"mapping": {"name": "linear", "machines": 2, "nodes_per_machine": n // 2,
                       "addresses": ["10.0.0.1", "10.0.0.2"]}}  # fmt: skip
    request = Request(write_config(tmp_path, **two), machine=1, in_process=True)
    found = facts(load(request.config, []), request)
    assert found.in_process and found.machines == [list(range(n))] and found.machine == 0 and not found.regroup
    for machine in (0, 1):
        here = Request(write_config(tmp_path, **two, communication={"name": "inproc"}), machine=machine)
        with pytest.raises((UsageError, ConfigError), match="inproc"):
            facts(load(here.config, []), here)


def test_input_files_with_the_same_name_are_copied_under_different_names(tmp_path: Path) -> None:
    """The graph's file and the experiment's file are both named tiny.yaml."""
    other = tmp_path / "graphs"
    other.mkdir()
    n = experiment()["graph"]["nodes"]
    (other / "tiny.yaml").write_text(f"{n}\n" + "".join(f"{u} {(u + 1) % n}\n" for u in range(n)))
    loaded = load(write_config(tmp_path, graph={"file": "graphs/tiny.yaml"}), [])
    inputs, kept = files_to_copy(loaded)
    assert inputs == {"inputs/tiny.yaml": str(tmp_path / "tiny.yaml"),
                      "inputs/other_tiny.yaml": str(other / "tiny.yaml")}  # fmt: skip
    assert kept["graph.file"] == "inputs/other_tiny.yaml" and kept["run.dir"] == "../.."


def test_models_that_exceed_the_memory_of_the_machine_are_refused_before_nodes_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prepare.psutil, "virtual_memory", lambda: SimpleNamespace(total=4e9))
    mapping = "mapping={machines: 1, nodes_per_machine: 4, device: cpu}"
    sets = ["model={name: mlp, hidden: [10000000]}", mapping]
    code, (failed,) = load_and_record(Request(write_config(tmp_path), sets))
    assert isinstance(failed, Failed) and code == EnvironmentFault.exit_code
    assert "take 24.0 GB, this machine has 4.0 GB of memory" in failed.text
    path = write_config(tmp_path)
    with pytest.raises(EnvironmentFault, match="this machine has"):
        check_machine(load(path, sets), "0", path)
    load(path, [*sets, "model.hidden=[1000000]"])
