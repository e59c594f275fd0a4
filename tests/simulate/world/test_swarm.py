"""Random worlds: invariants hold in all of them, rare events occur, and former bugs are found if they are put back."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import replace

import pytest

from decentnode.communication.receive.staging import Leases
from decentnode.communication.run_state import Steps
from decentnode.communication.zeromq.protocol.link_sender import LinkSender
from decentnode.communication.zeromq.protocol.reconfiguration import Reconfiguration
from decentnode.faults import Link
from decentnode.node.generations.transition import NodeGenerations
from decentnode.simulate.world.event_queue import EventQueue
from decentnode.simulate.world.network import VirtualNetwork
from decentnode.simulate.world.random_world import RULES, STATIC, Run, draw_world, run_world
from decentnode.wire.membership.leader import Leader
from decentnode.wire.membership.state import MemberState
from decentnode.wire.membership.watch import Watch
from decentnode.wire.messages import Message
from decentnode.wire.session import Session
from tests.conftest import scale
from tests.simulate.world.swarm import RARE, replay_command

SEEDS, PER_CASE = scale(200, 10_000), scale(20, 200)
WITH_RARE_EVENTS = (7, 22, 35, 36, 39, 41, 71, 81, 104, 109, 166)
"""Worlds among the first 200 in which, taken together, all events of RARE occur."""


@pytest.mark.parametrize("first", range(0, SEEDS, PER_CASE))
@pytest.mark.slow
def test_invariants_hold_in_random_worlds(first: int) -> None:
    failed = []
    for seed in range(first, first + PER_CASE):
        try:
            run_world(seed)
        except Exception as error:
            failed.append(f"{replay_command(seed)}   # {type(error).__name__}: {error}")
    assert not failed, "\n".join(failed)


MERGED = (4, 20, 34, 41, 47)
"""Worlds in which both sides of a broken network train on, and merge their models afterwards."""


@pytest.mark.parametrize("seed", [*MERGED, *range(1000, 1000 + scale(0, 2000))])
def test_invariants_hold_in_worlds_in_which_all_sides_of_a_broken_network_train_on(seed: int) -> None:
    drawn = draw_world(seed)
    run = Run(replace(drawn, sides=drawn.missing == "regroup"))
    run.execute()
    if seed in MERGED:
        merged = [generation for generation in run.history.generations.values() if generation.merging]
        assert merged and all(generation.first_round <= run.rounds for generation in merged)


@pytest.mark.slow
def test_worlds_whose_models_are_masked(monkeypatch: pytest.MonkeyPatch) -> None:
    """In three phases, of which any may be lost. A model with a mask left in it would have entries above `largest`,
    which is an error."""
    drawn = [draw_world(seed) for seed in range(scale(24, 2000))]
    monkeypatch.setitem(RULES, "secure_aggregation", {})
    for each in drawn:
        graph = each.graph if each.graph in STATIC else "complete"
        Run(replace(each, rule="secure_aggregation", graph=graph)).execute()


@pytest.mark.slow
def test_all_rare_events_occur_in_the_first_200_worlds() -> None:
    """Events that never occur would be tested by no world."""
    events = Counter[str]()
    for seed in WITH_RARE_EVENTS:
        events += run_world(seed)
    assert max(WITH_RARE_EVENTS) < 200 and [kind for kind in RARE if not events[kind]] == []


PRINT_DIGESTS = """
import hashlib
from decentnode.simulate.world.random_world import Run, draw_world
for seed in (3, 12):
    run = Run(draw_world(seed))
    run.execute()
    models = b"".join(bytes(t.model.parameters.numpy()) for t in run.trainings.values())
    print(seed, run.world.heap.count, hashlib.sha256(repr(run.history.log).encode() + models).hexdigest())
