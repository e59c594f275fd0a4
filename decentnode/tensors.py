"""Flat storage for a module's parameters and buffers, and the blocks in which flat tensors are processed."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

BLOCK_ELEMENTS = 1 << 18
"""Elements of one block: 1 MiB of float32, so that a block stays in a core's cache while neighbors' payloads are added.

Every transport mixes at multiples of this, so that the bits of the result do not depend on the transport.
"""
GPU_BLOCK_ELEMENTS = 1 << 25
"""Elements of one block on a GPU, where it bounds scratch memory (128 MiB of float32). Each block costs the host one
launch of every kernel: tens of microseconds, in which a GPU mixes a million elements. The bits of the result do not
depend on it, except for random draws."""

_DEVICE_FAULTS = (torch.OutOfMemoryError, getattr(torch, "AcceleratorError", torch.OutOfMemoryError))
_NO_MEMORY = ("DefaultCPUAllocator", "Cannot allocate memory")
"""Texts in torch's plain RuntimeError that mean that the host has no memory: torch's own, and the system's reason
within it."""

_KNOWN_TO_NUMPY = {torch.float32, torch.float64, torch.uint8, torch.int8, torch.int32, torch.int64}


def is_own_fault(error: BaseException) -> bool:
    """Returns whether an error is caused by this process's device or by its host's memory. No peer is the cause then,
    even if the error was raised while sending to peers."""
    if isinstance(error, (*_DEVICE_FAULTS, MemoryError)):
        return True
    return isinstance(error, RuntimeError) and any(text in str(error) for text in _NO_MEMORY)


def block_elements(device: torch.device) -> int:
    """Returns how many elements are processed at a time on a device."""
    return BLOCK_ELEMENTS if device.type == "cpu" else GPU_BLOCK_ELEMENTS


def blocks(start: int, stop: int, device: torch.device) -> Iterator[tuple[int, int]]:
    """Yields consecutive ranges [a, b) that cover [start, stop), divided at multiples of `block_elements(device)`."""
    size = block_elements(device)
    while start < stop:
        end = min((start // size + 1) * size, stop)
        yield start, end
        start = end


def as_bytes(tensor: Tensor) -> memoryview:
    """Returns the bytes of a contiguous CPU tensor, without a copy."""
    plain = tensor.detach() if tensor.requires_grad else tensor
    # numpy() of a flat tensor is faster: two torch views cost more than all the rest, once per chunk of a round
    if plain.dim() == 1 and plain.dtype in _KNOWN_TO_NUMPY and plain.numel():
        return memoryview(plain.numpy()).cast("B")  # type: ignore[arg-type]
    return memoryview(plain.view(-1).view(torch.uint8).numpy())  # type: ignore[arg-type]


def moved(tensor: Tensor, device: torch.device) -> Tensor:
    """Returns the tensor on `device`. A copy to a GPU is made from pinned memory in the queue of the current stream:
    the host does not wait for it, and the tensor may change as soon as this returns, unless it is pinned itself."""
    if device.type != "cuda" or not tensor.is_cpu:
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)


def known_all(flags: Tensor) -> bool:
    """Returns whether all flags are known to be set without waiting for a GPU; always False for a tensor on one. Used
    to skip work that has no effect if all are set."""
    return flags.device.type == "cpu" and bool(flags.all())


def _as_dense(tensor: Tensor) -> Tensor:
    """Returns the tensor, or a contiguous copy where its elements overlap or leave gaps in memory."""
    return tensor if torch._debug_has_internal_overlap(tensor) == 0 and _has_no_gaps(tensor) else tensor.contiguous()


def _has_no_gaps(tensor: Tensor) -> bool:
    num_spanned = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.numel() == 0 or num_spanned == tensor.numel()


def distinct(tensor: Tensor) -> Tensor:
    """Returns a view of the tensor without the repetitions that `expand` makes. Writing to it changes all of them."""
    for dimension, (stride, size) in enumerate(zip(tensor.stride(), tensor.shape, strict=True)):
        if stride == 0 and size > 1:
            tensor = tensor.narrow(dimension, 0, 1)
    return tensor


def exact(tensor: Tensor) -> Tensor:
    """Returns the tensor in the most precise dtype of its kind."""
    return tensor.to(torch.complex128 if tensor.is_complex() else torch.float64)


def at_least_float32(tensor: Tensor) -> Tensor:
    """Returns the tensor in a dtype that holds sums of it over nodes: float32 for float16 and bfloat16, else its own,
    without a copy. A sum of two float16 models may be larger than the largest float16, 65,504."""
    return tensor.to(sum_dtype(tensor.dtype))


def sum_dtype(dtype: torch.dtype) -> torch.dtype:
    """Returns the dtype in which tensors of a dtype are summed: float32 for float16 and bfloat16, else their own."""
    return torch.promote_types(dtype, torch.float32)


def squared_norm(tensor: Tensor) -> Tensor:
    """Returns the sum of |x|^2 over the elements, float64 []. tensor: dense, or sparse with coalesced indices or
    not."""
    tensor = tensor if tensor.layout is torch.strided else tensor.coalesce().values()
    return exact(tensor).abs().square().sum()


def problem_of(module: nn.Module) -> str:
    """Returns why the parameters of a module cannot be stored as one flat tensor and its float buffers as another;
    empty if they can."""
    for what, named in (("parameters", module.named_parameters()), ("buffers", module.named_buffers())):
        for name, value in named:
            if is_lazy(value):
                owner = type(module.get_submodule(name.rpartition(".")[0])).__name__
                return f"{what} must have shapes when the module is made, {name} has none ({owner})"
    trainable = {name: p for name, p in module.named_parameters() if p.requires_grad}
    if not any(p.numel() for p in trainable.values()):
        return "module must have trainable parameters, got none"
    devices = {p.device for p in trainable.values()}
    kinds = {
        name: _dtype_name(p.dtype) + (f" on {p.device}" if len(devices) > 1 else "") for name, p in trainable.items()
    }
    first = {kind: name for name, kind in reversed(kinds.items())}
    if len(first) != 1:
        found = ", ".join(f"{first[kind]} of {kind}" for kind in sorted(first))
        return (f"trainable parameters must share one dtype and device, got {found}; convert the module (.float()), or "
                "let those of another one require no gradient")  # fmt: skip
    name, one = next(iter(trainable.items()))
    if not one.is_floating_point():
        return (f"parameters must be floating point, got {name} of {_dtype_name(one.dtype)}; hold real and imaginary "
                "part as one parameter (torch.view_as_real)")  # fmt: skip
    for name, buffer in module.named_buffers():
        if buffer.is_floating_point() and buffer.dtype != torch.float32:
            kind = _dtype_name(buffer.dtype)
            return f"float buffers must be torch.float32, got {name} of {kind}; register it in that"
    return ""


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def training_bytes(module: nn.Module) -> int:
    """Returns how many bytes the parameters of a module and their gradients take."""
    return sum(p.numel() * p.element_size() * (2 if p.requires_grad else 1) for p in module.parameters())


class FlatModel:
    """The trainable parameters of a module as views of one flat tensor, and its float buffers as views of another.

    `parameters` is [P], `buffers` is [B]; writing to them writes the module. Parameters with `requires_grad=False`, and
    buffers of integers or complex numbers, are not moved. Memory formats (channels_last) are kept; tied parameters are
    stored once. All trainable parameters must share one floating dtype and device.
    """

    def __init__(
        self, module: nn.Module, storage: Tensor | None = None, order: Sequence[int] | None = None
    ) -> None:
        """order: the order of the trainable parameters in `parameters`, as a permutation of their positions in
        `module.parameters()`; None keeps that order. It decides which parameters are adjacent (fragments), and nothing
        about the module.

        storage: [P] that holds the parameters from now on (a row of a stack, shared memory); allocated here when None.
        The module's values are copied into it.

        The last bits of a matrix product depend on the alignment of its operands. For the same bits as with storage
        allocated here, storage from outside must start at a multiple of 64 bytes.

        Raises ValueError for a module that has a problem (`problem_of`), for storage of another shape or dtype, or for
        an order that is no permutation.
        """
        self.module = module
        self._trainable = [p for p in module.parameters() if p.requires_grad]
        if order is not None:
            if sorted(order) != list(range(len(self._trainable))):
                raise ValueError(f"order must be a permutation of {len(self._trainable)} parameters, got {[*order]}")
            self._trainable = [self._trainable[place] for place in order]
        if problem := problem_of(module):
            raise ValueError(problem)
        self.dtype, self.device = self._trainable[0].dtype, self._trainable[0].device
        self.num_parameters = sum(p.numel() for p in self._trainable)
        for p in self._trainable:
            p.data = _as_dense(p.data)
        if storage is None:
            storage = torch.empty(self.num_parameters, dtype=self.dtype, device=self.device)
        self._views: dict[int, list[Tensor]] = {}
        """By address of a storage: views of it, one per parameter. Kept for the current storage and the previous
        one."""
        self.parameters = self._bind_parameters(storage, copy=True)
        self.buffers = self._flatten_buffers()

    def values(self) -> Tensor:
        """Returns a copy [P + B] of the parameters, then the float buffers, at least in float32: buffers of half models
        are often float32, and may be larger than the largest float16."""
        parameters = at_least_float32(self.parameters.detach())
        return torch.cat([parameters, self.buffers.to(parameters.dtype)])

    @property
    def trainable(self) -> tuple[nn.Parameter, ...]:
        """The parameters in the order of `parameters`."""
        return tuple(self._trainable)

    @property
    def shapes(self) -> list[tuple[int, ...]]:
        """Shapes of the parameters in the order of `parameters`."""
        return [tuple(p.shape) for p in self._trainable]

    @property
    def named_shapes(self) -> list[tuple[str, tuple[int, ...]]]:
        """(name in the module, shape) of each parameter, in the order of `parameters`."""
        names = {id(p): name for name, p in self.module.named_parameters()}
        return [(names[id(p)], tuple(p.shape)) for p in self._trainable]

    def names_from(self, start: int) -> list[str]:
        """Returns the names in the module of the parameters that begin at `start` of the flat tensor or after it."""
        at, found = 0, set()
        for p in self._trainable:
            if at >= start and p.numel():
                found.add(id(p))
            at += p.numel()
        return [name for name, p in self.module.named_parameters(remove_duplicate=False) if id(p) in found]

    def _bind_parameters(self, storage: Tensor, copy: bool) -> Tensor:
        if storage.shape != (self.num_parameters,) or storage.dtype != self.dtype or not storage.is_contiguous():
            raise ValueError(
                f"storage must be contiguous [{self.num_parameters}] {self.dtype}, "
                f"got {list(storage.shape)} {storage.dtype}"
            )
        views = self._views.get(storage.data_ptr())
        if views is None:
            views = self._parameter_views(storage)
        for p, view in zip(self._trainable, views, strict=True):
            if copy:
                view.copy_(p.data)
            p.data = view
        return storage

    def _parameter_views(self, storage: Tensor) -> list[Tensor]:
        """Returns a view of the storage per parameter, cached: a model alternates between two slots, and creating the
        views of many parameters anew would take time in every round."""
        views, offset = [], storage.storage_offset()
        for p in self._trainable:
            views.append(storage.as_strided(p.shape, p.stride(), offset))
            offset += p.numel()
        while len(self._views) > 1:
            del self._views[next(iter(self._views))]
        self._views[storage.data_ptr()] = views
        return views

    def rebind(self, storage: Tensor) -> None:
        """Makes the parameters views of another storage [P], which must already have their values. Copies nothing.
        Raises ValueError for another shape or dtype."""
        self.parameters = self._bind_parameters(storage, copy=False)

    def _flatten_buffers(self) -> Tensor:
        floats = [b for b in self.module.buffers() if b.dtype.is_floating_point]
        flat = torch.empty(sum(b.numel() for b in floats), dtype=torch.float32, device=self.device)
        offset = 0
        for b in floats:
            view = flat[offset : offset + b.numel()].view(b.shape)
            view.copy_(b)
            b.data = view
            offset += b.numel()
        return flat

    def gradients(self) -> Tensor:
        """Returns a copy [P] of the gradients in the order of `parameters`; zero where a parameter has none."""
        flat = torch.zeros_like(self.parameters)
        offset = 0
        for p in self._trainable:
            if p.grad is not None:
                flat[offset : offset + p.numel()].as_strided(p.shape, p.stride()).copy_(p.grad)
            offset += p.numel()
        return flat

    def set_gradients(self, flat: Tensor) -> None:
        """Makes the gradients views of `flat` [P], in the order of `parameters`. Raises ValueError for another shape or
        dtype."""
        if flat.shape != self.parameters.shape or flat.dtype != self.dtype or not flat.is_contiguous():
            raise ValueError(
                f"flat must be contiguous [{self.num_parameters}] {self.dtype}, got {list(flat.shape)} {flat.dtype}"
            )
        offset = 0
        for p in self._trainable:
            p.grad = flat[offset : offset + p.numel()].as_strided(p.shape, p.stride())
            offset += p.numel()


def keep_freed_memory() -> bool:
    """Makes glibc keep and reuse the freed memory of this process instead of returning it to the system. Returns
    whether that was possible.

    By default every large block (a gradient, an activation) is mapped anew in each step, and the kernel clears its
    pages again. Measured on one thread: a step of GN-LeNet at batch 8 takes 2.9 instead of 3.9 ms, one of a 25 M
    parameter MLP 38 instead of 68 ms. The process keeps its peak memory between steps (290 instead of 200 MB beyond the
    imports for that MLP, 7 MB more for GN-LeNet). Call it once per process, before the model is created.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):  # not glibc
        return False
    trim_threshold, mmap_max = -1, -4  # M_TRIM_THRESHOLD, M_MMAP_MAX of malloc.h
    return bool(mallopt(trim_threshold, 1 << 30) and mallopt(mmap_max, 0))
