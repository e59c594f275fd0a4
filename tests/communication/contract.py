"""Makes and connects nodes of every transport for tests: threads of this process, or stepped nodes for inproc."""

from __future__ import annotations

import contextlib
import os
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor

from decentnode.communication.base import Communication
from decentnode.communication.hybrid.transport import Collective, Hybrid
from decentnode.communication.inproc import Hub, Inproc
from decentnode.communication.parts import BindPlan, Schema, TransportParts
from decentnode.communication.zeromq.config import ZeroMQConfig
from decentnode.communication.zeromq.sockets.security import load_keyring, write_keys
from decentnode.communication.zeromq.transport import ZeroMQ
from decentnode.errors import EnvironmentFault
from decentnode.payload import Payload, TensorSpec
from decentnode.wire.generation import Limits

BATCHED = "batched"
"""gloo with operations matched only by their order, as in NCCL: a silent node blocks its clique, so some tests cannot
use it."""
TRANSPORTS = ("inproc", "shared_memory", "ipc", "tcp", "tcp+curve", "tcp+aes-gcm", "collective", "hybrid", "own")
NETWORKED = TRANSPORTS[1:]


def make_nodes(
    transport: str, n: int, schemas: tuple[Schema, ...], folder: Path, digests: Sequence[str] = (),
    device: torch.device | None = None, limits: Limits | None = None, **options: object,
) -> list[ZeroMQ]:
    """Returns n nodes that are not bound yet.

    transport: with "tcp+BULK" the nodes have keys and bulk_security BULK. "hybrid": nodes 0 and 1 are a gloo clique, 1
    and 2 use ZeroMQ, all other pairs shared memory. "own": every edge takes a path that is not part of the package
    (unix_path.py). digests: by node, the digest of its config. limits: for nodes with generations of members. options:
    of the transport's config.
    """
    base, _, bulk = transport.partition("+")
    keys = folder / "keys"
    if bulk:
        write_keys(keys, range(n))
        options = {"keys": keys, "bulk_security": bulk, **options}
    name = base if base in ("shared_memory", "collective", "hybrid") else "hybrid" if base == "own" else "zeromq"
    transport_class = {"collective": Collective, "hybrid": Hybrid, "own": Hybrid}.get(base, ZeroMQ)
    if base == BATCHED:
        name, transport_class, options = "collective", Collective, {"backend": "gloo", "batched": True, **options}
    if base == "hybrid":
        edges = [{"nodes": [0, 1], "by": "collective"}, {"nodes": [1, 2], "by": "zeromq"}]
        options = {"cliques": [[0, 1]][: n - 1], "edges": edges[: n - 1], **options}
    if base == "own" and n > 1:
        own = "tests.communication.unix_path:UnixSocketPath"
        options = {"edges": [{"nodes": list(range(n)), "by": own}], **options}
    config = transport_class.Config.model_validate({"name": name, **options})
    assert isinstance(config, ZeroMQConfig)
    plan = BindPlan(None if base == "tcp" else folder)
    return [
        transport_class(config, TransportParts(
            uid=u, machine_of=dict.fromkeys(range(n), 0), schemas=schemas, digest=digests[u] if digests else "d",
            bind=plan, device=device, limits=limits,
        ), load_keyring(keys, u, n) if bulk else None)
        for u in range(n)
    ]  # fmt: skip


def flat_schema(elements: int, dtype: torch.dtype = torch.float32) -> tuple[Schema, ...]:
    """Returns the schema of payloads with one tensor `x` of this size, which is mixed slice by slice."""
    return (Schema(elements, {"x": TensorSpec(dtype, elements)}, True),)


def folder_prefix() -> str:
    """Returns the prefix of the names of the folders and the shared memory of `open_nodes`, which differs by
    process."""
    return f"dn{os.getpid()}-"


@contextlib.contextmanager
def open_nodes(
    transport: str,
    n: int,
    schemas: tuple[Schema, ...],
    *,
    digests: Sequence[str] = (),
    start: bool = True,
    device: torch.device | None = None,
    limits: Limits | None = None,
    **options: object,
) -> Iterator[list[Communication]]:
    """Yields n started nodes (not started if not `start`), and closes them at the end."""
    with tempfile.TemporaryDirectory(prefix=folder_prefix()) as folder:
        if transport == "inproc":
            hub = Hub(n)
            nodes: list[Communication] = [
                Inproc(Inproc.Config(name="inproc"), uid=u, hub=hub, schemas=schemas) for u in range(n)
            ]
        else:
            nodes = list(make_nodes(transport, n, schemas, Path(folder), digests, device, limits, **options))
        with connected(nodes, start):
            yield nodes


