"""Datasets of Hugging Face's library: `data: {name: "hf:ag_news"}`. Nothing is downloaded."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar, Self

import numpy as np
from pydantic import Field, model_validator

from decentnode import rng
from decentnode.config.component import Config
from decentnode.data.base import CachedConfig, Dataset, checked_indices, checked_targets, existing
from decentnode.data.cache import Writer, indexed
from decentnode.data.token_rows import TokenRows, TokenRowsWriter, TokenWindows, TokenWindowsWriter
from decentnode.data.tokens import FrequentWords, Tokenizer, TransformersTokenizer, WordPiece
from decentnode.errors import DataError, describe_error
from decentnode.samples import DataSpec, Samples
from decentnode.system import hub_offline

INPUTS = ("image", "img", "text", "sentence", "content")
TARGETS = ("label", "labels", "fine_label")
"""The columns that are tried, in this order, if the section names none."""
MAX_TOKENS = 1 << 24
"""The maximum number of tokens of one text that is split into pieces."""
BLOCK = 256
"""How many samples are in memory at once during the conversion."""


class HuggingFaceConfig(CachedConfig):
    name: str = "hf:"
    """hf: and the name of a dataset in the local cache, or a folder that its `save_to_disk` has written, relative to
    the YAML file."""
    subset: str | None = None
    """Which configuration of the dataset, if it has several."""
    train_split: str = "train"
    """Name of the split to train on."""
    test_split: str = "test"
    """Name of the split to test on. If it does not exist, a random test_fraction of the training samples is used."""
    test_fraction: float = Field(0.1, gt=0, lt=1)
    """Fraction of the training samples that is used for tests if there is no test split."""
    input: str | None = None
    """Column of the inputs: images, texts or lists of numbers. Default: image, img, text, sentence or content."""
    target: str | None = None
    """Column of the classes (integers) or of the numbers of a regression. Default: label, labels or fine_label; for
    texts without such a column, the next token is to be predicted."""
    key: str | None = None
    """Column of the natural owner of a sample, for `partition: by_key`."""
    vocabulary: Path | None = None
    """For texts: BERT's vocab.txt, one word piece per line."""
    tokenizer: str | None = None
    """For texts: name of a tokenizer in the local cache of transformers, instead of a vocabulary."""
    vocabulary_size: int = Field(30_000, ge=3, le=1 << 22)
    """For texts, if neither is given: size of the vocabulary, made of the most frequent words, padding and the unknown
    word."""
    length: int = Field(128, ge=2, le=1 << 16)
    """Longer texts are cut to this many tokens; if the next token is to be predicted, they are split into pieces of
    this length."""

    @model_validator(mode="after")
    def _one_tokenizer(self) -> Self:
        if self.vocabulary is not None and self.tokenizer is not None:
            raise ValueError("must have vocabulary or tokenizer, got both")
        return self


