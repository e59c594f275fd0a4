"""A round ends whatever a neighbor sends: all rules and codecs run through a schedule and get mutated payloads."""

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
from tests.sharing.contract import RULES, requirement_traits, set_up_rules, suitable_graph

ELEMENTS = 150
NODES = 4
NOT_ELEMENTWISE = [name for name, each in RULES.items()
             if not set_up_rules(each, [torch.zeros(ELEMENTS)])[0].requirements.elementwise]  # fmt: skip
WITH_A_SERVER = [name for name in NOT_ELEMENTWISE if RULES[name]().requirements.star]
WITHOUT_A_SERVER = [name for name in NOT_ELEMENTWISE if name not in WITH_A_SERVER]
MUTATIONS = scale(2000, 200_000) // len(WITHOUT_A_SERVER) + 1
"""Mutated payloads per rule. Each is a mutation of a payload that the sender's own rule made."""
SCALARS = (0, 1, -1, 2**31, 2**63 - 1, -(2**63), 2**64 - 1, 0.0, -0.5, 1e308, float("nan"), float("inf"), -float("inf"))


class CompletedExchange(Exchange):
    """An exchange in which all payloads have arrived, whole."""

    missing = departed = undelivered = frozenset()

    def __init__(self, received: Mapping[int, Payload]) -> None:
        self._received = received

    def arrivals(self, timeout_seconds: float) -> Iterator[Arrival]:
        yield Arrival(0, ELEMENTS, self._received, frozenset())


class FakeTransport:
    """The part of a transport that a schedule uses. In every exchange node 0 receives what `sent` holds."""

    def __init__(self) -> None:
        self.counters, self.history = Counters(), None
        self.config = SimpleNamespace(timeout_seconds=1.0)
        self.sent: dict[int, Payload] = {}
        self.continues_without_late = False

    def computed(self, round: int) -> None:
        """Does nothing: no peer waits for the local steps."""

    def exchange_steps(
        self, round: int, outgoing: Mapping[int, Payload], expected: tuple[int, ...], *_: object
    ) -> Steps[Any]:
        return at_once(CompletedExchange({uid: self.sent[uid] for uid in expected}))


class RunThroughSchedule:
    """Nodes with one rule. Node 0 runs through a schedule; payloads of the others may be changed on the way to it, and
    the others receive nothing."""

    def __init__(self, name: str) -> None:
        self.trainings = [Quadratic(uid, ELEMENTS) for uid in range(NODES)]
        self.rules = set_up_rules(RULES[name], [training.model.parameters for training in self.trainings])
        self.schema = self.rules[0].payload_schema(ELEMENTS, torch.float32)
        self.graph = suitable_graph(self.rules[0], NODES)
        self.transport = FakeTransport()
        transport: Any = self.transport
        exchange = FragmentExchange(Fragment(0, ELEMENTS, self.graph), self.rules[0], transport)
        self.schedule = Sequential(self.trainings[0], [exchange], transport)
        self.round = 0

    def step(self, change: Any = lambda payload, _schema: payload) -> frozenset[tuple[int, int]]:
        """Runs one round and returns the (phase, source) of the payloads that were refused. change: (payload, schema)
        -> the payload that arrives instead."""
        missing: frozenset[tuple[int, int]] = frozenset()
        phases = range(self.rules[0].requirements.phases)
        views_of_phases = [[rule.plan(replace(rule_view(rule, self.graph, uid, self.round, 1), phase=phase))
                            for uid, rule in enumerate(self.rules)] for phase in phases]  # fmt: skip
        for phase, views in enumerate(views_of_phases):
            for uid in range(1, NODES):
                model = self.trainings[uid].model.parameters
                if phase == 0:
                    self.rules[uid].begin(model, views[uid])
                    self.trainings[uid].local_update(self.round)
                    self.rules[uid].adjust(model, views[uid], 1.0)
            outgoing = [{} if uid == 0 else rule.outgoing(self.trainings[uid].model.parameters, views[uid])
                        for uid, rule in enumerate(self.rules)]  # fmt: skip
            self.transport.sent = {uid: change(outgoing[uid][0], self.schema) for uid in views[0].sources}
            if phase == 0:
                views_of_node_0 = [views_of_phase[0] for views_of_phase in views_of_phases]
                run_without_waits(self.schedule.begin(self.round, [views_of_node_0], lambda: None))
            else:
                run_without_waits(self.schedule.send(phase))
            (mixed,) = run_without_waits(self.schedule.finish() if phase == phases[-1] else self.schedule.mix())
            missing |= {(phase, uid) for uid in mixed.missing}
            for uid in range(1, NODES):  # the others receive nothing, which every rule must cope with
                self.rules[uid].mix(self.trainings[uid].model.parameters, {}, views[uid].without(views[uid].sources))
        self.round += 1
        return missing


def mutate_payload(payload: Payload, schema: Mapping[str, TensorSpec], draws: np.random.Generator) -> Payload:
    """Returns a payload with one to three random changes that a transport does not notice: sizes stay within the
    schema and scalars are numbers, but bytes are arbitrary."""
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
            resized = torch.zeros(size, dtype=spec.dtype)
            resized[: tensor.numel()] = tensor[:size]
            tensors[name] = resized
        elif kind == 3 and not spec.exact:
            tensors[name] = tensor[: int(draws.integers(tensor.numel() + 1))].clone()
        elif tensor.numel():
            raw = tensor.view(torch.uint8).numpy()
            part = raw[:10] if kind == 4 else raw  # codes begin with their kinds, parameters and counts
            part[int(draws.integers(len(part)))] = int(draws.integers(256)) >> int(draws.integers(8))
    return Payload(tensors, scalars, payload.metadata)


