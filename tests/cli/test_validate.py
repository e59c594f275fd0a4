from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import yaml
from click.testing import CliRunner, Result

from decentnode.cli import main
from decentnode.errors import DataError
from decentnode.experiment import load
from decentnode.launch.children.messages import Request
from decentnode.launch.supervising.prepare import facts
from tests.data.files import write_image_folder

QUICKSTART = str(Path(__file__).parents[2] / "configs" / "quickstart.yaml")


def validate(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["validate", *arguments], catch_exceptions=False)


@pytest.mark.parametrize("path", [
    pytest.param(path, id=path.name, marks=[pytest.mark.slow] if path.name == "imagenet.yaml" else [])
    for path in sorted(Path(QUICKSTART).parent.glob("*.yaml"))
])
def test_every_config_is_valid_and_names_its_schema(path, tmp_path, monkeypatch):
    keys = []
    if path.name == "private.yaml":
        pytest.importorskip("opacus")
    if path.name == "imagenet.yaml":  # whose images are nowhere
        monkeypatch.setenv("DECENTNODE_CACHE", str(tmp_path / "cache"))
        write_image_folder(tmp_path, classes=2, per_class=512)
        keys = ["--set", f"data.folder={tmp_path}"]
    done = validate(str(path), *keys)
    assert done.exit_code == 0, done.stderr
    assert path.read_text().startswith("# yaml-language-server: $schema=schema.json\n")


def test_without_imagenet_the_error_names_the_folder_that_it_must_be_in():
    path = str(Path(QUICKSTART).with_name("imagenet.yaml"))
    done = validate(path, "--set", "data.folder=/no/images")
    assert done.exit_code == 2
    assert "1 problem\n" in done.stderr
    assert "data: /no/images/train: no such folder; expected a folder of images for each class there (data.folder, " \
        "data.train_folder); of ImageNet its authors" in done.stderr


def test_a_valid_config_prints_one_line():
    done = validate(QUICKSTART)
    assert done.stdout.startswith(f"{QUICKSTART}: ok: quickstart, 16 nodes on 1 machine, digest ")
    assert done.stdout.count("\n") == 1


def test_problems_go_to_stderr_with_exit_code_2(tmp_path):
    path = tmp_path / "bad.yaml"
    path.write_text("graph: {name: rnig}\nseed: no\nseed: 1\n")
    done = validate(str(path))
    assert done.exit_code == 2
    assert done.stdout == ""
    assert done.stderr == (
        f"{path}: 1 problem\n\n{path}:3:1: duplicate key 'seed', first given at line 2\n    seed: 1\n    ^\n"
    )


PRIVATE = """graph: {name: ring, nodes: 3}
mapping: {machines: %d, nodes_per_machine: %d%s}
data: {name: npz, file: 'private{uid}.npz', num_classes: 3}
model: logistic
training: {}
node: {rounds: 1}
"""


def test_missing_files_of_single_nodes_are_found_before_the_run(tmp_path):
    """With --machine, only the files of the nodes of that machine are checked."""
    targets = np.arange(12) % 3
    for uid in (0, 2):
        np.savez(tmp_path / f"private{uid}.npz", train_inputs=np.ones((12, 2), np.float32), train_targets=targets,
                 test_inputs=np.ones((12, 2), np.float32), test_targets=targets)  # fmt: skip
    one, three = tmp_path / "one.yaml", tmp_path / "three.yaml"
    one.write_text(PRIVATE % (1, 3, ""))
    three.write_text(PRIVATE % (3, 1, ", addresses: [127.0.0.1, 127.0.0.2, 127.0.0.3]"))
    done = validate(str(one))
    assert done.exit_code == 2 and "1 problem\n" in done.stderr
    assert f"data: node 1: {tmp_path}/private1.npz: no such file; expected a .npz file (data.file)" in done.stderr
    assert validate(str(three)).exit_code == validate(str(three), "--machine", "2").exit_code == 0
    done = validate(str(three), "--machine", "1")
    assert done.exit_code == 2 and f"data: node 1: {tmp_path}/private1.npz: no such file" in done.stderr
    with pytest.raises(DataError, match=r"data: node 1: .*private1\.npz: no such file"):  # as a run's start does
        facts(load(three), Request(str(three), machine=1))


def test_set_overrides_keys_and_its_problems_name_it():
    assert validate(QUICKSTART, "--set", "node.rounds=2", "-s", "training.optimizer.lr=1e-3").exit_code == 0
    done = validate(QUICKSTART, "--set", "node.rounds=x")
    assert done.exit_code == 2
    assert "--set node.rounds=x: node.rounds must be an integer, got 'x'" in done.stderr


def test_resolved_shows_the_origin_of_every_value(monkeypatch):
    monkeypatch.setenv("DECENTNODE__SEED", "7")
    done = validate(QUICKSTART, "--resolved", "--set", "node.rounds=2")
    assert yaml.safe_load(done.stdout)["node"]["rounds"] == 2
    assert "seed: 7  # env\n" in done.stdout
    assert "  rounds: 2  # --set\n" in done.stdout
    assert f"run:\n  dir: {Path.cwd()}/runs  # default\n" in done.stdout
    assert f"name: quickstart  # {QUICKSTART}:4\n" in done.stdout


def test_json_has_the_problems_and_the_resolved_config():
    found = json.loads(validate(QUICKSTART, "--json", "--resolved").stdout)
    assert found["ok"]
    assert found["problems"] == []
    assert found["resolved"]["graph"]["nodes"] == 16
    done = validate("no such file.yaml", "--json")
    assert done.exit_code == 2
    assert json.loads(done.stdout) == {
        "ok": False,
        "source": "no such file.yaml",
        "problems": ["no such file.yaml: cannot be read: No such file or directory"],
    }


@pytest.mark.parametrize(("missing", "seconds", "warned"), [
    ("return_weight", "0.5", True), ("return_weight", "1", False), ("fail", "0.5", False),
])  # fmt: skip
def test_a_time_out_below_a_second_is_a_warning_with_return_weight(missing: str, seconds: str, warned: bool) -> None:
    done = validate(QUICKSTART, "-s", f"node.missing={missing}", "-s", f"communication.timeout_seconds={seconds}")
    assert done.exit_code == 0 and done.stdout.count("\n") == 1
    assert ("warning: communication.timeout_seconds is 0.5: on a busy machine" in done.stderr) == warned
