"""A mistake is reported with its place, the rule, and what was probably meant."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

import decentnode
from decentnode.cli import main
from decentnode.data.cifar import Cifar10
from decentnode.errors import DataError, GraphError, UsageError
from decentnode.experiment import load
from decentnode.graph.file import MAX_REPORTED_LINES, read
from tests.data.files import write_cifar10

ROOT = Path(decentnode.__file__).parent.parent
QUICKSTART = (ROOT / "configs" / "quickstart.yaml").read_text()


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "quickstart.yaml").write_text(QUICKSTART)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def validate(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["validate", "quickstart.yaml", *arguments], catch_exceptions=False)


@pytest.mark.parametrize(
    ("change", "hint"),
    [
        ("rounds=20", "did you mean 'node.rounds'?"),
        ("lr=0.1", "did you mean 'training.optimizer.lr'?"),
        ("batchsize=4", "did you mean 'training.batch_size'?"),
        ("optimzer=sgd", "did you mean 'training.optimizer'?"),
        ("extra=1", "known keys: "),
        ("training.batchsize=4", "did you mean 'batch_size'?"),
        ("node.round=4", "did you mean 'rounds'?"),  # there is a run.profile.round
        ("node.nodes=4", "did you mean 'graph.nodes'?"),
        ("trainig.lr=4", "did you mean 'training'?"),
        ("training.optimizer.name=adam", "to replace the section, --set training.optimizer='{name: adam, ...}'"),
    ],
)
def test_an_unknown_key_of_set_gets_the_nearest_known_key(folder: Path, change: str, hint: str) -> None:
    done = validate("--set", change)
    assert done.exit_code == 2 and hint in done.stderr


def test_set_of_a_whole_section_is_not_told_to_replace_the_section(folder: Path) -> None:
    done = validate("--set", "training.optimizer={name: adam, momentum: 0.9}")
    assert done.exit_code == 2 and "must be an argument of adam" in done.stderr and "replace" not in done.stderr


def test_a_wrong_key_in_a_replaced_section_gets_the_known_keys(folder: Path) -> None:
    done = validate("--set", "data.partition={name: k_classes, k: 2}")
    assert done.exit_code == 2 and "known keys: name, classes" in done.stderr and "replace" not in done.stderr


@pytest.mark.parametrize("given", ["quickstart.yml", "quickstrat.yaml"])
def test_a_misspelled_file_name_gets_the_nearest_file(folder: Path, given: str) -> None:
    done = CliRunner().invoke(main, ["validate", given])
    assert done.exit_code == 2 and "did you mean quickstart.yaml?" in done.stderr


def test_a_graph_family_says_which_option_it_needs() -> None:
    for words, says in ((["ring"], "needs -n N"), (["regular", "-d", "3"], "needs -n N")):
        done = CliRunner().invoke(main, ["graph", "info", *words])
        assert done.exit_code == 2 and says in done.stderr


def test_a_bad_graph_file_reports_all_its_bad_lines(tmp_path: Path) -> None:
    path = tmp_path / "g.edges"
    path.write_text("4\n0 1\n0 9\nfoo\n1 1\n2 3\n0 x\n")
    with pytest.raises(GraphError) as caught:
        read(path)
    assert [line.split(":")[1] for line in str(caught.value).splitlines()] == ["3", "4", "5", "7"]
    path.write_text("4\n" + "x\n" * 100)
    with pytest.raises(GraphError) as caught:
        read(path)
    assert len(str(caught.value).splitlines()) == MAX_REPORTED_LINES + 1 and str(caught.value).endswith("and 80 more")
    path = tmp_path / "g.adj"
    path.write_text("3\n9\n1\n1 1\n")
    with pytest.raises(GraphError) as caught:
        read(path)
    assert [line.split(":")[1] for line in str(caught.value).splitlines()] == ["2", "3", "4"]


NET = """\
from torch import nn
from helper import WIDTH


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Flatten(), nn.Linear(64, WIDTH), nn.Linear(WIDTH, 10))

    def forward(self, x):
        return self.layers(x)
