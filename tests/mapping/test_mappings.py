"""Mappings: the uids, places and devices of nodes on machines."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from pydantic import ValidationError

from decentnode.build import device_of
from decentnode.errors import EnvironmentFault, MappingError, UsageError
from decentnode.mapping import addresses
from decentnode.mapping.base import Mapping
from decentnode.mapping.linear import Linear, LinearConfig
from decentnode.mapping.table import Table, TableConfig


def linear(base_dir: Path = Path(), **options: object) -> Linear:
    return Linear(LinearConfig.model_validate({"name": "linear", **options}), base_dir=base_dir)


def table(*machines: dict[str, object]) -> Table:
    return Table(TableConfig.model_validate({"name": "table", "machines": list(machines)}))


MAPPINGS = [
    linear(nodes_per_machine=5),
    linear(machines=3, nodes_per_machine=2, addresses=["a", "b", "c"]),
    table({"nodes": 3}),
    table({"nodes": 1, "host": "a"}, {"nodes": 4, "host": "b", "base_port": 9000}, {"nodes": 2, "host": "c"}),
]


@pytest.mark.parametrize("mapping", MAPPINGS)
def test_uids_and_places_are_one_to_one(mapping: Mapping) -> None:
    places = [mapping.place(uid) for uid in range(mapping.num_nodes)]
    assert [mapping.uid(p.machine, p.rank) for p in places] == list(range(mapping.num_nodes))
    assert len({(p.machine, p.rank) for p in places}) == mapping.num_nodes
    local = mapping.nodes_by_machine()
    assert local == [mapping.local(machine) for machine in range(mapping.num_machines)]
    assert mapping.first_places() == [places[uids[0]] for uids in local]
    assert [uid for uids in local for uid in uids] == list(range(mapping.num_nodes))
    ports = [(p.host, port) for p in places if p.port is not None for port in (p.port, p.port + 1)]
    assert len(set(ports)) == len(ports)
    for bad in (-1, mapping.num_nodes):
        with pytest.raises(MappingError, match="uid must be in"):
            mapping.place(bad)
    with pytest.raises(MappingError, match="machine must be in"):
        mapping.uid(mapping.num_machines, 0)
    with pytest.raises(MappingError, match="rank on machine 0"):
        mapping.uid(0, 99)


def test_linear_numbers_the_nodes_of_a_machine_consecutively() -> None:
    mapping = linear(machines=3, nodes_per_machine=4, addresses=["a", "b", "c"])
    assert mapping.uid(2, 1) == 2 * 4 + 1
    place = mapping.place(9)
    assert (place.host, place.port, place.bind) == ("c", 20002, "c")


def test_one_machine_listens_on_loopback_without_fixed_ports() -> None:
    place = linear(nodes_per_machine=2).place(1)
    assert (place.bind, place.port) == ("127.0.0.1", None)
    assert linear(nodes_per_machine=2, base_port=7000).place(1).port == 7002


@pytest.mark.parametrize("form", ["list", "dict", "json", "yaml"])
def test_addresses_are_read_from_a_list_a_dict_or_a_file(tmp_path: Path, form: str) -> None:
    forms: dict[str, object] = {"list": ["10.0.0.1", "10.0.0.2"], "dict": {0: "10.0.0.1", 1: "10.0.0.2"}}
    (tmp_path / "ip.json").write_text(json.dumps({"0": "10.0.0.1", "1": "10.0.0.2"}))
    (tmp_path / "ip.yaml").write_text("- 10.0.0.1\n- 10.0.0.2\n")
    mapping = linear(tmp_path, machines=2, nodes_per_machine=1, addresses=forms.get(form, f"ip.{form}"))
    assert [mapping.place(uid).host for uid in (0, 1)] == ["10.0.0.1", "10.0.0.2"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"machines": 2, "addresses": ["a"]}, "machine 1 of 2 has no address"),
        ({"machines": 2, "addresses": "none.json"}, "No such file"),
        ({"machines": 2, "addresses": "bad.json"}, "neither YAML nor JSON|must be a list"),
        ({"machines": 2, "addresses": ["127.0.0.1", "127.0.0.1"]}, "port 20000 on 127.0.0.1 is taken twice"),
        ({"nodes_per_machine": 4, "base_port": 65530}, "ports end at 65535"),
    ],
)
def test_invalid_mappings_are_refused(tmp_path: Path, options: dict[str, object], message: str) -> None:
    (tmp_path / "bad.json").write_text("{[")
    with pytest.raises(MappingError, match=message):
        linear(tmp_path, **{"nodes_per_machine": 2, **options})


def test_machines_with_different_loopback_addresses_may_use_the_same_ports() -> None:
    mapping = linear(machines=2, nodes_per_machine=2, addresses=["127.0.0.1", "127.0.0.2"])
    assert mapping.place(0).port == mapping.place(2).port


def test_unknown_keys_are_refused() -> None:
    with pytest.raises(ValidationError):
        linear(nodes_per_machine=2, prots=1)


def test_find_machine_finds_the_machine_with_one_of_the_given_names() -> None:
    mapping = linear(machines=3, nodes_per_machine=1, addresses=["10.0.0.1", "beta", "10.0.0.3"])
    assert mapping.find_machine({"beta", "127.0.0.1"}) == 1
    with pytest.raises(MappingError, match="not in the mapping"):
        mapping.find_machine({"gamma"})
    with pytest.raises(MappingError, match="several"):
        mapping.find_machine({"10.0.0.1", "10.0.0.3"})
    assert linear(nodes_per_machine=2).find_machine({"whatever"}) == 0
    assert "127.0.0.1" in addresses.own_names()


def test_the_devices_of_a_machine_are_assigned_to_its_nodes_in_turn() -> None:
    config = Table.Config.model_validate({"name": "table", "machines": [
        {"nodes": 3, "host": "a", "device": ["cuda:1", "cpu"]}, {"nodes": 2, "host": "b", "device": "cuda"},
        {"nodes": 1, "host": "c"},
    ]})  # fmt: skip
    mapping = Table(config)
    assert [mapping.place(uid).device for uid in range(6)] == ["cuda:1", "cpu", "cuda:1", "cuda", "cuda", "auto"]
    with pytest.raises(MappingError, match="device of machine 0 must name at least one, got"):
        Table(Table.Config.model_validate({"name": "table", "machines": [{"nodes": 1, "device": []}]}))


@pytest.mark.parametrize(("wanted", "rank", "gpus", "found"), [
    ("auto", 0, 0, "cpu"), ("auto", 3, 2, "cuda:1"), ("cuda", 1, 4, "cuda:1"), ("cuda", 5, 4, "cuda:1"),
    ("cuda:2", 0, 4, "cuda:2"), ("cpu", 1, 4, "cpu"), ("cuda:2", 0, 2, "only 2 GPUs are usable"),
    ("cuda", 0, 0, "no GPU is usable"), ("cuda:1", 0, 1, "mapping.device is cuda:1, but only one GPU is usable here"),
    ("gpu", 0, 0, "mapping.device must be auto, cpu, cuda or cuda:N, got 'gpu'"),
])  # fmt: skip
def test_device_of_returns_the_device_of_a_rank_or_names_the_missing_one(
    monkeypatch: pytest.MonkeyPatch, wanted: str, rank: int, gpus: int, found: str
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpus > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    if " " in found:
        with pytest.raises((EnvironmentFault, UsageError), match=found):
            device_of(wanted, rank)
    else:
        assert device_of(wanted, rank) == torch.device(found)


def test_device_auto_in_a_fork_that_cannot_use_the_gpu_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "_is_in_bad_fork", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(EnvironmentFault, match="device is auto, but this process has already asked"):
        device_of("auto")
    assert device_of("cpu").type == "cpu"


@pytest.mark.parametrize("device", ["gpu", "cuda:x", "mps", ["cuda:0", ""]])
def test_devices_other_than_auto_cpu_and_cuda_are_refused(device: object) -> None:
    with pytest.raises(ValidationError, match="must be auto, cpu, cuda or cuda:N, got"):
        linear(nodes_per_machine=2, device=device)


def test_machines_may_be_behind_nat_but_not_all_of_them() -> None:
    options = {"machines": 3, "nodes_per_machine": 2, "addresses": ["a", "b", "c"]}
    mapping = linear(**options, behind_nat=[2])
    assert [mapping.place(uid).behind_nat for uid in range(6)] == [False] * 4 + [True] * 2
    with pytest.raises(MappingError, match=r"behind_nat must have numbers of machines, below 3, got 3"):
        linear(**options, behind_nat=[3])
    with pytest.raises(MappingError, match="at least one machine must be one that the others can connect to"):
        table({"nodes": 1, "host": "a", "behind_nat": True}, {"nodes": 1, "host": "b", "behind_nat": True})
