"""The restricted reader of pickles: reads CIFAR's Python files and vocabularies, and refuses everything else."""

from __future__ import annotations

import os
import pickle
import struct
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from decentnode.data import pickled
from decentnode.data.pickled import read_pickled
from decentnode.errors import DataError

from .files import python2_pickle

CONTENT = {"batch_label": "training batch 1", "labels": [6, 9, 300, 70_000], "filenames": ["a.png", "b.png"],
           "data": np.arange(4 * 300, dtype=np.int64).astype(np.uint8).reshape(4, 300)}  # fmt: skip


def read(folder: Path, content: bytes) -> dict[str, Any]:
    path = folder / "batch"
    path.write_bytes(content)
    return read_pickled(path)


def equals_content(found: dict[str, Any]) -> bool:
    plain = {key: value for key, value in found.items() if key != "data"}
    return np.array_equal(found["data"], CONTENT["data"]) and plain == {k: v for k, v in CONTENT.items() if k != "data"}


def test_a_pickle_of_python_2_is_read(tmp_path: Path) -> None:
    content = python2_pickle(CONTENT)
    reference = pickle.loads(content, encoding="latin-1")
    assert np.array_equal(reference.pop("data"), CONTENT["data"])
    assert reference == {key: value for key, value in CONTENT.items() if key != "data"}
    assert equals_content(read(tmp_path, content))


@pytest.mark.parametrize("protocol", [2, 3, 4])
def test_pickles_of_python_3_are_read(tmp_path: Path, protocol: int) -> None:
    assert equals_content(read(tmp_path, pickle.dumps(CONTENT, protocol)))
    bytes_keys = {key.encode(): value for key, value in CONTENT.items()}
    assert equals_content(read(tmp_path, pickle.dumps(bytes_keys, protocol)))


@pytest.mark.slow
@pytest.mark.sampled(one=["protocol"])
@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_a_pickled_vocabulary_is_read(tmp_path: Path, protocol: int) -> None:
    words = {f"word{n}é": n for n in range(70_000)}
    content = {"vocab": words, "size": 70_000, "pad_symbol": 0}
    assert read(tmp_path, pickle.dumps(content, protocol)) == content
    with pytest.raises(DataError, match="'vocab' is neither numbers"):
        read(tmp_path, pickle.dumps({"vocab": {"a": "b"}}, protocol))
    with pytest.raises(DataError, match="'vocab' is neither numbers"):
        read(tmp_path, pickle.dumps({"vocab": {"a": {"b": 1}}}, protocol))
    with pytest.raises(DataError, match="a key that is not a short text"):
        read(tmp_path, pickle.dumps({"a" * 2000: 1}, protocol))


def test_unpickled_pixels_are_a_view_of_the_file(tmp_path: Path) -> None:
    content = python2_pickle({"data": np.zeros((2000, 3072), np.uint8)})
    (tmp_path / "batch").write_bytes(content)
    tracemalloc.start()
    found = read_pickled(tmp_path / "batch")["data"]
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert found.shape == (2000, 3072) and peak < 1 << 20


class CallsSystem:
    """An object for which a general unpickler would run a command."""

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, ("touch /tmp/decentnode-was-here",)


@pytest.mark.parametrize("protocol", range(6))
def test_pickles_that_call_functions_are_refused(tmp_path: Path, protocol: int) -> None:
    with pytest.raises(DataError, match="not a batch of CIFAR in Python's format: byte"):
        read(tmp_path, pickle.dumps({"data": CallsSystem()}, protocol))


