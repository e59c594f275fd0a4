"""The rules for servers compared with their papers' equations, in runs of nodes in this process."""

from __future__ import annotations

import functools
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
RETURN_WEIGHT = {"rounds": ROUNDS, "evaluate_every": 0, "missing": "return_weight"}


def run(experiment: Experiment) -> list[Node]:
    """Runs all rounds and returns the nodes."""
    nodes = build_in_process(experiment)
    step_all(nodes)
    return nodes


def mean_change(local: LocalTraining, x: Tensor, round: int) -> np.ndarray:
    """Returns the mean of what the local steps of the chosen clients change, from model x."""
    changes = [local.change(uid, x, round).double().cpu().numpy() for uid in clients_of_round(round, CHOSEN)]
    mean: np.ndarray = np.mean(changes, axis=0)
    return mean


@pytest.mark.parametrize(("rule", "keys"), [
    ("fedavgm", {"server_lr": 0.7, "server_momentum": 0.6}),
    ("fedadam", {"server_lr": 0.05, "beta1": 0.8, "beta2": 0.95, "tau": 0.01}), ("fedyogi", {"tau": 0.02}),
])  # fmt: skip
def test_server_steps_are_those_of_the_papers(rule: str, keys: dict[str, float]) -> None:
    """Computed in float64 beside the run; the models are the same up to 1e-6."""
    experiment = star_experiment({"name": rule, "clients": CHOSEN, **keys})
    nodes, local = run(experiment), LocalTraining(experiment)
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
    nodes, local = run(experiment), LocalTraining(experiment)
    x = local.start
    for r in range(ROUNDS):
        total = torch.zeros_like(x)
        for uid in clients_of_round(r, CHOSEN):
            y = local.trainings[uid].model.parameters
            total += local.change(uid, x, r, lambda g, x=x, y=y: g + 0.5 * (y.detach() - x))  # type: ignore[misc]
        x = x + total / CHOSEN
    assert torch.equal(model_of(nodes[0]), x)
    plain = run(star_experiment({"name": "fedavg", "clients": CHOSEN}))
    none = run(star_experiment({"name": "fedprox", "clients": CHOSEN, "proximal": 0.0}))
    assert torch.equal(model_of(none[0]), model_of(plain[0]))
    assert not torch.equal(model_of(nodes[0]), model_of(plain[0]))


def test_scaffold_updates_control_variates_by_option_two_of_the_paper() -> None:
    experiment = star_experiment({"name": "scaffold", "clients": CHOSEN, "server_lr": 0.8})
    nodes, local = run(experiment), LocalTraining(experiment)
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
def test_fedstc_keeps_what_it_does_not_send_as_residuals_of_server_and_clients(lossy: bool) -> None:
    """The server sends the compressed difference of its model x from the public copy h; what it does not send is in the
    next difference. A client's answer and its residual add up to its change; after an answer that was lost, the
    residual is the whole change."""
    fedstc = {"name": "fedstc", "clients": CHOSEN, "entries": 0.2}
    experiment = star_experiment(fedstc, node={**RETURN_WEIGHT, "rounds": 12})
    lost = answers_lost() if lossy else set()
    nodes, local = run_with_losses(experiment, lost), LocalTraining(experiment)
    x, h = local.start.clone(), local.start.clone()
    errors = {uid: torch.zeros_like(x) for uid in range(1, CLIENTS + 1)}
    for r in range(12):
        h = h + ternary(x - h, 0.2)
        total = torch.zeros_like(x)
        for uid in clients_of_round(r, CHOSEN):
            whole = local.change(uid, h, r) + errors[uid]
            sent = ternary(whole, 0.2)
            arrived = (r, UP, uid) not in lost
            errors[uid] = whole - arrived * sent
            total += arrived * sent
        x = x + total / (CHOSEN - sum((r, UP, uid) in lost for uid in clients_of_round(r, CHOSEN)))
    torch.testing.assert_close(model_of(nodes[0]), x, atol=1e-5, rtol=0)
    for node in nodes[1:]:
        copy = node.sharing.public  # type: ignore[attr-defined]
        torch.testing.assert_close(copy, h, atol=1e-5, rtol=0)
        assert torch.equal(copy, nodes[0].sharing.public), "clients that are not chosen must have the copy, too"  # type: ignore[attr-defined]


def ternary(vector: Tensor, fraction: float) -> Tensor:
    """Returns the vector with its largest entries as plus or minus their mean magnitude, and zeros elsewhere."""
    count = max(1, round(fraction * vector.numel()))
    at = vector.abs().topk(count).indices
    compressed = torch.zeros_like(vector)
    compressed[at] = vector[at].sign() * vector[at].abs().mean()
    return compressed


