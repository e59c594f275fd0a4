"""The next token (a character, word or word piece) of a text."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar

from pydantic import Field

from decentnode.config import component
from decentnode.config.component import Config
from decentnode.errors import UsageError
from decentnode.metrics.figures import LOSS, Metric
from decentnode.samples import PADDING, DataSpec
from decentnode.tasks.base import Task, needs

if TYPE_CHECKING:
    from torch import Tensor

PERPLEXITY = Metric(
    "perplexity", "1", "e to the mean surprise of a test token: among so many equally likely ones the model chooses",
    "lower", digits=2, logarithmic=True,
)  # fmt: skip
BITS = Metric(
    "bits_per_character", "bits", "how many bits a character of the test text takes when the model encodes it", "lower",
    word="bits per character", short="bpc", suffix="bits",
)  # fmt: skip
ACCURACY = Metric(
    "accuracy", "fraction", "of the test tokens that the model thinks likeliest where they stand", "higher",
    short="acc", suffix="%", scale=100, digits=2,
)  # fmt: skip
LARGEST_EXPONENT = 700.0
"""The perplexity is infinite if its logarithm exceeds this, as the largest double is about e^709."""


class NextTokenConfig(Config):
    name: str = "next_token"
    characters_per_token: float = Field(1.0, gt=0)
    """Mean number of characters in a token of the text, for bits per character; 1 where tokens are characters."""


class NextToken(Task):
    """Outputs [B, T, V] are a value per token of the vocabulary for every position, targets [B, T] the tokens that
    follow; or outputs [B, V] and targets [B], for only the token after each input. Targets of -100 are not counted.

    Perplexity and bits are those of the likelihood, also if training minimizes another loss.
    """

    Config: ClassVar[type[Config]] = NextTokenConfig
    loss = "cross_entropy"
    metrics: tuple[Metric, ...] = (PERPLEXITY, BITS, ACCURACY, LOSS)
    sums = ("surprise", "correct")

    def __init__(self, config: component.Config, data: DataSpec) -> None:
        super().__init__(config, data)
        if data.vocabulary is None:
            raise UsageError(f"task {config.name} needs data of tokens; use the task that the data is for")

    def align(self, outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        return outputs.reshape(-1, outputs.shape[-1]), targets.reshape(-1)

    def check(self, outputs: Tensor, targets: Tensor) -> None:
        vocabulary = self.data.vocabulary
        if targets.is_floating_point() or len(outputs) != len(targets) or outputs.shape[1] != vocabulary:
            raise needs(self.config.name, f"a value for each of {vocabulary} tokens, and one whole number as target "
                        "for every such row", outputs, targets)  # fmt: skip

    def units(self, targets: Tensor) -> int | Tensor:
        return (targets != PADDING).sum()

    def parts(self, targets: Tensor) -> Tensor:
        return (targets != PADDING).reshape(len(targets), -1).sum(1)

    def measure(self, outputs: Tensor, targets: Tensor) -> dict[str, Tensor]:
        counted = targets != PADDING
        chosen = targets.clamp(min=0)
        likelihood = outputs.log_softmax(1).gather(1, chosen[:, None])[:, 0]
        return {
            "surprise": -likelihood.where(counted, 0).sum(),
            "correct": ((outputs.argmax(1) == targets) & counted).sum(),
        }

    def values(self, sums: Mapping[str, float]) -> dict[str, float]:
        bits = sums["surprise"] / sums["count"] / math.log(2)
        characters: float = self.config.characters_per_token  # type: ignore[attr-defined]
        return {**self.of_next(sums), "bits_per_character": bits / characters}

    def of_next(self, sums: Mapping[str, float]) -> dict[str, float]:
        """Returns the metrics that are defined for tokens of any kind."""
        surprise = sums["surprise"] / sums["count"]
        return {
            "perplexity": math.exp(surprise) if surprise < LARGEST_EXPONENT else math.inf,
            "accuracy": sums["correct"] / sums["count"],
        }
