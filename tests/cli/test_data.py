from __future__ import annotations

import json
import os
from pathlib import Path

import matplotlib
import pytest
from click.testing import CliRunner, Result

from decentnode.cli import main
from tests.data.files import write_celeba, write_femnist, write_image_folder

QUICKSTART = str(Path(__file__).parents[2] / "configs" / "quickstart.yaml")


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DECENTNODE_CACHE", str(tmp_path / "cache"))


def run_data(*words: str) -> Result:
    return CliRunner().invoke(main, ["data", *words])


def test_prepare_converts_and_checks(tmp_path: Path) -> None:
    write_femnist(tmp_path / "d")
    found = run_data("prepare", "femnist", "--from", str(tmp_path / "d"))
    assert found.exit_code == 0, found.output
    lines = found.output.splitlines()
    assert lines[0] == "20 training samples, 5 test samples, all readable"
    assert lines[1] == "5 users, with 2 to 6 training samples"
    assert lines[2].startswith(f"converted into {tmp_path / 'cache' / 'femnist-'}")
    assert lines[3] == f"data: {{name: femnist, folder: {tmp_path / 'd'}}}"
    (array,) = (tmp_path / "cache").glob("femnist-*/train_x.bin")
    array.write_bytes(b"\x01" + array.read_bytes()[1:])
    assert run_data("prepare", "femnist", "--from", str(tmp_path / "d")).output == found.output
    whole, times = array.read_bytes(), array.stat()
    array.write_bytes(b"\x01" + whole[1:])
    os.utime(array, ns=(times.st_atime_ns, times.st_mtime_ns))  # like a damaged disk, which changes no time stamp
    damaged = run_data("prepare", "femnist", "--from", str(tmp_path / "d"))
    assert "train_x has changed since it was written and will be converted again" in damaged.output
    assert array.read_bytes() == whole


def test_prepare_takes_further_keys(tmp_path: Path) -> None:
    write_celeba(tmp_path / "d", tmp_path / "img")
    without = run_data("prepare", "celeba", "--from", str(tmp_path / "d"))
    assert without.exit_code == 2
    assert "data celeba: images: Field required; --set KEY=VALUE gives a key" in without.output
    images = f"images={tmp_path / 'img'}"
    found = run_data("prepare", "celeba", "--from", str(tmp_path / "d"), "-s", images, "-s", "side=16")
    assert found.exit_code == 0 and "side: 16}" in found.output


def test_prepare_of_missing_files_says_how_to_download_them(tmp_path: Path) -> None:
    found = run_data("prepare", "cifar10", "--from", str(tmp_path / "no"))
    assert found.exit_code == 2 and "decentnode data get cifar10 downloads it" in found.output
    assert "did you mean 'cifar10'?" in run_data("prepare", "cifar1", "--from", ".").output


def test_info_shows_the_samples_and_classes_of_every_node(tmp_path: Path) -> None:
    found = run_data("info", QUICKSTART)
    assert found.exit_code == 0, found.output
    lines = found.output.splitlines()
    assert lines[0] == "digits: 1,437 training samples, 360 test samples, 10 classes"
    assert lines[1].startswith("dirichlet on 16 nodes: ") and len(lines) == 5 + 16
    assert lines[2] == "inputs [1, 8, 8] uint8, times 0.0625, plus 0, from 0 to 15.94"
    assert "samples of each class" in lines[4] and "|" in lines[5] and "█" in found.output
    facts = json.loads(run_data("info", QUICKSTART, "--json").output)
    assert sum(node["samples"] for node in facts["nodes"]) == 1437
    assert sum(sum(node["classes"]) for node in facts["nodes"]) == 1437 and facts["left_out"] == 0


def test_info_shows_the_keys_of_each_node_and_the_samples_left_out(tmp_path: Path) -> None:
    write_femnist(tmp_path / "d")
    section = f"data={{name: femnist, folder: {tmp_path / 'd'}, partition: {{name: by_key, keys_per_node: 2}}}}"
    found = run_data("info", QUICKSTART, "-s", section, "-s", "graph={name: ring, nodes: 2}",
                 "-s", "mapping={machines: 1, nodes_per_machine: 2}", "-s", "model=femnist_cnn")  # fmt: skip
    assert found.exit_code == 0, found.output
    assert "left out" in found.output and "keys" in found.output.splitlines()[4]
    assert [line.split("|")[0].split()[3] for line in found.output.splitlines()[5:]] == ["2", "2"]


