"""CHOCO-SGD with randomly rounded entries."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from decentnode.compression import CODECS
from decentnode.config import component
from decentnode.config.component import Config, section
from decentnode.sharing.choco import Choco, ChocoConfig


class QSGDGossipConfig(ChocoConfig):
    fraction: float = Field(1.0, gt=0, le=1)
    """Fraction of the entries of a difference that a node sends."""
    choose: Literal["largest", "random", "all"] = "all"
    """Which entries are sent: the largest, random ones, or all."""
    compression: Annotated[Config, section(CODECS, "compression")] | None = Field(
        default_factory=lambda: section(CODECS, "compression").validate({"name": "qsgd"})
    )
    """Codec of the values that are sent."""


class QSGDGossip(Choco):
    """CHOCO-SGD with QSGD's random rounding of all entries (arXiv 1902.00340, 5; 1610.02132)."""

    Config: ClassVar[type[component.Config]] = QSGDGossipConfig
