"""Every edge by the way that suits it: shared memory, torch.distributed inside a clique, ZeroMQ for the rest.

What keeps several paths in one run from waiting for each other (docs/explanation/transports.rst, "Rules against
deadlock"):

H1  Control, barriers and means are ZeroMQ's alone; `CliquePath` has no way to say any of them.
H2  Everything that decides a round is known before its first send: `exchange` takes neighbors and sources as given,
    and from there on the training thread waits only with deadlines (`Inbox.wait`, `CliquePath._may_send`).
H3  The I/O thread never calls torch.distributed or CUDA: communicators have threads of their own.
H4  Membership is that of the generation; nothing joins or leaves a communicator between two rounds, and a node that
    departs names the first round without it.
H5  Publish buffers and receive buffers get their sizes from the schema. Publish buffers exist before round 0, and so do
    a communicator's buffers on a GPU; those on CPUs come with the first rounds and stay, because taking memory waits
    for nobody there.
H6  Barriers over all nodes only where nothing flies: at the start, before round 0.
H7  The paths of a node do not wait for each other: payloads leave by ZeroMQ and shared memory before the communicator
    is asked, and arrivals of all paths meet in the inbox, in ascending order of uid.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Mapping
from itertools import combinations
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.distributed as dist

from decentnode.communication.base import AveragingGroup, CommunicationConfig, Exchange
from decentnode.communication.hybrid.config import HybridConfig, TorchConfig
from decentnode.communication.receive.exchange import InboxExchange
from decentnode.communication.routing import Routing
from decentnode.communication.shared_memory.cuda_ipc import CudaMemory
from decentnode.communication.shared_memory.device_slots import DeviceMemory
from decentnode.communication.torch_distributed.batched_p2p import BatchedPath
from decentnode.communication.torch_distributed.clique_path import CliquePath
from decentnode.communication.torch_distributed.communicator import (
    Communicator,
    GlooCommunicator,
    NcclCommunicator,
    describe_gpu,
    exchange_descriptions,
    gpu_number,
    refusal,
)
from decentnode.communication.torch_distributed.gloo import GlooClique, connect, in_file, listen, own_address
from decentnode.communication.torch_distributed.group_collective import CollectiveKind, SumExchange, kind_of
from decentnode.communication.torch_distributed.tagged_p2p import TaggedPath
from decentnode.communication.zeromq.io_thread import CONTROL
from decentnode.communication.zeromq.sender import grouped
from decentnode.communication.zeromq.transport import ZeroMQ
from decentnode.config import component
from decentnode.errors import AssemblyError
from decentnode.mapping.hosts import host_of
from decentnode.payload import Payload

logger = logging.getLogger(__name__)


class Hybrid(ZeroMQ):
    """ZeroMQ and shared memory, and one communicator of torch.distributed per clique; `edges` says which path is whose.

    The model's bits do not depend on the paths: every one delivers the same slices, added in ascending order of uid.
    """

    Config: ClassVar[type[component.Config]] = HybridConfig

    def __init__(self, config: CommunicationConfig, **parts: Any) -> None:
        """parts: ZeroMQ's. Raises ValueError for cliques or edges that contradict the mapping."""
        super().__init__(config, **parts)
        self._device = self._inbox.device
        self._path: CliquePath | None = None
        self._store: object = None
        """On the first node of a clique the store where it met: NCCL's threads may look there as long as they live."""
        self._inside: frozenset[int] = frozenset()
        """Nodes that are reached through the communicator."""

    def _routing_rule(self) -> Routing:
        assert isinstance(self.config, HybridConfig)
        rule = self.config.rule(super()._routing_rule())
        for problem in rule.problems():
            raise ValueError(problem)
        return rule

    # -- the start --------------------------------------------------------------------------------------------

    def _open_paths(self, timeout_seconds: float) -> None:
        assert isinstance(self.config, TorchConfig)
        together = self.routing.memory and len(set(self._machine_of.values())) < len(self._machine_of)
        if together or (self.routing.cliques and self.config.backend != "gloo"):
            self._look_for_gpus(timeout_seconds)
        super()._open_paths(timeout_seconds)
        if self.routing.used("collective"):
            self._meet(timeout_seconds)

    def _look_for_gpus(self, timeout_seconds: float) -> None:
        """Blocking: every node tells all others on which GPU its model lies, so that the rule may look at it."""
        told = torch.zeros(len(self._machine_of), dtype=torch.float64)
        told[self.uid] = gpu_number(self._device)
        mean, contributors = self.mean("cliques/gpus", told, closing=True).wait(timeout_seconds)
        found = (mean * contributors).round().tolist()
        self.routing = dataclasses.replace(self.routing, gpu={uid: int(gpu) for uid, gpu in enumerate(found) if gpu})

    def _device_memory(self, device: torch.device | None) -> DeviceMemory | None:
        return CudaMemory(device) if device is not None and device.type == "cuda" else None

    def _meet(self, timeout_seconds: float) -> None:
        """Blocking: the lowest uid of every clique opens a store on a free port, where a file would not do; all numbers
        travel in one mean."""
        members = self.routing.joined(self.routing.clique_of(self.uid))
        told = torch.zeros(len(self._machine_of), dtype=torch.float64)
        first = members[0] if members else -1
        if self.uid in members:
            host, via = self._store_host(members)
            if self.uid == first and self._store_file(members) is None:
                self._store = server = listen(via, timeout_seconds)
                told[self.uid] = float(server.port)
        mean, contributors = self.mean("cliques/stores", told, closing=True).wait(timeout_seconds)
        if self.uid in members:
            port = round(float(mean[first]) * contributors)
            try:
                others = tuple(uid for uid in members if uid != self.uid)
                with self._status.waits_for(others):
                    self._path = self._join(host, port, members, via, timeout_seconds)
            except RuntimeError as error:
                raise AssemblyError(
                    f"node {self.uid} could not join the communicator of nodes {', '.join(map(str, members))} at "
                    f"{host}:{port}: {error}", [self.uid],
                ) from error
            peers = self._path.peers
            self._inside = frozenset(uid for uid in peers if self.routing.path(self.uid, uid) == "collective")
        self.barrier("cliques/joined", timeout_seconds)

    def _join(
        self, host: str, port: int, members: tuple[int, ...], via: str, timeout_seconds: float
    ) -> CliquePath:
        """Raises RuntimeError, AssemblyError."""
        assert isinstance(self.config, TorchConfig)
        file = self._store_file(members)
        if file is not None:
            store = in_file(file, len(members), timeout_seconds)
        else:
            store = connect(host, port, f"{self.run_id.hex()}/{self._generation_name()}", timeout_seconds)
        parts = (self._inbox, self._status, self.counters, self.config.timeout_seconds, self._sending.lease)
        nccl = self._takes_nccl(store, members)
        logger.info("clique of nodes %s by %s", members, "nccl" if nccl else "gloo")
        if not nccl and not self.config.batched:
            return TaggedPath(GlooClique(store, self.uid, members, via, timeout_seconds), *parts,
                              pinned=self._device.type == "cuda")  # fmt: skip
        found: Communicator
        if nccl:
            found = NcclCommunicator(store, self.uid, members, self._device, timeout_seconds)
        else:
            found = GlooCommunicator(store, self.uid, members, via, timeout_seconds)
        return BatchedPath(found, *parts, start_seconds=timeout_seconds)

    def _takes_nccl(self, store: dist.Store, members: tuple[int, ...]) -> bool:
        """Blocking, the same answer on every member. Raises AssemblyError where nccl is asked for and cannot be."""
        if not self._may_take_nccl(members):
            return False
        assert isinstance(self.config, TorchConfig)
        wanted = self.config.backend
        problem = refusal(exchange_descriptions(store, self.uid, members, describe_gpu(self._device)))
        if problem and wanted == "nccl":
            raise AssemblyError(f"clique of nodes {', '.join(map(str, members))}: {problem}", list(members))
        if problem:
            logger.warning("clique of nodes %s by gloo, through host memory: %s", members, problem)
        return not problem

    def _may_take_nccl(self, members: tuple[int, ...]) -> bool:
        assert isinstance(self.config, TorchConfig)
        wanted = self.config.backend
        return wanted == "nccl" or (wanted == "auto" and set(members) <= self.routing.gpu.keys())

    def _store_file(self, members: tuple[int, ...]) -> Path | None:
        """Where the members of a clique meet that are on one host, the same on every member. None for others, and
        where NCCL's threads may look into the store for longer than the file is there."""
        folder = self._plan.ipc_dir
        if folder is None or self._may_take_nccl(members) or len({self._machine_of[uid] for uid in members}) > 1:
            return None
        return folder / f"clique-{members[0]}-{self._generation_name()}"

    def _generation_name(self) -> str:
        return f"{self._session.generation}-{self._session.origin.hex()}"

    def _store_host(self, members: tuple[int, ...]) -> tuple[str, str]:
        """(host of the clique's store, address of the own interface)."""
        far = [uid for uid in members if self._machine_of[uid] != self._machine_of[self.uid]]
        if not far:
            return "127.0.0.1", "127.0.0.1"

        other = members[0] if members[0] in far else far[0]
        host = host_of(self._addresses[other][CONTROL])
        via = own_address(host)
        if other == members[0]:
            return host, via
        return via, via

    # -- rounds -----------------------------------------------------------------------------------------------

    def exchange(
        self, round: int, outgoing: Mapping[int, Payload], expected: tuple[int, ...], phase: int = 0,
        group: AveragingGroup | None = None,
    ) -> Exchange:
        path = self._path
        if path is None or self._status.regrouping:
            return super().exchange(round, outgoing, expected, phase)
        self._status.raise_if_failed()
        self._inbox.advance(round)
        for payload, _ in grouped(outgoing):
            self._sending.checked(payload, phase)
        kind = None if group is None else self._collective_kind(group, outgoing, phase)
        if group is not None and kind is not None:
            self.counters.sent(outgoing)
            path.begin_collective(kind, (round, phase), group, outgoing)
            if kind != "all_gather":
                return SumExchange(self._inbox, (round, phase), expected)
            return InboxExchange(self._inbox, round, phase, expected, frozenset(outgoing))
        inside = self._inside & outgoing.keys()
        outside = {uid: p for uid, p in outgoing.items() if uid not in inside}
        dropped = self._sending.send(round, outside, phase)
        sources = self._inside.intersection(expected)
        groups = grouped({uid: outgoing[uid] for uid in sorted(inside)})
        dropped |= path.begin((round, phase), groups, sorted(sources))
        self.counters.sent({uid: outgoing[uid] for uid in outgoing if uid not in dropped} if dropped else outgoing)
        return InboxExchange(self._inbox, round, phase, expected, frozenset(outgoing), dropped)

    def _collective_kind(
        self, group: AveragingGroup, outgoing: Mapping[int, Payload], phase: int
    ) -> CollectiveKind | None:
        """How an averaging group does this phase, by one rule: at once where it is a whole clique, each edge of which
        goes by its communicator. Payloads that are to be looked at one by one are no sums."""
        assert isinstance(self.config, TorchConfig) and self._path is not None
        members = group.members
        if not self.config.use_collectives or set(members) != {*self._path.peers, self.uid}:
            return None
        if any(self.routing.path(a, b) != "collective" for a, b in combinations(members, 2)):
            return None
        if group.own is not None and self.config.non_finite == "reject":
            return None
        return kind_of(group, outgoing, self.schemas[phase], self._path.scatters)

    def _next_generation(self) -> None:
        """Without `ReliableLinks.lock`: an abort may take seconds, in which the node answers whoever asks whether it
        lives."""
        path, self._path, self._store, self._inside = self._path, None, None, frozenset()
        if path is not None:
            path.leave(clean=False)
        super()._next_generation()

    def close(self) -> None:
        if not self._closed and self._path is not None:
            self._path.close()
            self._path = self._store = None
        super().close()
