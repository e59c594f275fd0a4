"""Adds to `torch.distributed` what builds with CUDA have: NCCL, and gloo's collectives of GPU tensors
(communication.cpp)."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d
from torch.distributed import distributed_c10d as own

GPU, CPU = torch.device("cuda"), torch.device("cpu")
LONG = timedelta(days=1)


def add_gpu_backend(group: Any, gloo: Any, nccl: bool) -> Any:
    """Adds to a process group a backend for GPUs whose operations gloo does, and returns it."""
    _register(group, CPU, group.BackendType.GLOO, gloo)
    torch.ops.pretended_cuda.join(group.boxed(), nccl)
    return group._get_backend(GPU)


class _Nccl(type):
    def __call__(cls, store: Any, rank: int, size: int, options: Any = None, *_: Any) -> Any:
        options = c10d.ProcessGroupGloo._Options()
        options._devices, options._timeout = [c10d.ProcessGroupGloo.create_device(hostname="127.0.0.1")], LONG
        prefixed = c10d.PrefixStore("pretended", store)
        made = add_gpu_backend(c10d.ProcessGroup(prefixed, rank, size), _gloo(prefixed, rank, size, options), True)
        store.set_timeout(LONG)
        return made

    def __instancecheck__(cls, backend: object) -> bool:
        return isinstance(backend, c10d.Backend) and not isinstance(backend, _gloo) and backend.name() == "nccl"


class ProcessGroupNCCL(metaclass=_Nccl):
    class Options:
        def __init__(self, is_high_priority_stream: bool = False) -> None:
            self.is_high_priority_stream, self._timeout = is_high_priority_stream, LONG
            self.config = type("Config", (), {})()


def _register_backend(group: Any, device: torch.device, kind: Any, backend: Any = None) -> None:
    if device.type == "cuda" and kind == group.BackendType.GLOO:
        add_gpu_backend(group, backend, False)
    elif device.type in ("cpu", "cuda"):
        _register(group, device, kind, backend)


def _refuse_gpu_tensors(method: Any) -> Any:
    """Returns a send or recv of gloo that refuses GPU tensors, as the real one does."""
    def checked(backend: Any, tensors: list[torch.Tensor], *args: Any) -> Any:
        if any(tensor.is_cuda for tensor in tensors):
            raise RuntimeError("[gloo/transport/tcp/pair.cc] writev [127.0.0.1]: Bad address")
        return method(backend, tensors, *args)

    return checked


_register, _gloo = c10d.ProcessGroup._register_backend, c10d.ProcessGroupGloo


def install() -> None:
    c10d.ProcessGroup._register_backend = _register_backend  # type: ignore[assignment]
    for name in ("send", "recv"):
        setattr(_gloo, name, _refuse_gpu_tensors(getattr(_gloo, name)))
    c10d.Backend._set_default_timeout = lambda backend, timeout: None  # type: ignore[attr-defined]  # NCCL's backend has this method
    for module in (dist, own):
        module.ProcessGroupNCCL = ProcessGroupNCCL  # type: ignore[attr-defined]
    own._NCCL_AVAILABLE = True
    own.default_pg_nccl_timeout = timedelta(minutes=10)
    torch.cuda.nccl.version = lambda: (2, 29, 7)  # type: ignore[assignment]
