"""A small experiment of fake components, so that these tests depend on no other package of decentnode."""

from __future__ import annotations

from typing import Annotated, Literal

import pydantic
from pydantic import Field

from decentnode.config.component import Component, Config, Settings, section
from decentnode.config.explain import explain
from decentnode.config.yaml_source import Item, parse


class SgdConfig(Config):
    lr: float = Field(0.1, gt=0)
    """Step size."""
    nesterov: bool = False


class Sgd(Component):
    """Stochastic gradient descent.

    More text that is not a summary.
    """

    Config = SgdConfig


class RingConfig(Config):
    nodes: int = Field(ge=1)
    """How many nodes."""


class Ring(Component):
    Config = RingConfig


class FileConfig(Config):
    file: str


class File(Component):
    Config = FileConfig


class NoConfig:
    pass


OPTIMIZERS = {"sgd": f"{__name__}:Sgd"}
GRAPHS = {"ring": f"{__name__}:Ring", "regular": f"{__name__}:Ring", "file": f"{__name__}:File"}


class Work(Settings):
    batch: int | Literal["all"] = 16
    """Samples per step."""
    hidden: tuple[int, ...] = ()
    kind: Literal["fast", "off"] = "fast"
    places: list[str] | dict[int, str] = Field(default=[])
    optimizer: Annotated[Config, section(OPTIMIZERS, "optimizer", "sgd")] = Field(
        {"name": "sgd"}, validate_default=True
    )


class Tree(Settings):
    name: str = "x"
    seed: int = Field(1, ge=0)
    graph: Annotated[Config, section(GRAPHS, "graph", implied={"file": "file"})]
    work: Work = Work()


def explain_problems(text: str) -> str:
    """Returns the explanation that a user reads for an invalid text, or "" for a valid one."""
    tree: Item = parse(text, "a.yaml")
    try:
        Tree.model_validate(tree.plain())
    except pydantic.ValidationError as error:
        return "\n".join(explain(error, tree, Tree, "a.yaml"))
    return ""