@pytest.mark.sampled(of=requirement_traits)
@pytest.mark.parametrize("name", WITHOUT_A_SERVER)
def test_a_mutated_payload_is_either_mixed_or_refused(name: str) -> None:
    """Nothing else is raised, no payload but a mutated one is refused, and in later rounds unchanged payloads are
    mixed."""
    draws = np.random.default_rng(int.from_bytes(name.encode()[:7], "little"))
    run, refused, done = RunThroughSchedule(name), 0, 0
    assert run.step() == frozenset() and run.step() == frozenset()
    while done < MUTATIONS:
        try:
            missing = run.step(functools.partial(mutate_payload, draws=draws))
        except PeerLost as lost:
            assert not run.rules[0].requirements.tolerates_missing  # without it, the run ends here
            missing, faults = frozenset((0, uid) for uid in lost.missing), run.transport.counters
            done, run = done + len(run.transport.sent), RunThroughSchedule(name)
            run.transport.counters = faults
            assert run.step() == run.step() == frozenset()
        assert {uid for _, uid in missing} <= {1, 2, 3}
        refused, done = refused + len(missing), done + len(run.transport.sent)
        faults_by_reason = run.transport.counters.faults
        assert sum(faults_by_reason.values()) == faults_by_reason.get("malformed_payload", 0) == refused
        if not bool(run.trainings[0].model.parameters.isfinite().all()) or not run.round % 50:
            faults = run.transport.counters
            run = RunThroughSchedule(name)  # mutated values may be NaN: a model that mixed them in is of no more use
            run.transport.counters = faults
            assert run.step() == frozenset()
    can_be_refused = any(not spec.exact for spec in run.schema.values()) or run.rules[0].requirements.scalars
    assert refused or not can_be_refused


@pytest.mark.parametrize("name", WITH_A_SERVER)
def test_a_server_mixes_or_refuses_a_mutated_answer_of_a_client(name: str) -> None:
    """It raises nothing other than PeerFault."""
    draws = np.random.default_rng(4)
    models = [torch.randn(ELEMENTS, generator=torch.Generator().manual_seed(uid)) for uid in range(NODES)]
    rules, graph = set_up_rules(RULES[name], models), suitable_graph(RULES[name](), NODES)
    schema = rules[0].payload_schema(ELEMENTS, torch.float32)
    down, up = ([each.plan(replace(rule_view(each, graph, uid, 0, 1), phase=phase)) for uid, each in enumerate(rules)]
                for phase in (0, 1))  # fmt: skip
    for each, model, round_view in zip(rules, models, down, strict=True):
        each.begin(model, round_view)
    sent = rules[0].outgoing(models[0], down[0])
    rules[1].mix(models[1], {0: rules[1].unpack(sent[1], 0, down[1])}, down[1])
    answer, refused = rules[1].outgoing(models[1], up[1])[0], 0
    for _ in range(MUTATIONS):
        try:
            taken = decode(rules[0], mutate_payload(answer, schema, draws), 1, up[0])
        except PeerFault:
            refused += 1
        else:
            rules[0].mix(models[0], {1: taken, **{uid: decode(rules[0], answer, uid, up[0]) for uid in (2, 3)}}, up[0])
    assert 0 < refused < MUTATIONS


class RaisesInUnpack(Full):
    """A rule whose `unpack` raises `error`."""

    requirements = Requirements()
    error: Exception = ValueError("zip() argument 2 is longer than argument 1")

    def unpack(self, payload: Payload, uid: int, view: object) -> Payload:
        raise self.error


@pytest.mark.parametrize("error", [ValueError("x"), IndexError("x"), KeyError("x"), RuntimeError("x"), TypeError("x"),
                                   OverflowError("x"), PeerFault("malformed_payload", "x")])  # fmt: skip
def test_errors_of_unpack_become_faults_of_the_peer(error: Exception) -> None:
    rule = RaisesInUnpack(Full.Config())
    rule.error = error
    with pytest.raises(PeerFault, match="malformed_payload") as caught:
        decode(rule, Payload({"x": torch.zeros(1)}), 1, _any_view())
    assert caught.value is error or caught.value.__cause__ is error


@pytest.mark.parametrize("error", [Interrupted("x"), AssertionError("x"), MemoryError("x")])
def test_errors_that_no_payload_can_cause_are_passed_on_unchanged(error: Exception) -> None:
    rule = RaisesInUnpack(Full.Config())
    rule.error = error
    with pytest.raises(type(error)):
        decode(rule, Payload({"x": torch.zeros(1)}), 1, _any_view())


@pytest.mark.parametrize(("spec", "good", "bad"), [
    (ScalarSpec(int, low=0, high=9), [0, 9], [-1, 10, 1.0, True, None, float("nan")]),
    (ScalarSpec(float, low=0.0), [0, 0.5, 1e300], [-1e-9, float("nan"), float("inf"), None]),
    (ScalarSpec(float, finite=False, optional=True), [0, float("nan"), -float("inf"), None], [True]),
])  # fmt: skip
def test_a_scalar_spec_accepts_values_of_its_type_and_range_only(
    spec: ScalarSpec, good: list[Any], bad: list[Any]
) -> None:
    assert all(spec.accepts(value) for value in good) and not any(spec.accepts(value) for value in bad)


def _any_view() -> Any:
    return SimpleNamespace(uid=0, round=0)
