"""One round of one node: what is waited for how long, what becomes of payloads that are late, spoiled or refused, and
where its seconds are booked."""

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
    """Of a whole model, in the neighbors' shared memory where it is rewritten."""

    seconds = 0.25
    missing: frozenset[int] = frozenset()
    departed: frozenset[int] = frozenset()
    undelivered: frozenset[int] = frozenset()

    @property
    def in_place(self) -> bool:
        return bool(self.rewritten or self.changed)


class Transport(fakes.Transport):
    concurrent = False
    goes_on = False

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


def made(
    kind: type[Schedule], exchange: Exchange, sharing: Sharing | None = None, elements: int = ELEMENTS
) -> Schedule:
    """A schedule of node 0, whose model is zeros and wants to stay there."""
    training = Quadratic(0, elements, lr=0.0)
    training.model.parameters.zero_()
    transport: Any = Transport(exchange)
    whole = Fragment(0, elements, make("ring", nodes=4))
    each = FragmentExchange(whole, sharing or Full(Full.Config()), transport)
    return kind(training, [each], transport)


def begin(plan: Schedule, check: Callable[[], None] = lambda: None) -> None:
    seen = fakes.seen()
    run_without_waits(plan.begin(seen.round, [[seen]], check))


def one_round(plan: Schedule) -> ExchangeOutcome:
    begin(plan)
    (outcome,) = run_without_waits(plan.finish())
    return outcome


@pytest.mark.parametrize("kind", SCHEDULES.values())
@pytest.mark.parametrize("elements", [ELEMENTS, BLOCK_ELEMENTS + 5])
def test_a_missing_neighbors_weight_is_the_own(kind: type[Schedule], elements: int) -> None:
    plan = made(kind, Exchange([arrival({1: 3.0}, frozenset({3}), elements)]), elements=elements)
    one_round(plan)
    torch.testing.assert_close(plan.model.parameters, torch.ones(elements))


@pytest.mark.parametrize(("device", "slices"), [("cpu", 3), ("meta", 1)])
def test_what_arrived_together_is_mixed_in_blocks_of_a_cache_but_by_a_gpu_at_once(device: str, slices: int) -> None:
    elements = 2 * BLOCK_ELEMENTS + 5
    came = Arrival(0, elements, {1: Payload({"x": torch.empty(elements, device=device)})}, frozenset())
    transport: Any = Transport(Exchange([came]))
    each = FragmentExchange(Fragment(0, elements, make("ring", nodes=4)), Full(Full.Config()), transport)
    each.enter(0, [fakes.seen()])
    run_without_waits(each.send(torch.empty(elements, device=device), 0))
    assert len(list(each.slices(1.0, RoundTimes()))) == slices


@pytest.mark.parametrize("kind", SCHEDULES.values())
@pytest.mark.parametrize(("rewritten", "left"), [((), 4.0), ((1,), 3.0), ((1, 3), 0.0)])
def test_what_changed_while_it_was_read_is_mixed_again_without(
    kind: type[Schedule], rewritten: tuple[int, ...], left: float
) -> None:
    plan = made(kind, Exchange([arrival({1: 3.0, 3: 9.0})], rewritten))
    one_round(plan)
    torch.testing.assert_close(plan.model.parameters, torch.full((ELEMENTS,), left))


@pytest.mark.parametrize("kind", SCHEDULES.values())
def test_a_payload_that_cannot_be_read_is_missing_and_counted(kind: type[Schedule]) -> None:
    """One value less than its positions; the weight of its sender returns to this node."""
    sharing = rule("subsample", fraction=1.0)()
    good, bad = (Payload({"values": torch.full((count,), 3.0)}) for count in (ELEMENTS, ELEMENTS - 1))
    plan = made(kind, Exchange([Arrival(0, ELEMENTS, {1: good, 3: bad}, frozenset())]), sharing)
    outcome = one_round(plan)
    torch.testing.assert_close(plan.model.parameters, torch.ones(ELEMENTS))
    assert outcome.missing == outcome.departed == {3}, "who sends such bytes is not waited for in vain"
    assert plan.communication.counters.faults == {"malformed_payload": 1}
    assert one_round(made(kind, Exchange([arrival({1: 3.0, 3: 3.0})]))).missing == frozenset(), "of that round alone"


