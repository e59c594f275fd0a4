"""The rules of servers beside their equations, on runs of real nodes in this process."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from decentnode.build import build, build_in_process, step_all
from decentnode.communication.inproc import Hub, Inproc, InprocConfig
from decentnode.communication.inproc.hub import PayloadKey
from decentnode.errors import PeerLost
from decentnode.experiment import Experiment, load
from decentnode.graph.base import RoundView
from decentnode.node.node import Node
from decentnode.payload import Payload
from decentnode.sharing import WITH_SERVERS
from decentnode.sharing.federated.fedavg import FedAvg
from decentnode.sharing.federated.rounds import UP
from decentnode.sharing.rounds import rule_view
from tests.graph.contract import make
from tests.sharing.contract import rule, run_round, set_up_rules
from tests.sharing.federated.runs import CLIENTS, FEDERATED, LocalTraining, clients_of_round, model_of, star_experiment

ROUNDS, CHOSEN = 6, 4
GOES_ON = {"rounds": ROUNDS, "evaluate_every": 0, "missing": "return_weight"}


def ran(experiment: Experiment) -> list[Node]:
    nodes = build_in_process(experiment)
    step_all(nodes)
    return nodes


def mean_change(local: LocalTraining, x: Tensor, round: int) -> np.ndarray:
    changes = [local.change(uid, x, round).double().cpu().numpy() for uid in clients_of_round(round, CHOSEN)]
    found: np.ndarray = np.mean(changes, axis=0)
    return found


@pytest.mark.parametrize(("rule", "keys"), [
    ("fedavgm", {"server_lr": 0.7, "server_momentum": 0.6}),
    ("fedadam", {"server_lr": 0.05, "beta1": 0.8, "beta2": 0.95, "tau": 0.01}), ("fedyogi", {"tau": 0.02}),
])  # fmt: skip
def test_server_steps_are_those_of_the_papers(rule: str, keys: dict[str, float]) -> None:
    """In float64 to 1e-6."""
    experiment = star_experiment({"name": rule, "clients": CHOSEN, **keys})
    nodes, local = ran(experiment), LocalTraining(experiment)
    c: Any = experiment.sharing
    x = local.start.double().cpu().numpy()
    m, v = np.zeros_like(x), np.full_like(x, keys.get("tau", 0.0) ** 2)
    for r in range(ROUNDS):
        d = mean_change(local, torch.from_numpy(x).float(), r)
        if rule == "fedavgm":
            m = c.server_momentum * m + d
            x = x + c.server_lr * m
            continue
        m = c.beta1 * m + (1 - c.beta1) * d
        v = c.beta2 * v + (1 - c.beta2) * d**2 if rule == "fedadam" else v - (1 - c.beta2) * d**2 * np.sign(v - d**2)
        x = x + c.server_lr * m / (np.sqrt(v) + c.tau)
    torch.testing.assert_close(model_of(nodes[0]).double().cpu(), torch.from_numpy(x), atol=1e-6, rtol=0)


@pytest.mark.slow
def test_fedprox_pulls_every_local_step_to_the_servers_model() -> None:
    experiment = star_experiment({"name": "fedprox", "clients": CHOSEN, "proximal": 0.5})
    nodes, local = ran(experiment), LocalTraining(experiment)
    x = local.start
    for r in range(ROUNDS):
        total = torch.zeros_like(x)
        for uid in clients_of_round(r, CHOSEN):
            y = local.trainings[uid].model.parameters
            total += local.change(uid, x, r, lambda g, x=x, y=y: g + 0.5 * (y.detach() - x))  # type: ignore[misc]
        x = x + total / CHOSEN
    assert torch.equal(model_of(nodes[0]), x)
    plain = ran(star_experiment({"name": "fedavg", "clients": CHOSEN}))
    none = ran(star_experiment({"name": "fedprox", "clients": CHOSEN, "proximal": 0.0}))
    assert torch.equal(model_of(none[0]), model_of(plain[0]))
    assert not torch.equal(model_of(nodes[0]), model_of(plain[0]))


def test_scaffold_is_option_two_of_the_paper() -> None:
    experiment = star_experiment({"name": "scaffold", "clients": CHOSEN, "server_lr": 0.8})
    nodes, local = ran(experiment), LocalTraining(experiment)
    x, lr, steps = local.start, 0.2, 3
    c, own = torch.zeros_like(x), {uid: torch.zeros_like(x) for uid in range(1, CLIENTS + 1)}
    for r in range(ROUNDS):
        changes, moved = [], []
        for uid in clients_of_round(r, CHOSEN):
            d = local.change(uid, x, r, lambda g, uid=uid, c=c: g - own[uid] + c)  # type: ignore[misc]
            new = own[uid] - c - d / (steps * lr)
            changes.append(d)
            moved.append(new - own[uid])
            own[uid] = new
        x = x + 0.8 * sum(changes) / CHOSEN  # type: ignore[operator]
        c = c + sum(moved) / CLIENTS  # type: ignore[operator]
    torch.testing.assert_close(model_of(nodes[0]), x, atol=1e-5, rtol=0)
    torch.testing.assert_close(nodes[0].sharing.control, c, atol=1e-5, rtol=0)  # type: ignore[attr-defined]


@pytest.mark.slow
@pytest.mark.parametrize("lossy", [False, True])
def test_stc_loses_nothing_at_either_end(lossy: bool) -> None:
    """h + (x - h) is x, whatever went down; what came up and the residual are the change of a client, and all of it is
    the residual where the answer did not come."""
    experiment = star_experiment({"name": "fedstc", "clients": CHOSEN, "entries": 0.2}, node={**GOES_ON, "rounds": 12})
    lost = answers_lost() if lossy else set()
    nodes, local = ran_with_losses(experiment, lost), LocalTraining(experiment)
    x, h = local.start.clone(), local.start.clone()
    errors = {uid: torch.zeros_like(x) for uid in range(1, CLIENTS + 1)}
    for r in range(12):
        h = h + ternary(x - h, 0.2)
        total = torch.zeros_like(x)
        for uid in clients_of_round(r, CHOSEN):
            whole = local.change(uid, h, r) + errors[uid]
            sent = ternary(whole, 0.2)
            came = (r, UP, uid) not in lost
            errors[uid] = whole - came * sent
            total += came * sent
        x = x + total / (CHOSEN - sum((r, UP, uid) in lost for uid in clients_of_round(r, CHOSEN)))
    torch.testing.assert_close(model_of(nodes[0]), x, atol=1e-5, rtol=0)
    for node in nodes[1:]:
        copy = node.sharing.public  # type: ignore[attr-defined]
        torch.testing.assert_close(copy, h, atol=1e-5, rtol=0)
        assert torch.equal(copy, nodes[0].sharing.public), "all have one copy, who took part and who did not"  # type: ignore[attr-defined]


def ternary(vector: Tensor, fraction: float) -> Tensor:
    """The largest entries as plus or minus their mean size, all others 0."""
    count = max(1, round(fraction * vector.numel()))
    at = vector.abs().topk(count).indices
    found = torch.zeros_like(vector)
    found[at] = vector[at].sign() * vector[at].abs().mean()
    return found


@pytest.mark.parametrize("rule", WITH_SERVERS)
def test_nothing_changes_where_clients_return_what_they_got(rule: str) -> None:
    training = {"batch_size": 4, "local_steps": 3, "optimizer": {"name": "sgd", "lr": 0.0}}
    nodes = build_in_process(star_experiment({"name": rule, "clients": 3}, training=training))
    start = model_of(nodes[0])
    step_all(nodes)
    assert all(torch.equal(model_of(node), start) for node in nodes)


class Halves(FedAvg):
    """A rule of one's own."""

    def step(self, model: Tensor, change: Tensor, view: RoundView) -> None:
        model.add_(change, alpha=0.5)


