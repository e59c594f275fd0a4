"""Replaces functions of `torch.cuda` by those of the pretended GPU, which has one stream on each device."""

from __future__ import annotations

import ctypes
import os
import struct
from types import SimpleNamespace
from typing import Any

import pretended_torch_distributed
import torch

MEMORY_BYTES = 1 << 36
_device: Any = None


def waits() -> dict[str, int]:
    """Returns how often the host has waited for the GPU since the last call, by operation."""
    buffer = ctypes.create_string_buffer(1 << 16)
    _device.waited(buffer, len(buffer) - 1)
    return {name: int(count) for name, count in (line.split("\t") for line in buffer.value.decode().splitlines())}


class Stream(torch.Stream):
    def __new__(cls, device: Any = None, priority: int = 0, **_: Any) -> Stream:
        return super().__new__(cls, device=torch.device("cuda", index_of(device)))  # type: ignore[no-any-return]

    def wait_stream(self, other: Any) -> None: ...

    def wait_event(self, event: Any) -> None: ...

    def record_event(self, event: Any = None) -> Any:
        event = event or Event()
        event.record(self)
        return event

    def query(self) -> bool:
        synchronize()
        return True

    def synchronize(self) -> None:
        synchronize()

    cuda_stream = 0


class Event:
    """An event. Copies into and out of pinned memory are made when an event that was recorded after them is waited for,
    or queried for the second time."""

    def __init__(self, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False) -> None:
        self._last_copy, self._queries = 0, 0

    @classmethod
    def from_ipc_handle(cls, device: Any, handle: bytes) -> Event:
        assert len(handle) == 64
        return cls(interprocess=True)

    def ipc_handle(self) -> bytes:
        return bytes(64)

    def record(self, stream: Any = None) -> None:
        self._last_copy, self._queries = _device.copies_so_far(), 0

    def wait(self, stream: Any = None) -> None: ...

    def query(self) -> bool:
        self._queries += 1
        if self._last_copy and self._queries < 2:
            return False
        _device.copies_made(self._last_copy)
        return True

    def synchronize(self) -> None:
        _device.waited_for(b"synchronize")
        _device.copies_made(self._last_copy)

    def elapsed_time(self, other: Event) -> float:
        return 1.0


def begin_use() -> None:
    """Marks that this process uses the GPU, so that its forks cannot. Raises as CUDA does in such a fork."""
    if _device.is_forked():
        raise RuntimeError("Cannot re-initialize CUDA in forked subprocess")
    _device.begin()


def device_count() -> int:
    if os.environ.get("PRETENDED_NVML") == "0":  # in sandboxes without NVML, torch asks the driver instead
        _device.ask()
    return int(_device.count())


def is_available() -> bool:
    if os.environ.get("PYTORCH_NVML_BASED_CUDA_CHECK") == "1":
        return True
    _device.ask()
    return not _device.is_forked()


def index_of(device: Any = None) -> int:
    """Returns the index of a device, that of the current one for None and for "cuda". Raises as CUDA does if there is
    no such device."""
    begin_use()
    index = None if device is None else device if isinstance(device, int) else torch.device(device).index
    if index is None or index < 0:
        return int(_device.current_device())
    if index >= _device.count():
        raise RuntimeError("CUDA error: invalid device ordinal")
    return index


class DeviceGuard:
    """Makes another device the current one inside the block: torch.cuda.device, device_of and stream."""

    def __init__(self, given: Any) -> None:
        self._index = -1
        if isinstance(given, int):
            self._index = given
        elif given is not None:
            device = given.device if isinstance(given, torch.Tensor | torch.Stream) else torch.device(given)
            self._index = index_of(device) if device.type == "cuda" else -1

    def __enter__(self) -> None:
        self._before = index_of()
        set_device(self._index)

    def __exit__(self, *_: object) -> None:
        set_device(self._before)


def set_device(device: Any) -> None:
    if not isinstance(device, int) or device >= 0:
        _device.set_device(index_of(device))


def set_stream(stream: Any) -> None: ...


def synchronize(device: Any = None) -> None:
    index_of(device)
    _device.waited_for(b"synchronize")
    _device.copies_made(_device.copies_so_far())


def _share(storage: Any) -> tuple[Any, ...]:
    if os.environ.get("PRETENDED_CUDA_IPC") == "0":  # sandboxes refuse it
        raise RuntimeError("CUDA error: operation not supported")
    given = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
    file, count = torch.ops.pretended_cuda.lend(given)
    return storage.device.index, struct.pack("<qq", os.getpid(), file), count, 0, bytes(64), 0, bytes(64), False


def _borrow(device: int, handle: bytes, size: int, offset: int, *_: Any) -> Any:
    pid, file = struct.unpack("<qq", handle)
    return torch.ops.pretended_cuda.borrow(pid, file, size + offset, index_of(device))[offset:].untyped_storage()


def _storage_new(own: Any) -> Any:
    """Adds torch.UntypedStorage(n, device="cuda"), which only builds of torch with CUDA have."""

    def make(cls: Any, *args: Any, device: Any = None, **given: Any) -> Any:
        if device is None or torch.device(device).type != "cuda":
            return own(cls, *args, **({} if device is None else {"device": device}), **given)
        return torch.empty(args[0] if args else 0, dtype=torch.uint8, device=device).untyped_storage()

    return make


