"""Combinations of rule, codec, schedule, lost payloads, policy for buffers and kind of graph: each is either refused
before the run with a sentence that says what is needed, or has the properties that its parts promise."""

from __future__ import annotations

import functools
import importlib.util
import itertools
import random
import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from decentnode.build import build, step_all
from decentnode.communication.base import Arrival, AveragingGroup, Exchange
from decentnode.communication.inproc import Hub, Inproc, InprocConfig, InprocExchange
from decentnode.communication.parts import Schema
from decentnode.compression import CODECS, LOSSLESS
from decentnode.config.component import Config, load_class
from decentnode.errors import ConfigError
from decentnode.experiment import Experiment, load
from decentnode.models.base import Model, outputs_of
from decentnode.node.schedules import background
from decentnode.payload import Payload
from decentnode.samples import DataSpec
from decentnode.sharing import AMONG_EQUALS, step_size
from tests.conftest import scale
from tests.sharing.contract import KEEPS_NO_MEAN

QUICKSTART = Path(__file__).parents[2] / "configs" / "quickstart.yaml"
NODES, ROUNDS, LR = 4, 3, 0.05
SECONDS = 10.0
"""Longest wait of a node for a payload that should come."""
OPTIONS = {"hierarchical": "groups: [[0, 1], [2, 3]]", "powergossip": "rank: 1", "local_sgd": "every: 2",
           "slowmo": "every: 2", "diloco": "every: 2", "noloco": "every: 1"}  # fmt: skip
MISSING_LIBRARIES = {name for name, module in (("zstd", "zstandard"), ("lz4", "lz4"))
                     if importlib.util.find_spec(module) is None}  # fmt: skip


class Normed(Model):
    """Has float buffers, and parameters of three shapes and of very unequal sizes."""

    def __init__(self, config: Config) -> None:
        pass

    def make(self, data: DataSpec) -> nn.Module:
        outputs = outputs_of("normed", data)
        return nn.Sequential(nn.Linear(data.input_shape[0], 40), nn.BatchNorm1d(40), nn.ReLU(), nn.Linear(40, outputs))


# -- an in-process transport that waits and may lose payloads ------------------------------------------------------


class LossyHub(Hub):
    """Loses the payloads from node 2 to odd nodes in one round. `arrival` wakes receivers that wait."""

    def __init__(self, num_nodes: int, lost_round: int) -> None:
        super().__init__(num_nodes)
        self.lost_round = lost_round
        self.arrival = threading.Condition()

    def loses(self, round: int, source: int, destination: int) -> bool:
        return round == self.lost_round and source == 2 and destination % 2 == 1


class WaitingExchange(InprocExchange):
    def arrivals(self, timeout_seconds: float) -> Iterator[Arrival]:
        owner = self._owner
        assert isinstance(owner.hub, LossyHub)
        hub, deadline = owner.hub, time.monotonic() + SECONDS
        due = {(self._round, self._phase, source, owner.uid) for source in self._expected
               if not hub.loses(self._round, source, owner.uid)}  # fmt: skip
        with hub.arrival:
            while not due <= hub.payloads.keys():
                assert hub.arrival.wait(deadline - time.monotonic()), f"{due - hub.payloads.keys()} did not come"
        yield from super().arrivals(timeout_seconds)


class WaitingInproc(Inproc):
    """Receives in any thread, as the transports between processes do."""

    concurrent: bool = True

    def exchange(
        self, round: int, outgoing: Mapping[int, Payload], expected: tuple[int, ...], phase: int = 0,
        group: AveragingGroup | None = None,
    ) -> Exchange:
        hub = self.hub
        assert isinstance(hub, LossyHub)
        with hub.arrival:
            super().exchange(round, outgoing, expected, phase, group)
            for uid in outgoing:
                if hub.loses(round, self.uid, uid):
                    del hub.payloads[round, phase, self.uid, uid]
            hub.arrival.notify_all()
        return WaitingExchange(self, round, phase, expected)


