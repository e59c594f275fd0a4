"""The output of `list` and `explain`: complete for every component and key, and consistent with the Configs."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from decentnode.cli import main
from decentnode.config.component import load_class
from decentnode.describe import (
    GROUPS,
    KINDS,
    MAX_SUGGESTIONS,
    TABLES,
    ComponentInfo,
    config_class,
    describe,
    find,
    names,
)
from decentnode.errors import UsageError
from decentnode.experiment import Experiment

COMPONENTS = [(kind, name) for kind in KINDS for name in names(kind)]


def test_explain_finds_modules_of_the_user_in_the_current_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "heeding_of_test_describe.py").write_text(
        "from decentnode.graph.weights import Weights, WeightsConfig\n\n\nclass HeedConfig(WeightsConfig):\n"
        "    heed: float = 0.5\n    'How much neighbors count.'\n\n\nclass Heed(Weights):\n    'Heeds.'\n\n"
        "    Config = HeedConfig\n\n    def _row(self, topology, uid, round):\n        return {}\n")  # fmt: skip
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [each for each in sys.path if each not in ("", ".")])
    result = CliRunner().invoke(main, ["explain", "weights.heeding_of_test_describe:Heed"])
    assert result.exit_code == 0 and "How much neighbors count." in result.output, result.output


@pytest.mark.parametrize(("kind", "name"), COMPONENTS)
def test_every_component_and_key_is_described(kind: str, name: str) -> None:
    found = describe(kind, name)
    assert len(found.summary) > 10 and found.text
    for key in found.keys:
        assert len(key.text) > 5, f"{found.path}.{key.name} has no docstring"
        assert not re.search(r"typing|class|<|Annotated", key.type), key
        assert find(f"{found.path}.{key.name}") == (found, key)


def test_every_section_of_an_experiment_is_a_kind() -> None:
    below = {"experiment", "partition", "compression", "fragments", "sampler", "tracker"}
    assert {"name", "seed"} | KINDS.keys() - below == Experiment.model_fields.keys()
    assert KINDS.keys() == TABLES.keys() | GROUPS.keys()


def test_types_bounds_units_and_defaults() -> None:
    keys = {key.name: key for key in describe("communication", "zeromq").keys}
    assert keys["timeout_seconds"].facts == "number (s), > 0, default 60"
    assert keys["chunk_bytes"].facts == "integer (bytes), >= 65536, <= 67108864, default 4194304"
    assert keys["same_host"].type == "shared_memory | ipc | tcp | null"
    keys = {key.name: key for key in describe("sharing", "choco").keys}
    assert keys["fraction"].facts == "number, > 0, <= 1, default 0.1"
    assert keys["compression"].type == "section: compression"
    assert {key.name: key for key in describe("graph", "ring").keys}["nodes"].default is None
    nested = [key.name for key in describe("training", "supervised").keys]
    assert "optimizer.name" in nested and "validation.fraction" in nested
    assert "machines.base_port" in [key.name for key in describe("mapping", "table").keys]


@pytest.mark.parametrize(("kind", "name"), [each for each in COMPONENTS if each[0] in TABLES])
def test_described_keys_and_defaults_are_those_of_the_config(kind: str, name: str) -> None:
    fields = config_class(load_class(name, TABLES[kind], kind)).model_fields
    own = [key.name for key in describe(kind, name).keys if "." not in key.name]
    assert own == [each for each in fields if each not in ("name", "do")]
    assert all((key.default is None) == fields[key.name].is_required() for key in describe(kind, name).keys
               if "." not in key.name)  # fmt: skip


@pytest.mark.parametrize(
    ("path", "text"),
    [("sharing.chcoo", "did you mean 'choco'"), ("sharng.choco", "did you mean 'sharing'"),
     ("sharing.choco.fractoin", "did you mean 'fraction'"), ("node.round", "did you mean 'rounds'"),
     ("sharing", "choose one: full"), ("sharing.none_such:Class", "no module named")],
)  # fmt: skip
def test_an_unknown_name_is_refused_with_the_nearest_name(path: str, text: str) -> None:
    with pytest.raises(UsageError, match=re.escape(text)):
        find(path)


@pytest.mark.parametrize(
    ("path", "text"),
    [("topk", "did you mean 'sharing.topk'?"), ("sign", "did you mean 'sharing.sign' or 'compression.sign'?"),
     ("topk.fraction", "did you mean 'sharing.topk.fraction'?"), ("sharing.int8", "did you mean 'compression.int8'?"),
     ("compression.choco.fraction", "did you mean 'sharing.choco.fraction'?"), ("tpok", "did you mean 'sharing.topk'?"),
     ("rounds", "did you mean 'node.rounds' or"), ("batch_size", "did you mean 'training.supervised.batch_size'?"),
     ("digits", "did you mean 'data.digits'?")],
)  # fmt: skip
def test_a_name_of_another_kind_is_refused_with_its_whole_path(path: str, text: str) -> None:
    with pytest.raises(UsageError, match=re.escape(text)):
        find(path)
    suggested = re.findall(r"'([a-z_0-9]+\.[a-z_0-9.]+)'", text)
    assert suggested and all(find(each) for each in suggested)


def test_a_key_of_many_components_is_refused_with_a_few_of_them() -> None:
    with pytest.raises(UsageError, match="did you mean") as caught:
        find("fraction")
    assert 1 < str(caught.value).count(".fraction'") <= MAX_SUGGESTIONS
    with pytest.raises(UsageError, match=r"did you mean 'sharing\.topk'"):
        names("topk")
    with pytest.raises(UsageError) as caught:
        find("xyzzyq")
    assert "did you mean" not in str(caught.value)


@pytest.mark.parametrize("word", ["extra", "market", "danser"])
def test_a_name_of_another_kind_is_proposed_only_where_it_is_near(word: str) -> None:
    """There are so many names that most words are slightly similar to one of them."""
    with pytest.raises(UsageError) as caught:
        find(word)
    assert "did you mean" not in str(caught.value)


def test_a_class_given_by_its_path_is_described() -> None:
    found = find("sharing.decentnode.sharing.full:Full")
    assert isinstance(found, ComponentInfo) and "D-PSGD" in found.text


def test_the_commands_list_and_explain_show_the_descriptions() -> None:
    def run(*arguments: str) -> str:
        done = CliRunner().invoke(main, arguments, catch_exceptions=False)
        assert done.exit_code == 0, done.output
        return done.output

    assert all(kind in run("list") for kind in KINDS)
    assert json.loads(run("list", "sharing", "--json")).keys() == {*names("sharing")}
    assert "rounds" in run("list", "node") and run("explain", "sharing") == run("list", "sharing")
    assert "CHOCO-SGD" in run("explain", "sharing.choco") and "step_size" in run("explain", "sharing.choco")
    assert "default 60" in run("explain", "node.rounds")
    assert json.loads(run("explain", "node.rounds", "--json"))["type"] == "integer"
    assert "has no keys" not in run("explain", "mapping.table")


def test_a_section_is_explained_by_its_path_in_a_file_with_its_keys() -> None:
    done = CliRunner().invoke(main, ["explain", "training.privacy"])
    assert done.output == CliRunner().invoke(main, ["explain", "training.supervised.privacy"]).output
    assert done.output.startswith("training.supervised.privacy\n")
    assert all(f"  privacy.{key}" in done.output for key in ("clip", "noise", "delta", "draws"))
    assert "batch_size" not in done.output and "evaluate" not in done.output.partition("privacy.clip")[2]


@pytest.mark.parametrize(("path", "hint"), [
    ("training.lr", "see 'training.supervised.optimizer'"),
    ("training.optimizer.lr", "`decentnode explain training.supervised.optimizer` explains what that section takes"),
    ("node.checkpoint.evry", "did you mean 'checkpoint.every'?"),
])  # fmt: skip
def test_an_unknown_key_is_refused_with_the_place_that_explains_it(path: str, hint: str) -> None:
    with pytest.raises(UsageError, match=re.escape(hint) + "$"):
        find(path)


def test_a_key_under_its_former_name_is_refused_with_its_present_name() -> None:
    with pytest.raises(UsageError, match=r"node\.mix_behind is called node\.mix_in_background now"):
        find("node.mix_behind")


def test_explain_says_that_a_class_has_no_docstring(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "bare_of_test_describe.py").write_text(
        "from torch import nn\n\n\nclass Bare(nn.Module):\n    def __init__(self, width: int = 3):\n"
        "        super().__init__()\n")  # fmt: skip
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [each for each in sys.path if each not in ("", ".")])
    named = "model.bare_of_test_describe:Bare"
    whole = CliRunner().invoke(main, ["explain", named]).output
    assert whole.startswith(f"{named}\n\nIts class has no docstring, which would stand here.\n\nKeys:\n")
    key = CliRunner().invoke(main, ["explain", f"{named}.width"]).output
    assert "integer, default 3" in key, key
