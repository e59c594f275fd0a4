"""A case of gpu.py: how often a round makes the host wait for the GPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

from gpu_rows import Row, on_gpu

CONFIG = str(Path(__file__).resolve().parents[2] / "configs" / "quickstart.yaml")
WAITS = {"full": 1, "choco": 7, "topk": 7}
"""What is counted of, and expected: one wait for the loss, two to code indices, two for those of each of two neighbors
(docs/howto/gpus.rst)."""


def host(tiny: bool) -> Iterator[Row]:
    """Calls per node and round that make the host wait for the GPU, counted by torch's profiler."""
    from decentnode.build import build_in_process, step_all
    from decentnode.experiment import load

    gpu = on_gpu()
    for rule in ("full",) if tiny else WAITS:
        counts = []
        for length in (4, 8):
            experiment = load(CONFIG, [
                "graph={name: ring, nodes: 4}", f"mapping={{name: linear, nodes_per_machine: 4, device: "
                f"{'cuda' if gpu else 'cpu'}}}", f"node.rounds={length}", "node.evaluate_every=0", f"sharing={rule}",
                "communication=inproc", "training.local_steps=1",
            ])  # fmt: skip
            nodes = build_in_process(experiment)
            counts.append(_waits(lambda nodes=nodes: step_all(nodes), gpu))  # type: ignore[misc]
        what = f"waits of the host per node and round, {rule}"
        if not all(counts):
            yield Row("host", what, None, note="absent: torch's profiler sees no calls of CUDA here")
            continue
        # the difference of two lengths leaves out start and closing evaluation
        yield Row("host", what, (counts[1] - counts[0]) / (4 * 4), "", asked=f"<= {WAITS[rule]}",
                  note="" if gpu else "on the CPU: reads of scalars")  # fmt: skip


def _waits(work: Callable[[], object], gpu: bool) -> int:
    """How often the host waits for the GPU in work(), a synchronization of it all among them; 0 where nothing counts
    that. On the CPU: how often it reads a scalar."""
    import torch
    from torch.profiler import ProfilerActivity, profile, supported_activities

    pretended = getattr(torch.cuda, "host_waits", None)  # of tests/gpu/pretended, for which there is no profiler
    if pretended is not None:
        pretended()
        work()
        torch.cuda.synchronize()
        return sum(pretended().values())
    if gpu and ProfilerActivity.CUDA not in supported_activities():
        return 0
    with profile(activities=[ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if gpu else [])]) as seen:
        work()
        if gpu:
            torch.cuda.synchronize()
    waits = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize", "cudaMemcpy")
    names = waits if gpu else ("aten::_local_scalar_dense",)
    return sum(each.count for each in seen.key_averages() if each.key in names)
