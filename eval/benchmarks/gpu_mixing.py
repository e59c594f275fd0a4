"""Cases of gpu.py about memory bandwidth: mixing models of this process, and those of other processes on the GPU."""

from __future__ import annotations

import importlib.util
import os
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from gpu_profiles import Event, Profile, summarize, trace_of
from gpu_rows import Row, failure, milliseconds, on_gpu, with_failures

ARRIVALS = (1, 2, 4, 8)
KERNEL = "_weighted_sum"
"""Its name in decentnode/mixing/kernel.py."""
SUSTAINED_BYTES, MAX_WORKS = 1 << 30, 16
"""Bytes that a timed sequence of works must move, and the most works in it. Of the data written last, up to half of a
cache of 50 MB has not reached memory when the clock stops: a quarter of what a copy of 25 M elements in bfloat16 moves,
but almost nothing of what mixing eight arrivals reads."""


def mixing(tiny: bool) -> Iterator[Row]:
    """x <- w x + sum_k w_k r_k with d arrivals, beside copies of such models in the same process."""
    import torch

    gpu = on_gpu()
    yield from _check_launch() if gpu else _run_interpreted()
    for elements in (100_000,) if tiny else (25_000_000, 1_000_000_000):
        for dtype in (torch.float32, torch.bfloat16):
            what = f"{elements / 1e6:g} M elements, {str(dtype).removeprefix('torch.')}"
            yield from with_failures("mixing", what, _mixing_rows(elements, dtype, what, gpu))


def _mixing_rows(elements: int, dtype: Any, what: str, gpu: bool) -> Iterator[Row]:
    from decentnode.mixing import passes

    size = dtype.itemsize * elements
    copy = sustained(lambda: _copy_of(elements, dtype), 2 * size, gpu)
    for arrivals in ARRIVALS:
        moved = size * passes(arrivals, fused=True)
        speed = sustained(lambda: _mix_of(elements, dtype, arrivals), moved, gpu)  # noqa: B023
        yield Row("mixing", f"{arrivals} arrivals, {what}", speed, "GB/s", copy, ">= .85")