"""


def run_elsewhere(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """Runs decentnode in a process of its own from another folder, so that only the folder of the file can provide the
    module."""
    environ = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    away = folder / "away"
    away.mkdir(exist_ok=True)
    words = (sys.executable, "-P", "-m", "decentnode", *words)
    return subprocess.run(words, cwd=away, env=environ, capture_output=True, text=True, timeout=200)


@pytest.mark.slow
def test_a_plain_module_beside_the_file_runs_without_pythonpath(folder: Path) -> None:
    (folder / "helper.py").write_text("WIDTH = 7\n")
    (folder / "net.py").write_text(NET)
    done = run_elsewhere(folder, "run", str(folder / "quickstart.yaml"), "--set", "model={name: net:Net}", "--set",
                   "graph={name: ring, nodes: 2}", "--set", "mapping.nodes_per_machine=2", "--set",
                   "node.rounds=2")  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "model    net:Net, 535 parameters" in done.stdout


LAYER = "from torch import nn\n\n\nclass Net(nn.Sequential):\n    def __init__(self, num_classes):\n" \
        "        super().__init__(nn.Flatten(), nn.Linear(64, num_classes{0}))\n"  # fmt: skip


@pytest.mark.parametrize("of_a_run", [False, True])
def test_a_different_module_of_the_same_name_in_another_folder_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, of_a_run: bool
) -> None:
    """A long-lived process keeps the module that it imported first."""
    monkeypatch.setattr(sys, "path", [*sys.path])
    folders = [tmp_path / name for name in ("first", "same", "other")]
    module = f"own_layer_{of_a_run}"
    for folder, more in zip(folders, ("", "", ", bias=False"), strict=True):
        code = folder / "code" if of_a_run and folder is not folders[0] else folder
        code.mkdir(parents=True)
        (folder / "nodes").mkdir()
        (folder / "a.yaml").write_text(QUICKSTART)
        (code / f"{module}.py").write_text(LAYER.replace("{0}", more))
    model = [f"model={{name: '{module}:Net'}}"]
    for folder in folders[:2]:
        load(folder / "a.yaml", model, {})
    assert str(folders[1] / "code") not in sys.path, "a module that is imported already is not searched for"
    with pytest.raises(UsageError, match=f"already imported another module {module}, from {folders[0]}.*restart"):
        load(folders[2] / "a.yaml", model, {})


@pytest.mark.slow
def test_a_missing_module_is_reported_with_the_folders_that_were_searched(folder: Path) -> None:
    done = run_elsewhere(folder, "validate", str(folder / "quickstart.yaml"), "--set", "model={name: nett:Net}")
    assert done.returncode == 2 and f"no module named 'nett'; searched in {folder} and on Python's path" in done.stderr


@pytest.mark.slow
def test_modules_are_not_imported_from_a_world_writable_folder(folder: Path) -> None:
    (folder / "net.py").write_text("raise RuntimeError('planted')")
    folder.chmod(0o777)
    done = run_elsewhere(folder, "validate", str(folder / "quickstart.yaml"), "--set", "model={name: net:Net}")
    assert done.returncode == 2 and "no module named 'net'" in done.stderr


def test_a_missing_device_fails_only_on_its_machine(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert validate("--set", "mapping.device=cuda").exit_code == 0
    done = validate("--set", "mapping.device=cuda", "--machine", "0")
    assert done.exit_code == 3 and "mapping.device is cuda, but no GPU is usable here" in done.stderr
    assert validate("--machine", "auto").exit_code == 0
    assert validate("--machine", "7").exit_code == 2


def test_missing_key_files_fail_on_their_machine(folder: Path) -> None:
    change = ["--set", "communication={name: zeromq, security: required, keys: nowhere}", "--set",
              "mapping={machines: 2, nodes_per_machine: 8, base_port: 20100, addresses: [127.0.0.1, 127.0.0.2]}"]
    anywhere, on_its_machine = validate(*change), validate(*change, "--machine", "0")
    assert anywhere.exit_code == 0 and "nowhere does not exist on this machine" in anywhere.stderr
    assert on_its_machine.exit_code == 3 and "make keys with keygen" in on_its_machine.stderr


def test_a_cifar_folder_that_misses_batches_is_an_error(tmp_path: Path) -> None:
    write_cifar10(tmp_path, files=5)
    assert len(Cifar10(Cifar10.Config(folder=tmp_path), tmp_path).train_targets()) == 35  # type: ignore[call-arg,arg-type]
    (tmp_path / "data_batch_2.bin").unlink()
    with pytest.raises(DataError, match=r"got no data_batch_2\.bin"):
        Cifar10(Cifar10.Config(folder=tmp_path), tmp_path)  # type: ignore[call-arg,arg-type]
    assert len(Cifar10(Cifar10.Config(folder=tmp_path, batches=1), tmp_path).train_targets()) == 7  # type: ignore[call-arg,arg-type]