class HuggingFace(Dataset):
    """Images (pixels in [-1, 1]), lists of numbers, or texts as tokens, with a class or a number each; or texts alone,
    of which the next token is to be predicted. They are converted once. Needs datasets (extra `hf`)."""

    Config: ClassVar[type[Config]] = HuggingFaceConfig

    def __init__(self, config: HuggingFaceConfig, base_dir: Path) -> None:
        self.config = config
        self._vocabulary = existing(base_dir / config.vocabulary, "vocab.txt of BERT (data.vocabulary)") \
            if config.vocabulary is not None else None  # fmt: skip
        splits = _load(config, base_dir)
        if config.train_split not in splits:
            raise DataError(f"data.train_split must be one of {', '.join(splits)}, got {config.train_split!r}")
        self._splits = {split: splits[name] for split, name in
                        (("train", config.train_split), ("test", config.test_split)) if name in splits}  # fmt: skip
        columns = self._splits["train"].column_names
        self._input = _column("input", config.input, INPUTS, columns)
        first = self._splits["train"][:1][self._input]
        if not len(first):
            raise DataError(f"{config.name} has no samples")
        self._texts = isinstance(first[0], str)
        has_only_texts = self._texts and config.target is None and not set(TARGETS) & set(columns)
        self._target = None if has_only_texts else _column("target", config.target, TARGETS, columns)
        self._task = self._task_of()
        if config.key is not None:
            _column("key", config.key, (), columns)
        files = [Path(each["filename"]) for split in self._splits.values() for each in split.cache_files]
        files += [self._vocabulary] if self._vocabulary is not None else []
        keys = ("subset", "train_split", "test_split", "test_fraction", "input", "target", "key", "tokenizer",
                "vocabulary_size", "length")  # fmt: skip
        options = {"name": config.name, **{key: getattr(config, key) for key in keys},
                   "fingerprints": [getattr(split, "_fingerprint", "") for split in self._splits.values()]}  # fmt: skip
        self.index = indexed("hf", files, options, self._build, config.cache_folder(base_dir))
        notes = self.index.notes
        self.num_classes, self.input_shape = notes["classes"], tuple(notes["shape"])
        self._rows: dict[str, TokenRows | TokenWindows] = {}
        if self._texts:
            self._rows = {split: TokenWindows(self.index, split) if has_only_texts else
                          TokenRows(self.index, split, notes["padding"]) for split in ("train", "test")}  # fmt: skip

    @property
    def spec(self) -> DataSpec:
        notes = self.index.notes
        return DataSpec(
            self.input_shape, "ids" if self._texts else "values", self._task, num_classes=self.num_classes,
            vocabulary=notes["vocabulary"], padding=notes["padding"],
            target_shape=self.input_shape if self._target is None else (),
        )  # fmt: skip

    def check_private(self) -> None:
        raise DataError("data.name must be the same dataset for all nodes; use another reader for private files")

    def train_targets(self) -> np.ndarray | None:
        return np.array(self.index["train_y"]) if self.num_classes is not None else None

    def test_labels(self) -> np.ndarray | None:
        return np.array(self.index["test_y"]) if self.num_classes is not None else None

    def train_keys(self) -> np.ndarray | None:
        return np.array(self.index["train_user"]) if self.config.key is not None else None

    def test_keys(self) -> np.ndarray | None:
        return np.array(self.index["test_user"]) if self.config.key is not None else None

    def num_train(self) -> int:
        return len(self.index["train_user"])

    def num_test(self) -> int:
        return len(self.index["test_user"])

    def train(self, indices: np.ndarray) -> Samples:
        return self._samples("train", checked_indices(indices, self.num_train()), copy=True)

    def test(self) -> Samples:
        return self._samples("test", np.arange(self.num_test()), copy=False)

    def _samples(self, split: str, indices: np.ndarray, copy: bool) -> Samples:
        if self._rows:
            return self._rows[split].samples(indices)
        inputs, targets = self.index[f"{split}_x"], self.index[f"{split}_y"]
        if copy:
            inputs, targets = np.array(inputs[indices]), np.array(targets[indices])
        return Samples(inputs, targets, 2 / 255, -1.0) if inputs.dtype == np.uint8 else Samples(inputs, targets)

    # -- conversion ----------------------------------------------------------------------------------------------

    def _build(self, writer: Writer) -> None:
        classes = self._classes() if self._task == "classification" else None
        writer.notes |= {"vocabulary": None, "padding": None, "classes": classes}
        if self._target is None:
            self._build_windows(writer)
        elif self._texts:
            self._build_texts(writer, classes)
        else:
            self._build_arrays(writer, classes)

    def _task_of(self) -> str:
        if self._target is None:
            return "next_token"
        numbers = np.array(self._splits["train"][:1][self._target]).dtype.kind == "f"
        return "regression" if numbers and self._named_classes is None else "classification"

    @property
    def _named_classes(self) -> int | None:
        """The number of classes according to the type of the target column; None if the type does not say."""
        return getattr(self._splits["train"].features[self._target], "num_classes", None)

    def _blocks(self, classes: int | None = None) -> Iterator[tuple[np.ndarray, list[Any], np.ndarray, np.ndarray]]:
        """Yields (which samples are for tests [n], inputs, targets [n], owners [n]), a block of samples at a time.

        Raises DataError for a target that is not one of `classes` classes, or not a number.
        """
        users: dict[Any, int] = {}
        draw = rng.stream(0, rng.GLOBAL, "test samples")
        for split, rows in self._splits.items():
            for start in range(0, len(rows), BLOCK):
                block = rows[start : start + BLOCK]
                inputs = list(block[self._input])
                tested = np.full(len(inputs), split == "test")
                if "test" not in self._splits:
                    tested = draw.random(len(inputs)) < self.config.test_fraction
                where = f"{self.config.name}, {split} sample {start} on"
                targets = self._checked(block, classes, where, len(inputs))
                owners = block[self.config.key] if self.config.key is not None else [0] * len(inputs)
                yield tested, inputs, targets, np.array([users.setdefault(each, len(users)) for each in owners])

    def _checked(self, block: Any, classes: int | None, where: str, count: int) -> np.ndarray:
        if self._target is None:
            return np.zeros(count, np.int64)
        raw = np.array(block[self._target])
        if self._task == "regression":
            if raw.shape != (count,) or raw.dtype.kind not in "iuf" or not np.isfinite(raw).all():
                raise DataError(f"{where}: column {self._target} must have one finite number for each sample")
            return raw.astype(np.float32)
        return checked_targets(raw, classes, where)[0]

    def _classes(self) -> int:
        """Returns the number of classes: as the column's type says, else the highest training label + 1."""
        known = self._named_classes
        if known is None:
            known = max(int(targets[~tested].max(initial=0)) for tested, _, targets, _ in self._blocks()) + 1
        return int(known)

    def _tokenizer(self) -> Tokenizer:
        if self._vocabulary is not None:
            return WordPiece(self._vocabulary)
        if self.config.tokenizer is not None:
            return TransformersTokenizer(self.config.tokenizer, padded=self._target is not None)
        texts = (text for tested, inputs, *_ in self._blocks()
                 for text, is_test in zip(inputs, tested, strict=True) if not is_test)  # fmt: skip
        return FrequentWords(texts, self.config.vocabulary_size)

    def _build_windows(self, writer: Writer) -> None:
        tokenizer, length = self._tokenizer(), self.config.length
        writers = {split: TokenWindowsWriter(writer, split, length) for split in ("train", "test")}
        for tested, texts, _, users in self._blocks():
            for is_test, text, user in zip(tested, texts, users.tolist(), strict=True):
                writers["test" if is_test else "train"].add(tokenizer.encode(self._text(text), MAX_TOKENS), user)
        self._check_both({split: each.count for split, each in writers.items()})
        writer.notes |= {"vocabulary": tokenizer.size, "shape": [length]}

    def _text(self, text: Any) -> str:
        if not isinstance(text, str):
            raise DataError(f"{self.config.name}: column {self._input} must have texts, got {text!r:.40}")
        return text

    def _build_texts(self, writer: Writer, classes: int | None) -> None:
        tokenizer = self._tokenizer()
        writers = {split: TokenRowsWriter(writer, split) for split in ("train", "test")}
        for tested, texts, targets, users in self._blocks(classes):
            for is_test, text, target, user in zip(tested, texts, targets.tolist(), users.tolist(), strict=True):
                tokens = tokenizer.encode(self._text(text), self.config.length)
                writers["test" if is_test else "train"].add(tokens, target, user)
        for each in writers.values():
            each.flush()
        self._check_both({split: each.count for split, each in writers.items()})
        writer.notes |= {"vocabulary": tokenizer.size, "padding": tokenizer.padding, "shape": [self.config.length]}

    def _build_arrays(self, writer: Writer, classes: int | None) -> None:
        shape: tuple[int, ...] | None = None
        counts = {"train": 0, "test": 0}
        for tested, inputs, targets, users in self._blocks(classes):
            arrays = [_array(each) for each in inputs]
            shape = shape or arrays[0].shape
            wrong = next((each.shape for each in arrays if each.shape != shape), None)
            if wrong is not None:
                raise DataError(f"{self.config.name}: inputs must have one shape, got {list(shape)} and {list(wrong)}")
            stacked = np.stack(arrays)
            for split, chosen in (("train", ~tested), ("test", tested)):
                if chosen.any():
                    writer.append(f"{split}_x", stacked[chosen])
                    writer.append(f"{split}_y", targets[chosen])
                    writer.append(f"{split}_user", users[chosen])
                    counts[split] += int(chosen.sum())
        self._check_both(counts)
        writer.notes["shape"] = list(shape or ())

    def _check_both(self, counts: dict[str, int]) -> None:
        if missing := [split for split, count in counts.items() if not count]:
            raise DataError(f"{self.config.name}: no sample for {' and '.join(missing)}")