@contextlib.contextmanager
def connected(nodes: Sequence[Communication], start: bool = True) -> Iterator[None]:
    """Binds nodes, tells each the addresses of the others and, if `start`, starts them; closes them at the end."""
    addresses = {node.uid: bound for node in nodes if (bound := node.bind()) is not None}
    for node in nodes:
        node.set_peers(addresses)
    try:
        if start:
            run_on_all(nodes, lambda node: node.start(60))
        yield
    finally:
        run_on_all(nodes, lambda node: node.close())


def check_cannot_bind(plan: BindPlan, reason: str, *, machine: int = 0) -> None:
    """Checks that a single node on `machine` cannot bind as planned, and raises EnvironmentFault matching `reason`."""
    node = ZeroMQ(ZeroMQConfig(), TransportParts(
        uid=0, machine_of={0: machine}, schemas=flat_schema(4), digest="d", bind=plan,
    ))
    try:
        with pytest.raises(EnvironmentFault, match=reason):
            node.bind()
    finally:
        node.close()


def run_on_all(
    nodes: Sequence[Communication], work: Callable[[Communication], object], limit_seconds: float = 200
) -> dict[int, object]:
    """Calls work(node) for all nodes, concurrently if they are networked, in the given order otherwise. Returns the
    results by uid. Raises the first error."""
    results: dict[int, object] = {}
    errors: list[BaseException] = []

    def run(node: Communication) -> None:
        try:
            results[node.uid] = work(node)
        except BaseException as error:
            errors.append(error)

    if nodes and isinstance(nodes[0], Inproc):
        for node in nodes:
            run(node)
    else:
        threads = [threading.Thread(target=run, args=(node,)) for node in nodes]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(limit_seconds)
            assert not thread.is_alive(), "a node hangs"
    if errors:
        raise errors[0]
    return results


def ring(n: int) -> dict[int, tuple[int, ...]]:
    """Returns the neighbors of each node on a ring, in ascending order."""
    return {u: tuple(sorted({(u + 1) % n, (u - 1) % n} - {u})) for u in range(n)}


def random_values(elements: int, dtype: torch.dtype, seed: int) -> Tensor:
    """Returns a tensor of normal values, or of integers from -100 to 99 for integer dtypes."""
    generator = torch.Generator().manual_seed(seed)
    if dtype.is_floating_point:
        return torch.randn(elements, generator=generator).to(dtype)
    return torch.randint(-100, 100, (elements,), generator=generator).to(dtype)


def gossip(
    nodes: Sequence[Communication],
    elements: int,
    dtype: torch.dtype,
    rounds: int,
    before_round: Callable[[int, int], None] = lambda uid, round: None,
) -> list[Tensor]:
    """Makes rounds of x <- (x + sum of neighbors) / 3 on a ring, or of the plain sum for integers. Returns the final x
    of every node.

    before_round(uid, round): called on the node's thread before it sends. `rounds` may be 0.
    """
    n = len(nodes)
    models = [random_values(elements, dtype, u) for u in range(n)]
    exchanges = {}

    def begin(node: Communication, r: int) -> None:
        before_round(node.uid, r)
        payload = Payload({"x": models[node.uid]})
        neighbors = ring(n)[node.uid]
        exchanges[node.uid] = node.exchange(r, dict.fromkeys(neighbors, payload), neighbors)

    def finish(node: Communication) -> None:
        x = models[node.uid]
        for arrival in exchanges[node.uid].arrivals(60):
            part = x[arrival.start : arrival.stop]
            for uid in sorted(arrival.received):
                part.add_(arrival.received[uid].tensors["x"])
            if dtype.is_floating_point:
                part.div_(3)
        assert not exchanges[node.uid].missing

    if isinstance(nodes[0], Inproc):
        for r in range(rounds):
            for node in nodes:
                begin(node, r)
            for node in nodes:
                finish(node)
    else:

        def run(node: Communication) -> None:
            for r in range(rounds):
                begin(node, r)
                finish(node)

        run_on_all(nodes, run)
    return models
