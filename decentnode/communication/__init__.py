"""Transports: how payloads move between nodes."""

COMMUNICATIONS: dict[str, str] = {
    "auto": "decentnode.communication.hybrid.transport:Hybrid",
    "collective": "decentnode.communication.hybrid.collective:Collective",
    "hybrid": "decentnode.communication.hybrid.transport:Hybrid",
    "inproc": "decentnode.communication.inproc:Inproc",
    "shared_memory": "decentnode.communication.zeromq.transport:ZeroMQ",
    "zeromq": "decentnode.communication.zeromq.transport:ZeroMQ",
}
