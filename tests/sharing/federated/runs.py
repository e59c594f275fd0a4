"""Runs of a server and its clients in this process."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from decentnode import rng
from decentnode.build import build_in_process
from decentnode.experiment import Experiment, load
from decentnode.node.node import Node

FEDERATED = Path(__file__).parents[3] / "configs" / "federated.yaml"
CLIENTS = 6


def star_experiment(sharing: dict[str, Any], **sections: Any) -> Experiment:
    """Returns an experiment with a server, node 0, and CLIENTS clients with ten samples each. sections: replace those
    written here."""
    defaults = {
        "seed": 3, "graph": {"name": "star", "nodes": CLIENTS + 1},
        "mapping": {"machines": 1, "nodes_per_machine": CLIENTS + 1},
        "data": {"name": "synthetic", "input_shape": [5], "num_classes": 3, "train_samples": 10 * CLIENTS,
                 "test_samples": 30, "partition": {"name": "iid"}},
        "model": {"name": "logistic"}, "communication": {"name": "inproc"},
        "training": {"batch_size": 4, "local_steps": 3, "optimizer": {"name": "sgd", "lr": 0.2}},
        "sharing": sharing, "node": {"rounds": 6, "evaluate_every": 0},
    }
    return load(FEDERATED, [f"{key}={json.dumps(value)}" for key, value in {**defaults, **sections}.items()], {})


def model_of(node: Node) -> Tensor:
    """Returns a copy of the node's model [P]."""
    return node.training.model.parameters.detach().clone()


def clients_of_round(round: int, count: int, seed: int = 3, clients: int = CLIENTS) -> list[int]:
    """Returns the uids of the clients of server 0 that take part in a round, ascending."""
    chosen = rng.stream(seed, 0, "clients of a round", round).choice(clients, count, replace=False)
    return sorted(1 + int(index) for index in chosen)


class LocalTraining:
    """The local steps of each client, from any model: for tests that compute beside a run what its server should. The
    trainings are separate from those of the run."""

    def __init__(self, experiment: Experiment) -> None:
        self.trainings = [node.training for node in build_in_process(experiment)]
        self.start = self.trainings[0].model.parameters.detach().clone()

    def change(self, uid: int, x: Tensor, round: int, direction: Any = None) -> Tensor:
        """Returns by how much the local steps of a client change model x [P]. direction: as in
        `Training.local_update`."""
        model = self.trainings[uid].model.parameters
        with torch.no_grad():
            model.copy_(x)
        self.trainings[uid].local_update(round, direction)
        return model.detach() - x.to(model.device)
