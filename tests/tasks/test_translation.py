"""BLEU: beside its formula, beside published counts, and of what a model translates."""

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


def bleu(of: Translation, given: list[list[int]], wanted: list[list[int]]) -> float:
    sums = [sum(each) for each in zip(*(of.compare(g, w) for g, w in zip(given, wanted, strict=True)), strict=True)]
    named = dict(zip(of.generated_sums, map(float, sums), strict=True))
    return of.values({"surprise": 1.0, "correct": 1.0, "count": 1.0, "loss": 1.0, **named})["bleu"]


def numbers(text: str) -> list[int]:
    """A number for each word, the same for the same word in every text, and END."""
    words = sorted(set(THE_CAT.split()) | set(REFERENCE.split()))
    return [*(FIRST_WORD + words.index(word) for word in text.split()), END]


THE_CAT = "the the the the the the the"
REFERENCE = "the cat is on the mat"


def test_a_word_counts_as_often_as_the_reference_has_it() -> None:
    """Papineni et al. 2002, section 2.1, example 2: 2 of 7."""
    found = dict(zip(task().generated_sums, task().compare(numbers(THE_CAT), numbers(REFERENCE)), strict=True))
    assert (found["bleu_matches_1"], found["bleu_runs_1"]) == (2, 7)
    assert (found["bleu_matches_2"], found["bleu_runs_2"]) == (0, 6)
    assert (found["bleu_words"], found["bleu_wanted"]) == (7, 6)


def test_bleu_is_that_of_all_texts_together() -> None:
    wanted = [[4, 5, 6, 7, 8, END], [9, 10, 11, 12, END]]
    assert bleu(task(), wanted, wanted) == pytest.approx(100)
    given = [[4, 5, 6, 7, END], [9, 10, 11, 13, 12, END]]  # runs that match: 8 of 9, 5 of 7, 3 of 5, 1 of 3
    assert bleu(task(), given, wanted) == pytest.approx(100 * (8 / 9 * 5 / 7 * 3 / 5 * 1 / 3) ** 0.25)
    short = [[4, 5, 6, 7, END], [END]]
    assert bleu(task(), short, wanted) == pytest.approx(100 * math.exp(1 - 9 / 4)), "too short a translation"
    assert bleu(task(), [[END], [END]], wanted) == 0 and bleu(task(), [[4, 9, END], [5, END]], wanted) == 0


def test_what_stands_behind_the_end_is_no_word_nor_is_an_unknown_one_right() -> None:
    found = task().compare([4, UNKNOWN, 5, END, 6, 7], [4, UNKNOWN, 5, END, PADDING, PADDING])
    assert found == [2, 0, 0, 0, 3, 2, 1, 0, 3, 3]


def test_pieces_are_joined() -> None:
    of = task(pieces=2)  # 4 and 5 go on
    assert of.words([4, 5, 9, 10, 4, END, 7]) == [(4, 5, 9), (10,), (4,)]
    assert of.compare([4, 9, END], [4, 9, END])[:1] == [1] and of.compare([4, 9, END], [5, 9, END])[:1] == [0]


class Echo(nn.Module):
    """Gives the source back, and END behind it: the likeliest token at place t is the source's there."""

    def forward(self, pairs: Tensor) -> Tensor:
        source = pairs[..., 0]
        return nn.functional.one_hot(torch.where(source == 0, END, source), VOCABULARY).float()


class Quick(Echo):
    def translate(self, source: Tensor, most: int) -> Tensor:
        self.most = most
        return torch.where(source == 0, END, source)


@pytest.mark.parametrize("made", [Echo, Quick])
def test_a_model_is_asked_for_whole_translations(made: type[Echo]) -> None:
    inputs = torch.zeros(2, 9, 2, dtype=torch.int64)
    inputs[0, :5, 0], inputs[1, :3, 0] = torch.arange(4, 9), torch.arange(4, 7)
    inputs[:, 0, 1] = BEGIN
    targets = torch.full((2, 9), PADDING)
    targets[0, :6], targets[1, :4] = torch.tensor([4, 5, 6, 7, 8, END]), torch.tensor([4, 5, 9, END])
    of, module = task(), made()
    sums = of.measure_generated(module, inputs, targets)
    assert {*sums} == {*of.generated_sums} and all(each.ndim == 0 for each in sums.values())
    assert float(sums["bleu_matches_1"]) == 7 and float(sums["bleu_words"]) == 8 == float(sums["bleu_wanted"])
    if isinstance(module, Quick):
        assert module.most == 9
        task(longest=4).measure_generated(module, inputs, targets)
        assert module.most == 4
    else:
        cut = task(longest=2).measure_generated(module, inputs, targets)
        assert float(cut["bleu_words"]) == 4


def test_without_bleu_nothing_is_translated() -> None:
    assert task(bleu=False).generated_sums == () and "bleu" not in [each.name for each in task(bleu=False).metrics]
    assert task().metrics[0].name == "bleu" and set(task().all_sums) >= {"loss", "count", "surprise", "bleu_words"}
