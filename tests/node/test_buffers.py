"""Float buffers are averaged with the weights of the payloads that arrived whole."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from decentnode.communication.base import Arrival, AveragingGroup
from decentnode.communication.run_state import at_once, run_without_waits
from decentnode.graph.base import RoundView, view
from decentnode.node.schedules.buffers import BufferExchange
from decentnode.node.schedules.fragment_exchange import FragmentExchange
from decentnode.node.schedules.schedule import Schedule
from decentnode.node.schedules.sequential import Sequential
from decentnode.payload import Payload
from decentnode.sharing.base import Sharing
from decentnode.sharing.fragments import Fragment
from decentnode.sharing.full import Full
from tests.graph.contract import make
from tests.node.fakes import Quadratic

COUNT = 6


class Exchange:
    """An exchange with given slices. The payloads of the sources in `rewritten` change while they are read, one source
    after the other."""

    def __init__(self, slices: list[Arrival], rewritten: tuple[int, ...] = ()) -> None:
        self.slices, self.rewritten = slices, list(rewritten)
        self.changed: set[int] = set()
        self.timeout_seconds = 0.0

    def steps(self, timeout_seconds: float) -> Iterator[Arrival]:
        self.timeout_seconds = timeout_seconds
        yield from self.slices

    def spoiled(self) -> set[int]:
        if self.rewritten:
            self.changed.add(self.rewritten.pop(0))
        return set(self.changed)


class Transport:
    """Records what is sent, and returns the given exchange."""

    history = None

    class config:
        timeout_seconds = 7.0

    def __init__(self, answer: Exchange | None = None) -> None:
        self.answer, self.sent = answer, []

    def exchange_steps(
        self, round: int, outgoing: dict[int, Payload], expected: tuple[int, ...], phase: int = 0,
        group: AveragingGroup | None = None,
    ) -> Any:  # fmt: skip
        self.sent.append((round, outgoing, expected, phase, group))
        return at_once(self.answer)


def schedule(
    transport: Transport, buffers: int = COUNT, averaging_groups: bool = False, rule: Sharing | None = None
) -> Schedule:
    each = FragmentExchange(Fragment(0, 4, make("ring", nodes=4)), rule or Full(Full.Config()), transport)  # type: ignore[arg-type]
    return Sequential(Quadratic(0, 4, buffers=buffers), [each], transport,  # type: ignore[arg-type]
                      averaging_groups=averaging_groups)  # fmt: skip


def make_view(family: str = "ring", nodes: int = 4) -> RoundView:
    return view(make(family, nodes=nodes), 0, 3, 1)


def payload(value: float) -> Payload:
    return Payload({"x": torch.full((COUNT,), value)})


def mixed(exchange: Exchange, **options: Any) -> torch.Tensor:
    """Returns the buffers of node 0, which were zeros, after one exchange on a ring of four nodes (weights 1/3)."""
    transport = Transport(exchange)
    plan, each = schedule(transport, **options), BufferExchange(averaged=True)
    run_without_waits(each.send(make_view(), plan))
    run_without_waits(each.mix(make_view(), plan))
    return plan.model.buffers


@pytest.mark.parametrize(("averaged", "buffers"), [(False, COUNT), (True, 0)])
def test_local_or_absent_buffers_are_not_sent(averaged: bool, buffers: int) -> None:
    transport = Transport()
    plan, each = schedule(transport, buffers), BufferExchange(averaged=averaged)
    plan.model.buffers.fill_(5.0)
    run_without_waits(each.send(make_view(), plan))
    run_without_waits(each.mix(make_view(), plan))
    assert not transport.sent and bool((plan.model.buffers == 5.0).all())


def test_one_payload_goes_to_all_neighbors_in_the_phase_after_those_of_the_rule() -> None:
    transport = Transport(Exchange([]))
    plan = schedule(transport)
    run_without_waits(BufferExchange(averaged=True).send(make_view(), plan))
    ((round, outgoing, expected, phase, group),) = transport.sent
    assert (round, expected, phase, group) == (3, (1, 3), plan.sharing.requirements.phases, None)
    assert outgoing.keys() == {1, 3} and len({id(each) for each in outgoing.values()}) == 1
    assert outgoing[1].tensors["x"] is plan.model.buffers, "it is not the tensor itself, in full precision"


def test_an_averaging_group_is_passed_to_the_exchange() -> None:
    transport, complete = Transport(Exchange([])), replace(make_view("complete"), averaging_group=(0, 1, 2, 3))
    for allowed in (True, False):
        run_without_waits(BufferExchange(averaged=True).send(complete, schedule(transport, averaging_groups=allowed)))
    (*_, group), (*_, none) = transport.sent
    assert group is not None and group.members == (0, 1, 2, 3) and none is None


def test_buffers_are_averaged_slice_by_slice_with_the_weights_of_the_round() -> None:
    halves = [Arrival(a, b, {uid: Payload({"x": payload(uid).tensors["x"][a:b]}) for uid in (1, 3)}, frozenset())
              for a, b in ((0, 4), (4, COUNT))]  # fmt: skip
    exchange = Exchange(halves)
    torch.testing.assert_close(mixed(exchange), torch.full((COUNT,), 4 / 3))
    assert exchange.timeout_seconds == 7.0, "not as long as for a rule with one phase"


def test_the_weight_of_a_missing_source_returns_to_the_node() -> None:
    """The node's own buffers are zeros: the mean is a third of what node 1 sent, however many others are missing."""
    one = mixed(Exchange([Arrival(0, COUNT, {1: payload(3.0)}, frozenset({3}))]))
    torch.testing.assert_close(one, torch.ones(COUNT))
    assert not mixed(Exchange([Arrival(0, COUNT, {}, frozenset({1, 3}))])).any()


