"""Files of consecutive tokens, as tools for language models write them: train.bin, val.bin."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
from pydantic import Field

from decentnode.config.component import Config
from decentnode.data.base import CachedConfig, existing
from decentnode.data.cache import Writer, indexed
from decentnode.data.sequences import Part, SequenceDataset
from decentnode.data.vocabulary import MAX_WORDS
from decentnode.errors import DataError
from decentnode.samples import DataSpec, Rows, Samples

BLOCK = 1 << 24
"""How many tokens are examined at once."""


class TokenFileConfig(CachedConfig):
    name: str = "token_file"
    file: Path
    """File of integers in little-endian order without a header, such as train.bin of nanoGPT's prepare.py."""
    test_file: Path
    """Such a file for tests, nanoGPT's val.bin."""
    dtype: Literal["uint16", "uint32", "int32"] = "uint16"
    """Type of the integers."""
    vocabulary: int = Field(50257, ge=2, le=MAX_WORDS)
    """Number of different tokens. Default: that of GPT-2."""
    window: int = Field(1024, ge=1)
    """Tokens per sample."""
    stride: int | None = Field(None, ge=1)
    """Tokens between the beginnings of two samples. Default: `window`, so that samples do not overlap."""


class TokenFile(SequenceDataset):
    """Samples are windows of the file, which is memory-mapped and never copied; the target of each token is the next
    one."""

    Config: ClassVar[type[Config]] = TokenFileConfig
    config: TokenFileConfig

    def __init__(self, config: TokenFileConfig, base_dir: Path) -> None:
        self.config = config
        paths = {"train": existing(base_dir / config.file, "a file of tokens (data.file)"),
                 "test": existing(base_dir / config.test_file, "a file of tokens (data.test_file)")}  # fmt: skip
        self._tokens = {split: self._mapped(path) for split, path in paths.items()}
        index = indexed("token_file", [*paths.values()], {"dtype": config.dtype}, self._build,
                        config.cache_folder(base_dir))  # fmt: skip
        for split, path in paths.items():
            highest = index.notes[split]
            if highest >= config.vocabulary:
                raise DataError(f"{path}: has token {highest}, data.vocabulary is {config.vocabulary}")

    def _mapped(self, path: Path) -> np.memmap:
        size = np.dtype(self.config.dtype).itemsize
        if path.stat().st_size % size or path.stat().st_size // size <= self.config.window:
            raise DataError(f"{path}: must have more than {self.config.window} numbers {self.config.dtype} "
                            f"(data.window), got {path.stat().st_size} bytes")  # fmt: skip
        return np.memmap(path, np.dtype(self.config.dtype).newbyteorder("<"), mode="c")

    def _build(self, writer: Writer) -> None:
        """Notes the highest token of each file, so that it is searched only once."""
        for split, tokens in self._tokens.items():
            blocks = [tokens[start : start + BLOCK] for start in range(0, len(tokens), BLOCK)]
            if (lowest := min(int(block.min()) for block in blocks)) < 0:
                raise DataError(f"{tokens.filename}: tokens must be 0 or more, got {lowest}")
            writer.notes[split] = max(int(block.max()) for block in blocks)

    @property
    def spec(self) -> DataSpec:
        window = self.config.window
        return DataSpec((window,), "ids", "next_token", vocabulary=self.config.vocabulary, target_shape=(window,))

    def check_private(self) -> None:
        """Accepts private files: the section gives the size of the vocabulary, so all nodes have the same spec."""

    def _count(self, part: Part) -> int:
        stride = self.config.stride or self.config.window
        return (len(self._tokens[part]) - 1 - self.config.window) // stride + 1

    def _samples(self, part: Part, indices: np.ndarray) -> Samples:
        tokens: Any = self._tokens[part]
        starts = indices * (self.config.stride or self.config.window)
        window = self.config.window
        return Samples(Rows(tokens, starts, window), Rows(tokens, starts + 1, window), ids=True)
