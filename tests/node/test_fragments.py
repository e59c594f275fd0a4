"""Fragments: parts of the model with rounds, graphs and rules of their own, on every schedule and transport."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from decentnode.build import schemas_of, step_all
from decentnode.communication.inproc import Inproc
from decentnode.graph.topology import Topology
from decentnode.node.config import NodeConfig
from decentnode.node.node import Node, NodeParts
from decentnode.sharing.base import Sharing
from decentnode.sharing.fragments import Fragment
from decentnode.sharing.full import Full
from decentnode.tensors import BLOCK_ELEMENTS
from decentnode.training.base import Direction, Update
from tests.communication.contract import BATCHED, NETWORKED, open_nodes, run_on_all
from tests.graph.contract import make
from tests.node.fakes import ENDLESS, Quadratic, check_stop_in_round_7, stacked
from tests.node.test_generations import Run
from tests.node.test_phases import Twice
from tests.sharing.contract import KEEPS_NO_MEAN, RULES, example_shapes, requirement_traits, rule, suitable_graph

SCHEDULES = ["sequential", "overlapped"]
FULL = rule("full")


@dataclass
class Spec:
    """A fragment up to `stop`."""

    stop: int
    every: int = 1
    offset: int = 0
    graph: Topology | None = None


def fragments(specs: Sequence[Spec], graph: Topology) -> tuple[Fragment, ...]:
    starts = [0, *(spec.stop for spec in specs)]
    return tuple(Fragment(starts[i], spec.stop, spec.graph or graph, spec.every, spec.offset, i)
                 for i, spec in enumerate(specs))  # fmt: skip


class QuadraticRun:
    """Nodes that train on quadratics. They have finished their run, or with `by_hand` a test steps them."""

    def __init__(
        self, make_rule: Callable[[], Sharing], graph: Topology, specs: Sequence[Spec] = (), elements: int = 30,
        rounds: int = 6, lr: float = 0.1, transport: str = "inproc", buffers: int = 0, by_hand: bool = False,
        steps: int = 1, **options: object,
    ) -> None:  # fmt: skip
        self.records: list[dict[str, Any]] = []
        config = NodeConfig.model_validate({"rounds": rounds, "evaluate_every": 0, **options})
        cut = fragments(specs, graph)
        self.trainings = [SeveralSteps(u, elements, lr, steps, buffers) for u in range(graph.num_nodes)]
        self.initial = stacked(self.trainings).clone()  # type: ignore[arg-type]
        sizes = [fragment.elements for fragment in cut] or [elements]
        rules = [[set_up(make_rule(), size) for size in sizes] for _ in self.trainings]
        with open_nodes(transport, graph.num_nodes, schemas_of(rules[0], self.trainings[0].model, cut)) as made:
            self.made = made
            self.nodes = [
                Node(u, config, NodeParts(graph, self.trainings[u], rules[u] if cut else rules[u][0], made[u],
                                          fragments=cut),
                     seed=1, record=lambda record, u=u: self.records.append({"uid": u, **record}))  # type: ignore[misc]
                for u in range(graph.num_nodes)
            ]  # fmt: skip
            if by_hand:
                return
            if transport == "inproc":
                step_all(self.nodes)
            else:
                run_on_all(made, lambda communication: self.nodes[communication.uid].run())

    @property
    def models(self) -> Tensor:
        return stacked(self.trainings).clone()  # type: ignore[arg-type]

    def bytes_sent(self, uid: int = 0) -> list[int]:
        """Returns the bytes of data that a node sent in each round."""
        totals = [0, *(record["data_bytes_sent"] for record in self.records
                       if record["kind"] == "round" and record["uid"] == uid)]  # fmt: skip
        return [after - before for before, after in itertools.pairwise(totals)]


def set_up(rule: Sharing, elements: int) -> Sharing:
    """Tells a rule the machines and the shapes, as a run does, and returns it."""
    rule.set_machines([(0, 1, 2), (3, 4, 5)])
    rule.set_parameter_shapes(example_shapes(elements))
    return rule


class SeveralSteps(Quadratic):
    """Makes several gradient steps per round."""

    def __init__(self, uid: int, elements: int, lr: float, steps: int, buffers: int) -> None:
        super().__init__(uid, elements, lr, buffers=buffers)
        self.steps = steps

    @property
    def learning_rate(self) -> float:
        return self.lr

    def local_update(self, round: int, direction: Direction | None = None) -> Update:
        return [super(SeveralSteps, self).local_update(round, direction) for _ in range(self.steps)][-1]


def is_refused(rule: Sharing, schedule: str) -> bool:
    return rule.requirements.sequential and schedule != "sequential"


CASES = [(name, schedule) for name in RULES for schedule in SCHEDULES if not is_refused(RULES[name](), schedule)]


@pytest.mark.sampled(of=requirement_traits)
@pytest.mark.parametrize(("name", "schedule"), CASES)
def test_one_fragment_with_all_parameters_gives_the_bits_of_a_run_without_fragments(name: str, schedule: str) -> None:
    graph = suitable_graph(RULES[name](), 6)
    whole = QuadraticRun(RULES[name], graph, rounds=3, buffers=2, schedule=schedule)
    one = QuadraticRun(RULES[name], graph, [Spec(30)], rounds=3, buffers=2, schedule=schedule)
    assert torch.equal(whole.models, one.models)
    figures = [[(r["uid"], r["loss"], r["data_bytes_sent"], r["metadata_bytes_sent"]) for r in built.records
                if r["kind"] == "round"] for built in (whole, one)]  # fmt: skip
    assert figures[0] == figures[1] and len(figures[0]) == 18
    assert not any("fragments" in r for r in one.records)


@pytest.mark.sampled(of=requirement_traits)
@pytest.mark.parametrize(("name", "schedule"), CASES)
def test_every_rule_contracts_every_fragment_and_leaves_other_parameters_alone(name: str, schedule: str) -> None:
    graph = suitable_graph(RULES[name](), 6, "complete")
    specs = [Spec(30), Spec(54, every=2, offset=1), Spec(90, every=3)]
    built = QuadraticRun(RULES[name], graph, specs, elements=97, rounds=7, lr=0.0, schedule=schedule)
    before, after = built.initial.double(), built.models.double()
    assert torch.equal(after[:, 90:], before[:, 90:]), "parameters after the last fragment were exchanged"
    assert torch.isfinite(after).all()
    for start, stop in ((0, 30), (30, 54), (54, 90)):
        was, now = before[:, start:stop], after[:, start:stop]
        assert (now - now.mean(0)).norm() < 0.999 * (was - was.mean(0)).norm(), (start, stop)
        if not name.startswith(KEEPS_NO_MEAN) and not name.startswith("full+"):
            torch.testing.assert_close(now.mean(0), was.mean(0), atol=0.05, rtol=0)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_rounds_with_fragments_follow_the_formula(schedule: str) -> None:
    """Every fragment counts its own exchanges, and uses the edges that its graph has in an exchange of that number."""
    graph, other = make("ring", nodes=8), make("one_peer_exponential", nodes=8)
    specs = [Spec(10), Spec(17, 3, 1, other), Spec(25, 2, 0, other)]
    built = QuadraticRun(FULL, graph, specs, rounds=9, schedule=schedule)
    x = built.initial.double().numpy()
    target = stacked(built.trainings, "target").double().numpy()  # type: ignore[arg-type]
    cut = fragments(specs, graph)
    for r in range(9):
        delta = -0.1 * (x - target)
        new = x + delta
        for fragment in cut:
            if fragment.is_due(r):
                part = slice(fragment.start, fragment.stop)
                w = fragment.graph.matrix((r - fragment.offset) // fragment.every)
                new[:, part] = (w @ x[:, part] + delta[:, part] if schedule == "overlapped" else w @ new[:, part])
        x = new
    np.testing.assert_allclose(built.models.double().numpy(), x, atol=1e-6)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_node_sends_only_the_fragments_that_are_due(schedule: str) -> None:
    specs = [Spec(10), Spec(17, 3, 1), Spec(25, 2, 0)]
    built = QuadraticRun(FULL, make("ring", nodes=4), specs, rounds=7, schedule=schedule)
    due = [[0, 2], [0, 1], [0, 2], [0], [0, 1, 2], [0], [0, 2]]
    assert [r["fragments"] for r in built.records if r["kind"] == "round" and r["uid"] == 0] == due
    sizes = (10, 7, 8)
    assert built.bytes_sent() == [2 * 4 * sum(sizes[index] for index in indices) for indices in due]


@given(every=st.integers(1, 9), data=st.data())
def test_turns_are_a_pure_function_of_the_round(every: int, data: st.DataObject) -> None:
    offset, round = data.draw(st.integers(0, every - 1)), data.draw(st.integers(0, 10_000))
    fragment = Fragment(0, 1, make("ring", nodes=3), every, offset)
    due = [r for r in range(round + every) if fragment.is_due(r)]
    assert due == [fragment.round_of(turn) for turn in range(len(due))]
    assert fragment.round_of(fragment.turn(round)) == next(r for r in due if r >= round)


def test_an_empty_fragment_or_an_offset_beyond_the_period_is_refused() -> None:
    graph = make("ring", nodes=3)
    for wrong in ({"start": 3, "stop": 3}, {"start": 0, "stop": 3, "every": 2, "offset": 2}):
        with pytest.raises(ValueError, match=r"fragment must be a range|below every, 2, got 2"):
            Fragment(graph=graph, **wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["d2", "gradient_tracking", "gradient_tracking atc", "momentum_tracking", "diloco",
                                  "slowmo", "noloco", "elastic", "leader", "qg_momentum", "decentlam", "push_sum"])
def test_a_rule_sees_the_rounds_between_two_exchanges_of_a_fragment_as_one_round(name: str) -> None:
    """A fragment exchanged in every third round has the bits of a run with three times the local steps and an exchange
    in every round: the rule corrects the steps of all three rounds."""
    graph = make("complete", nodes=4)
    whole = QuadraticRun(RULES[name], graph, rounds=3, steps=3)
    turns = QuadraticRun(RULES[name], graph, [Spec(30, every=3, offset=2)], rounds=9)
    assert name == "leader" or torch.equal(whole.models, turns.models)
    assert (whole.models - turns.models).norm() < whole.models.norm()  # leader chooses by the loss of more steps


def test_a_rule_with_a_period_counts_the_exchanges_of_its_fragment() -> None:
    graph = make("one_peer_exponential", nodes=8)
    own = QuadraticRun(rule("local_sgd", every=6), graph, rounds=18)
    both = QuadraticRun(rule("local_sgd", every=3), graph, [Spec(30, every=2, offset=1)], rounds=18)
    assert torch.equal(own.models, both.models)
    assert [bool(sent) for sent in both.bytes_sent()] == [r % 6 == 5 for r in range(18)]


SPECS = [Spec(BLOCK_ELEMENTS + 77), Spec(BLOCK_ELEMENTS + 100, 2, 1), Spec(BLOCK_ELEMENTS + 277, 3, 0)]
SMALL = [Spec(377), Spec(400, 2, 1), Spec(777, 3, 0)]


@pytest.mark.sampled(one=["transport", "schedule"])
@pytest.mark.parametrize(("transport", "schedule"), [
    *((transport, "sequential") for transport in (*NETWORKED, BATCHED)),
    *((transport, "overlapped") for transport in ("shared_memory", "tcp", "collective")),
])  # fmt: skip
def test_every_transport_gives_the_same_bits_as_one_process(transport: str, schedule: str) -> None:
    graph, pairs = make("ring", nodes=4), make("random_matching", nodes=4)
    for make_rule, specs in ((FULL, SPECS), (lambda: Twice(Full.Config()), SMALL), (RULES["choco"], SMALL)):
        if make_rule is not RULES["choco"]:
            specs = [specs[0], Spec(specs[1].stop, 2, 1, pairs), specs[2]]
        options = {"elements": specs[-1].stop + 3, "rounds": 4, "schedule": schedule, "buffers": 3}
        in_process = QuadraticRun(make_rule, graph, specs, **options)  # type: ignore[arg-type]
        networked = QuadraticRun(make_rule, graph, specs, transport=transport, **options)  # type: ignore[arg-type]
        assert torch.equal(in_process.models, networked.models)
        assert in_process.bytes_sent() == networked.bytes_sent()
        assert not networked.made[0].counters.faults


@pytest.mark.sampled(one=["transport"])
@pytest.mark.parametrize("transport", ["ipc", "shared_memory", "collective", BATCHED])
def test_a_round_may_have_more_fragments_than_a_queue_holds_payloads(transport: str) -> None:
    """All 20 are in flight before the first one is mixed: the bounds of queues must not block them."""
    graph, specs = make("ring", nodes=4), [Spec(1000 * (i + 1)) for i in range(20)]
    in_process = QuadraticRun(FULL, graph, specs, elements=20_000, rounds=3)
    networked = QuadraticRun(FULL, graph, specs, elements=20_000, rounds=3, transport=transport)
    assert torch.equal(in_process.models, networked.models)
    assert not networked.made[0].counters.faults


def test_mixing_in_the_background_gives_the_same_bits() -> None:
    graph = make("ring", nodes=3)
    options = {"elements": BLOCK_ELEMENTS + 280, "rounds": 4, "schedule": "overlapped", "transport": "ipc"}
    foreground, background = (QuadraticRun(FULL, graph, SPECS, mix_in_background=value, **options)  # type: ignore[arg-type]
                              for value in (False, True))  # fmt: skip
    assert torch.equal(foreground.models, background.models)
    assert background.nodes[0].schedule._uses_background_mixing  # type: ignore[attr-defined]


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_lost_payload_returns_its_weight_in_its_fragment_only(schedule: str) -> None:
    graph = make("ring", nodes=4)
    options = {"lr": 0.0, "by_hand": True, "missing": "return_weight", "schedule": schedule}
    built = QuadraticRun(FULL, graph, [Spec(10), Spec(20), Spec(26)], **options)  # type: ignore[arg-type]
    for node in built.nodes:
        node.begin_round(0)
    del built.made[0].hub.payloads[0, 1, 3, 0]  # type: ignore[attr-defined]  # fragment 1 of node 3, to node 0
    for node in built.nodes:
        node.finish_round(0)
    w, x = torch.from_numpy(graph.matrix(0)), built.initial.double()
    expected = w @ x
    expected[:, 26:] = x[:, 26:]
    expected[0, 10:20] = (w[0, 0] + w[0, 3]) * x[0, 10:20] + w[0, 1] * x[1, 10:20]
    torch.testing.assert_close(built.models.double(), expected, atol=1e-6, rtol=0)
    assert [r.get("missing") for r in built.records] == [[3], None, None, None]


@pytest.mark.parametrize("transport", ["inproc", "ipc", "shared_memory"])
def test_a_stop_request_ends_all_nodes_between_rounds(transport: str) -> None:
    """Also if the graph of a fragment gives a node other neighbors in a later round."""
    graph = make("ring", nodes=4)
    specs = [Spec(10, 5, 2, make("complete", nodes=4)), Spec(20)]
    trainings, cut = [Quadratic(u, 24) for u in range(4)], fragments(specs, graph)
    rules = [[FULL(), FULL()] for _ in trainings]
    check_stop_in_round_7(transport, schemas_of(rules[0], trainings[0].model, cut), lambda communication, record: Node(
        (u := communication.uid), ENDLESS, NodeParts(graph, trainings[u], rules[u], communication, fragments=cut),
        seed=1, record=record))  # fmt: skip


class InGenerations(Run):
    """Nodes that may be lost and come back; they exchange two fragments and keep six parameters local."""

    def make(self, uid: int) -> Node:
        training, cut = Quadratic(uid, 40, self.lr), fragments([Spec(20), Spec(34, 3, 1)], self.graph)
        rules = [FULL(), FULL()]
        communication = Inproc(Inproc.Config(name="inproc"), uid=uid, hub=self.hub,
                               schemas=schemas_of(rules, training.model, cut))  # fmt: skip
        parts = NodeParts(self.graph, training, rules, communication, lambda: [FULL(), FULL()], cut)
        return Node(uid, self.config, parts, seed=1)


@pytest.mark.sampled(one=["steps"])
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("steps", range(4))
def test_a_node_that_rejoins_gets_the_shared_parameters_and_keeps_its_local_ones(schedule: str, steps: int) -> None:
    run = InGenerations(make("regular", nodes=8), rounds=30, schedule=schedule)
    before = run.models()
    run.step(5 + steps)
    run.lose(3)
    run.step(8)
    run.restart(3)
    run.end()
    after = run.models()
    np.testing.assert_array_equal(after[:, 34:], before[:, 34:])
    assert all(len(node.generation.members) == 8 and node.round == 30 for node in run.nodes.values())
    for part in (slice(0, 20), slice(20, 34)):
        deviation = np.abs(after[:, part] - after[:, part].mean(0)).max()
        assert deviation < 0.1 * np.abs(before[:, part] - before[:, part].mean(0)).max(), part
        assert (after[:, part] >= before[:, part].min(0) - 1e-6).all()


def test_local_parameters_are_in_no_mean_and_no_consensus_distance() -> None:
    """The merged model of a node has the node's local parameters; the consensus distance is that of the shared ones."""
    built = QuadraticRun(FULL, make("complete", nodes=4), [Spec(20)], elements=26, rounds=3, buffers=2)
    for node, model in zip(built.nodes, built.models, strict=True):
        assert node.merged is not None
        torch.testing.assert_close(node.merged[:20], built.models[:, :20].mean(0))
        assert torch.equal(node.merged[20:26], model[20:])
        torch.testing.assert_close(node.merged[26:], torch.full((2,), 1.5))
        assert node.figures()["consensus_distance"] < 1e-6 and node.shared == 20
    bytes_of_mean = built.made[0].counters.bytes_sent()["evaluation"]
    assert bytes_of_mean == QuadraticRun(FULL, make("complete", nodes=4), elements=20, rounds=3, buffers=2).made[
        0].counters.bytes_sent()["evaluation"]


def test_float_buffers_are_averaged_over_the_graph_of_the_run_in_every_round() -> None:
    built = QuadraticRun(FULL, make("complete", nodes=4), [Spec(30, 5, 4, make("ring", nodes=4))], rounds=2, buffers=3)
    assert stacked(built.trainings, "buffers").unique().tolist() == [1.5]  # type: ignore[arg-type]
