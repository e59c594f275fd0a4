"""Reads Python pickle files of CIFAR, LEAF and FedScale without a general unpickler.

A pickle is a program, and Python's interpreter of it imports and calls whatever the file names. This interpreter knows
only the few instructions (documented in Python's pickletools.py) that such files consist of: dicts of labels, of word
numbers, of one array of bytes, and of records with numbers. The only functions it accepts are those that construct
NumPy's arrays and numbers, which it does itself. Everything else is refused, naming the instruction and its position.
Memory is bounded by the file's size: no length in the file is trusted, nothing is expanded, and texts and bytes are
views of the mapped file.
"""

from __future__ import annotations

import math
import mmap
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from decentnode.errors import DataError

MAX_BYTES = 1 << 30
"""The maximum file size; CIFAR-100's training images take 155 MB."""
MAX_INSTRUCTIONS = 4_000_000
"""The maximum number of instructions, which bounds how much memory a file of one-byte instructions can take.
CIFAR-100's training file has about 300,000."""
MAX_RECORDS = 10_000
"""How many records of a file of records are read; the file may have more."""
MAX_RECORD_INSTRUCTIONS = 40_000_000
"""MAX_INSTRUCTIONS for files of records: a device's availability has hundreds of times."""
MAX_KEY_BYTES = 1024
"""The maximum length of keys of dicts, which are the words of a vocabulary."""
MAX_DEPTH = 64
"""The maximum depth of nested objects, not counting items of a list: CIFAR's files have fewer than 20."""

_RECONSTRUCT = ("numpy.core.multiarray _reconstruct", "numpy._core.multiarray _reconstruct")
_SCALAR = ("numpy.core.multiarray scalar", "numpy._core.multiarray scalar")
_SCALARS = {"f8": "<d", "f4": "<f", "i8": "<q", "i4": "<i"}
"""The supported dtypes of NumPy's scalars, with their formats for `struct`."""
_CALLABLE = {*_RECONSTRUCT, *_SCALAR, "numpy dtype", "_codecs encode"}
_KNOWN = {*_CALLABLE, "numpy ndarray"}


class _Refused(Exception):
    pass


@dataclass(frozen=True)
class _Global:
    name: str


@dataclass(frozen=True, eq=False)
class _Bytes:
    """A Python 2 text, or bytes: a view of the file."""

    view: memoryview
    unicode: bool = False
    """Whether it is a Python 3 text."""

    def text(self) -> str:
        return bytes(self.view[:4096]).decode("utf-8" if self.unicode else "latin-1")


class _Array:
    """An array, or a dtype, under construction."""

    def __init__(self, kind: str, code: str = "") -> None:
        self.kind = kind
        self.code = code
        """The type code of a dtype."""
        self.value: np.ndarray | None = None


def read_pickled(path: Path, what: str = "a batch of CIFAR") -> dict[str, Any]:
    """Returns the dict in a file: lists of integers, texts or bytes; integers; dicts of integers; and [N, ...] uint8
    arrays that are views of the mapped file.

    what: what the file should be, for errors. Raises DataError for anything else, with the position in the file.
    """
    return _read(path, what, records=False)


def read_records(path: Path) -> dict[int | str, dict[str, Any]]:
    """Returns the first MAX_RECORDS entries of a file with a dict of dicts, whose keys are texts and whose values are
    numbers, texts, None or lists of numbers.

    Raises DataError for anything else, with the position in the file.
    """
    return _read(path, "a dict of records", records=True)


def _read(path: Path, what: str, records: bool) -> dict[Any, Any]:
    size = path.stat().st_size
    if not 0 < size <= MAX_BYTES:
        raise DataError(f"{path}: size must be 1 to {MAX_BYTES} bytes, got {size}")
    # Mapped privately: pages stay shared while nobody writes, and torch accepts the array without warning.
    with open(path, "rb") as file:
        mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    machine = _Machine(memoryview(mapped), records)
    try:
        return machine.run()
    except (_Refused, IndexError, UnicodeError) as error:
        detail = "ends too early" if isinstance(error, IndexError) else str(error)
        raise DataError(f"{path}: not {what} in Python's format: byte {machine.start}: {detail}") from error