def test_a_rule_of_ones_own() -> None:
    own = ran(star_experiment({"name": f"{__name__}:Halves", "clients": CHOSEN}))
    known = ran(star_experiment({"name": "fedavg", "server_lr": 0.5, "clients": CHOSEN}))
    assert torch.equal(model_of(own[0]), model_of(known[0]))


# -- clients that do not answer -----------------------------------------------------------------------------------


class LossyPayloads(dict[PayloadKey, Payload]):
    """Payloads that are never there, as those that come too late."""

    def __init__(self, lost: Collection[tuple[int, int, int]]) -> None:
        super().__init__()
        self.lost = lost
        """(round, phase, source)."""

    def pop(self, key: PayloadKey, *default: Any) -> Any:  # type: ignore[override]
        found = super().pop(key, *default)
        return default[0] if key[:3] in self.lost else found


def ran_with_losses(experiment: Experiment, lost: Collection[tuple[int, int, int]]) -> list[Node]:
    hub = Hub(CLIENTS + 1)
    hub.payloads = LossyPayloads(lost)
    config = InprocConfig.model_validate({"name": "inproc"})

    def join(uid: int) -> Callable[..., Inproc]:
        return lambda schemas: Inproc(config, uid=uid, hub=hub, schemas=schemas)

    nodes = [build(experiment, uid, join(uid)) for uid in range(CLIENTS + 1)]
    step_all(nodes)
    return nodes


def answers_lost() -> set[tuple[int, int, int]]:
    """One of a client that takes part, in each of three rounds."""
    return {(r, UP, clients_of_round(r, CHOSEN)[r % CHOSEN]) for r in (1, 2, 4)}


def test_a_round_goes_on_with_those_that_answered() -> None:
    lost = answers_lost()
    experiment = star_experiment({"name": "fedavg", "clients": CHOSEN, "min_clients": 3}, node=GOES_ON)
    nodes, local = ran_with_losses(experiment, lost), LocalTraining(experiment)
    x = local.start
    for r in range(ROUNDS):
        changes = {uid: local.change(uid, x, r) for uid in clients_of_round(r, CHOSEN)}
        here = [d for uid, d in changes.items() if (r, UP, uid) not in lost]
        total = torch.zeros_like(x)
        for d in here:
            total += d
        x = x + total / len(here)
    assert torch.equal(model_of(nodes[0]), x)


