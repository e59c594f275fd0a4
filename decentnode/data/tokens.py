"""Tokenizers: BERT's WordPiece with its vocab.txt, counted words, or a tokenizer of transformers."""

from __future__ import annotations

import abc
import importlib
import re
import unicodedata
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from decentnode.data.vocabulary import count_words
from decentnode.errors import DataError, describe_error

MAX_WORD_LENGTH = 100
"""The maximum length of a word; longer words are unknown, as in BERT's own code."""
_WORD = re.compile(r"\w+|[^\w\s]")
_IDEOGRAPHS = ((0x4E00, 0x9FFF), (0x3400, 0x4DBF), (0x20000, 0x2A6DF), (0x2A700, 0x2B73F), (0x2B740, 0x2B81F),
               (0x2B820, 0x2CEAF), (0xF900, 0xFAFF), (0x2F800, 0x2FA1F))  # fmt: skip
"""Ranges of characters that are words of their own (Devlin et al. 2018, arXiv 1810.04805, whose code has these)."""


class Tokenizer(abc.ABC):
    """Turns a text into the numbers of its words, or of parts of them."""

    size: int
    """The number of different tokens; all numbers are smaller."""
    padding: int
    """The number that fills the end of shorter texts, and occurs nowhere else."""

    @abc.abstractmethod
    def encode(self, text: str, max_tokens: int) -> list[int]:
        """Returns 1 to `max_tokens` numbers; longer texts are cut at the end."""


class FrequentWords(Tokenizer):
    """The most frequent words and punctuation marks of some texts, in lower case; 0 is padding, 1 any other word."""

    padding = 0

    def __init__(self, texts: Iterable[str], size: int) -> None:
        vocabulary = count_words((words_of(text) for text in texts), size)
        self._numbers, self.size = vocabulary.numbers, vocabulary.size

    def encode(self, text: str, max_tokens: int) -> list[int]:
        return [self._numbers.get(word, 1) for word in words_of(text)[:max_tokens]] or [1]


def words_of(text: str) -> list[str]:
    return _WORD.findall(text.lower())


class WordPiece(Tokenizer):
    """BERT's tokens of texts in lower case without accents: [CLS], then each word from left to right as the longest
    pieces in the vocabulary, then [SEP]."""

    def __init__(self, path: Path) -> None:
        """path: vocab.txt, one piece per line. Raises DataError."""
        try:
            pieces = path.read_text(encoding="utf-8").split("\n")
        except (OSError, UnicodeDecodeError) as error:
            raise DataError(f"{path}: cannot be read as a vocabulary of pieces of words: {error}") from error
        if pieces[-1] == "":
            pieces.pop()
        self._numbers = {piece.rstrip("\r"): number for number, piece in enumerate(pieces)}
        self.size = len(pieces)
        missing = [each for each in ("[PAD]", "[UNK]", "[CLS]", "[SEP]") if each not in self._numbers]
        if missing:
            raise DataError(f"{path}: must have a piece in each line, {', '.join(missing)} among them")
        self.padding, self._unknown, self._begin, self._end = (
            self._numbers[each] for each in ("[PAD]", "[UNK]", "[CLS]", "[SEP]"))

    def encode(self, text: str, max_tokens: int) -> list[int]:
        found = [self._begin]
        for word in _basic_words(text):
            if len(found) >= max_tokens - 1:
                break
            found += self._pieces(word)
        return [*found[: max_tokens - 1], self._end] if max_tokens > 1 else found[:1]

    def _pieces(self, word: str) -> list[int]:
        if len(word) > MAX_WORD_LENGTH:
            return [self._unknown]
        found, start = [], 0
        while start < len(word):
            for stop in range(len(word), start, -1):
                number = self._numbers.get(("##" if start else "") + word[start:stop])
                if number is not None:
                    break
            else:
                return [self._unknown]
            found.append(number)
            start = stop
        return found


class TransformersTokenizer(Tokenizer):
    """A tokenizer of transformers from its local cache or a folder; nothing is downloaded."""

    def __init__(self, name: str, padded: bool = True) -> None:
        """Raises DataError if the tokenizer does not exist, or if it has no padding token although `padded`."""
        try:
            transformers: Any = importlib.import_module("transformers")
        except ImportError as error:
            raise DataError(
                f"data.tokenizer {name!r} needs the package transformers: pip install 'decentnode[hf]'") from error
        try:
            self._tokenizer = transformers.AutoTokenizer.from_pretrained(name, local_files_only=True)
        except Exception as error:
            raise DataError(f"data.tokenizer: {name} is neither in the local cache nor a folder with a tokenizer; "
                            f"`hf download {name}` downloads it on a machine with a network: "
                            f"{describe_error(error)[:300]}") from error
        if self._tokenizer.pad_token_id is None and padded:
            raise DataError(f"data.tokenizer: {name} has no token for padding")
        self.padding, self.size = int(self._tokenizer.pad_token_id or 0), len(self._tokenizer)

    def encode(self, text: str, max_tokens: int) -> list[int]:
        found: list[int] = self._tokenizer(text, truncation=True, max_length=max_tokens)["input_ids"]
        return found or [self._tokenizer.unk_token_id or 0]


def _basic_words(text: str) -> Iterator[str]:
    """Yields words and single punctuation marks as BERT splits texts: without control characters and accents."""
    word = ""
    for letter in unicodedata.normalize("NFD", "".join(map(_spaced, text)).lower()):
        kind = unicodedata.category(letter)
        if kind == "Mn":
            continue
        if letter.isspace() or _is_mark(letter, kind):
            if word:
                yield word
            word = ""
            if not letter.isspace():
                yield letter
            continue
        word += letter
    if word:
        yield word


def _spaced(letter: str) -> str:
    """Returns a blank for any space, "" for control characters, ideographs between blanks, other letters unchanged."""
    code, kind = ord(letter), unicodedata.category(letter)
    if letter in "\t\n\r" or kind == "Zs":
        return " "
    if code in (0, 0xFFFD) or kind.startswith("C"):
        return ""
    return f" {letter} " if any(first <= code <= last for first, last in _IDEOGRAPHS) else letter


def _is_mark(letter: str, kind: str) -> bool:
    code = ord(letter)
    return kind.startswith("P") or 33 <= code <= 47 or 58 <= code <= 64 or 91 <= code <= 96 or 123 <= code <= 126