class _Machine:
    def __init__(self, data: memoryview, records: bool = False) -> None:
        self.data = data
        self.records = records
        """Whether the file has records, whose keys may be integers and whose values are dicts."""
        self.has_enough_records = False
        self.at = self.start = 0
        self.stack: list[Any] = []
        self.marks: list[int] = []
        self.memo: dict[int, Any] = {}
        self.copied = 0
        """How many bytes of text have been copied; at most as many as the file has."""
        self.names: dict[_Bytes, str] = {}
        """For records, the keys as str; each text is decoded once, however many records use it."""

    def run(self) -> dict[Any, Any]:
        most = MAX_RECORD_INSTRUCTIONS if self.records else MAX_INSTRUCTIONS
        for _ in range(most):
            self.start = self.at
            code = self._take(1)[0]
            if code == ord(".") or self.has_enough_records:
                break
            action = _ACTIONS.get(code)
            if action is None:
                raise _Refused(f"instruction 0x{code:02x}, which is not supported in such files")
            action(self)
            if len(self.marks) > MAX_DEPTH:
                raise _Refused(f"objects are nested more than {MAX_DEPTH} deep")
        else:
            raise _Refused(f"more than {most} instructions")
        if len(self.stack) != 1 or not isinstance(self.stack[0], dict) or self.marks:
            raise _Refused("it does not contain exactly one dict")
        if self.records:
            return {key: self.record(key, value) for key, value in [*self.stack[0].items()][:MAX_RECORDS]}
        return {key: self.plain(key, value) for key, value in self.stack[0].items()}

    # -- reading --------------------------------------------------------------------------------------------------

    def _take(self, count: int) -> memoryview:
        if count > len(self.data) - self.at:
            raise IndexError
        piece = self.data[self.at : self.at + count]
        self.at += count
        return piece

    def number(self, count: int, signed: bool = False) -> int:
        return int.from_bytes(self._take(count), "little", signed=signed)

    def line(self) -> str:
        for length in range(min(64, len(self.data) - self.at)):
            if self.data[self.at + length] == 0x0A:
                text = bytes(self._take(length)).decode("ascii")
                self.at += 1
                return text
        raise _Refused("a name of more than 64 letters")

    def text(self, width: int, unicode: bool = False) -> None:
        self.stack.append(_Bytes(self._take(self.number(width)), unicode))

    # -- the stack ------------------------------------------------------------------------------------------------

    def pop(self) -> Any:
        if not self.stack or (self.marks and len(self.stack) <= self.marks[-1]):
            raise _Refused("takes an object from an empty stack")
        return self.stack.pop()

    def mark(self) -> None:
        self.marks.append(len(self.stack))

    def items(self) -> list[Any]:
        """Pops and returns everything above the last mark."""
        if not self.marks:
            raise _Refused("ends a list that has not begun")
        begin = self.marks.pop()
        found = self.stack[begin:]
        del self.stack[begin:]
        return found

    def top(self, kind: type) -> Any:
        if not self.stack or not isinstance(self.stack[-1], kind):
            raise _Refused(f"needs a {kind.__name__.strip('_').lower()} before it")
        return self.stack[-1]

    def put(self, index: int) -> None:
        self.memo[index] = self.top(object)

    def get(self, index: int) -> None:
        if index not in self.memo:
            raise _Refused(f"object {index} has not been made")
        self.stack.append(self.memo[index])

    def tuple_of(self, count: int) -> None:
        self.stack.append(tuple([self.pop() for _ in range(count)][::-1]))

    # -- objects on the stack -------------------------------------------------------------------------------------

    def append(self, found: list[Any]) -> None:
        self.top(list).extend(found)

    def set_items(self, found: list[Any]) -> None:
        if len(found) % 2:
            raise _Refused("a key without a value")
        target = self.top(dict)
        for key, value in zip(found[::2], found[1::2], strict=True):
            if self.records and type(key) is int:
                target[key] = value
                continue
            if not isinstance(key, _Bytes) or len(key.view) > MAX_KEY_BYTES:
                raise _Refused("a key that is not a short text")
            target[self.key(key)] = value
        self.has_enough_records = self.records and len(self.stack) == 1 and len(target) >= MAX_RECORDS

    def key(self, text: _Bytes) -> str:
        """Returns a text as a key. Records repeat the same few keys, often by references shorter than the text, so
        their keys are decoded only once."""
        found = self.names.get(text)
        if found is None:
            self.count_copied(len(text.view))
            found = text.text()
            if self.records:
                self.names[text] = found
        return found

    def set_item(self) -> None:
        value, key = self.pop(), self.pop()
        self.set_items([key, value])

    def name(self, module: str, name: str) -> None:
        if f"{module} {name}" not in _KNOWN:
            raise _Refused(f"names {module}.{name}"[:200] + ", which is not loaded")
        self.stack.append(_Global(f"{module} {name}"))

    def stack_name(self) -> None:
        name, module = self.pop(), self.pop()
        if not isinstance(name, _Bytes) or not isinstance(module, _Bytes):
            raise _Refused("a name that is not a text")
        self.name(module.text(), name.text())

    def reduce(self) -> None:
        arguments, function = self.pop(), self.pop()
        if not isinstance(function, _Global) or function.name not in _CALLABLE or not isinstance(arguments, tuple):
            raise _Refused("calls something other than a constructor of arrays")
        if function.name == "_codecs encode":  # Python 3 bytes in Python 2's format: a text of Latin-1 characters
            if arguments and isinstance(arguments[0], _Bytes):
                self.count_copied(len(arguments[0].view) // 2)  # a non-ASCII character takes two bytes there
            self.stack.append(_encoded(arguments))
        elif function.name == "numpy dtype":
            kind = arguments[0].text() if arguments and isinstance(arguments[0], _Bytes) else ""
            if kind not in ("u1", "|u1") and not (self.records and kind in _SCALARS):
                raise _Refused(f"an array of {kind[:20]!r}, where pixels are bytes (u1)")
            self.stack.append(_Array("dtype", kind))
        elif function.name in _SCALAR:
            self.stack.append(_scalar(arguments))
        else:
            self.stack.append(_Array("array"))

    def count_copied(self, size: int) -> None:
        """Bounds how much text is copied: a file may refer to one of its texts in every instruction."""
        self.copied += size
        if self.copied > len(self.data):
            raise _Refused("texts that are copied again and again")

    def build(self) -> None:
        state = self.pop()
        target: _Array = self.top(_Array)
        if target.kind == "dtype":  # (version, byte order, ...): the byte order does not matter for single bytes
            return
        if target.value is not None or not isinstance(state, tuple) or len(state) != 5:
            raise _Refused("an array that is not (version, shape, dtype, order, bytes)")
        _, shape, dtype, fortran, content = state
        sound = isinstance(shape, tuple) and 1 <= len(shape) <= 4 and all(type(n) is int and n >= 0 for n in shape)
        if not sound or not isinstance(dtype, _Array) or dtype.kind != "dtype" or not isinstance(content, _Bytes):
            raise _Refused("an array with an invalid shape, dtype or bytes")
        if fortran is not False:
            raise _Refused("an array in Fortran order")
        if math.prod(shape) != len(content.view):
            raise _Refused(f"an array of shape {list(shape)} with {len(content.view)} bytes")
        target.value = np.frombuffer(content.view, np.uint8).reshape(shape)


    def record(self, key: Any, value: Any) -> dict[str, Any]:
        """Returns one entry of a file of records as plain data for the caller."""
        if not isinstance(value, dict) or not all(isinstance(name, str) for name in value):
            raise _Refused(f"entry {str(key)[:64]!r} is not a dict with texts as keys")
        return {name: each if isinstance(each, int | float | None) or
                (isinstance(each, list) and all(isinstance(v, int | float) for v in each)) else self.plain(name, each)
                for name, each in value.items()}  # fmt: skip

    def plain(self, key: str, value: Any) -> Any:
        """Returns a value of the dict as plain data for the caller."""
        if isinstance(value, _Array) and value.value is not None:
            return value.value
        if isinstance(value, _Bytes):
            return value.text()
        if isinstance(value, int):
            return value
        if isinstance(value, dict) and all(type(each) is int for each in value.values()):
            return value
        if isinstance(value, list) and all(type(each) is int for each in value):
            return value
        if isinstance(value, list) and all(isinstance(each, _Bytes) for each in value):
            self.count_copied(sum(min(len(each.view), 4096) for each in value))
            return [each.text() for each in value]
        raise _Refused(f"{key[:64]!r} is neither numbers, texts nor an array")


def _scalar(arguments: tuple[Any, ...]) -> int | float:
    """Returns a NumPy number, given as (its dtype, its bytes)."""
    right = len(arguments) == 2 and isinstance(arguments[0], _Array) and isinstance(arguments[1], _Bytes)
    form = _SCALARS.get(arguments[0].code) if right else None
    if form is None or struct.calcsize(form) != len(arguments[1].view):
        raise _Refused("a number of NumPy's of another kind")
    found: int | float = struct.unpack(form, arguments[1].view)[0]
    return found


def _encoded(arguments: tuple[Any, ...]) -> _Bytes:
    """Returns the bytes that a text represents, one per Latin-1 character."""
    right = len(arguments) == 2 and all(isinstance(each, _Bytes) for each in arguments)
    if not right or arguments[1].text() not in ("latin1", "latin-1"):
        raise _Refused("encodes something other than a text as latin1")
    return _Bytes(memoryview(bytes(arguments[0].view).decode("utf-8").encode("latin-1")))


def _pushes(value: Any) -> Callable[[_Machine], None]:
    return lambda machine: machine.stack.append(value)


_ACTIONS: dict[int, Callable[[_Machine], Any]] = {
    0x80: lambda m: m.number(1),  # PROTO
    0x95: lambda m: m.number(8),  # FRAME: only a hint for streaming readers
    ord("}"): lambda m: m.stack.append({}),  # EMPTY_DICT
    ord("]"): lambda m: m.stack.append([]),  # EMPTY_LIST
    ord(")"): _pushes(()),  # EMPTY_TUPLE
    ord("N"): _pushes(None),  # NONE
    0x88: _pushes(True),  # NEWTRUE
    0x89: _pushes(False),  # NEWFALSE
    ord("("): _Machine.mark,  # MARK
    ord("J"): lambda m: m.stack.append(m.number(4, signed=True)),  # BININT
    ord("K"): lambda m: m.stack.append(m.number(1)),  # BININT1
    ord("M"): lambda m: m.stack.append(m.number(2)),  # BININT2
    ord("G"): lambda m: m.stack.append(struct.unpack(">d", m._take(8))[0]),  # BINFLOAT
    0x8A: lambda m: m.stack.append(m.number(m.number(1), signed=True)),  # LONG1: at most 255 bytes
    ord("U"): lambda m: m.text(1),  # SHORT_BINSTRING
    ord("T"): lambda m: m.text(4),  # BINSTRING
    ord("X"): lambda m: m.text(4, True),  # BINUNICODE
    0x8C: lambda m: m.text(1, True),  # SHORT_BINUNICODE
    ord("C"): lambda m: m.text(1),  # SHORT_BINBYTES
    ord("B"): lambda m: m.text(4),  # BINBYTES
    0x8E: lambda m: m.text(8),  # BINBYTES8
    0x85: lambda m: m.tuple_of(1),  # TUPLE1
    0x86: lambda m: m.tuple_of(2),  # TUPLE2
    0x87: lambda m: m.tuple_of(3),  # TUPLE3
    ord("t"): lambda m: m.stack.append(tuple(m.items())),  # TUPLE
    ord("a"): lambda m: m.append([m.pop()]),  # APPEND
    ord("e"): lambda m: m.append(m.items()),  # APPENDS
    ord("s"): _Machine.set_item,  # SETITEM
    ord("u"): lambda m: m.set_items(m.items()),  # SETITEMS
    ord("q"): lambda m: m.put(m.number(1)),  # BINPUT
    ord("r"): lambda m: m.put(m.number(4)),  # LONG_BINPUT
    0x94: lambda m: m.put(len(m.memo)),  # MEMOIZE
    ord("h"): lambda m: m.get(m.number(1)),  # BINGET
    ord("j"): lambda m: m.get(m.number(4)),  # LONG_BINGET
    ord("c"): lambda m: m.name(m.line(), m.line()),  # GLOBAL
    0x93: _Machine.stack_name,  # STACK_GLOBAL
    ord("R"): _Machine.reduce,  # REDUCE
    ord("b"): _Machine.build,  # BUILD
}
