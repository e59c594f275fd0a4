"""The translation of a text, token by token."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, ClassVar

from pydantic import Field

from decentnode.config.component import Config
from decentnode.errors import UsageError
from decentnode.metrics.figures import LOSS, Metric
from decentnode.samples import BEGIN, END, FIRST_WORD, PADDING, UNKNOWN, DataSpec
from decentnode.tasks.next_token import ACCURACY, PERPLEXITY, NextToken

if TYPE_CHECKING:
    from torch import Tensor, nn

NOTHING = -1
"""A token that never occurs in a translation, so that it matches nothing."""
ORDERS = (1, 2, 3, 4)
"""The lengths n of the n-grams that BLEU compares."""
BLEU = Metric(
    "bleu", "points", "BLEU-4, 0 to 100, of the test texts' likeliest translations, all together, without smoothing",
    "higher", word="BLEU", digits=2,
)  # fmt: skip


class TranslationConfig(Config):
    name: str = "translation"
    bleu: bool = True
    """Whether each evaluation translates the test texts, always taking the likeliest token, and computes BLEU. It takes
    a pass of the decoder for each token of a text; `data.sample_test` limits the time."""
    longest: int | None = Field(None, ge=1)
    """Largest number of tokens of a translation. Default: that of the longest target."""


class Translation(NextToken):
    """Outputs [B, T, V] are a value per token of the vocabulary for every position of the target, targets [B, T] the
    tokens there.

    BLEU (Papineni et al. 2002, section 2.3) compares the data's words, in their letter case; words that are not in the
    vocabulary never match. It differs from that of sacreBLEU, which splits texts into other words.
    """

    Config: ClassVar[type[Config]] = TranslationConfig
    metrics: tuple[Metric, ...] = (PERPLEXITY, ACCURACY, LOSS)
    config: TranslationConfig

    def __init__(self, config: TranslationConfig, data: DataSpec) -> None:
        super().__init__(config, data)
        if not data.pairs:
            raise UsageError("task translation needs data of pairs of texts, such as parallel_text")
        if config.bleu:
            self.metrics = (BLEU, *self.metrics)
            self.generated_sums = (*(f"bleu_{what}_{n}" for what in ("matches", "runs") for n in ORDERS), "bleu_words",
                                   "bleu_wanted")  # fmt: skip

    def measure_generated(self, module: nn.Module, inputs: Tensor, targets: Tensor) -> dict[str, Tensor]:
        """If the module has `translate(source [B, S], most)`, calls it for the tokens [B, at most `most`]; otherwise
        calls the module once for each position of the target."""
        most = self.config.longest or self.data.target_shape[0]
        translate = getattr(module, "translate", None)
        found = translate(inputs[..., 0], most) if translate is not None else _likeliest(module, inputs, most)
        sums = [0] * len(self.generated_sums)
        for given, wanted in zip(found.tolist(), targets.tolist(), strict=True):
            sums = [*map(sum, zip(sums, self.compare(given, wanted), strict=True))]
        return {name: targets.new_full((), value) for name, value in zip(self.generated_sums, sums, strict=True)}

    def compare(self, given: Sequence[int], wanted: Sequence[int]) -> list[int]:
        """Returns what one translation adds to the sums, in the order of `generated_sums`."""
        words = self.words(given)
        reference = [(NOTHING,) if UNKNOWN in word else word for word in self.words(wanted)]
        matches, runs = [], []
        for order in ORDERS:
            mine, theirs = _runs(words, order), _runs(reference, order)
            matches.append(sum((mine & theirs).values()))
            runs.append(mine.total())
        return [*matches, *runs, len(words), len(reference)]

    def words(self, tokens: Sequence[int]) -> list[tuple[int, ...]]:
        """Returns the words up to END, each as the tokens of its pieces."""
        found, pieces, last = list[tuple[int, ...]](), list[int](), FIRST_WORD + self.data.pieces
        for token in itertools.takewhile(lambda token: token not in (END, PADDING), tokens):
            pieces.append(token)
            if not FIRST_WORD <= token < last:
                found.append(tuple(pieces))
                pieces = []
        return [*found, tuple(pieces)] if pieces else found

    def values(self, sums: Mapping[str, float]) -> dict[str, float]:
        bleu = {"bleu": bleu_of(sums)} if self.config.bleu else {}
        return {**bleu, **self.of_next(sums)}


def bleu_of(sums: Mapping[str, float]) -> float:
    """Returns BLEU in points of 100: the geometric mean of the n-gram precisions, times the brevity penalty for
    translations that are too short."""
    parts = [(sums[f"bleu_matches_{n}"], sums[f"bleu_runs_{n}"]) for n in ORDERS]
    if not all(matches for matches, _ in parts):
        return 0.0
    short = min(0.0, 1 - sums["bleu_wanted"] / sums["bleu_words"])
    return 100 * math.exp(short + sum(math.log(matches / runs) for matches, runs in parts) / len(ORDERS))


def _runs(words: Sequence[tuple[int, ...]], order: int) -> Counter[tuple[tuple[int, ...], ...]]:
    """Returns the number of occurrences of each n-gram of `order` words."""
    return Counter(zip(*(words[start:] for start in range(order)), strict=False))


def _likeliest(module: nn.Module, inputs: Tensor, most: int) -> Tensor:
    """Returns the likeliest tokens [B, `most`], one forward pass per position (greedy decoding)."""
    pairs = inputs.new_zeros(len(inputs), max(most + 1, inputs.shape[1]), 2)
    pairs[:, : inputs.shape[1], 0] = inputs[..., 0]
    pairs[:, 0, 1] = BEGIN
    for place in range(most):
        pairs[:, place + 1, 1] = module(pairs)[:, place].argmax(1)
        if (pairs[..., 1] == END).any(1).all():
            break
    return pairs[:, 1 : most + 1, 1]