# -- combinations -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    rule: str = "full"
    codec: str = "none"
    schedule: str = "sequential"
    """background: overlapped, and mixed by a thread of its own."""
    missing: str = "fail"
    """With return_weight some payloads are lost."""
    buffers: str = "average"
    graph: str = "ring"

    def sections(self, lr: float) -> list[str]:
        section = "{name: zstd, of: {name: int4, unbiased: true}}" if self.codec == "zstd of int4" else self.codec
        codec = "" if self.codec == "none" else f", compression: {section}"
        options = f", {OPTIONS[self.rule]}" if self.rule in OPTIONS else ""
        overlapped, momentum = self.schedule != "sequential", 0 if self.rule == "scaffold" else 0.5
        return [
            f"sharing={{name: {self.rule}{options}{codec}}}",
            "weights=null", f"graph={{name: {self.graph}, nodes: {NODES}}}",
            f"mapping={{machines: 1, nodes_per_machine: {NODES}}}",
            "data={name: synthetic, input_shape: [6], num_classes: 3, train_samples: 60, test_samples: 12, "
            "partition: {name: iid}}",
            "model={name: 'tests.node.test_product:Normed'}",
            f"training={{batch_size: 5, local_steps: 1, optimizer: {{name: sgd, lr: {lr}, momentum: {momentum}}}}}",
            f"node={{rounds: {ROUNDS}, evaluate_every: 0, schedule: {'overlapped' if overlapped else 'sequential'}, "
            f"missing: {self.missing}, buffers: {self.buffers}"
            + (f", mix_in_background: {str(self.schedule == 'background').lower()}}}" if overlapped else "}"),
        ]  # fmt: skip

    def __str__(self) -> str:
        return " ".join(getattr(self, field.name) for field in fields(self))


VALUES: dict[str, Sequence[str]] = {
    "rule": list(AMONG_EQUALS),
    "codec": ["none", *(name for name in (*CODECS, "zstd of int4") if name.split()[0] not in MISSING_LIBRARIES)],
    "schedule": ["sequential", "overlapped", "background"],
    "missing": ["fail", "return_weight"],
    "buffers": ["average", "local", "recompute"],
    "graph": ["ring", "tree", "complete", "one_peer_exponential", "random_matching", "exponential",
              "directed_one_peer_exponential"],
}
"""Static undirected graphs (a ring, a tree, all with all), periodic and random ones, and directed ones (static,
periodic)."""


@dataclass(frozen=True)
class Results:
    """The final state of a run."""

    models: Tensor
    """[N, P]."""
    buffers: Tensor
    """[N, B]."""
    merged: Tensor
    accuracies: tuple[Any, ...]
    before: Tensor
    """[N, P] the models before the first round."""

    def equals(self, other: Results) -> bool:
        return (torch.equal(self.models, other.models) and torch.equal(self.buffers, other.buffers)
                and torch.equal(self.merged, other.merged) and self.accuracies == other.accuracies)  # fmt: skip


