"""Files of tokens: windows and their targets, which are views of the mapped file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from decentnode.data.token_file import TokenFile
from decentnode.errors import DataError
from decentnode.samples import Rows
from decentnode.training.source import Source

from .files import open_dataset

TOKENS = np.random.default_rng(0).integers(0, 50_257, 1000)


def open_tokens(folder: Path, dtype: str = "uint16", **keys: Any) -> TokenFile:
    TOKENS.astype(dtype).tofile(folder / "train.bin")
    TOKENS[500:].astype(dtype).tofile(folder / "val.bin")
    section = {"name": "token_file", "file": "train.bin", "test_file": "val.bin", "dtype": dtype, "window": 64, **keys}
    found = open_dataset(section, folder)
    assert isinstance(found, TokenFile)
    return found


@pytest.mark.parametrize("dtype", ["uint16", "uint32", "int32"])
def test_targets_are_the_tokens_after_the_inputs(dtype: str, tmp_path: Path) -> None:
    data = open_tokens(tmp_path, dtype)
    assert data.num_train() == 15 and data.num_test() == 7
    inputs, targets = Source(data.train(np.arange(15)), torch.device("cpu")).take(torch.arange(15))
    assert inputs.dtype == targets.dtype == torch.int64 and inputs.shape == (15, 64)
    assert inputs.flatten().tolist() == TOKENS[:960].tolist() and targets.flatten().tolist() == TOKENS[1:961].tolist()
    assert inputs.max() > 1 << 15, "tokens beyond int16 must be tested"
    tested, _ = Source(data.test(), torch.device("cpu")).take(torch.tensor([6]))
    assert tested[0].tolist() == TOKENS[500 + 384 : 500 + 448].tolist()


def test_overlapping_windows_reach_the_last_token(tmp_path: Path) -> None:
    data = open_tokens(tmp_path, stride=5)
    assert data.num_train() == 188
    _, targets = Source(data.train(np.array([187])), torch.device("cpu")).take(torch.arange(1))
    assert targets[0].tolist() == TOKENS[936:1000].tolist()


def test_the_file_is_mapped_and_never_copied(tmp_path: Path) -> None:
    data = open_tokens(tmp_path)
    train = data.train(np.arange(data.num_train()))
    assert isinstance(train.inputs, Rows) and isinstance(train.inputs.values, np.memmap)
    source = Source(train, torch.device("cpu"))
    assert source._inputs.tensor.data_ptr() == train.inputs.values.ctypes.data
    assert source._targets.tensor.data_ptr() == train.inputs.values.ctypes.data


def test_all_nodes_share_one_copy_of_the_tokens_on_a_device(tmp_path: Path) -> None:
    data, moves = open_tokens(tmp_path), []

    def move(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
        moves.append(tensor)
        return tensor.to(device, copy=True)

    sources = [Source(data.train(np.arange(node, 15, 4)), torch.device("cpu"), move) for node in range(4)]
    assert len(moves) == 1 and len({each._inputs.tensor.data_ptr() for each in sources}) == 1
    del sources, moves[:]
    Source(data.train(np.arange(3)), torch.device("cpu"), move)
    assert len(moves) == 1, "the moved tensor must be released with the last source"


def test_invalid_token_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=rf"train\.bin: has token {TOKENS.max()}, data\.vocabulary is 50000"):
        open_tokens(tmp_path, vocabulary=50_000)
    with pytest.raises(DataError, match=r"train\.bin: must have more than 1000 numbers uint16 \(data\.window\)"):
        open_tokens(tmp_path, window=1000)
    (tmp_path / "train.bin").write_bytes(b"x" * 2001)
    with pytest.raises(DataError, match="got 2001 bytes"):
        open_dataset({"name": "token_file", "file": "train.bin", "test_file": "val.bin", "window": 64}, tmp_path)
    (-TOKENS).astype(np.int32).tofile(tmp_path / "train.bin")
    with pytest.raises(DataError, match=rf"train\.bin: tokens must be 0 or more, got {-TOKENS.max()}"):
        open_dataset({"name": "token_file", "file": "train.bin", "test_file": "train.bin", "dtype": "int32",
                      "window": 64}, tmp_path)  # fmt: skip
