"""Writes tensors in the safetensors format directly from their memory, and reads them with a check of their digest.

The library's `save_file` first copies every tensor's bytes to a Python object with the GIL held, so that the training
thread would wait for a copy of the whole state. Writing and hashing memory views releases the GIL.
"""

from __future__ import annotations

import hashlib
import json
import os
import struct
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from decentnode.errors import CheckpointError
from decentnode.system import check_disk
from decentnode.tensors import as_bytes

DTYPES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.int64: "I64",
    torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
}  # fmt: skip
"""dtype -> its name in the format."""
NAMES = {name: dtype for dtype, name in DTYPES.items()}
CHUNK_BYTES = 1 << 22
"""Bytes that are hashed and then written at a time, small enough to be still in the cache when the system copies them.
"""


def digest() -> hashlib.blake2b:
    return hashlib.blake2b(digest_size=16)


def write(path: Path, tensors: Mapping[str, Tensor]) -> tuple[int, str]:
    """Writes contiguous CPU tensors to `path`. Blocking until the disk has them. Returns (bytes, digest in hex).

    Raises OSError, and CheckpointError for a dtype that the format lacks.
    """
    # Large elements first, so that every tensor begins at a multiple of its element's size.
    names = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))
    header, offset = {}, 0
    for name in names:
        tensor = tensors[name]
        if tensor.dtype not in DTYPES:
            raise CheckpointError(f"{name} must have one of the dtypes {', '.join(NAMES)}, got {tensor.dtype}")
        header[name] = {"dtype": DTYPES[tensor.dtype], "shape": list(tensor.shape),
                        "data_offsets": [offset, offset + tensor.nbytes]}  # fmt: skip
        offset += tensor.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    seen = digest()
    check_disk()
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o666)
    try:
        _write_all(file, memoryview(struct.pack("<Q", len(text)) + text), seen)
        for name in names:
            if tensors[name].numel():
                _write_all(file, as_bytes(tensors[name]), seen)
        os.fsync(file)
    finally:
        os.close(file)
    return 8 + len(text) + offset, seen.hexdigest()


def _write_all(file: int, data: memoryview, seen: hashlib.blake2b) -> None:
    for start in range(0, len(data), CHUNK_BYTES):
        piece = data[start : start + CHUNK_BYTES]
        seen.update(piece)
        while piece:
            piece = piece[os.write(file, piece) :]


def read(path: Path, size: int, expected: str) -> dict[str, Tensor]:
    """Returns the tensors of a file that `write` made. Raises CheckpointError if its size or digest is not as expected.
    """
    try:
        with open(path, "rb") as file:
            found = os.fstat(file.fileno()).st_size
            if found != size:
                raise CheckpointError(f"{path} must have {size} bytes, got {found}")
            data = bytearray(size)
            if file.readinto(data) != size:
                raise CheckpointError(f"{path} became shorter while it was read")
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error
    seen = digest()
    seen.update(data)
    if seen.hexdigest() != expected:
        raise CheckpointError(f"{path} is damaged: its bytes are not those that were written")
    begin = 8 + struct.unpack_from("<Q", data)[0]
    found_tensors = {}
    for name, entry in json.loads(data[8:begin].decode()).items():
        dtype, (start, stop) = NAMES[entry["dtype"]], entry["data_offsets"]
        flat = torch.empty(0, dtype=dtype)
        if stop > start:
            flat = torch.frombuffer(data, dtype=dtype, count=(stop - start) // dtype.itemsize, offset=begin + start)
        found_tensors[name] = flat.clone().view(entry["shape"])
    return found_tensors