def test_too_few_answers_end_the_run_and_say_whose_are_missing() -> None:
    experiment = star_experiment({"name": "fedavg", "clients": CHOSEN, "min_clients": CHOSEN}, node=GOES_ON)
    r, _, silent = min(answers_lost())
    with pytest.raises(PeerLost, match=rf"node 0: 3 of 4 clients answered in round {r}, fewer than sharing.min_clients "
                       rf"4; nothing from \[{silent}\]") as caught:  # fmt: skip
        ran_with_losses(experiment, answers_lost())
    assert caught.value.missing == (silent,)


@pytest.mark.sampled(one=["rule"])
@pytest.mark.parametrize("rule", WITH_SERVERS)
def test_lost_answers_and_models_do_no_lasting_harm(rule: str) -> None:
    """Models that never come down among them: such a client does not train, and says so."""
    down = {(3, 0, 0)}
    experiment = star_experiment({"name": rule, "clients": CHOSEN}, node={**GOES_ON, "rounds": 12})
    whole, lossy = (model_of(ran_with_losses(experiment, lost)[0]) for lost in (set[Any](), answers_lost()))
    assert bool(lossy.isfinite().all()) and float((lossy - whole).norm()) < 0.5 * float(whole.norm())
    with pytest.raises(PeerLost, match="0 of 4 clients answered in round 3"):
        ran_with_losses(experiment, down)


@pytest.mark.slow
def test_the_servers_control_variate_is_the_mean_of_the_clients_also_after_losses() -> None:
    experiment = star_experiment({"name": "scaffold", "clients": CHOSEN}, node={**GOES_ON, "rounds": 30})
    nodes = ran_with_losses(experiment, answers_lost())
    controls = state_of(nodes)
    mean = torch.stack([controls[uid] for uid in range(1, CLIENTS + 1)]).mean(0)
    torch.testing.assert_close(controls[0], mean, atol=1e-5, rtol=0)


def state_of(nodes: list[Node]) -> Mapping[int, Tensor]:
    zero = torch.zeros_like(model_of(nodes[0]))
    return {node.uid: zero if (c := node.sharing.control) is None else c for node in nodes}  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", WITH_SERVERS)
@pytest.mark.slow
def test_every_rule_trains_the_shipped_experiment(name: str) -> None:
    keys = {"server_lr": 0.3} if name == "fedavgm" else {"entries": 0.1} if name == "fedstc" else {}
    experiment = load(FEDERATED, [f"sharing={json.dumps({'name': name, 'clients': 4, **keys})}",
                          "node={rounds: 20, evaluate_every: 0}"])  # fmt: skip
    nodes = ran(experiment)
    assert float(nodes[0].figures()["accuracy_merged"]) > 0.8


@pytest.mark.slow
def test_clients_drift_and_control_variates_take_it_out() -> None:
    """Ten local steps on quadratics with unequal curvature: fedavg ends beside the optimum, fedprox nearer to it, and
    scaffold in it."""
    draws = torch.Generator().manual_seed(2)
    h = torch.rand(CLIENTS + 1, 4, generator=draws, dtype=torch.float64) + 0.3
    at = torch.randn(CLIENTS + 1, 4, generator=draws, dtype=torch.float64)
    best = (h * at)[1:].sum(0) / h[1:].sum(0)
    far = {name: float((on_quadratics(name, h, at, **keys) - best).norm())
           for name, keys in {"fedavg": {}, "fedprox": {"proximal": 1.0}, "scaffold": {}}.items()}  # fmt: skip
    assert far["scaffold"] < 1e-6 < 0.1 * far["fedavg"] and far["fedprox"] < 0.8 * far["fedavg"], far


def on_quadratics(name: str, h: Tensor, at: Tensor, lr: float = 0.2, **keys: float) -> Tensor:
    """Returns the server's model after 300 rounds of all clients, each with ten steps on h (x - at)^2 / 2."""
    models = [torch.zeros_like(each) for each in h]
    rules, graph = set_up_rules(rule(name, **keys), models), make("star", nodes=len(models))

    def steps(uid: int, x: Tensor, seen: RoundView) -> None:
        for _ in range(10):
            gradient = h[uid] * (x - at[uid])
            if rules[uid].requirements.gradient:
                gradient = rules[uid].direction(gradient, seen)
            x.sub_(gradient, alpha=lr)

    for r in range(300):
        seen = replace(rule_view(rules[0], graph, 1, r, 1), lr=lr)
        run_round(rules, models, graph, r, step=lambda uid, x, seen=seen: steps(uid, x, seen), lr=lr)  # type: ignore[misc]
    return models[0]
