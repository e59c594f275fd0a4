"""One round of one node: time-outs, late, changed and malformed payloads, and the recorded times."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from decentnode.communication.base import Arrival, Counters
from decentnode.communication.run_state import Steps, at_once, run_without_waits
from decentnode.errors import PeerLost
from decentnode.graph.base import averaging_group_of
from decentnode.node.config import NodeConfig
from decentnode.node.node import Node, NodeParts
from decentnode.node.schedules.fragment_exchange import ExchangeOutcome, FragmentExchange, RoundTimes
from decentnode.node.schedules.overlapped import Overlapped
from decentnode.node.schedules.schedule import Schedule
from decentnode.node.schedules.sequential import Sequential
from decentnode.payload import Payload
from decentnode.sharing.base import Sharing
from decentnode.sharing.fragments import Fragment
from decentnode.sharing.full import Full
from decentnode.tensors import BLOCK_ELEMENTS
from tests.communication.contract import flat_schema, open_nodes
from tests.graph.contract import make
from tests.node import test_buffers as fakes
from tests.node.fakes import Quadratic
from tests.node.test_node import run
from tests.sharing.contract import rule

ELEMENTS = 8
SCHEDULES: dict[str, type[Schedule]] = {"sequential": Sequential, "overlapped": Overlapped}


class Exchange(fakes.Exchange):
    """An exchange of a whole model; if sources rewrite it, payloads are in their shared memory."""

    seconds = 0.25
    missing: frozenset[int] = frozenset()
    departed: frozenset[int] = frozenset()
    undelivered: frozenset[int] = frozenset()

    @property
    def in_place(self) -> bool:
        return bool(self.rewritten or self.changed)


class Transport(fakes.Transport):
    concurrent = False
    continues_without_late = False

    def __init__(self, answer: Exchange) -> None:
        super().__init__(answer)
        self.counters = Counters()

    def computed(self, round: int) -> None:
        return None

    def acquire_slot_steps(self, model: torch.Tensor, timeout_seconds: float) -> Steps[None]:
        return at_once(None)


def arrival(values: dict[int, float], missing: frozenset[int] = frozenset(), elements: int = ELEMENTS) -> Arrival:
    return Arrival(0, elements, {uid: Payload({"x": torch.full((elements,), value)}) for uid, value in values.items()},
                   missing)  # fmt: skip


def make_schedule(
    kind: type[Schedule], exchange: Exchange, sharing: Sharing | None = None, elements: int = ELEMENTS
) -> Schedule:
    """Returns a schedule of node 0, whose model is zeros and does not change by training."""
    training = Quadratic(0, elements, lr=0.0)
    training.model.parameters.zero_()
    transport: Any = Transport(exchange)
    whole = Fragment(0, elements, make("ring", nodes=4))
    exchange_of_model = FragmentExchange(whole, sharing or Full(Full.Config()), transport)
    return kind(training, [exchange_of_model], transport)


def begin(plan: Schedule, check: Callable[[], None] = lambda: None) -> None:
    view = fakes.make_view()
    run_without_waits(plan.begin(view.round, [[view]], check))


def run_round(plan: Schedule) -> ExchangeOutcome:
    begin(plan)
    (outcome,) = run_without_waits(plan.finish())
    return outcome


@pytest.mark.parametrize("kind", SCHEDULES.values())
@pytest.mark.parametrize("elements", [ELEMENTS, BLOCK_ELEMENTS + 5])
def test_the_weight_of_a_missing_neighbor_returns_to_the_node(kind: type[Schedule], elements: int) -> None:
    plan = make_schedule(kind, Exchange([arrival({1: 3.0}, frozenset({3}), elements)]), elements=elements)
    run_round(plan)
    torch.testing.assert_close(plan.model.parameters, torch.ones(elements))


@pytest.mark.parametrize(("device", "slices"), [("cpu", 3), ("meta", 1)])
def test_a_whole_payload_is_mixed_in_cache_sized_blocks_on_a_cpu_and_at_once_on_a_gpu(device: str, slices: int) -> None:
    elements = 2 * BLOCK_ELEMENTS + 5
    whole = Arrival(0, elements, {1: Payload({"x": torch.empty(elements, device=device)})}, frozenset())
    transport: Any = Transport(Exchange([whole]))
    exchange = FragmentExchange(Fragment(0, elements, make("ring", nodes=4)), Full(Full.Config()), transport)
    exchange.enter(0, [fakes.make_view()])
    run_without_waits(exchange.send(torch.empty(elements, device=device), 0))
    assert len(list(exchange.slices(1.0, RoundTimes()))) == slices


@pytest.mark.parametrize("kind", SCHEDULES.values())
@pytest.mark.parametrize(("rewritten", "mixed"), [((), 4.0), ((1,), 3.0), ((1, 3), 0.0)])
def test_payloads_that_changed_while_they_were_read_are_left_out(
    kind: type[Schedule], rewritten: tuple[int, ...], mixed: float
) -> None:
    plan = make_schedule(kind, Exchange([arrival({1: 3.0, 3: 9.0})], rewritten))
    run_round(plan)
    torch.testing.assert_close(plan.model.parameters, torch.full((ELEMENTS,), mixed))


@pytest.mark.parametrize("kind", SCHEDULES.values())
def test_a_malformed_payload_counts_as_missing_and_as_a_fault(kind: type[Schedule]) -> None:
    """It has one value less than positions. The weight of its sender returns to this node."""
    sharing = rule("subsample", fraction=1.0)()
    good, bad = (Payload({"values": torch.full((count,), 3.0)}) for count in (ELEMENTS, ELEMENTS - 1))
    plan = make_schedule(kind, Exchange([Arrival(0, ELEMENTS, {1: good, 3: bad}, frozenset())]), sharing)
    outcome = run_round(plan)
    torch.testing.assert_close(plan.model.parameters, torch.ones(ELEMENTS))
    assert outcome.missing == outcome.departed == {3}, "the next rounds would wait for its sender"
    assert plan.communication.counters.faults == {"malformed_payload": 1}
    well_formed = make_schedule(kind, Exchange([arrival({1: 3.0, 3: 3.0})]))
    assert run_round(well_formed).missing == frozenset()


def test_a_malformed_payload_ends_a_run_whose_rule_needs_all_payloads_and_names_its_sender() -> None:
    sharing = rule("d2", compression={"name": "int8"})()
    sharing.payload_schema(ELEMENTS, torch.float32)
    bad = Payload({"x.q": torch.zeros(ELEMENTS - 1, dtype=torch.uint8), "x.scale": torch.ones(1)})
    plan = make_schedule(Sequential, Exchange([Arrival(0, ELEMENTS, {1: bad, 3: bad}, frozenset())]), sharing)
    begin(plan)
    with pytest.raises(PeerLost, match="node 1 sent an unreadable payload in round 3") as lost:
        run_without_waits(plan.finish())
    assert lost.value.missing == (1,)


@pytest.mark.parametrize("kind", SCHEDULES.values())
def test_the_rule_is_told_which_payloads_were_not_delivered(kind: type[Schedule]) -> None:
    undelivered: list[tuple[int, Payload]] = []

    class RecordsUndelivered(Full):
        def undelivered(self, uid: int, payload: Payload) -> None:
            undelivered.append((uid, payload))

    exchange = Exchange([arrival({1: 3.0, 3: 3.0})])
    exchange.undelivered = frozenset({3})
    plan = make_schedule(kind, exchange, RecordsUndelivered(Full.Config()))
    run_round(plan)
    assert [uid for uid, _ in undelivered] == [3]
    assert undelivered[0][1] is plan.communication.sent[0][1][3]  # type: ignore[attr-defined]


def test_the_timeout_grows_with_the_phase() -> None:
    """A neighbor may itself still wait in an earlier phase."""
    plan = make_schedule(Sequential, Exchange([]))
    assert [plan.timeout_seconds(phase) for phase in range(3)] == [7.0, 14.0, 21.0]


@pytest.mark.parametrize("kind", SCHEDULES.values())
def test_a_model_whose_check_fails_is_not_sent(kind: type[Schedule]) -> None:
    """A sequential round sends after its check; an overlapped one has by then sent the model from before its steps."""
    plan = make_schedule(kind, Exchange([]))

    def check() -> None:
        raise ValueError("not finite")

    with pytest.raises(ValueError, match="not finite"):
        begin(plan, check)
    assert len(plan.communication.sent) == (kind is Overlapped)  # type: ignore[attr-defined]


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("elements", [ELEMENTS, BLOCK_ELEMENTS + 5])
def test_the_times_of_the_parts_of_a_round_add_up_to_at_most_its_time(schedule: str, elements: int) -> None:
    """No time is counted for two parts."""
    records: list[dict[str, Any]] = []
    run(make("ring", nodes=4), 4, elements=elements, records=records, schedule=schedule, evaluate_every=0)
    rounds = [record for record in records if record["kind"] == "round"]
    assert len(rounds) == 16
    for record in rounds:
        parts = [record[f"{part}_seconds"] for part in ("train", "send", "wait", "mix")]
        assert min(parts) >= 0.0 and sum(parts) <= record["seconds"] + 1e-6
        assert parts[0] > 0.0 and parts[3] > 0.0 and 0.0 <= record["overlap"] <= 1.0


def test_overlap_is_the_part_of_the_flight_time_without_waiting() -> None:
    assert RoundTimes().overlap == 1.0, "without an exchange"
    assert RoundTimes(wait=0.25, flight=1.0).overlap == 0.75
    assert RoundTimes(wait=2.0, flight=1.0).overlap == 0.0


def test_averaging_groups_follow_the_graph_from_round_to_round() -> None:
    """On a graph whose pairs change, an exchange gets the pair of its own round, not that of the round before."""
    graph = make("one_peer_exponential", nodes=4)
    groups: dict[tuple[int, int], Any] = {}
    with open_nodes("inproc", 4, flat_schema(ELEMENTS)) as transports:
        built = [Node(uid, NodeConfig.model_validate({"rounds": 4, "evaluate_every": 0}),
                      NodeParts(graph, Quadratic(uid, ELEMENTS), Full(Full.Config()), transport), seed=1,
                      record=lambda _: None) for uid, transport in enumerate(transports)]  # fmt: skip
        for node in built:
            for round in range(4):
                views, _ = node._rules.views(round, node.generation)
                groups[node.uid, round] = views[0][0].averaging_group
    expected = {(uid, round): averaging_group_of(graph, uid, round) for uid in range(4) for round in range(4)}
    assert groups == expected and len({groups[0, round] for round in range(4)}) > 1
