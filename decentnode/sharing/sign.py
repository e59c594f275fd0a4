"""CHOCO-SGD with one bit per entry."""

from __future__ import annotations

from typing import Annotated, ClassVar

from pydantic import Field

from decentnode.compression import CODECS
from decentnode.config import component
from decentnode.config.component import Config, section
from decentnode.sharing.choco import Choco
from decentnode.sharing.qsgd import QSGDGossipConfig


class SignGossipConfig(QSGDGossipConfig):
    compression: Annotated[Config, section(CODECS, "compression")] | None = Field(
        default_factory=lambda: section(CODECS, "compression").validate({"name": "sign"})
    )
    """Codec of the values that are sent."""


class SignGossip(Choco):
    """CHOCO-SGD with one bit per entry and their mean size per block (arXiv 1902.00340, 5)."""

    Config: ClassVar[type[component.Config]] = SignGossipConfig
