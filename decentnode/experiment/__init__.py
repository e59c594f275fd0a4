"""The experiment: a YAML file as one frozen, checked tree."""

from decentnode.experiment.loading import load
from decentnode.experiment.tree import Experiment

__all__ = ["Experiment", "load"]
