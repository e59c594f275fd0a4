"""decentnode.run: how it merges sections, how a run ends, and what it raises."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import textwrap
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml

import decentnode
from decentnode import Experiment, RunInterrupted
from decentnode.errors import ConfigError, Diverged, NodeFailed, UsageError
from decentnode.experiment import load
from decentnode.launch.children import forkserver
from decentnode.launch.reporting.observer import Observer
from decentnode.launch.supervising import workers
from tests.api.small import experiment, net
from tests.cli.test_run import ROOT
from tests.launch import faults

TINY = faults.experiment(communication={"name": "inproc"})


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tiny.yaml").write_text(yaml.safe_dump(TINY))


def run_in_this_process(config: Any, **more: Any) -> decentnode.Run:
    return decentnode.run(config, progress=False, processes=False, **more)


@pytest.mark.slow
def test_sections_are_merged_key_by_key() -> None:
    run = run_in_this_process("tiny.yaml", sharing={"name": "choco", "fraction": np.float64(0.2)}, rounds=2, seed=7,
                              name="mine", training={"optimizer": {"lr": 0.02}})  # fmt: skip
    found = run.config
    assert found["sharing"]["name"] == "choco" and found["sharing"]["fraction"] == 0.2
    assert found["training"]["optimizer"]["lr"] == 0.02
    assert found["training"]["batch_size"] == TINY["training"]["batch_size"]
    assert (found["node"]["rounds"], found["seed"], run.summary["rounds"], run.name) == (2, 7, 2, "mine")
    assert run.path.parent == Path.cwd() / "runs" / "mine"


@pytest.mark.slow
def test_a_file_a_dict_a_resolved_experiment_and_a_run_are_the_same_experiment() -> None:
    first = run_in_this_process("tiny.yaml", rounds=2)
    for config in (TINY, load("tiny.yaml"), first.path, Experiment.from_yaml(Path("tiny.yaml").read_text())):
        again = run_in_this_process(config, rounds=2)
        assert again.summary["digest"] == first.summary["digest"]
        for key in first.models():
            pairs = zip(first.models().state_dict(key).values(), again.models().state_dict(key).values(), strict=True)
            assert all(torch.equal(a, b) for a, b in pairs)


@pytest.mark.slow
def test_processes_give_the_same_bits_and_see_the_current_folder_and_environment(
    monkeypatch: pytest.MonkeyPatch
) -> None:
    """The fork server may have been started before the folder and the environment were changed."""
    monkeypatch.setenv("DECENTNODE_TEST_WORD", "now")
    Path("here.py").write_text("import os, torch\nassert os.environ['DECENTNODE_TEST_WORD'] == 'now'\n"
                               "class Net(torch.nn.Linear):\n    def __init__(self):\n"
                               "        super().__init__(64, 10)\n"
                               "    def forward(self, x):\n        return super().forward(x.flatten(1))\n")  # fmt: skip
    more: dict[str, Any] = {"model": "here:Net", "rounds": 2, "data": {"partition": "iid"}}
    Path("tiny.yaml").write_text(yaml.safe_dump({**TINY, "training": {**TINY["training"], "name": "supervised"}}))
    run = decentnode.run("tiny.yaml", progress=False, communication="auto", **more)
    assert run.status == "finished" and run.summary["num_nodes"] == 4
    same = run_in_this_process("tiny.yaml", **more)
    assert torch.equal(run.models().state_dict(2)["weight"], same.models().state_dict(2)["weight"])


@pytest.mark.slow
def test_all_problems_are_raised_at_once_as_on_the_command_line() -> None:
    with pytest.raises(ConfigError) as caught:
        run_in_this_process("tiny.yaml", sharing={"name": "chocoo"}, rounds=-1, grap={"nodes": 3})
    for words in ("3 problems", "keyword grap: grap is not a known key", "did you mean 'graph'?",
                  "keyword node: node.rounds must be >= 0, got -1", "did you mean 'choco'?"):  # fmt: skip
        assert words in str(caught.value)
    with pytest.raises(ConfigError, match="cannot be read"):
        run_in_this_process("none.yaml")
    with pytest.raises(ConfigError, match="did you mean 'choco'"):
        decentnode.run("tiny.yaml", sharing="chocoo", progress=False)


def test_NodeFailed_has_the_users_exception_as_its_cause_and_the_failed_run() -> None:
    with pytest.raises(NodeFailed, match="node 2: RuntimeError: a bug in my model") as caught:
        run_in_this_process("tiny.yaml", training={"name": "tests.launch.faults:Raises"})
    assert isinstance(caught.value.__cause__, RuntimeError)
    run = caught.value.run  # type: ignore[attr-defined]
    assert run.status == "failed" and run.summary["failure"]["node"] == 2
    assert f"{run.path}/nodes/002/log.txt" in str(caught.value)
    assert len(run.rounds()) >= 8


def test_a_diverging_model_raises_Diverged() -> None:
    with pytest.raises(Diverged, match=r"^node 0: the .* try a smaller learning rate"):
        run_in_this_process("tiny.yaml", training={"optimizer": {"lr": 3e38}})


class PressesCtrlC(Observer):
    """Sends SIGINT to this process at the first evaluation after a round."""

    def __init__(self) -> None:
        self.events: list[str] = []

    def progress(self, uid: int, record: dict[str, Any]) -> None:
        if record["kind"] == "evaluation" and record["round"] > 0 and not self.events:
            self.events.append("pressed")
            os.kill(os.getpid(), signal.SIGINT)

    def stopping(self, signal_name: str) -> None:
        self.events.append(signal_name)

    def ended(self, outcome: Any) -> None:
        self.events.append(outcome.summary["status"])


def test_ctrl_c_writes_the_results_so_far_and_raises_a_KeyboardInterrupt() -> None:
    observer, before = PressesCtrlC(), signal.getsignal(signal.SIGINT)
    with pytest.raises(RunInterrupted, match=r"stopped after round \d+ of 5000; decentnode.open_run") as caught:
        for _ in range(2):
            decentnode.run("tiny.yaml", rounds=5000, node={"evaluate_every": 2}, progress=observer, processes=False)
    assert isinstance(caught.value, KeyboardInterrupt) and caught.value.exit_code == 130
    run = caught.value.run
    assert run is not None and run.status == "interrupted" and "merged" in run.models()
    assert observer.events == ["pressed", "SIGINT", "interrupted"]
    assert signal.getsignal(signal.SIGINT) is before


def test_ctrl_c_while_the_experiment_is_loaded_raises_a_KeyboardInterrupt_too(monkeypatch: pytest.MonkeyPatch) -> None:
    over = threading.Event()

    def start_child(*_: object) -> None:
        os.kill(os.getpid(), signal.SIGINT)
        over.wait(60)
        raise OSError("the child was not needed")

    monkeypatch.setattr(workers, "start_child", start_child)
    monkeypatch.setattr(forkserver, "start", lambda _request: multiprocessing.get_context("forkserver"))
    try:
        with pytest.raises(RunInterrupted, match="interrupted while the experiment was loading") as caught:
            decentnode.run("tiny.yaml", progress=False)
    finally:
        over.set()
    assert isinstance(caught.value, KeyboardInterrupt) and caught.value.run is None and caught.value.exit_code == 130


@pytest.mark.slow
def test_a_run_continues_from_its_checkpoints() -> None:
    first = run_in_this_process("tiny.yaml", rounds=2, node={"checkpoint": {"every": 2}})
    more = run_in_this_process("tiny.yaml", rounds=4, node={"checkpoint": {"every": 2}}, resume=first)
    whole = run_in_this_process("tiny.yaml", rounds=4, node={"checkpoint": {"every": 2}})
    assert more.summary["resumed"]["round"] == 2
    assert torch.equal(*(run.models().state_dict(1)["1.weight"] for run in (more, whole)))


@pytest.mark.slow
def test_a_run_of_objects_continues_from_the_latest_run_of_its_name() -> None:
    kept = {"node": {"checkpoint": {"every": 2}}, "progress": False}
    experiment(rounds=2).run(**kept)
    more = experiment(rounds=4).run(resume=True, **kept)
    assert more.summary["resumed"]["round"] == 2 and more.summary["rounds"] == 4
    with pytest.raises(UsageError, match="what: "):
        experiment(rounds=4, model=torch.nn.Linear(2, 2)).run(resume=True, **kept)


def start_script(text: str, *arguments: str, **more: Any) -> subprocess.Popen[str]:
    Path("script.py").write_text(textwrap.dedent(text))
    environ = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    return subprocess.Popen([sys.executable, "script.py", *arguments], env=environ, text=True, stdout=subprocess.PIPE,
                            stderr=subprocess.STDOUT, start_new_session=True, **more)  # fmt: skip


@pytest.mark.slow
def test_a_script_without_a_main_guard_runs_once_and_its_own_classes_are_objects() -> None:
    """With and without processes, although the start method is spawn; the classes are those of __main__."""
    with start_script("""
        import multiprocessing
        multiprocessing.set_start_method("spawn")
        print("the script")
        import torch, decentnode

        class Net(torch.nn.Linear):
            def __init__(self):
                super().__init__(64, 10)

        class Mine(torch.optim.SGD):
            pass

        for processes in (False, True):
            run = decentnode.run("tiny.yaml", model=torch.nn.Sequential(torch.nn.Flatten(), Net()), rounds=2,
                                 training={"optimizer": {"name": Mine, "lr": 0.1}}, communication="auto",
                                 processes=processes)
            print(type(run.models().merged[1]).__name__, run)
    """) as process:
        out, _ = process.communicate(timeout=200)
    assert process.returncode == 0, out
    assert out.count("the script") == 1 and out.count("Net <Run tiny: finished after 2 of 2 rounds") == 2, out
    assert out.count("round=2/2") == 2 and out.count("done in") == 2, out


@pytest.mark.slow
def test_ctrl_c_in_a_script_stops_its_processes_too() -> None:
    with start_script("""
        import decentnode
        try:
            decentnode.run("tiny.yaml", rounds=100_000, communication="auto", node={"evaluate_every": 5})
        except KeyboardInterrupt as stop:
            print("STOPPED", stop.run.status, stop.exit_code, flush=True)
            raise
    """) as process:
        assert process.stdout is not None
        seen = []
        for line in process.stdout:
            seen.append(line)
            if "round=5/" in line:
                os.killpg(process.pid, signal.SIGINT)
        process.wait(60)
    out = "".join(seen)
    assert "STOPPED interrupted 130" in out and "stopped after round" in out, out
    assert process.returncode, out


@pytest.mark.slow
def test_a_daemonic_process_must_use_processes_false() -> None:
    with start_script("""
        import multiprocessing, decentnode

        def work(_):
            try:
                decentnode.run("tiny.yaml", rounds=1, progress=False)
            except decentnode.errors.UsageError as error:
                message = str(error)
            return message, decentnode.run("tiny.yaml", rounds=1, progress=False, processes=False).status

        if __name__ == "__main__":
            with multiprocessing.get_context("fork").Pool(1) as pool:
                print(pool.map(work, [0]))
    """) as process:
        out, _ = process.communicate(timeout=200)
    assert "processes=False runs all nodes in this one" in out and "'finished'" in out, out


@pytest.mark.slow
def test_importing_decentnode_imports_no_heavy_library() -> None:
    text = "import sys, decentnode; print([name for name in sys.modules if name.split('.')[0] in " \
           "('torch', 'numpy', 'pandas', 'matplotlib', 'rich', 'click', 'pydantic')])"  # fmt: skip
    done = subprocess.run([sys.executable, "-c", text], env={**os.environ, "PYTHONPATH": str(ROOT)}, text=True,
                          capture_output=True, check=True, timeout=100)  # fmt: skip
    assert done.stdout == "[]\n"
    later = text.replace("; print", "; decentnode.run, decentnode.Experiment; print").replace(
        "'numpy', 'pandas', 'matplotlib', 'rich', 'click', 'pydantic'", "'pandas', 'matplotlib'")
    done = subprocess.run([sys.executable, "-c", later], env={**os.environ, "PYTHONPATH": str(ROOT)}, text=True,
                          capture_output=True, check=True, timeout=100)  # fmt: skip
    assert done.stdout == "[]\n"


def test_an_experiment_has_a_config_a_check_and_a_repr() -> None:
    made = Experiment.from_config("tiny.yaml", sharing="choco")
    assert made.config["sharing"]["name"] == "choco" and made.check() is made
    assert repr(made) == "<Experiment from tiny.yaml>"
    assert repr(experiment(name="mine")) == "<Experiment mine of data, model given as objects>"
    assert isinstance(experiment(model=net()), Experiment)
    assert {"run", "Experiment", "open_run", "__version__"} <= set(dir(decentnode))
    with pytest.raises(AttributeError, match="no attribute 'rnu'"):
        _ = decentnode.rnu
