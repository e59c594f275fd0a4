"""Checks of sharing rules with servers (federated learning) against the rest of the experiment."""

from __future__ import annotations

from collections.abc import Iterator

from decentnode.config.problems import Problem
from decentnode.experiment.crosschecks.parts import graph_of, has_float_buffers
from decentnode.experiment.tree import Experiment
from decentnode.sharing.federated.rounds import FederatedConfig
from decentnode.sharing.federated.sampling import count_of
from decentnode.sharing.federated.scaffold import ScaffoldConfig
from decentnode.training.supervised_config import SupervisedConfig


def check_clients(experiment: Experiment) -> Iterator[Problem]:
    """Checks that every server has as many clients as the rule needs, that several servers gossip with each other, and
    that rounds tolerate missing clients if there is a deadline."""
    graph, config = graph_of(experiment), experiment.sharing
    if not isinstance(config, FederatedConfig) or graph is None or not graph.servers:
        return
    clients = min(map(len, graph.servers.values()))
    if not clients:
        yield Problem(("graph",), ": a server has no clients; use more nodes", other=("sharing",))
    else:
        yield from _check_client_counts(config, clients)
    several = len(graph.servers) > 1
    if several and config.gossip_every is None:
        yield Problem(("sharing",), f": {len(graph.servers)} servers never hear of each other; set gossip_every, for "
                                    "example to 1", other=("graph",))  # fmt: skip
    if not several and config.gossip_every is not None:
        yield Problem(("sharing", "gossip_every"), f": needs several servers, got one; use graph: {{name: star, nodes: "
                      f"{graph.num_nodes}, servers: {{name: ring, nodes: 2}}}}", other=("graph",))  # fmt: skip
    if config.deadline_seconds is not None and experiment.node.missing != "return_weight":
        yield Problem(("node", "missing"), ": sharing.deadline_seconds leaves late clients out of a round, which needs "
                      f"missing: return_weight, got {experiment.node.missing}", other=("sharing",))  # fmt: skip


def _check_client_counts(config: FederatedConfig, clients: int) -> Iterator[Problem]:
    """Checks the numbers of clients per round and of required answers. clients: those of the smallest server."""
    if config.clients is not None and config.clients > clients:
        yield Problem(("sharing", "clients"), f"must be at most {clients}, the clients of a server, got "
                      f"{config.clients}", other=("graph",))  # fmt: skip
    taking_part = count_of(clients, config.fraction, None)
    if config.min_clients > taking_part:
        who = "the clients of a server" if config.fraction is None else \
            f"the clients of a round (fraction {config.fraction:g} of {clients})"  # fmt: skip
        yield Problem(("sharing", "min_clients"), f"must be at most {taking_part}, {who}, got {config.min_clients}",
                      other=("graph",))  # fmt: skip


def check_model_fits_server(experiment: Experiment) -> Iterator[Problem]:
    """Checks that the model can be trained with a server: it is exchanged as a whole, and its batch normalization
    statistics come from the clients, because the server has no samples."""
    if not experiment.servers():
        return
    name = experiment.sharing.name
    if experiment.parameters is not None and experiment.parameters.fragments is not None:
        yield Problem(("parameters", "fragments"), f": {name} exchanges all shared parameters together, in every round",
                      other=("sharing",))  # fmt: skip
    if experiment.node.buffers != "recompute" and has_float_buffers(experiment):
        yield Problem(("node", "buffers"), ": the model has statistics (batch normalization), but the server of "
                                           f"{name} has no samples to measure them on, got {experiment.node.buffers}; "
                                           "use recompute, which measures them on the clients",
                                           other=("model",))  # fmt: skip


def check_control_variates(experiment: Experiment) -> Iterator[Problem]:
    """Checks that local steps are plain SGD with one learning rate per round, for rules with control variates.

    SCAFFOLD computes the mean gradient from the change that the local steps made.
    """
    training, config = experiment.training, experiment.sharing
    if not isinstance(config, ScaffoldConfig) or not isinstance(training, SupervisedConfig):
        return
    optimizer = training.optimizer
    momentum = optimizer.arguments().get("momentum", 0)
    if optimizer.name != "sgd" or momentum:
        got = f"sgd with momentum {momentum:g}" if optimizer.name == "sgd" else optimizer.name
        yield Problem(("training", "optimizer"), f"must be sgd without momentum with {config.name}, which computes "
                                                 f"gradients from the change of its steps, got {got}",
                                                 other=("sharing",))  # fmt: skip
    if optimizer.arguments().get("maximize"):
        yield Problem(("training", "optimizer"), f"must not have maximize with {config.name}, whose control variates "
                      "are those of steps against the gradient, got true", other=("sharing",))  # fmt: skip
    schedule = training.lr_schedule
    if schedule.every == "step" and schedule.name != "constant":
        yield Problem(("training", "lr_schedule", "every"), f"must be round with {config.name}, whose steps of a round "
                      "have one learning rate, got step", other=("sharing",))  # fmt: skip