@pytest.mark.parametrize("rule", WITH_SERVERS)
def test_models_do_not_change_if_clients_train_with_learning_rate_zero(rule: str) -> None:
    training = {"batch_size": 4, "local_steps": 3, "optimizer": {"name": "sgd", "lr": 0.0}}
    nodes = build_in_process(star_experiment({"name": rule, "clients": 3}, training=training))
    start = model_of(nodes[0])
    step_all(nodes)
    assert all(torch.equal(model_of(node), start) for node in nodes)


class Halves(FedAvg):
    """A rule as a user may write it."""

    def step(self, model: Tensor, change: Tensor, view: RoundView) -> None:
        model.add_(change, alpha=0.5)


def test_a_rule_of_an_own_class_defines_the_server_step() -> None:
    own = run(star_experiment({"name": f"{__name__}:Halves", "clients": CHOSEN}))
    known = run(star_experiment({"name": "fedavg", "server_lr": 0.5, "clients": CHOSEN}))
    assert torch.equal(model_of(own[0]), model_of(known[0]))


# -- clients that do not answer -----------------------------------------------------------------------------------


class LossyPayloads(dict[PayloadKey, Payload]):
    """Payloads of a run in one process, of which some never arrive."""

    def __init__(self, lost: Collection[tuple[int, int, int]]) -> None:
        super().__init__()
        self.lost = lost
        """Those that do not arrive: (round, phase, source)."""

    def pop(self, key: PayloadKey, *default: Any) -> Any:  # type: ignore[override]
        found = super().pop(key, *default)
        return default[0] if key[:3] in self.lost else found


def run_with_losses(experiment: Experiment, lost: Collection[tuple[int, int, int]]) -> list[Node]:
    hub = Hub(CLIENTS + 1)
    hub.payloads = LossyPayloads(lost)
    config = InprocConfig.model_validate({"name": "inproc"})

    def join(uid: int) -> Callable[..., Inproc]:
        return lambda schemas: Inproc(config, uid=uid, hub=hub, schemas=schemas)

    nodes = [build(experiment, uid, join(uid)) for uid in range(CLIENTS + 1)]
    step_all(nodes)
    return nodes


def answers_lost() -> set[tuple[int, int, int]]:
    """Returns one answer of a chosen client in each of three rounds, as (round, phase, source)."""
    return {(r, UP, clients_of_round(r, CHOSEN)[r % CHOSEN]) for r in (1, 2, 4)}


def test_the_server_averages_the_answers_that_arrived() -> None:
    lost = answers_lost()
    experiment = star_experiment({"name": "fedavg", "clients": CHOSEN, "min_clients": 3}, node=RETURN_WEIGHT)
    nodes, local = run_with_losses(experiment, lost), LocalTraining(experiment)
    x = local.start
    for r in range(ROUNDS):
        changes = {uid: local.change(uid, x, r) for uid in clients_of_round(r, CHOSEN)}
        arrived = [change for uid, change in changes.items() if (r, UP, uid) not in lost]
        total = torch.zeros_like(x)
        for change in arrived:
            total += change
        x = x + total / len(arrived)
    assert torch.equal(model_of(nodes[0]), x)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_the_mean_of_many_clients_of_16_bits_has_the_precision_of_these(dtype: torch.dtype) -> None:
    """A sum of changes times 60,000 samples would be infinite, and one of 400 changes would stop growing."""
    for samples in (1, 60_000):
        models = [torch.zeros(5, dtype=dtype) for _ in range(401)]
        rules = set_up_rules(rule("fedavg"), models)
        for uid, each in enumerate(rules):
            each.set_samples(samples + uid % 2)
        run_round(rules, models, make("star", nodes=401), 0, step=lambda uid, model: model.add_(1.0 + uid % 2))
        expected = torch.full((5,), (samples + 2 * (samples + 1)) / (2 * samples + 1), dtype=torch.float64)
        torch.testing.assert_close(models[0].double(), expected, rtol=torch.finfo(dtype).eps, atol=0)


def test_fewer_answers_than_min_clients_end_the_run_with_an_error_that_names_the_missing_clients() -> None:
    experiment = star_experiment({"name": "fedavg", "clients": CHOSEN, "min_clients": CHOSEN}, node=RETURN_WEIGHT)
    r, _, silent = min(answers_lost())
    with pytest.raises(PeerLost, match=rf"node 0: 3 of 4 clients answered in round {r}, fewer than sharing.min_clients "
                       rf"4; nothing from \[{silent}\]") as caught:  # fmt: skip
        run_with_losses(experiment, answers_lost())
    assert caught.value.missing == (silent,)