def sustained(make: Callable[[], Callable[[], object]], moved: int, gpu: bool) -> float:
    """Returns GB/s of works made by make(), each with memory of its own, as many in sequence as together move
    SUSTAINED_BYTES. moved: bytes that one of them reads and writes."""
    works = [make() for _ in range(min(MAX_WORKS, -(-SUSTAINED_BYTES // moved)) if gpu else 1)]

    def in_turn() -> None:
        for work in works:
            work()

    return 1e-6 * len(works) * moved / milliseconds(in_turn, gpu, queued=True)


def _model(elements: int, dtype: Any) -> Any:
    import torch

    return torch.randn(elements, dtype=dtype, device="cuda" if on_gpu() else "cpu")


def _copy_of(elements: int, dtype: Any) -> Callable[[], object]:
    x, y = _model(elements, dtype), _model(elements, dtype)
    return lambda: y.copy_(x)


def _mix_of(elements: int, dtype: Any, arrivals: int) -> Callable[[], None]:
    from decentnode.mixing import mix_into

    x, weight = _model(elements, dtype), 1 / (arrivals + 1)
    received = [(_model(elements, dtype), weight) for _ in range(arrivals)]

    def mix() -> None:
        mix_into(x, x, weight, received)

    return mix


def mix_named(what: str) -> Callable[[], None] | None:
    """Returns the work of a row of `mixing`; None if the row is not about mixed models."""
    import torch

    found = re.fullmatch(r"(\d+) arrivals, (\S+) M elements, (\w+)", what)
    if found is None:
        return None
    return _mix_of(round(1e6 * float(found[2])), getattr(torch, found[3]), int(found[1]))


def profile_mixing(whats: Sequence[str], _tiny: bool) -> Iterator[Profile]:
    for what in whats:
        work = mix_named(what)
        if work is not None:
            yield summarize(trace_of(work), "mixing", what)
        del work  # frees its memory before the next one allocates as much


def _check_launch() -> Iterator[Row]:
    """Yields a failure if the kernel cannot be launched here: then the figures of mixing are those of several
    passes."""
    import torch

    try:
        from decentnode.mixing.kernel import launch_once

        launch_once(torch.device("cuda", torch.cuda.current_device()))
        torch.cuda.synchronize()
    except Exception as error:  # models are mixed without the kernel
        yield failure("mixing", "the Triton kernel is launched", error)


def _run_interpreted() -> Iterator[Row]:
    """Runs the Triton kernel with its interpreter, for machines without a GPU."""
    what = "Triton kernel by its interpreter, largest error"
    if importlib.util.find_spec("triton") is None:
        yield Row("mixing", what, None, note="absent: Triton is not installed")
        return
    os.environ["TRITON_INTERPRET"] = "1"  # read when the kernel's module is imported
    import torch

    from decentnode.mixing.kernel import launch

    model, arrived, out = torch.randn(5000), torch.randn(5000), torch.empty(5000)
    launch(out, model, 0.5, [(arrived, 0.25)])
    yield Row("mixing", what, float((out - (0.5 * model + 0.25 * arrived)).abs().max()), "", asked="<= 1e-6")


def ipc(tiny: bool) -> Iterator[Row]:
    """Mixing directly from the memory of other processes on the same GPU, beside a copy."""
    if not on_gpu():
        yield Row("ipc", "mixing from the neighbors' memory", None, note="needs a GPU")
        return
    from tests.gpu.processes import on_one_gpu

    for n, what in _process_counts(tiny):
        try:
            copy, mixed = on_one_gpu(n, _elements(tiny), _mix_speed)[0]
        except Exception as error:  # the next one may still run
            yield failure("ipc", what, error)
        else:
            yield Row("ipc", what, mixed, "GB/s", copy, ">= .80")


def _process_counts(tiny: bool) -> list[tuple[int, str]]:
    return [(n, f"mixing from the memory of {n - 1} neighbors") for n in ((2,) if tiny else (2, 4))]


def _elements(tiny: bool) -> int:
    return 100_000 if tiny else 64_000_000


def profile_ipc(whats: Sequence[str], tiny: bool) -> Iterator[Profile]:
    from tests.gpu.processes import on_one_gpu

    for n, what in _process_counts(tiny):
        if what in whats:
            yield summarize(on_one_gpu(n, _elements(tiny), _mix_trace)[0], "ipc", what)


def _mix_speed(node: Any, device: Any) -> tuple[float, float]:
    """Returns (GB/s of a copy, GB/s of mixing all neighbors); only node 0 measures."""
    import torch

    from decentnode.mixing import passes

    found = _map_neighbors(node, device)
    if found is None:
        return 0.0, 0.0
    x, mix, others = found
    y = torch.empty_like(x)
    copy = 8e-6 * x.numel() / milliseconds(lambda: y.copy_(x), True, queued=True)
    moved = 4e-6 * x.numel() * passes(others, True)
    return copy, moved / milliseconds(mix, True, queued=True)


def _mix_trace(node: Any, device: Any) -> list[Event]:
    found = _map_neighbors(node, device)
    return [] if found is None else trace_of(found[1])


def _map_neighbors(node: Any, device: Any) -> tuple[Any, Callable[[], None], int] | None:
    """Exchanges a model among all nodes. Returns on node 0: (its model, a function that mixes it with the models of all
    others where these are in their processes' memory, the number of others); None on the other nodes."""
    import torch

    from decentnode.communication.shared_memory.path import SharedMemoryPath
    from decentnode.mixing import mix_into
    from decentnode.payload import Payload

    others = tuple(uid for uid in range(len(node._run.machine_of)) if uid != node.uid)
    x = torch.randn(node.schemas[0].elements, device=device)
    for arrival in node.exchange(0, dict.fromkeys(others, Payload({"x": x})), others).arrivals(60):
        assert not arrival.missing
    node.barrier("written", 60)  # from here on only node 0 uses the GPU
    if node.uid:
        return None
    mapped = node.parts.paths.of(SharedMemoryPath)._buffer_readers
    if unread := set(others) - mapped.keys():
        raise RuntimeError(f"no CUDA IPC here: the memory of {len(unread)} of {len(others)} neighbors cannot be mapped")
    slots = [mapped[uid].slots[0][1][0] for uid in others]  # the memory of the first payload, whole
    weighted = [(tensor, 1 / (1 + len(others))) for tensor in slots]

    def mix() -> None:
        mix_into(x, x, 0.5, weighted)

    return x, mix, len(others)
