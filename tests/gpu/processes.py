"""Runs nodes in separate processes on one GPU, as a run does: CUDA IPC cannot map memory of the same process."""

from __future__ import annotations

import multiprocessing
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing as mp

from decentnode.communication.hybrid.transport import Hybrid
from decentnode.communication.parts import BindPlan, TransportParts
from tests.communication.contract import flat_schema

Work = Callable[[Hybrid, torch.device], Any]
HANGS_SECONDS = 400.0 if "PRETENDED_CUDA" in os.environ else 90.0
"""Time after which processes count as hung. A real GPU is fast, and lent for minutes; a pretended one is slow."""
METHOD = "forkserver"
"""The server loads torch once and uses no GPU. Sixteen processes by "spawn" would each load torch for seconds."""


def _run_node(
    uid: int, n: int, elements: int, folder: str, work: Work, results: Any, environment: dict[str, str]
) -> None:
    os.environ.update(environment)  # the fork server has the environment of its own start
    device = torch.device("cuda", 0)
    torch.cuda.set_device(device)
    node = Hybrid(Hybrid.Config.model_validate({"name": "hybrid"}), TransportParts(
        uid=uid, machine_of=dict.fromkeys(range(n), 0), schemas=flat_schema(elements), digest="d",
        bind=BindPlan(Path(folder)), device=device,
    ))  # fmt: skip
    node.bind()
    node.set_peers({u: (f"ipc://{folder}/{u}c", f"ipc://{folder}/{u}b") for u in range(n)})
    try:
        node.start(120)
        results.put((uid, work(node, device)))
        node.barrier("done", 120)
    finally:
        node.close()


def on_one_gpu(n: int, elements: int, work: Work) -> dict[int, Any]:
    """Returns uid -> work(node, device), which runs in n processes at once. Raises the error of the first process that
    fails, and AssertionError after HANGS_SECONDS; all processes are killed then."""
    with tempfile.TemporaryDirectory(prefix="dn") as folder:
        multiprocessing.get_context(METHOD).set_forkserver_preload([__name__])
        results: Any = mp.get_context(METHOD).SimpleQueue()
        arguments = n, elements, folder, work, results, dict(os.environ)
        context = mp.start_processes(_run_node, arguments, nprocs=n, join=False, start_method=METHOD)
        assert context is not None
        by_uid: dict[int, Any] = {}

        def receive_results() -> None:
            while not results.empty():
                uid, value = results.get()
                by_uid[uid] = value

        deadline = time.monotonic() + HANGS_SECONDS
        try:
            while not context.join(0.1):  # raises when one fails
                receive_results()
                assert time.monotonic() < deadline, f"after {HANGS_SECONDS:g} s there are results of {sorted(by_uid)}"
        finally:
            for process in context.processes:
                process.kill()
        receive_results()
        return by_uid
