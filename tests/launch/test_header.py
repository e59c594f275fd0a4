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
from decentnode.launch.reporting.header import TrafficEstimate, estimate_traffic, header

QUICKSTART = Path(__file__).parents[2] / "configs" / "quickstart.yaml"


def estimate_and_sent(sharing: str, rounds: int) -> tuple[TrafficEstimate, float, str]:
    """Returns (estimate, bytes that a node sends in the rounds as the mean over 4 nodes, line of the header)."""
    experiment = load(QUICKSTART, [
        "graph={name: complete, nodes: 4}", "mapping={name: linear, machines: 1, nodes_per_machine: 4}",
        f"sharing={sharing}", f"node.rounds={rounds}", "node.evaluate_every=0", "training.local_steps=1",
    ])  # fmt: skip
    found = estimate_traffic(experiment, make_model(experiment, experiment.open_data().spec))
    nodes = build_in_process(experiment)
    step_all(nodes)
    counters = [node.communication.counters for node in nodes]
    sent = sum(each.bytes_sent()["data"] + each.bytes_sent()["metadata"] for each in counters) / 4
    return found, sent, dict(map(tuple, header(experiment, range(4))))["sharing"]  # type: ignore[arg-type]


@pytest.mark.sampled(one=["sharing"])
@pytest.mark.parametrize("sharing", [
    "full", "{name: full, compression: {name: int8}}", "gradient_tracking", "{name: local_sgd, every: 2}",
    "{name: hierarchical, groups: [[0, 1], [2, 3]]}", "secure_aggregation",
    "{name: secure_aggregation, fraction: 0.1}", "push_sum", "{name: leader, compression: int8}",
])  # fmt: skip
def test_the_estimated_traffic_is_exact_where_sizes_are_fixed(sharing: str) -> None:
    found, sent, text = estimate_and_sent(sharing, 2)
    exchanges = 1 if "every" in sharing else 2
    assert (found.source, found.first) == ("exact", 1 if "every" in sharing else 0)
    assert sent == exchanges * found.sent
    assert "about" not in text and "at most" not in text and ("per exchange" in text) is (exchanges == 1)


@pytest.mark.sampled(one=["sharing"])
@pytest.mark.parametrize(("sharing", "rounds"), [
    ("{name: topk, fraction: 0.2}", 4), ("choco", 4), ("{name: choco, compression: qsgd}", 4), ("stc", 4),
    ("{name: full, compression: {name: zlib}}", 4), ("powergossip", 4), ("jwins", 28),
])  # fmt: skip
def test_the_estimated_traffic_is_measured_where_sizes_differ(sharing: str, rounds: int) -> None:
    """Bounds of differences are as large as whole models, which are sent when a neighbor lost its copy. Factors of
    powergossip alternate; jwins draws a fraction in every round."""
    found, sent, text = estimate_and_sent(sharing, rounds)
    assert found.source == "measured" and found.message <= found.most
    assert sent == pytest.approx(rounds * found.sent, rel=0.1)
    assert text.count("about ") == 2 and text.count("at most ") == 1


def test_payloads_that_are_too_large_to_measure_have_an_upper_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("decentnode.launch.reporting.header.MEASURED_ELEMENTS", 100)
    found, sent, text = estimate_and_sent("choco", 2)
    assert found.source == "bound" and found.message == found.most
    assert 0 < sent < 2 * found.sent
    assert text.count("at most ") == 2 and "about" not in text


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


def graph_lines(*sets: str) -> list[str]:
    return [text for label, text in header(load(QUICKSTART, sets), range(16)) if label == "graph"]


def test_the_graphs_over_which_fragments_are_exchanged_are_described_once_each() -> None:
    ring = "graph={name: ring, nodes: 16}"
    (run,) = graph_lines(ring)
    assert run.startswith("ring, 16 nodes, degree 2, spectral gap 0.051")
    (drawn,) = graph_lines(ring, "parameters={fragments: {name: random, count: 3, degree: 4}}")
    assert drawn.startswith("random_regular, 16 nodes, degree 4, spectral gap 0.")
    complete = "{parameters: '*', graph: {name: complete, nodes: 16}}"
    lines = graph_lines(ring, f"parameters={{fragments: [{{parameters: '1.*'}}, {complete}]}}")
    assert [text.split(",")[0] for text in lines] == ["ring", "complete"] and lines[0] == run
