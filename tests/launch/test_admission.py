"""Which experiments can admit newcomers, and what a newcomer accepts from the run that admits it."""

from __future__ import annotations

import socket

import pytest

from decentnode.errors import AssemblyError, ConfigError, GraphError, UsageError
from decentnode.experiment import load
from decentnode.graph import GRAPHS
from decentnode.launch.nodes.admission import own_address, validated_experiment
from tests.launch.faults import experiment

ADMITS = {"node": {"missing": "regroup", "newcomers": 2}, "communication": "zeromq",
          "mapping": {"name": "linear", "nodes_per_machine": 4, "base_port": 20000}}  # fmt: skip


@pytest.mark.parametrize("family", ["ring", "exponential", "complete", "{name: regular, degree: 2}"])
def test_graph_families_for_any_number_of_nodes_admit_newcomers(family: str) -> None:
    found = load(None, [], {}, True, [{**experiment(), **ADMITS, "graph": graph_of(family)}])
    assert found.make_run_graph().neighbors(5, 0, tuple(range(6)))
    assert load(None, [], {}, False, [{"name": "a", **found.resolved()}]).digest() == found.digest()


def graph_of(family: str) -> dict[str, object]:
    return {"name": "regular", "degree": 2, "nodes": 4} if "regular" in family else {"name": family, "nodes": 4}


@pytest.mark.parametrize("schedule", ["overlapped", "gossip_async", "ad_psgd", "epidemic"])
def test_every_schedule_admits_newcomers(schedule: str) -> None:
    keys = {**ADMITS, "node": {**ADMITS["node"], "schedule": schedule}, "graph": graph_of("ring")}  # type: ignore[dict-item]
    assert load(None, [], {}, True, [{**experiment(), **keys}]).node.newcomers == 2


@pytest.mark.parametrize(("node", "reason"), [
    ({"orphans": "adopted"}, "orphans: adopted supports only nodes in the mapping"),
    ({"schedule": "epidemic", "sampler": "cyclon"}, "sampler cyclon begins with neighbors in the mapping's graph"),
])  # fmt: skip
def test_components_that_support_only_nodes_in_the_mapping_are_refused(node: dict[str, object], reason: str) -> None:
    keys = {**ADMITS, "node": {**ADMITS["node"], **node}, "graph": graph_of("ring")}  # type: ignore[dict-item]
    with pytest.raises(ConfigError, match=rf"node.newcomers: {reason}"):
        load(None, [], {}, True, [{**experiment(), **keys}])


@pytest.mark.parametrize("family", ["hypercube", "star"])
def test_graph_families_that_cannot_grow_are_refused_by_name(family: str) -> None:
    with pytest.raises((ConfigError, GraphError), match=rf"newcomers.*{family}"):
        load(None, [], {}, True, [{**experiment(), **ADMITS, "graph": {"name": family, "nodes": 4}}])
    assert family in GRAPHS


def test_invitations_to_a_run_without_newcomers_are_refused() -> None:
    sections = {**ADMITS, "node": {"missing": "regroup"}, "communication": {"name": "zeromq", "invitations": "a"}}
    with pytest.raises(ConfigError, match=r"invitations.*admits no newcomers; set node.newcomers"):
        load(None, [], {}, True, [{**experiment(), **sections}])


@pytest.mark.parametrize(("text", "reason"), [
    ("model: {name: 'os:system'}\n", "its own code, model.name: os:system"),
    ("sharing:\n- {name: a.b.c:Class}\n", "its own code, sharing.0.name"),
    ("extends: /etc/passwd\n", "extends another file"), ("[1, 2]", "no sections"), ("a: [", "not YAML"),
    ("a: !!python/object/apply:os.system [ls]", "not YAML"), ("[" * 40 + "]" * 40, "no sections"),
    ("a: " + "[" * 40 + "]" * 40, "nested too deeply"), ("\udcff", "not YAML"),
    ("a: &a [1]\nb: [*a, *a]\n", "refers to parts of itself"),
])  # fmt: skip
def test_a_newcomer_refuses_an_experiment_with_foreign_code_files_or_malformed_yaml(text: str, reason: str) -> None:
    with pytest.raises(AssemblyError, match=reason):
        validated_experiment(text.encode("utf-8", "surrogateescape"))


def test_a_newcomer_accepts_an_experiment_with_components_of_the_package() -> None:
    assert validated_experiment(b"model: {name: mlp}\nseed: 1\n") == "model: {name: mlp}\nseed: 1\n"


def test_a_newcomer_listens_on_the_interface_to_the_run_on_two_free_ports() -> None:
    host, port = own_address("127.0.0.1", 9)
    assert host == "127.0.0.1" and 20000 <= port < 32000
    for number in (port, port + 1):
        with socket.socket() as taken:
            taken.bind((host, number))
    with pytest.raises(UsageError, match=r"no route to nowhere\.invalid"):
        own_address("nowhere.invalid", 9)