def test_a_rule_that_cannot_go_on_without_it_ends_the_run_and_names_the_sender() -> None:
    sharing = rule("d2", compression={"name": "int8"})()
    sharing.payload_schema(ELEMENTS, torch.float32)
    bad = Payload({"x.q": torch.zeros(ELEMENTS - 1, dtype=torch.uint8), "x.scale": torch.ones(1)})
    plan = made(Sequential, Exchange([Arrival(0, ELEMENTS, {1: bad, 3: bad}, frozenset())]), sharing)
    begin(plan)
    with pytest.raises(PeerLost, match="node 1 sent an unreadable payload in round 3") as lost:
        run_without_waits(plan.finish())
    assert lost.value.missing == (1,)


@pytest.mark.parametrize("kind", SCHEDULES.values())
def test_the_rule_is_told_whom_its_payload_did_not_reach(kind: type[Schedule]) -> None:
    told: list[tuple[int, Payload]] = []

    class Telling(Full):
        def undelivered(self, uid: int, payload: Payload) -> None:
            told.append((uid, payload))

    exchange = Exchange([arrival({1: 3.0, 3: 3.0})])
    exchange.undelivered = frozenset({3})
    plan = made(kind, exchange, Telling(Full.Config()))
    one_round(plan)
    assert [uid for uid, _ in told] == [3]
    assert told[0][1] is plan.communication.sent[0][1][3]  # type: ignore[attr-defined]


def test_later_phases_are_waited_for_longer() -> None:
    """A neighbor may itself still wait in the earlier ones."""
    plan = made(Sequential, Exchange([]))
    assert [plan.timeout_seconds(phase) for phase in range(3)] == [7.0, 14.0, 21.0]


@pytest.mark.parametrize("kind", SCHEDULES.values())
def test_nothing_is_sent_of_local_steps_that_fail_their_check(kind: type[Schedule]) -> None:
    """A sequential round sends after its check; an overlapped one has sent the model from before its steps."""
    plan = made(kind, Exchange([]))

    def check() -> None:
        raise ValueError("not finite")

    with pytest.raises(ValueError, match="not finite"):
        begin(plan, check)
    assert len(plan.communication.sent) == (kind is Overlapped)  # type: ignore[attr-defined]


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("elements", [ELEMENTS, BLOCK_ELEMENTS + 5])
def test_the_parts_of_a_round_are_no_longer_than_the_round(schedule: str, elements: int) -> None:
    """Each is a duration, and none is booked twice."""
    records: list[dict[str, Any]] = []
    run(make("ring", nodes=4), 4, elements=elements, records=records, schedule=schedule, evaluate_every=0)
    rounds = [each for each in records if each["kind"] == "round"]
    assert len(rounds) == 16
    for each in rounds:
        parts = [each[f"{part}_seconds"] for part in ("train", "send", "wait", "mix")]
        assert min(parts) >= 0.0 and sum(parts) <= each["seconds"] + 1e-6
        assert parts[0] > 0.0 and parts[3] > 0.0 and 0.0 <= each["overlap"] <= 1.0


def test_overlap_is_the_part_of_the_flight_that_nobody_waited() -> None:
    assert RoundTimes().overlap == 1.0, "no exchange"
    assert RoundTimes(wait=0.25, flight=1.0).overlap == 0.75
    assert RoundTimes(wait=2.0, flight=1.0).overlap == 0.0


def test_groups_that_average_as_a_whole_follow_the_graph_from_round_to_round() -> None:
    """Pairs that change: each exchange is told of the pair of its round, not of the one before."""
    graph = make("one_peer_exponential", nodes=4)
    told: dict[tuple[int, int], Any] = {}
    with open_nodes("inproc", 4, flat_schema(ELEMENTS)) as transports:
        built = [Node(uid, NodeConfig.model_validate({"rounds": 4, "evaluate_every": 0}),
                      NodeParts(graph, Quadratic(uid, ELEMENTS), Full(Full.Config()), transport), seed=1,
                      record=lambda _: None) for uid, transport in enumerate(transports)]  # fmt: skip
        for node in built:
            for round in range(4):
                views, _ = node._rules.views(round, node.generation)
                told[node.uid, round] = views[0][0].averaging_group
    expected = {(uid, round): averaging_group_of(graph, uid, round) for uid in range(4) for round in range(4)}
    assert told == expected and len({told[0, round] for round in range(4)}) > 1
