"""Nodes in processes of their own on one GPU, as a run has them; threads of one process cannot map their own memory."""

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
"""After which processes count as hung: a GPU is lent for minutes, a pretended one is slow."""
METHOD = "forkserver"
"""The server loads torch once, and uses no GPU. Sixteen nodes that began anew would each load it for seconds."""


def _node(
    uid: int, n: int, elements: int, folder: str, work: Work, results: Any, environment: dict[str, str]
) -> None:
    os.environ.update(environment)  # the server has that of its beginning
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
    """work(node, device) in n processes at once; their results by uid. Raises what a process died of, AssertionError
    after HANGS_SECONDS; no process is left then."""
    with tempfile.TemporaryDirectory(prefix="dn") as folder:
        multiprocessing.get_context(METHOD).set_forkserver_preload([__name__])
        results: Any = mp.get_context(METHOD).SimpleQueue()
        told = n, elements, folder, work, results, dict(os.environ)
        context = mp.start_processes(_node, told, nprocs=n, join=False, start_method=METHOD)
        assert context is not None
        found: dict[int, Any] = {}

        def take() -> None:
            while not results.empty():
                uid, value = results.get()
                found[uid] = value

        deadline = time.monotonic() + HANGS_SECONDS
        try:
            while not context.join(0.1):  # raises when one fails
                take()
                assert time.monotonic() < deadline, f"after {HANGS_SECONDS:g} s there are results of {sorted(found)}"
        finally:
            for process in context.processes:
                process.kill()
        take()
        return found