def run_case(case: Case, lr: float = LR, lossy: bool = False) -> Results:
    """Runs a case in this process, from different initial models. Raises ConfigError if it is refused."""
    experiment = load_case(case, lr)
    hub = LossyHub(NODES, lost_round=1 if lossy else -1)
    records: list[dict[str, Any]] = []

    def join(uid: int) -> Callable[[tuple[Schema, ...]], WaitingInproc]:
        return lambda schemas: WaitingInproc(InprocConfig(name="inproc"), uid=uid, hub=hub, schemas=schemas)

    nodes = [build(experiment, uid, join(uid), records.append) for uid in range(NODES)]
    draws = torch.Generator().manual_seed(9)
    for node in nodes:
        noise = torch.randn(node.training.model.num_parameters, generator=draws).to(node.training.model.device)
        node.training.model.parameters.add_(noise, alpha=0.3)
    before = torch.stack([node.training.model.parameters.clone() for node in nodes])
    step_all(nodes)
    assert [node.round for node in nodes] == [ROUNDS] * NODES and len(nodes[0].reports) == NODES
    assert not hub.payloads, "a payload was sent and not received"
    assert not any(node.figures()["faults"] for node in nodes)
    gaps = [(record["round"], record["missing"]) for record in records
            if record["kind"] == "round" and "missing" in record]  # fmt: skip
    assert all(gap == (1, [2]) for gap in gaps) and (lossy or not gaps), "a payload is missing that was not lost"
    if case.schedule == "background" and case.rule in ("full", "choco", "push_sum"):
        for node in nodes:  # on a GPU there is no background mixing
            assert node.schedule._uses_background_mixing == node.training.model.parameters.is_cpu  # type: ignore[attr-defined]
    assert nodes[0].merged is not None
    return Results(
        torch.stack([node.training.model.parameters.clone() for node in nodes]),
        torch.stack([node.training.model.buffers.clone() for node in nodes]), nodes[0].merged,
        tuple((record["round"], record["accuracy_mean"], record["accuracy_merged"], record["consensus_rms"])
              for record in records if record["kind"] == "evaluation"), before,
    )  # fmt: skip


@functools.lru_cache(8)
def load_case(case: Case, lr: float, *more: str) -> Experiment:
    return load(QUICKSTART, [*case.sections(lr), *more], {}, check=lr > 0)


def refusal(case: Case) -> str:
    """Returns why the run is refused before it starts, or an empty string."""
    try:
        load_case(case, LR)
    except ConfigError as error:
        return "\n".join(error.problems)
    return ""


SENTENCE = re.compile(r"must be|needs |works with schedule: sequential|cannot recover .+ use |is not a known key")


def check_refusal(text: str) -> None:
    """A refusal says what is needed, and shows no bug of the package."""
    assert SENTENCE.search(text), text
    assert not re.search(r"Traceback|Error\(|object at 0x|None", text), text


def check(case: Case) -> None:
    lossy = case.missing == "return_weight"
    first = run_case(case, lossy=lossy)
    for tensor in (first.models, first.buffers, first.merged):
        assert bool(tensor.isfinite().all())
    assert not torch.equal(first.models, first.before)
    again = replace(case, schedule="overlapped") if case.schedule == "background" else case
    assert first.equals(run_case(again, lossy=lossy)), "a second run, mixed by another thread, has other bits"
    without_steps = run_case(case, lr=0.0)
    assert bool(without_steps.models.isfinite().all())
    if case.schedule != "sequential":
        sequential = run_case(replace(case, schedule="sequential"), lr=0.0)
        assert without_steps.equals(sequential), "without local steps, schedules must not differ"
    if keeps_mean(case):
        mean, mean_before = without_steps.models.double().mean(0), without_steps.before.double().mean(0)
        torch.testing.assert_close(mean, mean_before, atol=2e-5, rtol=0)


def keeps_mean(case: Case) -> bool:
    """Rules promise to keep the mean if W is doubly stochastic, as on all graphs here, with lossless codecs; rules that
    compress themselves promise it with every codec. push_sum weights models by their mass, which differs between nodes
    with different numbers of neighbors."""
    compresses_itself = case.rule in ("choco", "beer", "lead", "qsgd", "sign", "deepsqueeze")
    if case.rule == "push_sum" and case.graph == "tree":
        return False
    return case.rule not in KEEPS_NO_MEAN and (compresses_itself or case.codec in ("none", *LOSSLESS))


# -- choice of combinations ------------------------------------------------------------------------------------------


