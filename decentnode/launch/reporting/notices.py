"""Notices about an experiment that need none of its components, at most its data."""

from __future__ import annotations

from decentnode.experiment import Experiment
from decentnode.training.optimizers import OptimizerConfig, default_lr
from decentnode.training.privacy import epsilon_of
from decentnode.training.supervised_config import SupervisedConfig

LEAST_SECONDS = 1.0
"""Shortest time-out at which no healthy node was missed at a load of 19 on two cores; with .5 s some were."""


def default_lr_notice(experiment: Experiment) -> str:
    """Returns a text about the default learning rate if the experiment does not set one, else ""."""
    config = getattr(experiment.training, "optimizer", None)
    if not isinstance(config, OptimizerConfig) or (rate := default_lr(config)) is None:
        return ""
    return f"lr of optimizer {config.name} is {rate:g}, its default: none is given"


def privacy_notice(experiment: Experiment) -> str:
    """Returns the epsilon that the run reaches at the node with the fewest samples, which has the largest; "" if the
    training is not private. Takes some seconds."""
    training = experiment.training
    if not isinstance(training, SupervisedConfig) or training.privacy is None:
        return ""
    privacy, servers = training.privacy, experiment.servers()
    if not privacy.noise:
        return "none without noise: gradients of samples are only clipped"
    if training.local_seconds is not None:
        return f"epsilon at delta {privacy.delta:g} follows from the steps that local_seconds allows"
    sizes = {uid: len(part) for uid, part in experiment.open_data().shares().items() if uid not in servers}
    aside = training.validation if training.validation and training.validation.source == "train" else None
    uid = min(sizes, key=sizes.__getitem__)
    samples = sizes[uid] - (aside.aside(sizes[uid]) if aside else 0)
    steps = experiment.node.rounds * training.steps_per_round(samples)
    rate = min(1.0, training.batch_size * training.accumulate / samples)
    reached = epsilon_of({(privacy.noise, rate): steps}, privacy.delta)
    return (f"epsilon {reached:.2f} at delta {privacy.delta:g} after {steps:,} steps of node {uid}, which has the "
            f"fewest samples ({samples:,})")  # fmt: skip


def short_timeout_warning(experiment: Experiment) -> str:
    """Returns a warning if nodes continue without a neighbor after such a short time-out that healthy nodes on a busy
    machine miss each other, else ""."""
    config = experiment.communication
    if experiment.node.missing != "return_weight" or config.name == "inproc" or config.timeout_seconds >= LEAST_SECONDS:
        return ""
    return (
        f"communication.timeout_seconds is {config.timeout_seconds:g}: on a busy machine, healthy nodes can be silent "
        f"for that long, and with missing: return_weight, rounds then continue without them; use {LEAST_SECONDS:g} or "
        "more"
    )
