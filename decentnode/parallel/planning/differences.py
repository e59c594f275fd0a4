"""CHOCO-SGD for models in buckets: ranks send compressed changes of public copies, which all neighbors keep."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar

from pydantic import Field

from decentnode.config import component
from decentnode.graph.base import Graph, RoundView
from decentnode.sharing.choco import Choco, ChocoConfig
from decentnode.sharing.local_sgd import LocalSGD, LocalSGDConfig
from decentnode.sharing.step_size import Search, largest_step


class DifferencesConfig(ChocoConfig, LocalSGDConfig):
    """The keys of choco, and what runs have as `training.local_steps`."""

    every: int = Field(1, ge=1)
    """Number of steps per exchange (Singh et al., arXiv 1910.14280): ranks exchange after the last one of every so
    many."""


class Differences(LocalSGD):
    """Sends q_i = C(x_i - h_i); then h_j += q_j, x_i += gamma sum_j W_ij (h_j - h_i) (arXiv 1902.00340, algorithm 2).

    On a topology that repeats after several rounds, a rank has one public copy for each of them, which its neighbors of
    that round keep, too. The mean of the models is kept whatever C is.
    """

    Config: ClassVar[type[component.Config]] = DifferencesConfig
    requirements = replace(LocalSGD.requirements, doubly_stochastic=True, compresses=True)
    config: DifferencesConfig

    def __init__(self, config: DifferencesConfig) -> None:
        """Raises ValueError for `choose: random`, where the number of entries is random."""
        super().__init__(config)
        if config.choose == "random":
            raise ValueError("choose must be largest or all here, got random: how many entries are sent must be known "
                             "before")  # fmt: skip
        self.step_size = config.step_size

    @classmethod
    def of(cls, config: ChocoConfig) -> Differences:
        """Returns the rule for the config of a `Choco`."""
        return cls(DifferencesConfig(**dict(config)))

    @property
    def fraction(self) -> float:
        """The fraction of a bucket's entries that is sent."""
        return 1.0 if self.config.choose == "all" else self.config.fraction

    @classmethod
    def step_search(cls, config: Any) -> Search:
        return replace(Choco.step_search(config), state_per_matrix=True)

    def choose_step(self, graph: Graph) -> None:
        """Sets the step size if the config has none. May take seconds once."""
        if self.config.step_size is None:  # searched again: the object may have been used with another graph
            config = self.config.model_copy(update={"every": 1})  # the step size does not depend on `every`
            search, largest = self.step_search(config), largest_step(type(self), config, graph)
            self.step_size = search.without_graph() if largest is None else search.default(largest)

    def plan(self, view: RoundView) -> RoundView:
        return view if self.step_size is None else view.part_way(self.step_size)
