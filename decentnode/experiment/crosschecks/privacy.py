"""Checks that differentially private training is possible, and that nothing else reveals samples to other nodes."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from decentnode.config.component import load_class
from decentnode.config.problems import Problem
from decentnode.errors import UsageError
from decentnode.experiment.crosschecks.parts import spec_of
from decentnode.experiment.initial_model import module_without_values
from decentnode.experiment.tree import Experiment
from decentnode.samplers import SAMPLERS
from decentnode.sharing import SHARINGS
from decentnode.training.privacy import NEEDED, is_installed
from decentnode.training.private_gradients import mixes_samples
from decentnode.training.supervised_config import SupervisedConfig

KEY = ("training", "privacy")


def check_privacy(experiment: Experiment) -> Iterator[Problem]:
    """Checks that epsilon can be computed, that no layer of the model mixes samples, and that delta is small enough."""
    training = experiment.training
    if not isinstance(training, SupervisedConfig) or training.privacy is None:
        return
    if training.privacy.noise and not is_installed():
        yield Problem(KEY, NEEDED)
    spec = spec_of(experiment)
    if spec is None:
        return
    layer, samples = "", 0
    with contextlib.suppress(UsageError):  # reported by check_model
        layer = mixes_samples(module_without_values(experiment, spec))
    with contextlib.suppress(UsageError):  # reported by check_partition
        samples = max(map(len, experiment.open_data().shares().values()))
    if layer:
        yield Problem(("model",), f": layer {layer} lets a sample change more than its own gradient, which noise does "
                      "not protect", "use group normalization", other=KEY)  # fmt: skip
    if training.privacy.delta * samples >= 1:
        yield Problem((*KEY, "delta"), f"must be below 1 / {samples}, with {samples} samples of a node, got "
                      f"{training.privacy.delta:g}, which allows to send one of them", other=("data",))  # fmt: skip


def check_privacy_of_payloads(experiment: Experiment) -> Iterator[Problem]:
    """Checks that nodes send nothing that depends on their samples except through the model."""
    training, node = experiment.training, experiment.node
    if not isinstance(training, SupervisedConfig) or training.privacy is None:
        return

    def problem(path: tuple[str, ...], what: str, hint: str) -> Problem:
        return Problem(path, f": nodes send {what}, which noise does not protect", hint, other=KEY)

    requirements = getattr(load_class(experiment.sharing.name, SHARINGS, "sharing"), "requirements", None)
    if "loss" in getattr(requirements, "scalars", {}):
        yield problem(("sharing",), "their training losses", "use another rule, such as full")
    if node.quorum is not None and node.quorum.weights != "neighbors":
        yield problem(("node", "quorum", "weights"), f"the {node.quorum.weights} that they trained on", "use neighbors")
    if node.on_partition == "both" and node.merge_weights == "samples":
        yield problem(("node", "merge_weights"), "the number of samples that they trained on", "use rounds")
    if node.orphans == "adopted":
        yield Problem(("node", "orphans"), "must be lost with privacy, got adopted: epsilon is that of a node's own "
                      "samples", other=KEY)  # fmt: skip
    sampler: Any = node.sampler
    if sampler is not None and load_class(sampler.name, SAMPLERS, "sampler").tells(sampler).of == "labels":
        yield problem(("node", "sampler"), "the shares of their labels", "use by: model")


def check_membership(experiment: Experiment) -> Iterator[Problem]:
    """Checks that training and test samples, which an attack is to tell apart, are distributed in the same way."""
    training, partition = experiment.training, getattr(experiment.data, "partition", None)
    if not isinstance(training, SupervisedConfig) or training.evaluate_membership is None or partition is None:
        return
    if partition.name != "iid" and spec_of(experiment) is not None and experiment.open_data().test == "global":
        yield Problem(("training", "evaluate_membership"), "needs test samples that are distributed as the node's "
                      f"training samples: with partition {partition.name}, losses would differ without any leak",
                      "use data.test: both", other=("data", "test"))  # fmt: skip
