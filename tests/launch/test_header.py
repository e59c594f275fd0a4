"""The header of a run: estimated traffic, devices and warnings. The estimate is compared with the counted bytes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

from decentnode.build import build_in_process, step_all
from decentnode.cli import main
from decentnode.experiment import load
from decentnode.experiment.initial_model import make_model
from decentnode.launch.reporting.header import estimate_traffic, header

QUICKSTART = Path(__file__).parents[2] / "configs" / "quickstart.yaml"


@pytest.mark.sampled(one=["sharing"])
@pytest.mark.parametrize(("sharing", "exact"), [
    ("full", True), ("{name: full, compression: {name: int8}}", True), ("gradient_tracking", True),
    ("{name: local_sgd, every: 2}", True), ("{name: hierarchical, groups: [[0, 1], [2, 3]]}", True),
    ("{name: topk, fraction: 0.2}", False), ("secure_aggregation", False),
    ("{name: jwins, compression: {name: zlib}}", False), ("choco", False),
])  # fmt: skip
def test_the_estimated_traffic_is_exact_or_an_upper_bound_of_what_is_sent(sharing: str, exact: bool) -> None:
    experiment = load(QUICKSTART, [
        "graph={name: complete, nodes: 4}", "mapping={name: linear, machines: 1, nodes_per_machine: 4}",
        f"sharing={sharing}", "node.rounds=2", "node.evaluate_every=0", "training.local_steps=1",
    ])  # fmt: skip
    found = estimate_traffic(experiment, make_model(experiment, experiment.open_data().spec))
    nodes = build_in_process(experiment)
    step_all(nodes)
    counters = [node.communication.counters for node in nodes]
    sent = sum(each.bytes_sent()["data"] + each.bytes_sent()["metadata"] for each in counters) / 4
    rounds = 1 if "every" in sharing else 2
    assert found.exact is exact and found.first == (1 if "every" in sharing else 0)
    assert sent == rounds * found.sent if exact else 0 < sent <= rounds * found.sent
    text = dict(map(tuple, header(experiment, range(4))))["sharing"]  # type: ignore[arg-type]
    assert ("at most" in text) is not exact and ("per exchange" in text) is (rounds == 1)


def test_the_header_names_the_devices_of_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """The devices of another machine in the mapping need not exist on this machine."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "Zeta")
    monkeypatch.setattr(torch.cuda, "get_rng_state", lambda _: torch.get_rng_state())  # the GPUs do not exist
    monkeypatch.setattr(torch.cuda, "set_rng_state", lambda *_: None)
    machines = [{"nodes": 1, "host": "127.0.0.1", "device": "cuda:7"},
                {"nodes": 4, "host": "127.0.0.2", "device": ["cuda:0", "cuda:1", "cuda:0", "cpu"]}]  # fmt: skip
    experiment = load(QUICKSTART, [
        "graph={name: ring, nodes: 5}", "node.rounds=1", f"mapping={{name: table, machines: {machines}}}"])
    lines = [header(experiment, local)[0][1] for local in ([1, 2, 3, 4], [1, 3], [4])]
    assert ["2 GPUs Zeta and CPU, " in lines[0], "GPU Zeta, " in lines[1], " CPU, " in lines[2]] == [True] * 3


def test_only_a_run_with_connections_is_warned_that_they_are_without_security() -> None:
    experiment = load(QUICKSTART, ["graph={name: ring, nodes: 4}", "mapping={machines: 2, nodes_per_machine: 2, "
                                   "addresses: [10.0.0.1, 10.0.0.2]}"])  # fmt: skip
    warned = ["without security" in str(header(experiment, [0], connected)) for connected in (True, False)]
    assert warned == [True, False]


@pytest.mark.parametrize(("optimizer", "text"), [
    ("{name: sgd}", "lr of optimizer sgd is 0.001, its default: none is given"),
    ("{name: accumadam}", "lr of optimizer accumadam is 0.001, its default: none is given"),
    ("{name: sgd, lr: 0.001}", ""),
])  # fmt: skip
def test_a_default_learning_rate_is_named_in_the_header_and_by_validate(optimizer: str, text: str) -> None:
    override = f"training.optimizer={optimizer}"
    assert dict(map(tuple, header(load(QUICKSTART, [override]), [0]))).get("training", "") == text  # type: ignore[arg-type]
    note = CliRunner().invoke(main, ["validate", str(QUICKSTART), "--set", override]).stderr
    assert note == (f"note: {text}\n" if text else "")