@pytest.mark.parametrize("content, problem", [
    (b"\x80\x02cos\nsystem\nU\x02ls\x85R.", r"byte 2: names os\.system, which is not loaded"),
    (b"\x80\x02cbuiltins\neval\nU\x011\x85R.", r"names builtins\.eval, which is not loaded"),
    (b"\x80\x04\x8c\x02os\x8c\x06system\x93.", r"names os\.system, which is not loaded"),
    (b"\x80\x02i\x00.", "instruction 0x69, which is not supported in such files"),
    (b"\x80\x02}U\x04dataNs.", "'data' is neither numbers, texts nor an array"),
    (b"\x80\x02]q\x00h\x00a.", "it does not contain exactly one dict"),
    (b"\x80\x02}U\x01a]q\x00h\x00as.", "'a' is neither"),
    (b"\x80\x02}}U\x01aNs" * 2 + b".", "it does not contain exactly one dict"),
    (b"\x80\x02}NNs.", "a key that is not a short text"),
    (b"\x80\x02}(Nu.", "a key without a value"),
    (b"\x80\x02}T\xff\xff\xff\xffab.", "byte 3: ends too early"),
    (b"\x80\x04\x8e\xff\xff\xff\xff\xff\xff\xff\x7fab.", "ends too early"),
    (b"\x80\x02h\x07.", "object 7 has not been made"),
    (b"\x80\x02s.", "takes an object from an empty stack"),
    (b"\x80\x02e.", "ends a list that has not begun"),
    (b"\x80\x02}(.", "it does not contain exactly one dict"),
    (b"\x80\x02NNR.", "calls something other than a constructor of arrays"),
    (b"\x80\x02cnumpy\nndarray\n)R.", "calls something other than a constructor of arrays"),
    (b"\x80\x02c_codecs\nencode\nU\x01aU\x05utf-8\x86R.", "encodes something other than a text as latin1"),
    (b"\x80\x02c_codecs\nencode\nX\x02\x00\x00\x00" + "\u0416".encode() + b"U\x06latin1\x86R.", "latin-1"),
    (b"\x80\x02cnumpy\ndtype\nU\x01O\x85R.", "an array of 'O', where pixels are bytes"),
    (b"\x80\x02cnumpy\ndtype\nU\x02f8\x85R.", "an array of 'f8', where pixels are bytes"),
    (b"c" + b"a" * 100, "a name of more than 64 letters"),
    (b"", "size must be 1 to"),
    (b"\x80", "byte 0: ends too early"),
])
def test_malformed_pickles_are_refused(tmp_path: Path, content: bytes, problem: str) -> None:
    with pytest.raises(DataError, match=problem):
        read(tmp_path, content)


def array(shape: bytes, order: bytes = b"\x89", content: bytes = b"U\x04abcd", version: bytes = b"K\x01") -> bytes:
    dtype = b"cnumpy\ndtype\nU\x02u1K\x00K\x01\x87R"
    return (b"\x80\x02}U\x04datacnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\nK\x00\x85U\x01b\x87R("
            + version + shape + dtype + order + content + b"tbs.")  # fmt: skip


@pytest.mark.parametrize("content, problem", [
    (array(b"K\x05\x85"), r"an array of shape \[5\] with 4 bytes"),
    (array(b"J\xff\xff\xff\xff\x85"), "with an invalid shape, dtype or bytes"),
    (array(b"\x88\x85"), "with an invalid shape, dtype or bytes"),
    (array(b")"), "with an invalid shape, dtype or bytes"),
    (array(b"K\x04\x85", b"\x88"), "in Fortran order"),
    (array(b"K\x04\x85", content=b"N"), "with an invalid shape, dtype or bytes"),
    (array(b"K\x04\x85", version=b""), "an array that is not"),
])
def test_malformed_pickled_arrays_are_refused(tmp_path: Path, content: bytes, problem: str) -> None:
    assert read(tmp_path, array(b"K\x02K\x02\x86"))["data"].tolist() == [[97, 98], [99, 100]]
    with pytest.raises(DataError, match=problem):
        read(tmp_path, content)


