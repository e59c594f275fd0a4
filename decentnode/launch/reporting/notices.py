"""Notices about an experiment that need none of its components, at most its data, its graph and its rule."""

from __future__ import annotations

from decentnode.experiment import Experiment
from decentnode.training.optimizers import OptimizerConfig, default_lr
from decentnode.training.privacy import epsilon_of
from decentnode.training.supervised_config import SupervisedConfig

LEAST_SECONDS = 1.0
"""Shortest time-out at which no healthy node was missed at a load of 19 on two cores; with .5 s some were."""
MAX_COMPUTED = 8
"""For how many nodes epsilon is computed at most, which takes up to 0.2 s for each."""


def default_lr_notice(experiment: Experiment) -> str:
    """Returns a text about the default learning rate if the experiment does not set one, else ""."""
    config = getattr(experiment.training, "optimizer", None)
    if not isinstance(config, OptimizerConfig) or (rate := default_lr(config)) is None:
        return ""
    return f"lr of optimizer {config.name} is {rate:g}, its default: none is given"


def privacy_notice(experiment: Experiment) -> str:
    """Returns the largest epsilon that the run reaches at a node; "" if the training is not private. Takes some
    seconds.

    Of nodes that make equally many steps, the one with the fewest samples has the largest. With local_epochs, nodes
    with more samples make more steps, so that several nodes come into question: those with the largest product of
    steps and squared rate.
    """
    training = experiment.training
    if not isinstance(training, SupervisedConfig) or training.privacy is None:
        return ""
    privacy, servers = training.privacy, experiment.servers()
    if not privacy.noise:
        return "none without noise: gradients of samples are only clipped"
    if training.local_seconds is not None:
        return f"epsilon at delta {privacy.delta:g} follows from the steps that local_seconds allows"
    aside = training.validation if training.validation and training.validation.source == "train" else None
    batch, fewest = training.batch_size * training.accumulate, dict[int, tuple[int, int]]()
    trained_rounds = experiment.trained_rounds()
    for uid, part in experiment.open_data().shares().items():
        if uid not in servers:
            samples = len(part) - (aside.aside(len(part)) if aside else 0)
            steps = training.steps_per_round(samples) * trained_rounds[uid]
            fewest[steps] = min(fewest.get(steps, (samples, uid)), (samples, uid))
    nodes = [(steps, min(1.0, batch / samples), uid, samples)
             for steps, (samples, uid) in fewest.items()]  # fmt: skip
    nodes.sort(key=lambda each: each[0] * each[1] ** 2)
    reached = [(epsilon_of({(privacy.noise, rate): made}, privacy.delta), made, uid, samples)
               for made, rate, uid, samples in nodes[-MAX_COMPUTED:]]  # fmt: skip
    epsilon, made, uid, samples = max(reached)
    return (f"epsilon {epsilon:.2f} at delta {privacy.delta:g} after {made:,} steps of node {uid} with {samples:,} "
            f"sample{'s' if samples != 1 else ''}; no node has a larger one")  # fmt: skip


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
