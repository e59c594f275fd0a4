"""Whatever a neighbor sends, a round ends: all rules and codecs through a schedule, payloads changed on the way."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from decentnode.communication.base import Arrival, Exchange
from decentnode.communication.counters import Counters
from decentnode.communication.run_state import Steps, at_once, run_without_waits
from decentnode.errors import Interrupted, PeerFault, PeerLost
from decentnode.node.schedules.fragment_exchange import FragmentExchange
from decentnode.node.schedules.sequential import Sequential
from decentnode.payload import Payload, ScalarSpec, TensorSpec
from decentnode.sharing.decoding import decode
from decentnode.sharing.fragments import Fragment
from decentnode.sharing.full import Full
from decentnode.sharing.requirements import Requirements
from decentnode.sharing.rounds import rule_view
from tests.conftest import scale
from tests.node.fakes import Quadratic
from tests.sharing.contract import RULES, bound, by_needs, suited

ELEMENTS = 150
NODES = 4
UNPACKING = [name for name, each in RULES.items()
             if not bound(each, [torch.zeros(ELEMENTS)])[0].requirements.elementwise]  # fmt: skip
SERVED = [name for name in UNPACKING if RULES[name]().requirements.star]
VIA_UNPACK = [name for name in UNPACKING if name not in SERVED]
MUTATIONS = scale(2000, 200_000) // len(VIA_UNPACK) + 1
"""Per rule; every payload is a mutation of what the sender's own rule made."""
SCALARS = (0, 1, -1, 2**31, 2**63 - 1, -(2**63), 2**64 - 1, 0.0, -0.5, 1e308, float("nan"), float("inf"), -float("inf"))


class Arrived(Exchange):
    """All payloads at once, from everybody."""

    missing = departed = undelivered = frozenset()

    def __init__(self, received: Mapping[int, Payload]) -> None:
        self._received = received

    def arrivals(self, timeout_seconds: float) -> Iterator[Arrival]:
        yield Arrival(0, ELEMENTS, self._received, frozenset())


class Line:
    """What a schedule needs of a transport; node 0 hears of the others what `sent` holds."""

    def __init__(self) -> None:
        self.counters, self.history = Counters(), None
        self.config = SimpleNamespace(timeout_seconds=1.0)
        self.sent: dict[int, Payload] = {}
        self.goes_on = False

    def computed(self, round: int) -> None:
        """Nobody waits for the local steps."""

    def exchange_steps(
        self, round: int, outgoing: Mapping[int, Payload], expected: tuple[int, ...], *_: object
    ) -> Steps[Any]:
        return at_once(Arrived({uid: self.sent[uid] for uid in expected}))


class Run:
    """Nodes of one rule, whose node 0 goes through a schedule; the others' payloads may be changed on the way to it."""

    def __init__(self, name: str) -> None:
        self.trainings = [Quadratic(uid, ELEMENTS) for uid in range(NODES)]
        self.rules = bound(RULES[name], [training.model.parameters for training in self.trainings])
        self.schema = self.rules[0].payload_schema(ELEMENTS, torch.float32)
        self.graph = suited(self.rules[0], NODES)
        self.line = Line()
        each = FragmentExchange(Fragment(0, ELEMENTS, self.graph), self.rules[0], self.line)  # type: ignore[arg-type]
        self.schedule = Sequential(self.trainings[0], [each], self.line)  # type: ignore[arg-type]
        self.round = 0

    def step(self, change: Any = lambda payload, _schema: payload) -> frozenset[int]:
        """One round in which `change` makes of a source's payload what arrives; the sources that were refused."""
        missing: frozenset[int] = frozenset()
        phases = range(self.rules[0].requirements.phases)
        of_phase = [[each.plan(replace(rule_view(each, self.graph, uid, self.round, 1), phase=phase))
                     for uid, each in enumerate(self.rules)] for phase in phases]  # fmt: skip
        for phase, views in enumerate(of_phase):
            for uid in range(1, NODES):
                model = self.trainings[uid].model.parameters
                if phase == 0:
                    self.rules[uid].begin(model, views[uid])
                    self.trainings[uid].local_update(self.round)
                    self.rules[uid].adjust(model, views[uid], 1.0)
            out = [{} if uid == 0 else each.outgoing(self.trainings[uid].model.parameters, views[uid])
                   for uid, each in enumerate(self.rules)]  # fmt: skip
            self.line.sent = {uid: change(out[uid][0], self.schema) for uid in views[0].sources}
            if phase == 0:
                run_without_waits(self.schedule.begin(self.round, [[each[0] for each in of_phase]], lambda: None))
            else:
                run_without_waits(self.schedule.send(phase))
            (mixed,) = run_without_waits(self.schedule.finish() if phase == phases[-1] else self.schedule.mix())
            missing |= mixed.missing
            for uid in range(1, NODES):  # the others hear of nobody, which every rule has to stand
                self.rules[uid].mix(self.trainings[uid].model.parameters, {}, views[uid].without(views[uid].sources))
        self.round += 1
        return missing


