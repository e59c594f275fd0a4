"""Every fragment of the model is exchanged over a graph of its own: a new random regular graph per fragment and
exchange."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from pydantic import Field

from decentnode.config import component
from decentnode.config.component import Config, section
from decentnode.graph import GRAPHS
from decentnode.sharing.parameters import MAX_FRAGMENTS, Fragments, Part


class RandomFragmentsConfig(Config):
    count: int = Field(ge=1, le=MAX_FRAGMENTS)
    """Number of fragments of equal size into which the shared parameters are split."""
    degree: int = Field(ge=1)
    """Number of nodes with which every node exchanges a fragment, drawn anew for every fragment and exchange. 1: random
    pairs."""
    every: int = Field(1, ge=1)
    """Rounds per exchange of a fragment. If it is above 1, the fragments take turns: their offsets are spread over the
    rounds."""


class RandomFragments(Fragments):
    """A node sends as many bytes as with `random_regular` of this degree, but to up to `count` times as many others.

    It also receives from as many nodes, as in Mosaic Learning (arXiv 2602.04352), and in DivShare (arXiv 2410.12918)
    without its asynchrony. Fragments are consecutive ranges of the parameters in the order of the model, the same on
    all nodes. With `every` above 1, fragments take turns as in Streaming DiLoCo (arXiv 2501.18512), and the bytes of a
    round decrease by that factor.
    """

    Config: ClassVar[type[component.Config]] = RandomFragmentsConfig
    config: RandomFragmentsConfig

    def parts(self, num_nodes: int) -> Sequence[Part]:
        config = self.config
        name = "random_matching" if config.degree == 1 else "random_regular"
        degree = {} if config.degree == 1 else {"degree": config.degree}
        graph = section(GRAPHS, "graph").validate({"name": name, "nodes": num_nodes, **degree})
        return [Part(config.every, i * config.every // config.count, graph) for i in range(config.count)]
