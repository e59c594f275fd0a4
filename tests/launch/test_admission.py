"""What a newcomer takes from the run that admits it, and what it does not."""

from __future__ import annotations

import socket

import pytest

from decentnode.config.component import Config
from decentnode.errors import AssemblyError, ConfigError, GraphError, UsageError
from decentnode.experiment import load
from decentnode.graph import GRAPHS
from decentnode.launch.nodes.admission import own_address, validated_experiment
from tests.launch.faults import experiment

ADMITS = {"node": {"missing": "regroup", "newcomers": 2}, "communication": "zeromq",
          "mapping": {"name": "linear", "nodes_per_machine": 4, "base_port": 20000}}  # fmt: skip


@pytest.mark.parametrize("family", ["ring", "exponential", "complete", "{name: regular, degree: 2}"])
def test_families_that_grow_are_taken(family: str) -> None:
    found = load(None, [], {}, True, [{**experiment(), **ADMITS, "graph": graph_of(family)}])
    assert found.make_run_graph().neighbors(5, 0, tuple(range(6)))
    assert load(None, [], {}, False, [{"name": "a", **found.resolved()}]).digest() == found.digest()


def graph_of(family: str) -> dict[str, object]:
    return {"name": "regular", "degree": 2, "nodes": 4} if "regular" in family else {"name": family, "nodes": 4}


@pytest.mark.parametrize("schedule", ["overlapped", "gossip_async", "ad_psgd", "epidemic"])
def test_newcomers_come_whatever_the_schedule(schedule: str) -> None:
    keys = {**ADMITS, "node": {**ADMITS["node"], "schedule": schedule}, "graph": graph_of("ring")}  # type: ignore[dict-item]
    assert load(None, [], {}, True, [{**experiment(), **keys}]).node.newcomers == 2


@pytest.mark.parametrize(("node", "why"), [
    ({"orphans": "adopted"}, "orphans: adopted supports only nodes in the mapping"),
    ({"schedule": "epidemic", "sampler": "cyclon"}, "sampler cyclon begins with neighbors in the mapping's graph"),
])  # fmt: skip
def test_what_knows_of_the_mapping_alone_is_refused(node: dict[str, object], why: str) -> None:
    keys = {**ADMITS, "node": {**ADMITS["node"], **node}, "graph": graph_of("ring")}  # type: ignore[dict-item]
    with pytest.raises(ConfigError, match=rf"node.newcomers: {why}"):
        load(None, [], {}, True, [{**experiment(), **keys}])


@pytest.mark.parametrize("family", ["hypercube", "star"])
def test_one_that_does_not_is_refused_by_name(family: str) -> None:
    with pytest.raises((ConfigError, GraphError), match=rf"newcomers.*{family}"):
        load(None, [], {}, True, [{**experiment(), **ADMITS, "graph": {"name": family, "nodes": 4}}])
    assert family in GRAPHS and issubclass(Config, object)


def test_invitations_to_a_run_that_admits_nobody_are_a_mistake() -> None:
    sections = {**ADMITS, "node": {"missing": "regroup"}, "communication": {"name": "zeromq", "invitations": "a"}}
    with pytest.raises(ConfigError, match=r"invitations.*admits no newcomers; set node.newcomers"):
        load(None, [], {}, True, [{**experiment(), **sections}])


@pytest.mark.parametrize(("text", "why"), [
    ("model: {name: 'os:system'}\n", "its own code, model.name: os:system"),
    ("sharing:\n- {name: a.b.c:Class}\n", "its own code, sharing.0.name"),
    ("extends: /etc/passwd\n", "extends another file"), ("[1, 2]", "no sections"), ("a: [", "not YAML"),
    ("a: !!python/object/apply:os.system [ls]", "not YAML"), ("[" * 40 + "]" * 40, "no sections"),
    ("a: " + "[" * 40 + "]" * 40, "nested too deeply"), ("\udcff", "not YAML"),
    ("a: &a [1]\nb: [*a, *a]\n", "refers to parts of itself"),
])  # fmt: skip
def test_nothing_in_the_experiment_is_trusted(text: str, why: str) -> None:
    with pytest.raises(AssemblyError, match=why):
        validated_experiment(text.encode("utf-8", "surrogateescape"))


def test_what_names_components_of_this_package_is_taken() -> None:
    assert validated_experiment(b"model: {name: mlp}\nseed: 1\n") == "model: {name: mlp}\nseed: 1\n"


def test_a_node_listens_where_it_reaches_the_run_on_two_free_ports() -> None:
    host, port = own_address("127.0.0.1", 9)
    assert host == "127.0.0.1" and 20000 <= port < 32000
    for number in (port, port + 1):
        with socket.socket() as taken:
            taken.bind((host, number))
    with pytest.raises(UsageError, match=r"no route to nowhere\.invalid"):
        own_address("nowhere.invalid", 9)
