"""Float buffers beside the parameters: weighted means of what arrived, whatever happens to what did not."""

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
    """Slices that a test wrote down; the payloads of `rewritten` change while they are read, one after the other."""

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
    """Takes what is sent, and answers with one exchange."""

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


def seen(family: str = "ring", nodes: int = 4) -> RoundView:
    return view(make(family, nodes=nodes), 0, 3, 1)


def payload(value: float) -> Payload:
    return Payload({"x": torch.full((COUNT,), value)})


def mixed(exchange: Exchange, **options: Any) -> torch.Tensor:
    """The buffers of node 0, zeros before, after one exchange on a ring of four (weights of a third)."""
    transport = Transport(exchange)
    plan, each = schedule(transport, **options), BufferExchange(averaged=True)
    run_without_waits(each.send(seen(), plan))
    run_without_waits(each.mix(seen(), plan))
    return plan.model.buffers


@pytest.mark.parametrize(("averaged", "buffers"), [(False, COUNT), (True, 0)])
def test_nothing_is_sent_of_what_stays_local_or_is_not_there(averaged: bool, buffers: int) -> None:
    transport = Transport()
    plan, each = schedule(transport, buffers), BufferExchange(averaged=averaged)
    plan.model.buffers.fill_(5.0)
    run_without_waits(each.send(seen(), plan))
    run_without_waits(each.mix(seen(), plan))
    assert not transport.sent and bool((plan.model.buffers == 5.0).all())


def test_one_payload_goes_to_all_neighbors_in_the_phase_after_those_of_the_rule() -> None:
    transport = Transport(Exchange([]))
    plan = schedule(transport)
    run_without_waits(BufferExchange(averaged=True).send(seen(), plan))
    ((round, outgoing, expected, phase, group),) = transport.sent
    assert (round, expected, phase, group) == (3, (1, 3), plan.sharing.requirements.phases, None)
    assert outgoing.keys() == {1, 3} and len({id(each) for each in outgoing.values()}) == 1
    assert outgoing[1].tensors["x"] is plan.model.buffers, "full precision, as it is"


def test_a_group_that_averages_as_a_whole_says_so() -> None:
    transport, complete = Transport(Exchange([])), replace(seen("complete"), averaging_group=(0, 1, 2, 3))
    for allowed in (True, False):
        run_without_waits(BufferExchange(averaged=True).send(complete, schedule(transport, averaging_groups=allowed)))
    (*_, group), (*_, none) = transport.sent
    assert group is not None and group.members == (0, 1, 2, 3) and none is None


def test_the_mean_is_that_of_the_round_slice_by_slice() -> None:
    halves = [Arrival(a, b, {uid: Payload({"x": payload(uid).tensors["x"][a:b]}) for uid in (1, 3)}, frozenset())
              for a, b in ((0, 4), (4, COUNT))]  # fmt: skip
    exchange = Exchange(halves)
    torch.testing.assert_close(mixed(exchange), torch.full((COUNT,), 4 / 3))
    assert exchange.timeout_seconds == 7.0, "of a rule with one phase: as long as for it"


def test_the_weight_of_who_is_missing_is_the_own() -> None:
    """Own buffers are zeros: a third of what node 1 sent is left, however many others say nothing."""
    one = mixed(Exchange([Arrival(0, COUNT, {1: payload(3.0)}, frozenset({3}))]))
    torch.testing.assert_close(one, torch.ones(COUNT))
    assert not mixed(Exchange([Arrival(0, COUNT, {}, frozenset({1, 3}))])).any()


@pytest.mark.parametrize(("rewritten", "left"), [((1,), 3.0), ((3,), 1.0), ((1, 3), 0.0), ((1, 1), 3.0)])
def test_what_changed_while_it_was_read_is_left_out(rewritten: tuple[int, ...], left: float) -> None:
    """One of the two, or both, one after the other while it is mixed anew: as if they had sent nothing."""
    exchange = Exchange([Arrival(0, COUNT, {1: payload(3.0), 3: payload(9.0)}, frozenset())], rewritten)
    torch.testing.assert_close(mixed(exchange), torch.full((COUNT,), left))


def test_a_sum_of_a_group_is_divided_by_its_size() -> None:
    transport, complete = Transport(), replace(seen("complete"), averaging_group=(0, 1, 2, 3))
    transport.answer = Exchange([Arrival(0, COUNT, {}, frozenset(), torch.full((COUNT,), 8.0))])
    plan, each = schedule(transport, averaging_groups=True), BufferExchange(averaged=True)
    run_without_waits(each.send(complete, plan))
    run_without_waits(each.mix(complete, plan))
    torch.testing.assert_close(plan.model.buffers, torch.full((COUNT,), 2.0))


class KeepsToAPart(Full):
    """Mixes one half of the model only, as a rule with shards does."""

    def mix_sum(self, out: torch.Tensor, model: torch.Tensor, total: torch.Tensor, view: RoundView) -> None:
        half = out.numel() // 2
        super().mix_sum(out[:half], model[:half], total[:half], view)


def test_the_sum_of_a_group_is_mixed_without_the_rule() -> None:
    """On a ring of four with weights of a third: the mean of all three, in slices, for parameters of any rule."""
    total = torch.arange(6.0)
    slices = [Arrival(a, a + 3, {}, frozenset(), total[a : a + 3]) for a in (0, 3)]
    plan = schedule(Transport(Exchange(slices)), rule=KeepsToAPart(Full.Config()))
    each = BufferExchange(averaged=True)
    run_without_waits(each.send(seen(), plan))
    run_without_waits(each.mix(seen(), plan))
    torch.testing.assert_close(plan.model.buffers, total / 3)
