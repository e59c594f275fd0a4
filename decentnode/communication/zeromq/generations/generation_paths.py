"""The paths of one generation of members: which path every edge takes, and how they are opened and closed together."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from decentnode import clock
from decentnode.communication import PATHS
from decentnode.communication.path import Path, PathContext, Paths
from decentnode.communication.receive.staging import Leases, staging_of
from decentnode.communication.routing import Routing
from decentnode.communication.shared_memory.model_slots import ModelSlots
from decentnode.communication.shared_memory.path import SharedMemoryPath
from decentnode.communication.torch_distributed.communicator import gpu_number
from decentnode.communication.zeromq.chunk_path import ChunkPath
from decentnode.communication.zeromq.generations.tree_collectives import TreeCollectives
from decentnode.communication.zeromq.protocol.link_state import CONTROL, ONE_FRAME_BYTES
from decentnode.communication.zeromq.run_parts import RunParts
from decentnode.config.component import load_class
from decentnode.errors import PeerFault
from decentnode.mapping.hosts import host_of
from decentnode.wire.messages import Message, Slot


@dataclasses.dataclass(frozen=True)
class GenerationParts:
    """The routing, paths and model slots of one generation, created when all paths are open and replaced as a whole."""

    routing: Routing
    paths: Paths
    model_slots: ModelSlots


class GenerationPaths:
    """The paths of one generation, from before they are open until they are closed. Used by the training thread, except
    for `take`."""

    def __init__(self, run: RunParts, collectives: TreeCollectives) -> None:
        self._run, self._collectives = run, collectives
        self._paths_by_class: dict[type[Path], Path] = {}
        """Path class -> path. Already set while paths are being opened, because doorbells may arrive by then."""

    def open(self, partners: frozenset[int] | None, timeout_seconds: float) -> GenerationParts:
        """Determines which path every edge takes, and opens the paths that any edge of the run may take: a node without
        such an edge still takes part in opening them.

        A blocking collective call: all members have to make it. partners: the nodes that this node ever exchanges
        payloads with; None: all.
        """
        run = self._run
        routing = self.routing(timeout_seconds)
        taken = {uid: routing.path(run.uid, uid) for uid in run.session.members if uid != run.uid}
        peers = {name: frozenset(uid for uid, path in taken.items() if path == name) for name in routing.names()}
        used = set(taken.values())
        if not used.isdisjoint(("zeromq", "shared_memory", "collective")):
            self._allocate_pinned("zeromq" in used)
        leases = Leases()
        leases.request_acks = run.driver.request_acks
        leases.unacked_peers.append(run.driver.unacked_peers)
        classes: dict[type[Path], list[str]] = {}
        for name in peers:
            classes.setdefault(load_class(name, PATHS, "path"), []).append(name)

        def lease_of(tensor: Tensor) -> object:
            # a short tensor is copied, which takes less time than waiting for its receivers
            return model_slots.lease(tensor) if tensor.nbytes > ONE_FRAME_BYTES else None

        context = self._context(routing, partners, leases, lease_of)
        self._paths_by_class = {made: made(context) for made in classes}
        made_paths = self._paths_by_class.values()
        owner = next((path for path in made_paths if type(path).model_slots is not Path.model_slots), None)
        model_slots = ModelSlots(run.schemas[0], leases, owner, run.state, run.counters)
        wanted = {names[0]: frozenset().union(*(peers[name] for name in names)) for names in classes.values()}
        opened, reached = {}, {}
        for made, (first, *_) in classes.items():
            opened[first] = self._paths_by_class[made]
            reached[first] = opened[first].open(wanted[first], timeout_seconds)
        self._allocate_pinned_without_ipc(peers, partners)
        paths = Paths(opened, wanted, reached, ChunkPath(context, run.sender))
        return GenerationParts(routing, paths, model_slots)

    def routing(self, timeout_seconds: float) -> Routing:
        """Returns the config's routing, restricted to the members of the generation. If it depends on the GPUs of the
        nodes, these are gathered first, which blocks."""
        run = self._run
        routing = run.config.routing(run.machine_of)
        members = set(run.session.members)
        cliques = tuple(tuple(uid for uid in clique if uid in members) for clique in routing.cliques)
        together = frozenset[int]() if run.process is None else frozenset(run.process.uids)
        has_faults = None if run.faults is None else run.faults.affects_models
        routing = dataclasses.replace(routing, cliques=cliques, together=together, has_faults=has_faults)
        if run.config.looks_for_gpus(routing):
            found = self._gather("cliques/gpus", gpu_number(run.inbox.device), timeout_seconds)
            routing = dataclasses.replace(routing, gpu={uid: gpu for uid, gpu in enumerate(found) if gpu})
        return routing

    def _context(
        self, routing: Routing, partners: frozenset[int] | None, leases: Leases, lease_of: Callable[[Tensor], object]
    ) -> PathContext:
        def send(uid: int, kind: type[Message], *values: object) -> None:
            header = run.maker.header(kind, *values)
            control = run.driver.links.sender.control_header
            run.driver.call(lambda: control(uid, header, clock.now(), purpose="protocol"))

        run, session = self._run, self._run.session
        return PathContext(
            uid=run.uid, machine_of=run.machine_of, config=run.config,
            schemas=run.schemas, routing=routing, partners=partners, run_id=session.run, generation=session.name,
            folder=run.folder, inbox=run.inbox, state=run.state, counters=run.counters, leases=leases,
            lease_of=lease_of, barrier=self._collectives.barrier, gather=self._gather,
            host_of=lambda uid: host_of(run.addresses.others[uid][CONTROL]), send=send, admit=session.admit,
            refuse=run.driver.links.refuse, process=run.process,
        )  # fmt: skip

    def _gather(self, key: str, value: int, timeout_seconds: float) -> list[int]:
        """Returns a small integer of every node, indexed by uid. A blocking collective call; the integers are computed
        with one mean over a vector with one entry per node."""
        values = torch.zeros(len(self._run.machine_of), dtype=torch.float64)
        values[self._run.uid] = value
        mean, contributors = self._collectives.mean(key, values, closing=True).wait(timeout_seconds)
        return [round(each) for each in (mean * contributors).tolist()]

    def take(self, message: Slot) -> None:
        """Passes an admitted doorbell that arrived over ZeroMQ to the shared memory path. Called by the I/O thread.
        Raises PeerFault if there is no such payload."""
        memory = self._paths_by_class.get(SharedMemoryPath)
        if not isinstance(memory, SharedMemoryPath):
            raise PeerFault("no_board", f"of {message.source}")
        memory.take(message)

    def close(self, broken: bool, leaving_chunks: bool) -> None:
        """Closes the paths whose `Path.leaves_chunks` equals `leaving_chunks`: those that leave some neighbors to the
        chunk path, or those that do not. Idempotent."""
        for path in self._paths_by_class.values():
            if path.leaves_chunks == leaving_chunks:
                path.close(broken)

    def _allocate_pinned_without_ipc(
        self, peers: Mapping[str, frozenset[int]], partners: frozenset[int] | None
    ) -> None:
        """Allocates pinned memory if GPU memory cannot be shared with some neighbors on the same GPU, to which chunks
        are sent instead. Some virtual machines and sandboxes do not allow CUDA IPC."""
        path = self._paths_by_class.get(SharedMemoryPath)
        near = peers.get("cuda_ipc", frozenset())
        near = near if partners is None else near & partners
        if isinstance(path, SharedMemoryPath) and not all(uid in path.readers and path.receives(uid) for uid in near):
            self._allocate_pinned(outwards=not near <= path.readers)

    def _allocate_pinned(self, outwards: bool) -> None:
        """Allocates the pinned slots for copies between a GPU and host memory: before round 0, or before the first
        round of the generation that needs them. outwards: also those for sending."""
        run = self._run
        if run.sender.staging is None:
            run.sender.staging = staging_of(run.inbox.device)
        if run.sender.staging is None:
            return
        run.inbox.state.placement.upload = run.sender.staging.upload
        if outwards:
            run.sender.staging.take([spec for each in run.schemas for spec in each.tensors.values()])