def pairwise(values: Mapping[str, Sequence[str]], seed: int = 0) -> Iterator[Case]:
    """Yields cases until every pair of values of two keys was in one. Each case is the one of 30 random ones with the
    most new pairs."""
    draw, keys = random.Random(seed), list(values)
    missing = {pair for a, b in itertools.combinations(keys, 2)
            for pair in itertools.product(((a, x) for x in values[a]), ((b, y) for y in values[b]))}  # fmt: skip
    while missing:
        (a, x), (b, y) = min(missing)
        tried = [{**{key: draw.choice(values[key]) for key in keys}, a: x, b: y} for _ in range(30)]
        best = max(tried, key=lambda case: len(missing & pairs(case)))
        missing -= pairs(best)
        yield Case(**best)


def pairs(case: Mapping[str, str]) -> set[Any]:
    return set(itertools.combinations(case.items(), 2))


@pytest.fixture(autouse=True)
def small_models(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Lets small models be mixed in the background, too. A second torch thread would cost more time than it saves."""
    monkeypatch.setattr(background, "LEAST_ELEMENTS", 1)
    # the search of a step size has tests of its own, and takes seconds per codec
    monkeypatch.setattr(step_size, "largest_step", lambda *_: 0.5)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def check_all(cases: Iterable[Case]) -> tuple[list[Case], list[Case]]:
    """Returns the cases that ran and those that were refused."""
    done: list[Case] = []
    refused: list[Case] = []
    for case in cases:
        try:
            if text := refusal(case):
                check_refusal(text)
                refused.append(case)
            else:
                check(case)
                done.append(case)
        except Exception as error:
            raise AssertionError(f"{case}: {error!r}") from error
    return done, refused


@pytest.mark.slow
def test_all_pairs_of_codec_schedule_losses_buffers_and_graph_run_with_plain_averaging() -> None:
    """Plain averaging refuses no combination. By default with four graphs and one codec of each kind."""
    plain = {key: values for key, values in VALUES.items() if key != "rule"}
    if not scale(0, 1):
        plain["graph"] = ["ring", "one_peer_exponential", "random_matching", "directed_one_peer_exponential"]
        kinds = ("none", "bfloat16", "int8", "qsgd", "sign", "zlib")
        plain["codec"] = [name for name in plain["codec"] if name in kinds]
    done, refused = check_all(pairwise(plain))
    assert not refused and len(done) >= len(plain["codec"]) * len(plain["graph"])
    for key, values in plain.items():
        assert {getattr(case, key) for case in done} == {*values}


def random_cases(rule: str, schedule: str, draw: random.Random) -> Iterator[Case]:
    """Yields cases with random other values, endlessly. Rules without the key `compression` are drawn with no codec."""
    has_codec = "compression" in load_class(rule, AMONG_EQUALS, "sharing").Config.model_fields
    while True:
        chosen = {key: draw.choice(values) for key, values in VALUES.items()} | ({} if has_codec else {"codec": "none"})
        yield Case(**{**chosen, "rule": rule, "schedule": schedule})


@pytest.mark.slow
def test_every_rule_runs_in_a_random_case_or_is_refused_with_a_reason() -> None:
    """Draws cases until one runs, mixed in the background if the rule can be; all refusals before it must be clear."""
    refusals = []
    for number, rule in enumerate(AMONG_EQUALS):
        sequential = load_class(rule, AMONG_EQUALS, "sharing").requirements.sequential
        if sequential:
            check_refusal(refusal(Case(rule, schedule="background")))
        schedule = "sequential" if sequential else "background"
        for case in itertools.islice(random_cases(rule, schedule, random.Random(number)), 60):
            done, refused = check_all([case])
            refusals += refused
            if done:
                break
        else:
            raise AssertionError(f"{rule} never runs")
    assert len(refusals) > 10 and "full" not in {case.rule for case in refusals}


@pytest.mark.skipif(not scale(0, 1), reason="a hundred runs for each rule")
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("rule", AMONG_EQUALS)
def test_every_rule_runs_or_is_refused_with_all_pairs_of_the_other_values(rule: str) -> None:
    """Under --stress. The full product would be 1,764 combinations per rule."""
    check_all(pairwise({**VALUES, "rule": [rule]}, seed=len(rule)))
