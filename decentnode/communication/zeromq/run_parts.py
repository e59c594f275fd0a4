"""The parts of one node's networked transport that last for the whole run, and their construction."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

import torch
import zmq

from decentnode import entropy
from decentnode.communication.counters import Counters
from decentnode.communication.parts import LinkFaults, Schema, TransportParts
from decentnode.communication.receive.inbox import Inbox
from decentnode.communication.run_state import RunState
from decentnode.communication.shared_process import SharedProcess
from decentnode.communication.zeromq.config import ZeroMQConfig
from decentnode.communication.zeromq.protocol.link_state import MAX_PAYLOADS
from decentnode.communication.zeromq.protocol.message_maker import MessageMaker
from decentnode.communication.zeromq.protocol.sender import Sender
from decentnode.communication.zeromq.sockets.addresses import Addresses
from decentnode.communication.zeromq.sockets.connections import hold_in_frame
from decentnode.communication.zeromq.sockets.faulty_driver import FaultyDriver
from decentnode.communication.zeromq.sockets.link_driver import LinkDriver, LinkSizes
from decentnode.communication.zeromq.sockets.security import Keyring, Security
from decentnode.version import __version__
from decentnode.wire.session import Session


@dataclass(frozen=True)
class RunParts:
    """The parts of one node's transport that are the same in all generations of members."""

    uid: int
    config: ZeroMQConfig
    machine_of: Mapping[int, int]
    schemas: tuple[Schema, ...]
    folder: Path | None
    """Private folder for Unix sockets on this host."""
    addresses: Addresses
    session: Session
    driver: LinkDriver
    inbox: Inbox
    sender: Sender
    maker: MessageMaker
    state: RunState
    counters: Counters
    security: Security | None = None
    """None if the config is not `secure`."""
    process: SharedProcess | None = None
    """What this node shares with the other nodes of its process; None if it has a process of its own."""
    faults: LinkFaults | None = None
    """The faults to inject between nodes; None for none."""


def build_run_parts(config: ZeroMQConfig, parts: TransportParts, keyring: Keyring | None) -> RunParts:
    """Creates the parts of one node. Its sockets neither listen nor connect yet.

    keyring: the node's keys. Raises ValueError for cliques or edges that contradict the mapping, and if keys are given
    without a `secure` config or are missing with one.
    """
    if parts.faults is not None and parts.faults.damages and config.checksum == "auto":
        config = config.model_copy(update={"checksum": "xxh3"})  # also for messages within one host
    machine_of = dict(parts.machine_of)
    routing = config.routing(machine_of)
    for problem in chain(routing.unknown(), routing.problems()):
        raise ValueError(problem)
    if config.secure != (keyring is not None):
        raise ValueError("keyring must be given exactly when the config is secure")
    counters, state = Counters(), RunState()
    if parts.process is not None:
        state.process = parts.process
    addresses = Addresses(parts.uid, machine_of, parts.bind)
    software = f"decentnode {__version__}, torch {torch.__version__}, pyzmq {zmq.__version__}"
    run_id = parts.run_id or (entropy.draw(8) if parts.uid == 0 else None)
    session = Session(parts.uid, len(machine_of), parts.digest, run_id, software=software,
                      describe=addresses.describe, founders=parts.founders, sections=parts.sections)  # fmt: skip
    security = None if keyring is None else Security(keyring, config.bulk_security)
    sizes = LinkSizes.of(config.chunk_bytes, config.window_bytes)
    driver_arguments = session, counters, sizes, security, parts.process
    driver = LinkDriver(*driver_arguments) if parts.faults is None else FaultyDriver(*driver_arguments, parts.faults)
    links = driver.links.sender
    links.max_payloads = max(MAX_PAYLOADS, 2 * len(parts.schemas))  # all fragments of a round are sent at once
    maker = MessageMaker(session, config)
    inbox = Inbox(parts.schemas, config.chunk_bytes, state, counters, driver.consumed,
                  reject_non_finite=config.non_finite == "reject", device=parts.device)  # fmt: skip
    sender = Sender(links, driver, maker, inbox.plans, state, counters, timeout_seconds=config.timeout_seconds,
                    hold=hold_in_frame)  # fmt: skip
    return RunParts(
        uid=parts.uid, config=config, machine_of=machine_of, schemas=parts.schemas, folder=parts.bind.ipc_dir,
        addresses=addresses, session=session, driver=driver, inbox=inbox, sender=sender, maker=maker, state=state,
        counters=counters, security=security, process=parts.process,
        faults=parts.faults,
    )  # fmt: skip
