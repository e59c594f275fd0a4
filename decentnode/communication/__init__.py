"""Transports: how payloads move between nodes."""

COMMUNICATIONS: dict[str, str] = {
    "auto": "decentnode.communication.zeromq:ZeroMQ",
    "collective": "decentnode.communication.collective:Collective",
    "inproc": "decentnode.communication.inproc:Inproc",
    "shared_memory": "decentnode.communication.zeromq:ZeroMQ",
    "zeromq": "decentnode.communication.zeromq:ZeroMQ",
}
