"""A case of gpu.py: how often a round makes the host wait for the GPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from gpu_profiles import Profile, summarize, trace_of
from gpu_rows import Row, on_gpu

CONFIG = str(Path(__file__).resolve().parents[2] / "configs" / "quickstart.yaml")
NODES = 4
WHAT = "waits of the host per node and round, "
WAITS = {"full": 1, "choco": 7, "topk": 7}
"""Rule -> expected waits: one for the loss, two to code indices, two for the indices of each of two neighbors
(docs/howto/gpus.rst)."""


def host(tiny: bool) -> Iterator[Row]:
    """Calls per node and round that make the host wait for the GPU, counted by torch's profiler."""
    from decentnode.build import step_all

    gpu = on_gpu()
    for rule in ("full",) if tiny else WAITS:
        counts = []
        step_all(_nodes(rule, 1, gpu))  # waits while libraries are loaded do not belong to a round
        for length in (4, 8):
            nodes = _nodes(rule, length, gpu)
            counts.append(_count_waits(lambda nodes=nodes: step_all(nodes), gpu))  # type: ignore[misc]
        what = WHAT + rule
        if not all(counts):
            yield Row("host", what, None, note="absent: torch's profiler sees no calls of CUDA here")
            continue
        # the difference of two lengths cancels start and closing evaluation
        yield Row("host", what, (counts[1] - counts[0]) / (4 * NODES), "", asked=f"<= {WAITS[rule]}",
                  note="" if gpu else "on the CPU: reads of scalars")  # fmt: skip


def _nodes(rule: str, rounds: int, gpu: bool) -> list[Any]:
    from decentnode.build import build_in_process
    from decentnode.experiment import load

    return build_in_process(load(CONFIG, [
        f"graph={{name: ring, nodes: {NODES}}}", f"mapping={{name: linear, nodes_per_machine: {NODES}, device: "
        f"{'cuda' if gpu else 'cpu'}}}", f"node.rounds={rounds}", "node.evaluate_every=0", f"sharing={rule}",
        "communication=inproc", "training.local_steps=1",
    ]))  # fmt: skip


def profile_host(whats: Sequence[str], _tiny: bool) -> Iterator[Profile]:
    """Profiles a run of 8 rounds, including start and closing evaluation: which lines wait."""
    from decentnode.build import step_all

    for what in whats:
        nodes = _nodes(what.removeprefix(WHAT), 8, on_gpu())
        trace = trace_of(lambda nodes=nodes: step_all(nodes), stacks=True, calls=1, warm=0)  # type: ignore[misc]
        yield summarize(trace, "host", f"{what}: {NODES} nodes, 8 rounds")


def _count_waits(work: Callable[[], object], gpu: bool) -> int:
    """Returns how often the host waits for the GPU in work(), including a final synchronization; 0 if nothing can count
    that. On the CPU: how often it reads a scalar."""
    import torch
    from torch.profiler import ProfilerActivity, profile, supported_activities

    pretended = getattr(torch.cuda, "host_waits", None)  # of tests/gpu/pretended, which the profiler does not see
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
