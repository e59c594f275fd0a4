"""Pairs of sentences: vocabulary, subword pieces, padding, and files that do not match."""

from __future__ import annotations

import gzip
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from decentnode.data.parallel_text import ParallelText
from decentnode.errors import DataError
from decentnode.samples import BEGIN, END, FIRST_WORD, PADDING, UNKNOWN, Samples
from decentnode.training.source import Source

from .files import open_dataset, write_pairs

GERMAN = ["Ein Hund, ein Haus.", "Ein Haus!", "", "Zwei Hunde laufen weit ueber das Feld zum Haus ."]
ENGLISH = ["A dog, a house.", "a House!", "nothing", "Two dogs run ."]


def open_text(folder: Path, german: list[str] = GERMAN, english: list[str] = ENGLISH, **keys: Any) -> ParallelText:
    write_pairs(folder / "d", german, english, keys.pop("tested", None))
    names = {"source": "train.de", "target": "train.en", "test_source": "test.de.gz", "test_target": "test.en.gz"}
    section = {"name": "parallel_text", **{key: f"d/{name}" for key, name in names.items()}, "length": 6, **keys}
    found = open_dataset(section, folder)
    assert isinstance(found, ParallelText)
    return found


def as_words(data: ParallelText, samples: Samples) -> list[tuple[list[str], list[str], list[str]]]:
    """Returns (source, earlier target words, target words) of each sample, without padding."""
    names = ["", "?", "<", ">", *data.vocabulary()]
    inputs, targets = Source(samples, torch.device("cpu")).take(torch.arange(len(samples)))
    return [
        ([names[token] for token in x[:, 0].tolist() if token], [names[token] for token in x[:, 1].tolist() if token],
         [names[token] for token in y.tolist() if token != PADDING])
        for x, y in zip(inputs, targets, strict=True)
    ]


def test_both_languages_share_one_vocabulary_of_words_and_punctuation(tmp_path: Path) -> None:
    data = open_text(tmp_path)
    assert data.num_train() == 2, "an empty text and one that is longer than data.length are left out"
    first, second = as_words(data, data.train(np.arange(2)))
    assert first == (["ein", "hund", ",", "ein", "haus", "."], ["<", "a", "dog", ",", "a", "house", "."],
                     ["a", "dog", ",", "a", "house", ".", ">"])  # fmt: skip
    assert second == (["ein", "haus", "!"], ["<", "a", "house", "!"], ["a", "house", "!", ">"])
    spec = data.spec
    assert spec.pairs and spec.task == "translation" and spec.input_shape == (7, 2) and spec.target_shape == (7,)
    assert spec.vocabulary == FIRST_WORD + len(data.vocabulary()) and spec.pieces == 0 and spec.padding == 0
    inputs, targets = Source(data.train(np.array([1])), torch.device("cpu")).take(torch.arange(1))
    assert inputs.shape == (1, 4, 2) and inputs[0, 0, 1] == BEGIN and inputs[0, 3, 0] == 0 and targets[0, 3] == END


def test_long_test_sentences_are_truncated_and_rare_words_are_unknown(tmp_path: Path) -> None:
    data = open_text(tmp_path, tested=(GERMAN, ENGLISH), vocabulary_size=FIRST_WORD + 2)
    assert data.spec.vocabulary == FIRST_WORD + 2 and data.num_test() == 3
    assert data.vocabulary() == [".", "a"], "the most frequent of all training texts, the alphabet among equals"
    tested = as_words(data, data.test())
    assert tested[2] == (["?"] * 6, ["<", "?", "?", "?", "."], ["?", "?", "?", ".", ">"])
    inputs, _ = Source(data.test(), torch.device("cpu")).take(torch.arange(3))
    assert int(inputs[2, 0, 0]) == UNKNOWN


def test_byte_order_marks_and_windows_line_ends_are_ignored(tmp_path: Path) -> None:
    """A byte order mark, and line ends of Windows."""
    plain = open_text(tmp_path / "plain", ["ein Hund", "ein Haus"], ["a dog", "a house"])
    edited = open_text(tmp_path / "edited", ["\ufeffein Hund\r", "ein Haus\r"], ["\ufeffa dog\r", "a house\r"])
    assert edited.vocabulary() == plain.vocabulary()
    assert as_words(edited, edited.train(np.arange(2))) == as_words(plain, plain.train(np.arange(2)))


def test_subword_pieces_have_the_first_numbers_of_the_vocabulary(tmp_path: Path) -> None:
    german, english = ["ein Hun@@ d", "Hau@@ s Hun@@ d"], ["a dog", "The hou@@ se"]
    data = open_text(tmp_path, german, english, words="spaced")
    assert data.spec.pieces == 3 and data.vocabulary()[:3] == ["Hun@@", "Hau@@", "hou@@"]
    assert as_words(data, data.train(np.array([1])))[0][0] == ["Hau@@", "s", "Hun@@", "d"]
    assert "The" in data.vocabulary(), "words=spaced keeps capital letters"
    assert open_text(tmp_path, german, english, words="marked").spec.pieces == 0


@pytest.mark.parametrize("german, english, message", [
    (["a", "b"], ["a"], r"train\.en: has 1 lines, fewer than .*train\.de"),
    (["a"], ["a", "b"], r"train\.en: has more lines than .*train\.de"),
    (["a b c d e f g"], ["a"], r"train\.de: no pair of at most 6 words \(data\.length\)"),
    ([""], ["a"], r"train\.de: no line with a text in both files"),
])
def test_files_without_matching_pairs_of_lines_are_refused(
    german: list[str], english: list[str], message: str, tmp_path: Path
) -> None:
    with pytest.raises(DataError, match=message):
        open_text(tmp_path, german, english)


def test_unreadable_files_of_sentences_are_named(tmp_path: Path) -> None:
    open_text(tmp_path)
    whole = (tmp_path / "d" / "test.de.gz").read_bytes()
    for damaged in (whole[:-9], b"no gzip", whole[:10] + b"\xff" * 20):
        (tmp_path / "d" / "test.de.gz").write_bytes(damaged)
        with pytest.raises(DataError, match=r"test\.de\.gz: cannot be read: "):
            open_existing(tmp_path)
    (tmp_path / "d" / "test.de.gz").write_bytes(gzip.compress(b"\xff\n"))
    with pytest.raises(DataError, match=r"test\.de\.gz: cannot be read as UTF-8"):
        open_existing(tmp_path)
    (tmp_path / "d" / "test.de.gz").unlink()
    with pytest.raises(DataError, match=r"test\.de\.gz: no such file; expected .* \(data\.test_source\)"):
        open_existing(tmp_path)


def open_existing(folder: Path) -> None:
    open_dataset({"name": "parallel_text", "source": "d/train.de", "target": "d/train.en",
                  "test_source": "d/test.de.gz", "test_target": "d/test.en.gz"}, folder)  # fmt: skip


def test_parallel_text_refuses_private_files(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="must be the same for all nodes"):
        open_text(tmp_path).check_private()
