"""A state that is encoded as JSON and tensors, and decoded again, is the same to the bit."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import Tensor

from decentnode.checkpoint import tensor_file
from decentnode.checkpoint.state import decode, encode
from decentnode.errors import CheckpointError

KEYS = st.text(max_size=6) | st.integers() | st.booleans()
NUMBERS = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8)
TREES = st.recursive(
    NUMBERS,
    lambda below: st.lists(below, max_size=4) | st.tuples(below, below) | st.dictionaries(KEYS, below, max_size=4),
    max_leaves=20,
)


def encode_and_decode(state: Any, copy: bool = True) -> Any:
    tensors: dict[str, Tensor] = {}
    tree = encode(state, "s", tensors, copy=copy)
    return decode(json.loads(json.dumps(tree, allow_nan=False)), tensors)


def states_equal(one: Any, other: Any) -> bool:
    """Returns whether two states have the same types, order of keys, dtypes and bits (any NaN equals another)."""
    if isinstance(one, Tensor):
        return torch.equal(one, other) and one.dtype == other.dtype
    if isinstance(one, np.ndarray):
        return bool(np.array_equal(one, other)) and one.dtype == other.dtype
    if isinstance(one, dict):
        return list(one) == list(other) and all(states_equal(value, other[key]) for key, value in one.items())
    if isinstance(one, list | tuple):
        return type(one) is type(other) and len(one) == len(other) and all(map(states_equal, one, other))
    if isinstance(one, float):
        return type(other) is float and ((one == other and math.copysign(1, one) == math.copysign(1, other))
                                         or (one != one and other != other))  # fmt: skip
    return type(one) is type(other) and bool(one == other)


@pytest.mark.slow
@given(TREES)
def test_plain_values_are_decoded_unchanged(state: Any) -> None:
    assert states_equal(encode_and_decode(state), state)


def test_tensors_and_arrays_are_decoded_unchanged() -> None:
    state = {
        "a": torch.randn(3, 4, dtype=torch.float64), "b": [torch.arange(5), torch.tensor(True), torch.empty(0, 7)],
        "c": {3: torch.randn(6).bfloat16(), (1, "x"): torch.tensor(2.5)}, "d": np.arange(6.0).reshape(2, 3),
        "e": torch.randn(3, 2, dtype=torch.complex64), "f": torch.randn(4, dtype=torch.complex128).conj(),
        "#": (torch.randn(2, 3).t(), np.int64(3)),
    }  # fmt: skip
    with pytest.raises(CheckpointError, match="got tuple"):
        encode_and_decode(state)
    del state["c"][(1, "x")]  # type: ignore[attr-defined]
    decoded = encode_and_decode(state)
    assert decoded.pop("#")[1] == 3 and torch.equal(encode_and_decode(state)["#"][0], state.pop("#")[0])  # type: ignore[index]
    assert states_equal(decoded, state)


def test_only_a_copied_tensor_is_unaffected_by_later_changes() -> None:
    changing = torch.zeros(4)
    tensors: dict[str, Tensor] = {}
    encode({"x": changing}, "s", tensors, copy=True)
    encode({"y": changing}, "s", tensors, copy=False)
    changing.fill_(1.0)
    assert not tensors["s.x"].any() and tensors["s.y"].all()


@pytest.mark.parametrize("value", [object(), {1.5, 2.5}, b"bytes", [lambda: None]])
def test_a_value_that_cannot_be_saved_is_refused_with_its_place(value: Any) -> None:
    with pytest.raises(CheckpointError, match=r"s\.deep\.here"):
        encode({"deep": {"here": value}}, "s", {}, copy=True)


@pytest.mark.parametrize("tree", [{"#": ["tensor", "missing"]}, {"#": ["code", 1]}, {"#": 3}, {"#": ["float", "zero"]}])
def test_an_invalid_tree_is_refused(tree: Any) -> None:
    with pytest.raises(CheckpointError):
        decode(tree, {})


TENSORS = {
    "weights.0": torch.randn(3, 5), "flags": torch.tensor([True, False, True]), "half": torch.randn(7).half(),
    "brain": torch.randn(2, 2).bfloat16(), "scalar": torch.tensor(3.0, dtype=torch.float64), "none": torch.empty(0, 4),
    "counts": torch.arange(9), "bytes": torch.arange(5, dtype=torch.uint8), "small": torch.arange(3, dtype=torch.int16),
}  # fmt: skip


def test_tensor_files_can_be_read_by_the_safetensors_library(tmp_path: Path) -> None:
    """The library and `read` both return what was written."""
    size, digest = tensor_file.write(tmp_path / "x", TENSORS)
    assert size == (tmp_path / "x").stat().st_size
    own, theirs = tensor_file.read(tmp_path / "x", size, digest), load_file(tmp_path / "x")
    assert own.keys() == theirs.keys() == TENSORS.keys()
    for name, tensor in TENSORS.items():
        assert states_equal(own[name], tensor) and states_equal(theirs[name], tensor), name


def test_a_file_without_tensors_can_be_read(tmp_path: Path) -> None:
    size, digest = tensor_file.write(tmp_path / "x", {})
    assert tensor_file.read(tmp_path / "x", size, digest) == {} == load_file(tmp_path / "x")


def test_a_changed_byte_or_size_of_a_tensor_file_is_detected(tmp_path: Path) -> None:
    size, digest = tensor_file.write(tmp_path / "x", TENSORS)
    original = (tmp_path / "x").read_bytes()
    for index in random.Random(3).sample(range(size), 40):
        (tmp_path / "x").write_bytes(original[:index] + bytes([original[index] ^ 4]) + original[index + 1 :])
        with pytest.raises(CheckpointError, match="is damaged"):
            tensor_file.read(tmp_path / "x", size, digest)
    (tmp_path / "x").write_bytes(original[:-1])
    with pytest.raises(CheckpointError, match=f"must have {size} bytes, got {size - 1}"):
        tensor_file.read(tmp_path / "x", size, digest)


def test_a_dtype_that_the_format_lacks_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="x must have one of the dtypes"):
        tensor_file.write(tmp_path / "x", {"x": torch.zeros(2, dtype=torch.complex64)})
