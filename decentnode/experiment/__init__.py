"""The experiment: a YAML file as one frozen, checked tree."""

from decentnode.experiment.loading import load
from decentnode.experiment.tree import Digests, Experiment

__all__ = ["Digests", "Experiment", "load"]
