"""BLEU compared with its formula and with published counts, and of translations that a model makes."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from decentnode.samples import BEGIN, END, FIRST_WORD, PADDING, UNKNOWN, DataSpec
from decentnode.tasks.translation import Translation, TranslationConfig

VOCABULARY = 40


def task(pieces: int = 0, **keys: Any) -> Translation:
    data = DataSpec((9, 2), "ids", "translation", vocabulary=VOCABULARY, target_shape=(9,), padding=0, pairs=True,
                    pieces=pieces)  # fmt: skip
    return Translation(TranslationConfig(**keys), data)


def bleu(translation: Translation, translations: list[list[int]], references: list[list[int]]) -> float:
    counts = [translation.compare(*pair) for pair in zip(translations, references, strict=True)]
    sums = [sum(of_text) for of_text in zip(*counts, strict=True)]
    named = dict(zip(translation.generated_sums, map(float, sums), strict=True))
    return translation.values({"surprise": 1.0, "correct": 1.0, "count": 1.0, "loss": 1.0, **named})["bleu"]


def tokens_of(text: str) -> list[int]:
    """Returns a token for each word, the same for the same word in every text, and END."""
    words = sorted(set(THE_CAT.split()) | set(REFERENCE.split()))
    return [*(FIRST_WORD + words.index(word) for word in text.split()), END]


THE_CAT = "the the the the the the the"
REFERENCE = "the cat is on the mat"


def test_a_word_counts_at_most_as_often_as_it_occurs_in_the_reference() -> None:
    """Papineni et al. 2002, section 2.1, example 2: 2 of 7."""
    found = dict(zip(task().generated_sums, task().compare(tokens_of(THE_CAT), tokens_of(REFERENCE)), strict=True))
    assert (found["bleu_matches_1"], found["bleu_runs_1"]) == (2, 7)
    assert (found["bleu_matches_2"], found["bleu_runs_2"]) == (0, 6)
    assert (found["bleu_words"], found["bleu_wanted"]) == (7, 6)


def test_bleu_is_computed_from_the_counts_of_all_texts() -> None:
    references = [[4, 5, 6, 7, 8, END], [9, 10, 11, 12, END]]
    assert bleu(task(), references, references) == pytest.approx(100)
    translations = [[4, 5, 6, 7, END], [9, 10, 11, 13, 12, END]]  # runs that match: 8 of 9, 5 of 7, 3 of 5, 1 of 3
    assert bleu(task(), translations, references) == pytest.approx(100 * (8 / 9 * 5 / 7 * 3 / 5 * 1 / 3) ** 0.25)
    short = [[4, 5, 6, 7, END], [END]]
    assert bleu(task(), short, references) == pytest.approx(100 * math.exp(1 - 9 / 4)), "too short a translation"
    assert bleu(task(), [[END], [END]], references) == 0 and bleu(task(), [[4, 9, END], [5, END]], references) == 0


def test_tokens_after_the_end_do_not_count_and_unknown_words_do_not_match() -> None:
    found = task().compare([4, UNKNOWN, 5, END, 6, 7], [4, UNKNOWN, 5, END, PADDING, PADDING])
    assert found == [2, 0, 0, 0, 3, 2, 1, 0, 3, 3]


def test_pieces_of_words_are_joined_before_words_are_compared() -> None:
    translation = task(pieces=2)  # tokens 4 and 5 are pieces that continue in the next token
    assert translation.words([4, 5, 9, 10, 4, END, 7]) == [(4, 5, 9), (10,), (4,)]
    assert translation.compare([4, 9, END], [4, 9, END])[:1] == [1]
    assert translation.compare([4, 9, END], [5, 9, END])[:1] == [0]


class Echo(nn.Module):
    """Returns the source, followed by END: the most likely token at every position is that of the source."""

    def forward(self, pairs: Tensor) -> Tensor:
        source = pairs[..., 0]
        return nn.functional.one_hot(torch.where(source == 0, END, source), VOCABULARY).float()


class TranslatesItself(Echo):
    def translate(self, source: Tensor, most: int) -> Tensor:
        self.most = most
        return torch.where(source == 0, END, source)


@pytest.mark.parametrize("module_class", [Echo, TranslatesItself])
def test_translations_are_generated_by_the_model_and_compared(module_class: type[Echo]) -> None:
    inputs = torch.zeros(2, 9, 2, dtype=torch.int64)
    inputs[0, :5, 0], inputs[1, :3, 0] = torch.arange(4, 9), torch.arange(4, 7)
    inputs[:, 0, 1] = BEGIN
    targets = torch.full((2, 9), PADDING)
    targets[0, :6], targets[1, :4] = torch.tensor([4, 5, 6, 7, 8, END]), torch.tensor([4, 5, 9, END])
    translation, module = task(), module_class()
    sums = translation.measure_generated(module, inputs, targets)
    assert {*sums} == {*translation.generated_sums} and all(each.ndim == 0 for each in sums.values())
    assert float(sums["bleu_matches_1"]) == 7 and float(sums["bleu_words"]) == 8 == float(sums["bleu_wanted"])
    if isinstance(module, TranslatesItself):
        assert module.most == 9
        task(longest=4).measure_generated(module, inputs, targets)
        assert module.most == 4
    else:
        cut = task(longest=2).measure_generated(module, inputs, targets)
        assert float(cut["bleu_words"]) == 4


def test_without_bleu_no_translations_are_generated() -> None:
    assert task(bleu=False).generated_sums == () and "bleu" not in [each.name for each in task(bleu=False).metrics]
    assert task().metrics[0].name == "bleu" and set(task().all_sums) >= {"loss", "count", "surprise", "bleu_words"}