def test_pickles_that_would_fill_the_memory_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Instructions, nesting and copies are bounded, not only bytes, so that a small file cannot fill the memory."""
    monkeypatch.setattr(pickled, "MAX_INSTRUCTIONS", 1000)
    with pytest.raises(DataError, match="more than 1000 instructions"):
        read(tmp_path, b"\x80\x02" + b"N" * 2000 + b".")
    with pytest.raises(DataError, match="objects are nested more than 64 deep"):
        read(tmp_path, b"\x80\x02" + b"(" * 100 + b".")
    doubling = b"\x80\x02]q\x00" + b"".join(b"h" + bytes([n]) + b"h" + bytes([n]) + b"\x86q" + bytes([n + 1])
                                            for n in range(100)) + b"."  # fmt: skip
    with pytest.raises(DataError, match="not contain exactly one dict"):  # 2^100 leaves, 200 objects
        read(tmp_path, doubling)
    text = b"T" + struct.pack("<I", 1000) + b"a" * 1000
    encoding = b"c_codecs\nencode\nq\x00" + text + b"U\x06latin1\x86q\x01" + b"h\x00h\x01R" * 100 + b"."
    with pytest.raises(DataError, match="copied again and again"):
        read(tmp_path, b"\x80\x02" + encoding)
    with pytest.raises(DataError, match="copied again and again"):
        read(tmp_path, b"\x80\x02}U\x05names](" + text + b"q\x01" + b"h\x01" * 100 + b"es.")
    monkeypatch.setattr(pickled, "MAX_BYTES", 100)
    with pytest.raises(DataError, match="size must be 1 to 100 bytes, got 101"):
        read(tmp_path, b"x" * 101)


VALID = python2_pickle({"labels": [1, 2], "data": np.arange(12, dtype=np.uint8).reshape(2, 6), "t": "x"})


@pytest.mark.slow
@given(st.lists(st.tuples(st.integers(0, len(VALID) - 1), st.integers(0, 255)), min_size=1, max_size=6),
       st.integers(0, len(VALID)), st.booleans())  # fmt: skip
@settings(max_examples=400 if not os.environ.get("DECENTNODE_STRESS") else 100_000, deadline=None)
def test_damaged_pickles_are_an_error_or_plain_data(flips: list[tuple[int, int]], cut: int, cuts: bool) -> None:
    content = bytearray(VALID)
    for place, value in flips:
        content[place] = value
    check_error_or_plain_data(bytes(content[:cut]) if cuts else bytes(content))


@given(st.binary(min_size=1, max_size=60))
@settings(max_examples=300, deadline=None)
def test_random_bytes_are_an_error_or_plain_data(content: bytes) -> None:
    check_error_or_plain_data(b"\x80\x02" + content + b".")


@given(st.lists(st.sampled_from([
    b"}", b"]", b")", b"(", b"N", b"\x88", b"K\x03", b"U\x01a", b"a", b"e", b"s", b"u", b"t", b"\x85", b"\x86", b"\x87",
    b"q\x00", b"h\x00", b"\x94", b"R", b"b", b"\x93", b"cnumpy\ndtype\n", b"cnumpy\nndarray\n", b"U\x02u1",
    b"cnumpy.core.multiarray\n_reconstruct\n", b"c_codecs\nencode\n",
]), max_size=40))  # fmt: skip
@settings(max_examples=400 if not os.environ.get("DECENTNODE_STRESS") else 100_000, deadline=None)
def test_random_pickle_programs_are_an_error_or_plain_data(program: list[bytes]) -> None:
    check_error_or_plain_data(b"\x80\x02" + b"".join(program) + b".")


def check_error_or_plain_data(content: bytes) -> None:
    """Checks that the reader refuses the content, or returns arrays, texts, numbers and lists only."""
    machine = pickled._Machine(memoryview(bytearray(content)))
    try:
        found = machine.run()
    except (pickled._Refused, IndexError, UnicodeDecodeError):
        return
    assert all(isinstance(value, np.ndarray | str | int | list) for value in found.values())


def test_text_lengths_in_pickles_are_little_endian(tmp_path: Path) -> None:
    text = b"x" * 300
    assert read(tmp_path, b"\x80\x02}U\x01tT" + struct.pack("<I", 300) + text + b"s.") == {"t": text.decode()}