def mutated(payload: Payload, schema: Mapping[str, TensorSpec], draws: np.random.Generator) -> Payload:
    """A payload that a transport would hand over: sizes within the schema, numbers as scalars, any bytes."""
    tensors = {name: tensor.clone() for name, tensor in payload.tensors.items()}
    scalars = dict(payload.scalars)
    for _ in range(int(draws.integers(1, 4))):
        name = list(tensors)[int(draws.integers(len(tensors)))]
        spec, tensor = schema[name], tensors[name]
        kind = int(draws.integers(6))
        if kind == 0 and scalars:
            key = list(scalars)[int(draws.integers(len(scalars)))]
            scalars[key] = SCALARS[int(draws.integers(len(SCALARS)))]
        elif kind == 1 and scalars:
            del scalars[list(scalars)[int(draws.integers(len(scalars)))]]
        elif kind == 2 and not spec.exact:
            size = int(draws.integers(spec.max_elements + 1))
            longer = torch.zeros(size, dtype=spec.dtype)
            longer[: tensor.numel()] = tensor[:size]
            tensors[name] = longer
        elif kind == 3 and not spec.exact:
            tensors[name] = tensor[: int(draws.integers(tensor.numel() + 1))].clone()
        elif tensor.numel():
            raw = tensor.view(torch.uint8).numpy()
            head = raw[:10] if kind == 4 else raw  # kinds, parameters and counts stand there
            head[int(draws.integers(len(head)))] = int(draws.integers(256)) >> int(draws.integers(8))
    return Payload(tensors, scalars, payload.metadata)


@pytest.mark.sampled(of=by_needs)
@pytest.mark.parametrize("name", VIA_UNPACK)
def test_any_payload_is_mixed_or_refused(name: str) -> None:
    """Nothing is raised, nobody but a sender of changed bytes is refused, and untouched payloads are mixed again."""
    draws = np.random.default_rng(int.from_bytes(name.encode()[:7], "little"))
    run, refused, done = Run(name), 0, 0
    assert run.step() == frozenset() and run.step() == frozenset()
    while done < MUTATIONS:
        try:
            missing = run.step(functools.partial(mutated, draws=draws))
        except PeerLost as lost:
            assert not run.rules[0].requirements.tolerates_missing  # its run ends there
            missing, faults = frozenset(lost.missing), run.line.counters
            done, run = done + len(run.line.sent), Run(name)
            run.line.counters = faults
            assert run.step() == run.step() == frozenset()
        assert missing <= {1, 2, 3}
        refused, done = refused + len(missing), done + len(run.line.sent)
        assert sum(run.line.counters.faults.values()) == run.line.counters.faults.get("malformed_payload", 0) == refused
        if not bool(run.trainings[0].model.parameters.isfinite().all()) or not run.round % 50:
            faults = run.line.counters
            run = Run(name)  # values may be anything: a run that took NaN in shows it, and is over
            run.line.counters = faults
            assert run.step() == frozenset()
    can_tell = any(not spec.exact for spec in run.schema.values()) or run.rules[0].requirements.scalars
    assert refused or not can_tell


@pytest.mark.parametrize("name", SERVED)
def test_any_answer_of_a_client_is_taken_or_refused(name: str) -> None:
    """By the server, of which nothing else than a PeerFault is raised."""
    draws = np.random.default_rng(4)
    models = [torch.randn(ELEMENTS, generator=torch.Generator().manual_seed(uid)) for uid in range(NODES)]
    rules, graph = bound(RULES[name], models), suited(RULES[name](), NODES)
    schema = rules[0].payload_schema(ELEMENTS, torch.float32)
    down, up = ([each.plan(replace(rule_view(each, graph, uid, 0, 1), phase=phase)) for uid, each in enumerate(rules)]
                for phase in (0, 1))  # fmt: skip
    for each, model, seen in zip(rules, models, down, strict=True):
        each.begin(model, seen)
    sent = rules[0].outgoing(models[0], down[0])
    rules[1].mix(models[1], {0: rules[1].unpack(sent[1], 0, down[1])}, down[1])
    answer, refused = rules[1].outgoing(models[1], up[1])[0], 0
    for _ in range(MUTATIONS):
        try:
            taken = decode(rules[0], mutated(answer, schema, draws), 1, up[0])
        except PeerFault:
            refused += 1
        else:
            rules[0].mix(models[0], {1: taken, **{uid: decode(rules[0], answer, uid, up[0]) for uid in (2, 3)}}, up[0])
    assert 0 < refused < MUTATIONS


class Broken(Full):
    """Raises what it is told to."""

    requirements = Requirements()
    error: Exception = ValueError("zip() argument 2 is longer than argument 1")

    def unpack(self, payload: Payload, uid: int, view: object) -> Payload:
        raise self.error


@pytest.mark.parametrize("error", [ValueError("x"), IndexError("x"), KeyError("x"), RuntimeError("x"), TypeError("x"),
                                   OverflowError("x"), PeerFault("malformed_payload", "x")])  # fmt: skip
def test_whatever_bytes_raise_is_the_peers_fault(error: Exception) -> None:
    rule = Broken(Full.Config())
    rule.error = error
    with pytest.raises(PeerFault, match="malformed_payload") as caught:
        decode(rule, Payload({"x": torch.zeros(1)}), 1, _any_view())
    assert caught.value is error or caught.value.__cause__ is error


@pytest.mark.parametrize("error", [Interrupted("x"), AssertionError("x"), MemoryError("x")])
def test_our_own_errors_stay_what_they_are(error: Exception) -> None:
    rule = Broken(Full.Config())
    rule.error = error
    with pytest.raises(type(error)):
        decode(rule, Payload({"x": torch.zeros(1)}), 1, _any_view())


@pytest.mark.parametrize(("spec", "good", "bad"), [
    (ScalarSpec(int, low=0, high=9), [0, 9], [-1, 10, 1.0, True, None, float("nan")]),
    (ScalarSpec(float, low=0.0), [0, 0.5, 1e300], [-1e-9, float("nan"), float("inf"), None]),
    (ScalarSpec(float, finite=False, optional=True), [0, float("nan"), -float("inf"), None], [True]),
])  # fmt: skip
def test_scalars_are_what_a_rule_announced(spec: ScalarSpec, good: list[Any], bad: list[Any]) -> None:
    assert all(spec.accepts(value) for value in good) and not any(spec.accepts(value) for value in bad)


def _any_view() -> Any:
    return SimpleNamespace(uid=0, round=0)
