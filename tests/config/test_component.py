from __future__ import annotations

from typing import Literal

import pytest
import yaml
from pydantic import ConfigDict, ValidationError

from decentnode.communication import COMMUNICATIONS, CONFIGS
from decentnode.config.component import Config, load_class, section
from decentnode.config.key_docs import DocumentedSchema
from decentnode.errors import UsageError
from decentnode.similar_words import nearest

from . import fakes

HERE = fakes.__package__


def test_a_section_becomes_the_config_of_its_class():
    tree = fakes.Tree.model_validate({"graph": {"name": "ring", "nodes": 3}})
    assert isinstance(tree.graph, fakes.RingConfig)
    assert tree.graph.nodes == 3
    assert isinstance(tree.work.optimizer, fakes.SgdConfig)


def test_a_component_may_be_a_bare_name_or_implied_by_its_keys():
    assert fakes.Tree.model_validate({"graph": {"file": "a.edges"}}).graph.name == "file"
    assert fakes.Work.model_validate({"optimizer": "sgd"}).optimizer.name == "sgd"
    assert fakes.Work.model_validate({"optimizer": {"lr": 1}}).optimizer.name == "sgd"


def test_a_dump_has_every_key_of_the_chosen_config():
    dump = fakes.Tree.model_validate({"graph": {"name": "ring", "nodes": 3}}).model_dump(mode="json")
    assert dump["graph"] == {"name": "ring", "nodes": 3}
    assert dump["work"]["optimizer"] == {"name": "sgd", "lr": 0.1, "nesterov": False}


def test_configs_are_frozen():
    tree = fakes.Tree.model_validate({"graph": {"name": "ring", "nodes": 3}})
    with pytest.raises(ValidationError):
        tree.graph.nodes = 4


def test_a_class_from_outside_is_named_by_its_path():
    name = f"{HERE}.fakes:Ring"
    tree = fakes.Tree.model_validate({"graph": {"name": name, "nodes": 2}})
    assert (tree.graph.name, tree.graph.nodes) == (name, 2)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("rnig", "must be one of ring, regular, file, or 'package.module:Class', got 'rnig'; did you mean 'ring'?"),
        ("no.such:Thing", "no module named 'no'"),
        (f"{HERE}.fakes:Rng", "has no class 'Rng'; did you mean 'Ring'?"),
        (f"{HERE}.fakes:GRAPHS", "must name a class, got dict"),
        (":Thing", "raised ValueError"),
        ("..x:Thing", "raised TypeError"),
        (f"{HERE}.broken:Thing", "raised RuntimeError('as outsiders do')"),
    ],
)
def test_load_class_says_what_is_wrong_with_the_name(name, message):
    with pytest.raises(UsageError) as caught:
        load_class(name, fakes.GRAPHS, "graph")
    assert message in str(caught.value)


def test_a_class_without_config_is_refused():
    assert "must name a class whose Config" in fakes.explain_problems(f"graph: {{name: '{HERE}.fakes:NoConfig'}}")


def test_nearest_ignores_case():
    assert nearest("RING", fakes.GRAPHS) == "ring"
    assert nearest("zzz", fakes.GRAPHS) is None


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_numbers_must_be_finite(value):
    with pytest.raises(ValidationError, match="finite"):
        fakes.SgdConfig(lr=value)


def test_booleans_are_refused_as_numbers():
    for bad in ({"batch": True}, {"hidden": [1, False]}):
        with pytest.raises(ValidationError, match="true or false"):
            fakes.Work.model_validate(bad)
    assert fakes.SgdConfig.model_validate({"nesterov": True}).nesterov


@pytest.mark.parametrize("value", ["yes", "no", "true", "False", "on", "y", "0", "1", 0, 1, 1.0, 0.0])
def test_text_and_numbers_are_refused_as_booleans(value: object):
    class Recording(Config):
        record: Literal["auto"] | bool = "auto"
        merge: bool | None = None

    for key, rule in (("record", "must be true or false or 'auto'"), ("merge", "must be true or false")):
        with pytest.raises(ValidationError, match=rule):
            Recording.model_validate({key: value})
    valid = Recording.model_validate({"record": "auto", "merge": None})
    assert (valid.record, valid.merge) == ("auto", None)
    assert Recording.model_validate({"record": True, "merge": False}).record is True


@pytest.mark.parametrize(("key", "value"), [("batch", "3"), ("hidden", [8, " 0x10 "]), ("lr", "0.1")])
def test_quoted_numbers_are_refused_as_numbers(key: str, value: object):
    with pytest.raises(ValidationError, match="must be a"):
        (fakes.SgdConfig if key == "lr" else fakes.Work).model_validate({key: value})


@pytest.mark.parametrize("written", ["1e-3", "-.5e-1", "1E2", "2.5e3"])
def test_numbers_like_1e_minus_3_that_yaml_reads_as_text_are_accepted_as_numbers(written: str):
    class Shifted(Config):
        by: float

    assert isinstance(yaml.safe_load(written), str)
    assert Shifted.model_validate(yaml.safe_load(f"by: {written}")).by == float(written)
    assert Shifted.model_validate({"by": 3}).by == 3


def test_text_may_look_like_a_number_or_a_boolean():
    class Named(Config):
        host: str | int = ""
        hosts: list[str] | dict[int, str]

    named = Named.model_validate({"name": "3", "host": "8", "hosts": ["1", "yes"]})
    assert (named.name, named.host, named.hosts) == ("3", "8", ["1", "yes"])


def test_text_of_a_number_becomes_a_number_under_extra_keys_only():
    class Open(Config):
        model_config = ConfigDict(extra="allow")
        known: str = ""

    extra = Open.model_validate({"known": "1e-3", "lr": "1e-3", "betas": ["9e-1", "x"], "text": "1e"}).model_extra
    assert extra == {"lr": 1e-3, "betas": [0.9, "x"], "text": "1e"}
    assert Open.model_validate({"known": "1e-3"}).known == "1e-3"


def test_json_schema_tells_components_apart_by_name():
    schema = fakes.Tree.model_json_schema(schema_generator=DocumentedSchema)
    bare, ring, regular, file, outside = schema["properties"]["graph"]["anyOf"]
    assert bare["enum"] == ["ring", "regular", "file"]
    assert ring["properties"]["name"]["const"] == "ring"
    assert regular["properties"]["name"]["const"] == "regular"
    assert ring["properties"]["nodes"]["description"] == "How many nodes."
    assert ring["required"] == ["name", "nodes"]
    assert file["required"] == ["file"]
    assert outside["properties"]["name"]["pattern"]


def test_a_section_without_components_raises_validation_errors_only():
    empty = section({}, "thing")
    with pytest.raises(ValidationError):
        fakes.Tree.model_validate({"graph": None})
    assert empty.name_of({"x": 1}) is None


def test_a_config_can_be_found_without_importing_its_component():
    table = {"ring": "no.such.module:Ring"}
    chosen = section(table, "graph", configs={"ring": f"{HERE}.fakes:RingConfig"})
    assert chosen.config_of("ring") is fakes.RingConfig
    with pytest.raises(UsageError, match="no module named 'no'"):
        section(table, "graph").config_of("ring")


@pytest.mark.parametrize("name", CONFIGS)
def test_CONFIGS_has_the_same_config_as_the_class_of_each_transport(name: str):
    assert section({}, "communication", configs=CONFIGS).config_of(name) is section(
        COMMUNICATIONS, "communication").config_of(name)  # fmt: skip