class _Evaluated(torch.autograd.Function):
    """The output of a recurrent layer in evaluation mode, for which cuDNN computes no gradients."""

    @staticmethod
    def forward(ctx: Any, out: Any) -> Any:
        return out.view_as(out)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        raise RuntimeError("cudnn RNN backward can only be called in training mode")


def lstm_of_steps(own: Any) -> Any:
    """Returns a `torch._VF.lstm` that computes GPU tensors step by step: a real GPU has a kernel that the CPU lacks.
    One direction only, without packed sequences."""

    def lstm(given: Any, state: Any, weights: Any, bias: bool, layers: int, dropout: float, train: bool,
             bidirectional: bool, batch_first: bool) -> Any:  # fmt: skip
        if not given.is_cuda:
            return own(given, state, weights, bias, layers, dropout, train, bidirectional, batch_first)
        assert not bidirectional, "the pretended GPU has no LSTM of two directions"
        per_layer = 4 if bias else 2
        out, last_h, last_c = given.transpose(0, 1) if batch_first else given, [], []
        for n in range(layers):
            w_in, w_own, *biases = weights[n * per_layer : (n + 1) * per_layer]
            b_in, b_own = biases if bias else (None, None)
            h, c, steps = state[0][n], state[1][n], []
            for x in out:
                gates = torch.nn.functional.linear(x, w_in, b_in) + torch.nn.functional.linear(h, w_own, b_own)
                i, f, g, o = gates.chunk(4, 1)
                c = f.sigmoid() * c + i.sigmoid() * g.tanh()
                h = o.sigmoid() * c.tanh()
                steps.append(h)
            out = torch.stack(steps)
            if dropout and train and n + 1 < layers:
                out = torch.nn.functional.dropout(out, dropout)
            last_h.append(h)
            last_c.append(c)
        out = out if train else _Evaluated.apply(out)
        return out.transpose(0, 1) if batch_first else out, torch.stack(last_h), torch.stack(last_c)

    return lstm


def install(device: Any) -> None:
    """Replaces those functions of `torch.cuda` that this project and torch itself call."""
    global _device
    _device = device
    device.waited.argtypes = [ctypes.c_char_p, ctypes.c_int]
    device.waited_for.argtypes = [ctypes.c_char_p]
    device.copies_so_far.restype, device.copies_made.argtypes = ctypes.c_uint64, [ctypes.c_uint64]
    cuda = torch.cuda
    count = device.count()
    properties = [
        SimpleNamespace(name="pretended GPU", total_memory=MEMORY_BYTES, multi_processor_count=1, major=9, minor=0,
                        uuid=f"00000000-0000-0000-0000-{n:012x}", warp_size=32) for n in range(count)
    ]  # fmt: skip
    streams = [Stream(device=n) for n in range(count)]
    cuda._initialized = True
    cuda._lazy_init = cuda.init = begin_use
    cuda._is_in_bad_fork = lambda: bool(device.is_forked())
    torch.backends.cuda.is_built = lambda: True
    replaced: dict[str, Any] = {
        "is_available": is_available, "is_initialized": lambda: bool(device.is_used()), "device_count": device_count,
        "current_device": index_of, "host_waits": waits, "set_device": set_device,
        "get_device_properties": lambda device=None: properties[index_of(device)],
        "get_device_name": lambda device=None: properties[index_of(device)].name,
        "get_device_capability": lambda device=None: (9, 0),
        "synchronize": synchronize, "device": DeviceGuard, "device_of": DeviceGuard, "stream": DeviceGuard,
        "set_stream": set_stream, "current_stream": lambda device=None: streams[index_of(device)],
        "default_stream": lambda device=None: streams[index_of(device)],
        "Stream": Stream, "Event": Event, "empty_cache": lambda: None,
        "memory_allocated": lambda device=None: 0, "max_memory_allocated": lambda device=None: 0,
        "memory_reserved": lambda device=None: 0, "reset_peak_memory_stats": lambda device=None: None,
        "mem_get_info": lambda device=None: (MEMORY_BYTES, MEMORY_BYTES), "ipc_collect": lambda: None,
        "is_current_stream_capturing": lambda: False, "can_device_access_peer": lambda a, b: True,
        "is_bf16_supported": lambda including_emulation=True: True, "_sleep": lambda cycles: None,
    }  # fmt: skip
    for name, value in replaced.items():
        setattr(cuda, name, value)
    # the first generator that is made for a device is its default one (device.cpp)
    generators = cuda.default_generators = tuple(torch.Generator(device=f"cuda:{n}") for n in range(count))

    def seed(value: int) -> None:
        generators[_device.current_device()].manual_seed(int(value))

    def seed_all(value: int) -> None:
        for each in generators:
            each.manual_seed(int(value))

    def set_state(state: Any, device: Any = "cuda") -> None:
        generators[index_of(device)].set_state(state)

    for module in (cuda, cuda.random):
        module.manual_seed, module.manual_seed_all = seed, seed_all
        module.get_rng_state = lambda device="cuda": generators[index_of(device)].get_state()
        module.set_rng_state = set_state
        module.initial_seed = lambda: generators[index_of()].initial_seed()
    storage = torch.UntypedStorage
    storage.__new__ = staticmethod(_storage_new(storage.__new__))
    storage._share_cuda_, storage._new_shared_cuda = _share, staticmethod(_borrow)
    torch._VF.lstm = lstm_of_steps(torch._VF.lstm)
    pretended_torch_distributed.install()
    # torch would warn that it was built without cuDNN
    torch.backends.cudnn.is_acceptable = lambda tensor: False
    device.end()  # the calls above do not count as use of the GPU
