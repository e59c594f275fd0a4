"""Compiles the pretended GPU, once for each version of torch, into the user's cache folder."""

from __future__ import annotations

import fcntl
import hashlib
import importlib.util
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

SOURCES = [Path(__file__).with_name(name) for name in ("device.cpp", "communication.cpp")]
SITE = Path(__file__).with_name("site")
LIBRARY = "PRETENDED_CUDA"  # the environment variable with the library's path, which sitecustomize.py reads
COUNT = "PRETENDED_CUDA_COUNT"  # the environment variable with the number of GPUs
COMPILE_SECONDS = 500  # g++ needs 45 s on an idle machine


def torch_folder() -> Path:
    found = importlib.util.find_spec("torch")
    assert found is not None and found.origin is not None
    return Path(found.origin).parent


def unavailable() -> str | None:
    """Returns why no GPU can be pretended here, None if one can."""
    import torch

    if torch.version.cuda or torch.version.hip:
        return "this torch has CUDA of its own: no GPU is pretended"
    if torch.__version__.partition("+")[0] != "2.13.0":
        return f"it is written for torch 2.13.0, and this is {torch.__version__}"
    if shutil.which("g++") is None:
        return "no g++ here to compile the pretended GPU with"
    return None


def library() -> Path:
    """Returns the compiled device; takes half a minute the first time. Raises RuntimeError with what g++ said."""
    from decentnode import user_cache

    torch = torch_folder()
    sources = b"".join(source.read_bytes() for source in SOURCES)
    key = hashlib.sha256(sources + (torch / "version.py").read_bytes() + str(torch).encode()).hexdigest()
    path = user_cache.folder() / f"pretended-cuda-{key[:16]}.so"
    with (path.parent / "pretended-cuda.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # if several processes need it at once, one compiles
        if not user_cache.ours(path):
            _compile(torch, path)
    return path


def _compile(torch: Path, path: Path) -> None:
    handle, new = tempfile.mkstemp(dir=path.parent, suffix=".new")
    os.close(handle)
    include, lib = torch / "include", torch / "lib"
    done = subprocess.run(
        ["g++", "-std=c++20", "-O1", "-shared", "-fPIC", f"-I{include}", f"-I{include}/torch/csrc/api/include",
         *map(str, SOURCES), "-o", new, f"-L{lib}", "-Wl,--no-as-needed", "-lc10", "-ltorch_cpu"],
        capture_output=True, text=True, timeout=COMPILE_SECONDS,
    )  # fmt: skip
    if done.returncode != 0:
        Path(new).unlink()
        raise RuntimeError(f"g++ refused it:\n{done.stderr[-4000:]}")
    Path(new).replace(path)


def environment(gpus: int = 1) -> dict[str, str]:
    """Returns the environment for a process with so many pretended GPUs; the processes that it starts inherit them."""
    current = os.environ.get("PYTHONPATH")
    path = f"{SITE}{os.pathsep}{current}" if current else str(SITE)
    return {**os.environ, LIBRARY: str(library()), COUNT: str(gpus), "PYTHONPATH": path}