@pytest.mark.parametrize(("rewritten", "left"), [((1,), 3.0), ((3,), 1.0), ((1, 3), 0.0), ((1, 1), 3.0)])
def test_buffers_that_changed_while_they_were_read_are_left_out(rewritten: tuple[int, ...], left: float) -> None:
    """One of the two sources or both, the second one while the mean is computed again: as if they had sent nothing."""
    exchange = Exchange([Arrival(0, COUNT, {1: payload(3.0), 3: payload(9.0)}, frozenset())], rewritten)
    torch.testing.assert_close(mixed(exchange), torch.full((COUNT,), left))


def test_a_sum_of_a_group_is_divided_by_its_size() -> None:
    transport, complete = Transport(), replace(make_view("complete"), averaging_group=(0, 1, 2, 3))
    transport.answer = Exchange([Arrival(0, COUNT, {}, frozenset(), torch.full((COUNT,), 8.0))])
    plan, each = schedule(transport, averaging_groups=True), BufferExchange(averaged=True)
    run_without_waits(each.send(complete, plan))
    run_without_waits(each.mix(complete, plan))
    torch.testing.assert_close(plan.model.buffers, torch.full((COUNT,), 2.0))


class MixesHalf(Full):
    """Mixes only one half of the model, as a rule with shards does."""

    def mix_sum(self, out: torch.Tensor, model: torch.Tensor, total: torch.Tensor, view: RoundView) -> None:
        half = out.numel() // 2
        super().mix_sum(out[:half], model[:half], total[:half], view)


def test_the_sum_of_a_group_is_mixed_without_the_rule() -> None:
    """On a ring of four nodes with weights 1/3 the result is the mean of three, in slices, whatever the rule does."""
    total = torch.arange(6.0)
    slices = [Arrival(a, a + 3, {}, frozenset(), total[a : a + 3]) for a in (0, 3)]
    plan = schedule(Transport(Exchange(slices)), rule=MixesHalf(Full.Config()))
    each = BufferExchange(averaged=True)
    run_without_waits(each.send(make_view(), plan))
    run_without_waits(each.mix(make_view(), plan))
    torch.testing.assert_close(plan.model.buffers, total / 3)