"""


@pytest.mark.slow
def test_a_world_runs_exactly_the_same_in_another_process() -> None:
    """Also with another hash seed."""
    outputs = [
        subprocess.run(
            [sys.executable, "-c", PRINT_DIGESTS], env={**os.environ, "PYTHONHASHSEED": seed}, capture_output=True,
            check=True, text=True, timeout=300,
        ).stdout
        for seed in ("1", "2")
    ]
    assert outputs[0] == outputs[1] and outputs[0].count("\n") == 2


# -- former bugs, put back ---------------------------------------------------------------------------------------------


def suspect_after_a_fixed_silence(patch: pytest.MonkeyPatch) -> None:
    """Nodes suspect a peer after a silence of fixed length, as when the worlds of BUGS were searched: so few of them
    show a bug that with other times none of them might."""
    patch.setattr(Watch, "patience", property(lambda self: self._longest))
    patch.setattr(Watch, "next_ask", Watch._next_look)
    patch.setattr(Watch, "note_heard", lambda _self, _uid: None)


def ignore_leases(patch: pytest.MonkeyPatch) -> None:
    """The model moves back to memory from which messages are still sent."""
    patch.setattr(Leases, "held", lambda _self, _address: False)


def ignore_min_nodes(patch: pytest.MonkeyPatch) -> None:
    """A leader goes on with any number of members, so that two generations may be in force."""
    patch.setattr(MemberState, "enough", lambda _self, _generation: True)
    propose = Leader.propose

    def with_few(self: Leader, now: float) -> None:
        limits = self._state.limits
        object.__setattr__(limits, "min_nodes", 1)
        propose(self, now)

    patch.setattr(Leader, "propose", with_few)


def queue_without_limit(patch: pytest.MonkeyPatch) -> None:
    """Any number of payloads waits for a peer that takes none."""
    patch.setattr(LinkSender, "takes", lambda _self, _uid: True)


def add_jitter(patch: pytest.MonkeyPatch) -> None:
    """Some messages take much longer than others, so that they arrive after the others have agreed on another
    generation. Not a bug by itself."""
    init = VirtualNetwork.__init__

    def with_jitter(self: VirtualNetwork, heap: EventQueue, link: Link, seed: int) -> None:
        init(self, heap, link.model_copy(update={"jitter_seconds": 1.0}), seed)

    patch.setattr(VirtualNetwork, "__init__", with_jitter)


def accept_late_messages_of_old_generations(patch: pytest.MonkeyPatch) -> None:
    """Messages of a generation that is over are accepted, and arrive late. Payloads among them are still refused, as
    their rounds are over, too; parts of closing means are not."""
    add_jitter(patch)
    accept_other_generations(patch)


def accept_other_generations(patch: pytest.MonkeyPatch) -> None:
    """Messages of other generations than the receiver's are accepted."""
    belongs = Session.belongs

    def of_any_generation(self: Session, message: Message) -> None:
        own = self.generation, self.origin
        self.generation, self.origin = message.generation, message.origin
        try:
            belongs(self, message)
        finally:
            self.generation, self.origin = own

    patch.setattr(Session, "belongs", of_any_generation)


def begin_generation_in_current_round(patch: pytest.MonkeyPatch) -> None:
    """Messages of other generations are accepted, and the next generation begins with the current round, not with the
    one after it, so that payloads of the old generation are mixed."""
    accept_other_generations(patch)

    def enter(self: Reconfiguration, round: int) -> None:
        self.facts.raise_if_over()
        self.begin_at(round)

    patch.setattr(Reconfiguration, "enter", enter)


def skip_rounds(patch: pytest.MonkeyPatch) -> None:
    """Nodes that are behind when a generation begins jump to its first round without making those between."""

    def skip(self: NodeGenerations, first_round: int) -> Steps[None]:
        self._node.round = first_round
        yield from ()

    patch.setattr(NodeGenerations, "_catch_up", skip)


BUGS: dict[Callable[[pytest.MonkeyPatch], None], tuple[range, str]] = {
    ignore_leases: (range(64, 70), "published otherwise"),
    ignore_min_nodes: (range(20, 60), "generations are in force"),
    queue_without_limit: (range(36, 60), "5 payloads wait for"),
    accept_late_messages_of_old_generations: (range(140, 144), "gets the mean"),
    begin_generation_in_current_round: (range(38, 42), "did not publish for it"),
    skip_rounds: (range(3, 5), "makes rounds"),
}
"""Function that puts a former bug back -> (seeds of worlds of which one fails then, the message of the failure)."""


@pytest.mark.sampled(one=["put_back"])
@pytest.mark.parametrize("put_back", BUGS, ids=lambda put_back: put_back.__name__)
def test_a_former_bug_that_is_put_back_is_found(put_back: Callable[[pytest.MonkeyPatch], None]) -> None:
    """The same world does not fail without the bug."""
    seeds, message = BUGS[put_back]
    with pytest.MonkeyPatch.context() as patch:
        suspect_after_a_fixed_silence(patch)
        put_back(patch)
        for seed in seeds:
            try:
                Run(draw_world(seed)).execute()
            except Exception as error:
                assert message in str(error)
                break
        else:
            pytest.fail("the bug is not found")
    Run(draw_world(seed)).execute()
