"""The path of payloads between the members of a clique over torch.distributed: gloo between CPUs, NCCL between GPUs."""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping
from itertools import combinations
from pathlib import Path as File

import torch.distributed as dist

from decentnode.communication.base import AveragingGroup, Exchange
from decentnode.communication.parts import ExchangeKey
from decentnode.communication.path import Path, PathContext, Sent, grouped
from decentnode.communication.receive.exchange import InboxExchange
from decentnode.communication.torch_distributed.batched_p2p import BatchedPath
from decentnode.communication.torch_distributed.clique_path import CliquePath, NodeSide
from decentnode.communication.torch_distributed.communicator import (
    Communicator,
    GlooCommunicator,
    NcclCommunicator,
    describe_gpu,
    exchange_descriptions,
    refusal,
)
from decentnode.communication.torch_distributed.config import TorchKeys
from decentnode.communication.torch_distributed.gloo import GlooClique, connect, file_store, listen, own_address
from decentnode.communication.torch_distributed.group_collective import CollectiveKind, SumExchange, kind_of
from decentnode.communication.torch_distributed.tagged_p2p import TaggedPath
from decentnode.errors import AssemblyError
from decentnode.payload import Payload
from decentnode.tensors import is_own_fault

logger = logging.getLogger(__name__)


