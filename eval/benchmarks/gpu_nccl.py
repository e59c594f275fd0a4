"""Cases of gpu.py about NCCL: one rank with itself, two ranks on one GPU, and the costs of calls between GPUs."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from gpu_rows import CONFIGS, Row, failure, milliseconds, on_gpu, run_summary, with_failures


def nccl(tiny: bool) -> Iterator[Row]:
    """Runs NCCL with a world of one and with two ranks on one GPU; on the CPU two gloo nodes with NCCL's batched
    path."""
    import torch.distributed as dist

    if on_gpu() and dist.is_nccl_available():
        yield from with_failures("nccl", "to itself", _self_exchange(tiny))
        yield _two_ranks()
        yield from with_failures("nccl", "costs of calls between GPUs", _costs_of_calls(tiny))
        return
    with tempfile.TemporaryDirectory() as folder:
        overrides = ["graph={name: ring, nodes: 2}", "mapping.nodes_per_machine=2", "node.rounds=4",
                     "node.evaluate_every=0", "communication={name: collective, backend: gloo, batched: true}"]
        summary = run_summary(overrides, folder, str(CONFIGS / "quickstart.yaml"))
        yield Row("nccl", "rounds of two gloo nodes by the batched path", float(summary["rounds"]), "", asked="4")


def _two_ranks(seconds: float = 30) -> Row:
    """Returns a row that says whether NCCL allows two ranks on one GPU: before 2.30 it refuses them."""
    import torch.multiprocessing as mp

    what = "two ranks on one GPU, sum of their ones"
    with tempfile.TemporaryDirectory() as folder:
        context = mp.spawn(_one_of_two, (folder,), nprocs=2, join=False)
        assert context is not None
        until = time.monotonic() + seconds
        try:
            while not context.join(0.1):
                if time.monotonic() > until:
                    return Row("nccl", what, None, note=f"absent: nothing came of it in {seconds:g} s")
        except Exception as error:  # one of the ranks was refused
            why = [line for line in str(error).splitlines() if line.strip()][-1]
            return Row("nccl", what, None, note=f"absent: refused: {why[:200]}")
        finally:
            for process in context.processes:
                process.kill()
        return Row("nccl", what, float((Path(folder) / "sum").read_text()), "", asked="2")


def _one_of_two(rank: int, folder: str) -> None:
    from datetime import timedelta

    import torch
    import torch.distributed as dist

    torch.cuda.set_device(0)
    dist.init_process_group("nccl", init_method=f"file://{folder}/store", rank=rank, world_size=2,
                            timeout=timedelta(seconds=20))  # fmt: skip
    x = torch.ones(1000, device="cuda")
    dist.all_reduce(x)
    if rank == 0:
        (Path(folder) / "sum").write_text(str(float(x.mean())))


def _self_exchange(tiny: bool) -> Iterator[Row]:
    """all_reduce, and send and receive in one batch, in a world of one, beside a copy of the same tensor."""
    import torch
    import torch.distributed as dist

    from decentnode.parallel import initialize_dist

    initialize_dist()
    x = torch.randn(100_000 if tiny else 25_000_000, device="cuda")
    y, moved = torch.empty_like(x), 8e-6 * x.numel()
    copy = moved / milliseconds(lambda: y.copy_(x), True, queued=True)

    def exchange() -> None:
        for work in dist.batch_isend_irecv([dist.P2POp(dist.isend, x, 0), dist.P2POp(dist.irecv, y, 0)]):
            work.wait()

    for way, call in (("all_reduce", lambda: dist.all_reduce(x)), ("send and receive", exchange)):
        what = f"{4e-6 * x.numel():g} MB to itself, {way}"
        try:
            yield Row("nccl", what, moved / milliseconds(call, True, queued=True), "GB/s", copy)
        except RuntimeError as error:
            yield failure("nccl", what, error)
    few = x[:256]
    for peers in (1, 4):
        def batch(peers: int = peers) -> None:
            ops = [dist.P2POp(dist.isend, few, 0) for _ in range(peers)]
            ops += [dist.P2POp(dist.irecv, y[256 * k : 256 * (k + 1)], 0) for k in range(peers)]
            for work in dist.batch_isend_irecv(ops):
                work.wait()

        alone, whole = (1e3 * milliseconds(batch, True, queued=queued) for queued in (True, False))
        yield Row("nccl", f"a batch of {peers} x 1 KB to itself, on the GPU", alone, "us",
                  note=f"with the host's part: {whole:.0f} us")  # fmt: skip


def _costs_of_calls(tiny: bool) -> Iterator[Row]:
    """Fits the costs that a plan assumes for NCCL's operations (simulate.links.calls) between the GPUs of this
    machine."""
    import torch

    count = torch.cuda.device_count()
    what = "costs of calls between GPUs"
    if count < 2:
        yield Row("nccl", what, None, note="absent: needs two GPUs, as pytest -m multigpu does")
        return
    from calls import SMALL, fitted, measure

    from decentnode.simulate.cliques import COSTS

    rows = [(operation, d, seconds) for size in range(2, min(count, 8) + 1)
            for (operation, d, elements), seconds in measure(size, "nccl", 5 if tiny else 100).items()
            if elements == SMALL]  # fmt: skip
    taken = COSTS["nccl"]
    for name, found in zip(("call_seconds", "peer_seconds", "hop_seconds"), fitted(rows), strict=True):
        yield Row("nccl", f"simulate.links.calls.{name}", 1e6 * float(found), "us",
                  note=f"a plan takes {1e6 * getattr(taken, name):.3g} us where nothing is said")  # fmt: skip
