"""Plain text: speakers as keys, and windows that do not reach from the training part into the test part."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from decentnode.data.text import Text, TextConfig, speeches
from decentnode.errors import DataError
from decentnode.samples import PADDING, Samples
from decentnode.training.source import Source

PLAY = "".join(
    f"{name}:\n{line * (12 + len(name))}\n\n" for line in ("abcde", "fghij\nk") for name in ("Ann", "Robert", "Eve")
)


def open_text(folder: Path, text: str = PLAY, **keys: Any) -> Text:
    (folder / "t.txt").write_text(text, encoding="utf-8")
    return Text(TextConfig.model_validate({"file": "t.txt", "window": 16, **keys}), folder)


def as_texts(data: Text, samples: Samples) -> list[tuple[str, str]]:
    """Returns (input, target) of each sample as text, without padding."""
    inputs, targets = Source(samples, torch.device("cpu")).take(torch.arange(len(samples)))
    found = []
    for x, y in zip(inputs.tolist(), targets.tolist(), strict=True):
        target_tokens = [token for token in y if token != PADDING] if isinstance(y, list) else [y]
        length = len(target_tokens) if isinstance(y, list) else len(x)
        target = "".join(data.alphabet[token] for token in target_tokens)
        found.append(("".join(data.alphabet[token] for token in x[:length]), target))
    return found


def test_targets_are_the_characters_after_the_inputs(tmp_path: Path) -> None:
    data = open_text(tmp_path)
    assert data.names == ["Ann", "Robert", "Eve"] and data.spec.vocabulary == 12
    speech = ["".join(parts) for parts in speeches(PLAY).values()]
    train, test = data.train(np.arange(data.num_train())), data.test()
    for key, whole in enumerate(speech):
        mine = [pair for pair, of in zip(as_texts(data, train), data.train_keys(), strict=True) if of == key]  # type: ignore[arg-type]
        tested = [pair for pair, of in zip(as_texts(data, test), data.test_keys(), strict=True) if of == key]  # type: ignore[arg-type]
        border = len(whole) - round(0.1 * len(whole))
        assert "".join(y for _, y in mine) == whole[1:border] and "".join(y for _, y in tested) == whole[border + 1 :]
        assert all(x[1:] == y[:-1] for x, y in mine + tested) and {len(x) for x, _ in mine} >= {16}


def test_predict_last_has_the_character_after_the_window_as_target(tmp_path: Path) -> None:
    data = open_text(tmp_path, predict="last", stride=1)
    assert data.spec.target_shape == () and data.spec.input_shape == (16,)
    speech = "".join(speeches(PLAY)["Eve"])
    for x, y in as_texts(data, data.train(np.flatnonzero(data.train_keys() == 2))):
        assert len(x) == 16 and x + y in speech


def test_texts_without_speakers_and_with_a_given_alphabet(tmp_path: Path) -> None:
    data = open_text(tmp_path, "ab " * 200, speakers=False, alphabet="ab z")
    assert data.train_keys() is None and data.spec.vocabulary == 4
    assert sum(len(y) for _, y in as_texts(data, data.train(np.arange(data.num_train())))) == 539
    with pytest.raises(DataError, match=r"data\.alphabet must have all characters of .* it lacks 'c'"):
        open_text(tmp_path, "abc " * 100, speakers=False, alphabet="ab ")
    with pytest.raises(DataError, match="too short"):
        open_text(tmp_path, "ab", speakers=False)
    with pytest.raises(DataError, match="alphabet must be given where each node has private files"):
        open_text(tmp_path).check_private()
    (tmp_path / "t.txt").write_bytes(b"\xff\xfe")
    with pytest.raises(DataError, match="cannot be read as UTF-8"):
        Text(TextConfig(file=Path("t.txt")), tmp_path)