@pytest.mark.sampled(one=["rule"])
@pytest.mark.parametrize("rule", WITH_SERVERS)
def test_lost_answers_have_no_lasting_effect_and_a_lost_model_counts_as_no_answer(rule: str) -> None:
    """A client to which the server's model did not arrive does not train. In round 3 it arrives nowhere."""
    lost_model = {(3, 0, 0)}
    experiment = star_experiment({"name": rule, "clients": CHOSEN}, node={**RETURN_WEIGHT, "rounds": 12})
    whole, lossy = (model_of(run_with_losses(experiment, lost)[0]) for lost in (set[Any](), answers_lost()))
    assert bool(lossy.isfinite().all()) and float((lossy - whole).norm()) < 0.5 * float(whole.norm())
    with pytest.raises(PeerLost, match="0 of 4 clients answered in round 3"):
        run_with_losses(experiment, lost_model)


@pytest.mark.slow
def test_the_servers_control_variate_is_the_mean_of_the_clients_also_after_lost_answers() -> None:
    experiment = star_experiment({"name": "scaffold", "clients": CHOSEN}, node={**RETURN_WEIGHT, "rounds": 30})
    nodes = run_with_losses(experiment, answers_lost())
    controls = controls_of(nodes)
    mean = torch.stack([controls[uid] for uid in range(1, CLIENTS + 1)]).mean(0)
    torch.testing.assert_close(controls[0], mean, atol=1e-5, rtol=0)


def controls_of(nodes: list[Node]) -> Mapping[int, Tensor]:
    """Returns the control variates by uid, zero for nodes that have none yet."""
    zero = torch.zeros_like(model_of(nodes[0]))
    return {node.uid: zero if (c := node.sharing.control) is None else c for node in nodes}  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", WITH_SERVERS)
@pytest.mark.slow
def test_every_server_rule_trains_configs_federated_yaml(name: str) -> None:
    keys = {"server_lr": 0.3} if name == "fedavgm" else {"entries": 0.1} if name == "fedstc" else {}
    experiment = load(FEDERATED, [f"sharing={json.dumps({'name': name, 'clients': 4, **keys})}",
                          "node={rounds: 20, evaluate_every: 0}"])  # fmt: skip
    nodes = run(experiment)
    assert float(nodes[0].figures()["accuracy_merged"]) > 0.8


@pytest.mark.slow
def test_client_drift_biases_fedavg_and_less_fedprox_and_scaffold_finds_the_optimum() -> None:
    """With ten local steps per round on quadratics with unequal curvature."""
    draws = torch.Generator().manual_seed(2)
    h = torch.rand(CLIENTS + 1, 4, generator=draws, dtype=torch.float64) + 0.3
    at = torch.randn(CLIENTS + 1, 4, generator=draws, dtype=torch.float64)
    optimum = (h * at)[1:].sum(0) / h[1:].sum(0)
    errors = {name: float((model_on_quadratics(name, h, at, **keys) - optimum).norm())
              for name, keys in {"fedavg": {}, "fedprox": {"proximal": 1.0}, "scaffold": {}}.items()}  # fmt: skip
    assert errors["scaffold"] < 1e-6 < 0.1 * errors["fedavg"] and errors["fedprox"] < 0.8 * errors["fedavg"], errors


def model_on_quadratics(name: str, h: Tensor, at: Tensor, lr: float = 0.2, **keys: float) -> Tensor:
    """Returns the server's model after 300 rounds of all clients, each with ten steps on h (x - at)^2 / 2."""
    models = [torch.zeros_like(each) for each in h]
    rules, graph = set_up_rules(rule(name, **keys), models), make("star", nodes=len(models))

    def local_steps(uid: int, x: Tensor, round_view: RoundView) -> None:
        for _ in range(10):
            gradient = h[uid] * (x - at[uid])
            if rules[uid].requirements.gradient:
                gradient = rules[uid].direction(gradient, round_view)
            x.sub_(gradient, alpha=lr)

    for r in range(300):
        round_view = replace(rule_view(rules[0], graph, 1, r, 1), lr=lr)
        step = functools.partial(local_steps, round_view=round_view)
        run_round(rules, models, graph, r, step=step, lr=lr)
    return models[0]
