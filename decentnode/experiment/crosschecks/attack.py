"""Checks that the attackers of a run are nodes of it, and that their attack is possible."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from decentnode.config.component import load_class
from decentnode.config.problems import Problem
from decentnode.errors import EnvironmentFault, UsageError
from decentnode.experiment.crosschecks.parts import graph_of, graphs_of, mapping_of, spec_of
from decentnode.experiment.tree import Experiment
from decentnode.node.schedules.schedules import SCHEDULES
from decentnode.sharing.attacks import ATTACKS
from decentnode.sharing.attacks.attacked import may_differ_by_neighbor, sends_models
from decentnode.sharing.attacks.base import Attack, AttackConfig
from decentnode.sharing.base import Sharing
from decentnode.sharing.compressed import make_sharing

ELEMENTS = 64
"""The size of the model for which the payloads of the rule are examined."""


def check_attack_class(experiment: Experiment) -> Iterator[Problem]:
    """Checks that a user's own class is derived from Attack, and its Config from AttackConfig."""
    config = experiment.attack
    if config is None or _attack(experiment) is not None:
        return
    base = "a class derived from decentnode.sharing.attacks.base.Attack"
    needed = f"{base}, whose Config is derived from AttackConfig" if _is_attack(config.name) else base
    yield Problem(("attack", "name"), f"must name {needed}, got {config.name}")


def check_attackers(experiment: Experiment) -> Iterator[Problem]:
    """Checks that attackers are nodes of the graph and no servers, and that at least one node is honest."""
    config, graph = _attack(experiment), graph_of(experiment)
    if config is None or graph is None:
        return
    for index, uid in enumerate(config.nodes or ()):
        if not 0 <= uid < graph.num_nodes:
            yield Problem(("attack", "nodes", index), f"must be uids below {graph.num_nodes}, got {uid}",
                          other=("graph",))  # fmt: skip
            return
    if len(config.nodes or ()) >= graph.num_nodes or (config.count or 0) >= graph.num_nodes:
        key = "count" if config.nodes is None else "nodes"
        yield Problem(("attack", key), f": all {graph.num_nodes} nodes would be attackers; leave at least one honest "
                      "node", other=("graph",))  # fmt: skip
        return
    servers = sorted({*experiment.attackers()} & {*experiment.servers()})
    if servers:
        yield Problem(("attack",), f": node {servers[0]} is a server, whose model is the run's; name clients in "
                      "attack.nodes", other=("sharing",))  # fmt: skip


def check_attack(experiment: Experiment) -> Iterator[Problem]:
    """Checks what the attack needs: nodes in the same round, whole models if it uses those of others, and classes if it
    changes labels."""
    config = _attack(experiment)
    if config is None:
        return
    kind = load_class(config.name, ATTACKS, "attack")
    schedule = experiment.node.schedule
    if SCHEDULES[schedule].asynchronous:
        yield Problem(("attack",), f": needs nodes that are in the same round, got schedule {schedule}; use schedule: "
                      "sequential or overlapped", other=("node", "schedule"))  # fmt: skip
    if kind.OMNISCIENT or kind.forged_by_neighbor is not Attack.forged_by_neighbor:
        yield from _check_that_neighbors_may_differ(experiment, config.name)
    elif kind.NEEDS_MODELS and not _holds_of_rule(experiment, _sends_models):
        yield Problem(("attack",), f": {config.name} uses the models that an attacker receives, but with this section "
                      "sharing nodes do not send whole models; use full, clipped_gossip or trimmed_mean without "
                      "compression", other=("sharing",))  # fmt: skip
    if kind.forged is not Attack.forged and getattr(experiment.sharing, "force", None) == "before":  # of elastic
        yield Problem(("attack",), ": has no effect with force: before, with which nodes send what follows from the "
                      "model before their local steps; use force: after", other=("sharing",))  # fmt: skip
    spec = spec_of(experiment)
    if kind.labels is not Attack.labels and spec is not None and (spec.num_classes is None or spec.target_shape):
        yield Problem(("attack",), f": {config.name} changes labels, but this data has no classes; use an attack that "
                      "forges models, such as sign_flip", other=("data",))  # fmt: skip


def check_attack_is_of_use(experiment: Experiment) -> Iterator[Problem]:
    """Warns about an attack that begins after the end of the run, and about more attackers than a robust rule
    tolerates over the graphs of the run or of its fragments."""
    config, graphs, rounds = _attack(experiment), graphs_of(experiment), experiment.node.rounds
    if config is None or not graphs:
        return
    if 0 < rounds <= config.first_round:
        yield Problem(("attack", "first_round"), f": the run has only rounds 0 to {rounds - 1}, so that nobody attacks",
                      other=("node", "rounds"), is_warning=True)  # fmt: skip
    tolerated, attackers = getattr(experiment.sharing, "byzantine", None), {*experiment.attackers()}
    if not isinstance(tolerated, int) or getattr(experiment.sharing, "radius", None) is not None:
        return
    honest = [uid for uid in range(graphs[0][1].num_nodes) if uid not in attackers]
    most, index, r, uid = max(((len(attackers.intersection(graph.sources(uid, r))), -index, -r, -uid)
                               for index, graph in graphs for r in range(min(graph.period or 4, 16))
                               for uid in honest), default=(0, 0, 0, 0))  # fmt: skip
    if most > tolerated:
        of_fragment = f" of fragment {-index}" if len(graphs) > 1 else ""
        yield Problem(("sharing", "byzantine"), f"is {tolerated}, but node {-uid} has {most} attackers among its "
                      f"neighbors in exchange {-r}{of_fragment}", other=("attack",), is_warning=True)  # fmt: skip


def _check_that_neighbors_may_differ(experiment: Experiment, name: str) -> Iterator[Problem]:
    """Checks that an attacker may send each neighbor another model, with weights that it knows."""
    quorum = experiment.node.quorum
    if not _holds_of_rule(experiment, lambda rule: may_differ_by_neighbor(rule, ELEMENTS)):
        yield Problem(("attack",), f": {name} tells each neighbor something else, but with this section sharing a node "
                      "does not just send its model to all neighbors, once per round; use full, ac, local_sgd, "
                      "clipped_gossip or trimmed_mean", other=("sharing",))  # fmt: skip
    if quorum is not None and quorum.weights != "neighbors":
        yield Problem(("attack",), f": {name} needs weights that all nodes know, got {quorum.weights}; use weights: "
                      "neighbors", other=("node", "quorum", "weights"))  # fmt: skip


def _sends_models(rule: Sharing) -> bool:
    return sends_models(rule.payload_schema(ELEMENTS, torch.float32), ELEMENTS)


def _holds_of_rule(experiment: Experiment, condition: Callable[[Sharing], bool]) -> bool:
    """Returns whether a condition holds of the sharing rule; True if it cannot be made, which another check reports."""
    mapping = mapping_of(experiment)
    if mapping is None:
        return True
    try:
        rule = make_sharing(experiment.sharing, mapping.nodes_by_machine())
        rule.set_parameter_shapes([(ELEMENTS,)])
        return condition(rule)
    except (UsageError, ValueError, EnvironmentFault):
        return True


def _attack(experiment: Experiment) -> AttackConfig | None:
    """Returns the section; None if it is missing or does not name an attack (see `check_attack_class`)."""
    config = experiment.attack
    return config if isinstance(config, AttackConfig) and _is_attack(config.name) else None


def _is_attack(name: str) -> bool:
    return issubclass(load_class(name, ATTACKS, "attack"), Attack)