def _load(config: HuggingFaceConfig, base_dir: Path) -> dict[str, Any]:
    """Returns the splits by name. Raises DataError."""
    name = config.name.partition(":")[2]
    try:
        datasets: Any = importlib.import_module("datasets")
    except ImportError as error:
        raise DataError(f"data {config.name} needs the package datasets: pip install 'decentnode[hf]'") from error
    try:
        with hub_offline():
            folder = base_dir / name
            found: Any = (datasets.load_from_disk(str(folder)) if folder.is_dir()
                          else datasets.load_dataset(name, config.subset))  # fmt: skip
    except Exception as error:
        how = f"datasets.load_dataset({name!r}) downloads it on a machine with a network"
        raise DataError(f"data: {config.name} is neither in the local cache nor a folder of save_to_disk; {how}: "
                        f"{describe_error(error)[:300]}") from error  # fmt: skip
    return {str(key): found[key] for key in found} if hasattr(found, "keys") else {config.train_split: found}


def _column(key: str, chosen: str | None, usual: tuple[str, ...], columns: list[str]) -> str:
    found = chosen if chosen is not None else next((each for each in usual if each in columns), None)
    if found not in columns:
        got = "none of the usual ones" if found is None else repr(found)
        raise DataError(f"data.{key} must be one of the columns {', '.join(columns)}, got {got}")
    assert found is not None
    return found


def _array(value: Any) -> np.ndarray:
    """Returns an image as [C, H, W] uint8, or numbers as float32."""
    if hasattr(value, "convert") and hasattr(value, "mode"):  # an image of Pillow
        plain = value if value.mode in ("L", "RGB") else value.convert("RGB")
        pixels = np.asarray(plain, np.uint8)
        return pixels[None] if pixels.ndim == 2 else pixels.transpose(2, 0, 1)
    try:
        return np.asarray(value, np.float32)
    except (ValueError, TypeError) as error:
        raise DataError(f"inputs must be images, texts or lists of numbers, got {type(value).__name__}") from error
