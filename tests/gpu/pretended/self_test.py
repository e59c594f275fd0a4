"""python -m tests.gpu.pretended.self_test: checks that the pretended GPU refuses and counts what a real GPU does."""

from __future__ import annotations

import contextlib
import copy
import os
import traceback
from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist


@contextlib.contextmanager
def raises(error: type[Exception], part: str) -> Iterator[None]:
    """Checks that the block raises this error, with `part` in its message."""
    try:
        yield
    except error as raised:
        assert part in str(raised), raised
    else:
        raise AssertionError(f"not refused: {part}")


def check_refusals(x: torch.Tensor) -> None:
    with raises(RuntimeError, "same device"):
        x + torch.ones(5)
    with raises(RuntimeError, "same device"):
        torch.cat([x, torch.ones(2)])
    with raises(TypeError, "convert cuda:0"):
        x.numpy()
    with raises(RuntimeError, "'cuda' device type for generator"):
        torch.randn(3, device="cuda", generator=torch.Generator())
    with raises(RuntimeError, "invalid device ordinal"):
        torch.cuda.set_device(1)
    assert float((x + torch.tensor(1.0)).sum()) == 15.0  # a scalar may come from the host
    assert x[torch.tensor([True, False, True, False, False])].numel() == 2  # and so may indices


def check_counted_waits(x: torch.Tensor) -> None:
    host_waits: Callable[[], dict[str, int]] = torch.cuda.host_waits  # type: ignore[attr-defined]
    host_waits()
    y = torch.ones(5, pin_memory=True).to("cuda", non_blocking=True).mul_(2).add(x)
    torch.topk(y, 2)
    torch.ones(5).to("cuda", non_blocking=True)  # CUDA has copied pageable memory when this returns
    assert host_waits() == {}
    torch.ones(5).to("cuda")
    assert host_waits() == {"copy from the host": 1}
    y[0].item(), y.cpu(), torch.nonzero(y)
    y.to("cpu", non_blocking=True)  # torch allocates pinned memory for the result
    assert host_waits() == {"aten::_local_scalar_dense": 1, "copy to the host": 1, "aten::nonzero": 1}
    at, mask, lengths = torch.zeros(1, dtype=torch.int64, device="cuda"), y > 0, torch.full((5,), 1, device="cuda")
    y[at], y.index_fill_(0, at, 1.0), mask.nonzero_static(size=2), y.repeat_interleave(lengths, output_size=5)
    y[at] = y[at]
    y[mask] = 1.0
    torch.segment_reduce(y, "sum", lengths=lengths, unsafe=True)
    assert host_waits() == {}
    y[at] = 1.0  # the number comes from the host, and its memory is not pinned
    y[mask], y.repeat_interleave(lengths), torch.segment_reduce(y, "sum", lengths=lengths)
    assert host_waits() == {"aten::_index_put_impl_": 1, "aten::nonzero": 1, "aten::repeat_interleave": 1,
                            "aten::segment_reduce": 1}  # fmt: skip


def check_copies_arrive_late() -> None:
    """A copy that was not waited for has not arrived in host memory yet, and has not read host memory yet."""
    x, host = torch.arange(5.0, device="cuda"), torch.empty(5, pin_memory=True)
    host.copy_(x, non_blocking=True)
    event = torch.cuda.Event()
    event.record()
    x.zero_()  # behind the copy, on the same stream
    assert host.tolist() != [0, 1, 2, 3, 4]
    event.synchronize()
    assert host.tolist() == [0, 1, 2, 3, 4]
    y = host.to("cuda", non_blocking=True)
    event.record()
    while not event.query():
        pass
    host.fill_(9)
    assert y.tolist() == [0, 1, 2, 3, 4]
    z = host.to("cuda", non_blocking=True)
    host.zero_()  # too early
    assert z.tolist() == [0] * 5


def check_communication(x: torch.Tensor) -> None:
    """gloo sums GPU tensors but does not send them; NCCL takes only GPU tensors, and lacks a few types."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    dist.all_reduce(x)
    with raises(RuntimeError, "Bad address"):
        dist.group.WORLD._get_backend(x.device).send([x], 0, 0)  # type: ignore[union-attr]
    dist.destroy_process_group()
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1, device_id=x.device)
    dist.all_reduce(x)
    with raises(RuntimeError, "device type cpu"):
        dist.all_reduce(x.cpu())
    with raises(RuntimeError, "Input tensor data type is not supported"):
        dist.all_reduce(x.short())
    dist.destroy_process_group()


def run_in_fork(target: Callable[[], None]) -> None:
    pid = os.fork()
    if not pid:
        try:
            target()
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    assert os.waitpid(pid, 0)[1] == 0


def use_gpu() -> None:
    assert not torch.cuda._is_in_bad_fork() and torch.ones(2, device="cuda").is_cuda and torch.cuda.is_initialized()


def fail_to_use_gpu() -> None:
    assert torch.cuda._is_in_bad_fork() and not torch.cuda.is_available() and torch.cuda.device_count() > 0
    for use in (lambda: torch.ones(2, device="cuda"), torch.cuda.get_device_name):
        with raises(RuntimeError, "Cannot re-initialize CUDA in forked subprocess"):
            use()


def check_forks() -> None:
    """Forks of a process cannot use the GPU once the process has asked whether CUDA is available; counting the GPUs
    does no harm."""
    assert torch.cuda.device_count() > 0
    run_in_fork(use_gpu)
    assert torch.cuda.is_available() and not torch.cuda.is_initialized()
    run_in_fork(fail_to_use_gpu)


def check_training() -> None:
    generator = torch.Generator("cuda").manual_seed(3)
    assert generator.device.type == "cuda" and torch.randperm(9, device="cuda", generator=generator).is_cuda
    host_state = torch.get_rng_state()
    torch.randn(3, device="cuda")
    assert torch.equal(torch.get_rng_state(), host_state)  # the GPU has a generator of its own
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Conv2d(1, 4, 3), torch.nn.BatchNorm2d(4), torch.nn.Flatten(), torch.nn.Linear(36, 2)
    )
    inputs, results = torch.randn(3, 1, 5, 5), []
    for device in ("cpu", "cuda"):
        own = copy.deepcopy(model).to(device)
        loss = torch.nn.functional.cross_entropy(own(inputs.to(device)), torch.tensor([0, 1, 0], device=device))
        loss.backward()
        tensors = [*(p.grad for p in own.parameters() if p.grad is not None), *own.buffers()]
        results.append((loss.item(), [tensor.cpu() for tensor in tensors]))
    torch.testing.assert_close(*results)  # not the same bits: convolutions have other kernels
    weight = torch.randn(2, 3, 4, 5, device="cuda").contiguous(memory_format=torch.channels_last)
    assert torch.zeros_like(weight).mul_(2).stride() == weight.stride()


def check_ipc(x: torch.Tensor) -> None:
    """A tensor that is mapped by its IPC handle shares the memory of the original."""
    handle = x.untyped_storage()._share_cuda_()
    mapped = torch.UntypedStorage._new_shared_cuda(0, *handle[1:])
    x.fill_(7)
    assert torch.empty(0, device="cuda").set_(mapped, 0, (5,), (1,)).tolist() == [7.0] * 5


if __name__ == "__main__":
    check_forks()
    check_refusals(torch.arange(5.0, device="cuda"))
    check_counted_waits(torch.arange(5.0, device="cuda"))
    check_copies_arrive_late()
    check_communication(torch.arange(5.0, device="cuda"))
    check_training()
    check_ipc(torch.arange(5.0, device="cuda"))
