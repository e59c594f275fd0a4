"""Notices about an experiment that need none of its components."""

from __future__ import annotations

from decentnode.experiment import Experiment
from decentnode.training.optimizers import OptimizerConfig, default_lr

LEAST_SECONDS = 1.0
"""Shortest time-out at which no healthy node was missed at a load of 19 on two cores; with .5 s some were."""


def default_lr_notice(experiment: Experiment) -> str:
    """Returns a text about the default learning rate if the experiment does not set one, else ""."""
    config = getattr(experiment.training, "optimizer", None)
    if not isinstance(config, OptimizerConfig) or (rate := default_lr(config)) is None:
        return ""
    return f"lr of optimizer {config.name} is {rate:g}, its default: none is given"


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