class TorchDistributedPath(Path):
    """One communicator for this node's clique. Nodes without a clique still take part in `open`."""

    def __init__(self, context: PathContext) -> None:
        super().__init__(context)
        assert isinstance(context.config, TorchKeys), "this path needs a transport with cliques"
        self._config: TorchKeys = context.config
        self.clique: CliquePath | None = None
        """What moves the payloads, once the members have met."""
        self._store: object = None
        """On the first node of a clique, the store at which it met: NCCL's threads may read it as long as they live."""

    # -- opening ----------------------------------------------------------------------------------------------

    def open(self, peers: frozenset[int], timeout_seconds: float) -> frozenset[int]:
        """The members of every clique meet in a file or, if that is not possible, at a store that the lowest uid opens
        on a free port; one mean carries all port numbers."""
        context = self.context
        members = context.routing.joined(context.routing.clique_of(context.uid))
        first, port = members[0] if members else -1, 0
        if context.uid in members:
            host, via = self._store_host(members)
            if context.uid == first and self._store_file(members) is None:
                self._store = server = listen(via, timeout_seconds)
                port = server.port
        ports = context.gather("cliques/stores", port, timeout_seconds)
        reached: frozenset[int] = frozenset()
        if context.uid in members:
            others = tuple(uid for uid in members if uid != context.uid)
            try:
                with context.state.waits_for(others):
                    self.clique = self._join(host, ports[first], members, via, timeout_seconds)
            except RuntimeError as error:
                if is_own_fault(error):
                    raise
                raise AssemblyError(
                    f"node {context.uid} could not join the communicator of nodes {', '.join(map(str, members))} at "
                    f"{host}:{ports[first]}: {error}", [context.uid],
                ) from error
            reached = peers & self.clique.peers
            context.leases.unacked_peers.append(self.clique.peers_in_flight)
        context.barrier("cliques/joined", timeout_seconds)
        return reached

    def _join(self, host: str, port: int, members: tuple[int, ...], via: str, timeout_seconds: float) -> CliquePath:
        """Blocks until all members have joined, and returns the clique's path. Raises RuntimeError, AssemblyError."""
        context = self.context
        file = self._store_file(members)
        if file is not None:
            store = file_store(file, len(members), timeout_seconds)
        else:
            store = connect(host, port, f"{context.run_id.hex()}/{self._generation_name()}", timeout_seconds)
        node = NodeSide(context.inbox, context.state, context.counters, self._config.timeout_seconds, context.lease_of)
        nccl = self._takes_nccl(store, members)
        logger.info("clique of nodes %s by %s", members, "nccl" if nccl else "gloo")
        if not nccl and not self._config.batched:
            return TaggedPath(GlooClique(store, context.uid, members, via, timeout_seconds), node,
                              pinned=context.device.type == "cuda")  # fmt: skip
        found: Communicator
        if nccl:
            found = NcclCommunicator(store, context.uid, members, context.device, timeout_seconds)
        else:
            found = GlooCommunicator(store, context.uid, members, via, timeout_seconds)
        return BatchedPath(found, node, start_seconds=timeout_seconds)

    def _takes_nccl(self, store: dist.Store, members: tuple[int, ...]) -> bool:
        """Blocks, and returns whether the clique uses NCCL, the same on every member. Raises AssemblyError if nccl is
        required and not possible."""
        if not self._may_take_nccl(members):
            return False
        wanted, context = self._config.backend, self.context
        problem = refusal(exchange_descriptions(store, context.uid, members, describe_gpu(context.device)))
        if problem and wanted == "nccl":
            raise AssemblyError(f"clique of nodes {', '.join(map(str, members))}: {problem}; use backend: auto",
                                list(members))  # fmt: skip
        if problem:
            logger.warning("clique of nodes %s by gloo, through host memory: %s", members, problem)
        return not problem

    def _may_take_nccl(self, members: tuple[int, ...]) -> bool:
        wanted = self._config.backend
        return wanted == "nccl" or (wanted == "auto" and set(members) <= self.context.routing.gpu.keys())

    def _store_file(self, members: tuple[int, ...]) -> File | None:
        """Returns the file in which the members of a clique on one host meet, the same on every member. Returns None
        for other cliques, and if NCCL's threads may read the store after the file is removed."""
        folder, machine_of = self.context.folder, self.context.machine_of
        if folder is None or self._may_take_nccl(members) or len({machine_of[uid] for uid in members}) > 1:
            return None
        return folder / f"clique-{members[0]}-{self._generation_name()}"

    def _generation_name(self) -> str:
        number, origin = self.context.generation
        return f"{number}-{origin.hex()}"

    def _store_host(self, members: tuple[int, ...]) -> tuple[str, str]:
        """Returns (host of the clique's store, address of this node's interface)."""
        context = self.context
        far = [uid for uid in members if context.machine_of[uid] != context.machine_of[context.uid]]
        if not far:
            return "127.0.0.1", "127.0.0.1"
        other = members[0] if members[0] in far else far[0]
        host = context.host_of(other)
        via = own_address(host)
        if other == members[0]:
            return host, via
        return via, via

    # -- rounds -----------------------------------------------------------------------------------------------

    def send(self, key: ExchangeKey, outgoing: Mapping[int, Payload], sources: Collection[int]) -> Sent:
        assert self.clique is not None
        groups = grouped({uid: outgoing[uid] for uid in sorted(outgoing)})
        return Sent(dropped=self.clique.begin(key, groups, sorted(sources)))

    def collective(
        self, key: ExchangeKey, group: AveragingGroup, outgoing: Mapping[int, Payload], expected: tuple[int, ...]
    ) -> Exchange | None:
        """Makes one call of the whole clique, if the group is the whole clique and every edge of it takes this path.
        Payloads that have to be checked one by one are not summed."""
        assert self.clique is not None
        kind = self._collective_kind(group, outgoing, key[1])
        if kind is None:
            return None
        self.clique.begin_collective(kind, key, group, outgoing)
        if kind != "all_gather":
            return SumExchange(self.context.inbox, key, expected)
        return InboxExchange(self.context.inbox, key, expected, frozenset(outgoing))

    def _collective_kind(
        self, group: AveragingGroup, outgoing: Mapping[int, Payload], phase: int
    ) -> CollectiveKind | None:
        assert self.clique is not None
        members, context = group.members, self.context
        if not self._config.use_collectives or set(members) != {*self.clique.peers, context.uid}:
            return None
        if any(context.routing.path(a, b) != "collective" for a, b in combinations(members, 2)):
            return None
        if group.own is not None and context.inbox.state.reject_non_finite:
            return None
        return kind_of(group, outgoing, context.schemas[phase], self.clique.scatters)

    # -- closing ----------------------------------------------------------------------------------------------

    def close(self, broken: bool) -> None:
        """broken: aborts, which may take seconds. Otherwise waits until everything has been sent, for a bounded
        time."""
        clique, self.clique, self._store = self.clique, None, None
        if clique is None:
            return
        if broken:
            clique.leave(clean=False)
        else:
            clique.close()
