"""Settings that do not fit runs with a server are refused before the run starts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from decentnode.errors import ConfigError
from decentnode.experiment import load
from decentnode.sharing import WITH_SERVERS
from tests.sharing.federated.runs import CLIENTS, star_experiment

NODES = CLIENTS + 1
BATCH_NORM = {"name": "gn_lenet", "norm": "batch"}
IMAGES = {"name": "synthetic", "input_shape": [3, 32, 32], "num_classes": 3, "train_samples": 60, "test_samples": 6,
          "partition": {"name": "iid"}}  # fmt: skip

REFUSED: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "ring": ({}, {"graph": {"name": "ring", "nodes": NODES}},
             rf"sharing: fedavg needs a graph with a server, .* use \{{name: star, nodes: {NODES}\}}"),
    "overlapped": ({}, {"node": {"schedule": "overlapped"}},
                   "fedavg works with schedule: sequential only, got overlapped"),
    "clients": ({"clients": 7}, {}, "sharing.clients must be at most 6, the clients of a server, got 7"),
    "both": ({"clients": 2, "fraction": 0.5}, {}, "must have fraction or clients, got both"),
    "least": ({"min_clients": 9}, {}, "sharing.min_clients must be at most 6"),
    "least of a round": ({"clients": 2, "min_clients": 3}, {}, "min_clients must be at most the 2 clients of a round"),
    "least of a fraction": ({"fraction": 0.34, "min_clients": 3}, {}, r"sharing.min_clients must be at most 2, the "
                            r"clients of a round \(fraction 0.34 of 6\), got 3"),
    "deadline": ({"deadline_seconds": 3}, {}, r"node.missing: .*needs missing: return_weight, got fail"),
    "gossip of one": ({"gossip_every": 2}, {}, "sharing.gossip_every: needs several servers, got one"),
    "several": ({}, {"graph": {"name": "star", "nodes": 6, "servers": {"name": "ring", "nodes": 3}},
                     "mapping": {"nodes_per_machine": 6}}, "3 servers never hear of each other; set gossip_every"),
    "statistics": ({}, {"model": BATCH_NORM, "data": IMAGES},
                   "node.buffers: the model has statistics .* got average; use recompute"),
    "fragments": ({}, {"parameters": {"fragments": {"name": "random", "count": 2, "degree": 1}}},
                  "parameters.fragments: fedavg exchanges all shared parameters together"),
    "virtual": ({}, {"simulate": {"links": {"node_mbit_per_second": 100}}, "node": {"missing": "return_weight"}},
                "virtual seconds are not known of rounds that go on without late clients"),
    "momentum": ({"name": "scaffold"}, {"training": {"optimizer": {"name": "sgd", "lr": 0.1, "momentum": 0.9}}},
                 "training.optimizer must be sgd without momentum with scaffold, .* got sgd with momentum 0.9"),
    "adam": ({"name": "scaffold"}, {"training": {"optimizer": {"name": "adam", "lr": 0.1}}}, "got adam"),
    "upward": ({"name": "scaffold"}, {"training": {"optimizer": {"name": "sgd", "lr": 0.1, "maximize": True}}},
               "training.optimizer must not have maximize with scaffold"),
    "rate": ({"name": "scaffold"},
             {"training": {"lr_schedule": {"name": "exponential", "gamma": 0.5, "every": "step"}}},
             "training.lr_schedule.every must be round with scaffold"),
    "weights": ({"name": "scaffold", "weighted_by": "samples"}, {}, "sharing.weighted_by must be"),
    "codec": ({"name": "fedstc", "compression": {"name": "int8"}}, {}, "sharing.compression must be left out"),
    "place": ({}, {"graph": {"name": "star", "nodes": NODES, "server": 7}}, "server must be less than 7"),
    "groups": ({"gossip_every": 1}, {"graph": {"name": "star", "nodes": 7, "servers": {"name": "ring", "nodes": 3}}},
               "nodes must be a multiple of 3 servers, got 7"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_settings_that_do_not_fit_runs_with_a_server_are_refused(case: str) -> None:
    keys, sections, message = REFUSED[case]
    with pytest.raises(ConfigError, match=message):
        star_experiment({"name": "fedavg", **keys}, **sections)


def test_batch_normalization_is_accepted_if_its_statistics_are_recomputed() -> None:
    experiment = star_experiment({"name": "fedavg"}, model=BATCH_NORM, data=IMAGES, node={"buffers": "recompute"})
    assert experiment.servers() == (0,)


@pytest.mark.parametrize("sharing", [{"name": name, "clients": 2} for name in WITH_SERVERS] + [{"name": "fedavg"}])
def test_the_resolved_experiment_loads_with_the_same_digest(sharing: dict[str, Any], tmp_path: Path) -> None:
    experiment = star_experiment(sharing)
    (tmp_path / "again.yaml").write_text(experiment.resolved_yaml())
    assert load(tmp_path / "again.yaml").digest() == experiment.digest()


def test_a_server_without_clients_is_refused_with_a_single_error() -> None:
    with pytest.raises(ConfigError) as refused:
        star_experiment({"name": "fedavg"}, graph={"name": "star", "nodes": 1}, mapping={"nodes_per_machine": 1})
    assert len(refused.value.problems) == 1 and "graph: a server has no clients" in str(refused.value)


def test_an_experiment_on_a_star_has_no_servers_unless_its_rule_needs_them() -> None:
    assert star_experiment({"name": "full"}).servers() == ()
