"""Transports: how payloads move between nodes."""

COMMUNICATIONS: dict[str, str] = {
    "auto": "decentnode.communication.hybrid:Hybrid",
    "collective": "decentnode.communication.collective:Collective",
    "hybrid": "decentnode.communication.hybrid:Hybrid",
    "inproc": "decentnode.communication.inproc:Inproc",
    "shared_memory": "decentnode.communication.zeromq:ZeroMQ",
    "zeromq": "decentnode.communication.zeromq:ZeroMQ",
}
