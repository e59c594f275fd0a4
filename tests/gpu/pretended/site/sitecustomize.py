"""Python runs this file when it starts. It gives torch the pretended GPU as soon as torch is imported."""

from __future__ import annotations

import ctypes
import importlib.abc
import importlib.machinery
import os
import sys
from pathlib import Path
from types import ModuleType
from typing import Any


class _TorchFinder(importlib.abc.MetaPathFinder):
    def find_spec(self, name: str, path: Any = None, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        if name != "torch":
            return None
        sys.meta_path.remove(self)
        found = importlib.machinery.PathFinder.find_spec(name, path)
        if found is not None and found.loader is not None and found.origin is not None:
            found.loader = _Loader(found.loader, Path(found.origin).parent / "lib")
        return found


class _Loader(importlib.abc.Loader):
    def __init__(self, own: Any, lib: Path) -> None:
        self._own, self._lib = own, lib

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return self._own.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        for name in ("libtorch_global_deps.so", "libc10.so", "libtorch_cpu.so"):
            ctypes.CDLL(str(self._lib / name), mode=ctypes.RTLD_GLOBAL)
        device = ctypes.CDLL(os.environ["PRETENDED_CUDA"])  # before torch asks for the first time whether there is CUDA
        if device.install() != 0:
            raise RuntimeError("this torch has CUDA of its own: no GPU is pretended")
        self._own.exec_module(module)
        sys.path.insert(0, str(Path(__file__).parent))
        import pretended_torch_cuda

        pretended_torch_cuda.install(device)


if "PRETENDED_CUDA" in os.environ:
    sys.meta_path.insert(0, _TorchFinder())