def test_info_shows_the_augmentation_and_the_number_of_test_samples(tmp_path: Path) -> None:
    sets = [word for each in ("training.augment={random_crop: 2, flip: true}", "data.sample_test=100",
                              "data.shard_test=true") for word in ("-s", each)]  # fmt: skip
    lines = run_data("info", QUICKSTART, *sets).output.splitlines()
    assert lines[2].endswith("; in training shifted by up to 2 pixels, mirrored")
    assert lines[3] == "each node's model is tested on up to 7 test samples"
    facts = json.loads(run_data("info", QUICKSTART, *sets, "--json").output)
    assert facts["scale"] == 1 / 16 and facts["offset"] == 0 and facts["tested_samples"] == 7
    assert facts["augmentation"]["random_crop"] == 2
    text = run_data("info", str(Path(QUICKSTART).parent / "tasks" / "next_character.yaml")).output.splitlines()
    assert text[2] == "inputs [40] of whole numbers"


def test_info_draws_the_partition_into_a_picture(tmp_path: Path) -> None:
    for name in ("a.png", "b.svg"):
        found = run_data("info", QUICKSTART, "--draw", str(tmp_path / name))
        assert found.exit_code == 0 and (tmp_path / name).stat().st_size > 5000
    with matplotlib.rc_context({"svg.fonttype": "none"}):
        run_data("info", QUICKSTART, "--draw", str(tmp_path / "b.svg"))
    largest = max(max(node["classes"]) for node in json.loads(run_data("info", QUICKSTART, "--json").output)["nodes"])
    assert f"area: samples, {largest} in the largest circle" in (tmp_path / "b.svg").read_text()
    assert run_data("info", QUICKSTART, "--draw", str(tmp_path / "a.txt")).exit_code == 2


@pytest.mark.parametrize(("words", "text"), [
    (["x={a"], "--set x={a:"), (["x"], "must be key=value, got no '='"), (["=1"], "must be names joined by dots"),
    (["seed=!!python/object:os.system x"], "the tag tag:yaml.org,2002:python/object:os.system is not allowed here"),
    (["ü=1"], "data npz: ü: Extra inputs are not permitted"),
    (["partition.name=nowhere"], "partition.name: must be one of iid"),
])  # fmt: skip
def test_prepare_refuses_wrong_keys_with_the_reason(tmp_path: Path, words: list[str], text: str) -> None:
    found = run_data("prepare", "npz", "--from", str(tmp_path), *(word for each in words for word in ("--set", each)))
    assert found.exit_code == 2 and text in found.output, (found.output, found.exception)


@pytest.mark.parametrize("name", ["json:JSONDecoder", "builtins:dict", "builtins:int", "no:such", "os:path"])
def test_prepare_refuses_a_class_that_is_no_dataset(tmp_path: Path, name: str) -> None:
    found = run_data("prepare", name, "--from", str(tmp_path))
    assert found.exit_code == 2 and found.output.startswith("error: ") and name in found.output, found.exception


@pytest.mark.parametrize("mirror", ["nonsense", "", "ftp://127.0.0.1/x", "file:///etc", "http://", "http://[::",
                                    "http://a b/", "http://127.0.0.1:99999/", "http://ü ü/"])  # fmt: skip
def test_a_mirror_must_be_an_address(tmp_path: Path, mirror: str) -> None:
    found = run_data("get", "mnist", "--to", str(tmp_path / "m"), "--mirror", mirror)
    assert found.exit_code == 2 and "mirror must be the address of a folder, such as http" in found.output, found.output
    assert not (tmp_path / "m").exists()


def test_prepare_reads_every_image_and_names_a_broken_one(tmp_path: Path) -> None:
    write_image_folder(tmp_path / "d")
    words = ("prepare", "image_folder", "--from", str(tmp_path / "d"), "--set", "size=8")
    found = run_data(*words)
    assert found.exit_code == 0, found.output
    lines = found.output.splitlines()
    assert lines[0] == "12 training samples, 6 test samples, all readable"
    assert lines[1].startswith(f"listed in {tmp_path / 'cache' / 'image_folder-'}")
    last = tmp_path / "d" / "val" / "n02" / "val_1.png"
    last.write_bytes(last.read_bytes()[:60])
    broken = run_data(*words)
    assert broken.exit_code == 8 and f"{last}: cannot be read as a JPEG or PNG image" in broken.stderr


@pytest.mark.slow
def test_info_shows_how_each_channel_is_normalized(tmp_path: Path) -> None:
    write_image_folder(tmp_path / "d", per_class=64)
    keys = ("--set", f"data={{name: image_folder, folder: {tmp_path / 'd'}, size: 8, mean: [0.5, 0, 0]}}",
            "--set", "training.augment={random_resized_crop: true}")  # fmt: skip
    text = ("inputs [3, 8, 8] read from files, times (0.0171248, 0.017507, 0.0174292), plus (-2.18341, 0, 0); "
            "in training cut out of their files at random")  # fmt: skip
    assert text in run_data("info", QUICKSTART, *keys).output
    facts = json.loads(run_data("info", QUICKSTART, *keys, "--json").stdout)
    assert len(facts["scale"]) == len(facts["offset"]) == 3 and facts["augmentation"]["random_resized_crop"] is True
