"""Transports: how payloads move between nodes."""

COMMUNICATIONS: dict[str, str] = {
    "auto": "decentnode.communication.zeromq:ZeroMQ",
    "inproc": "decentnode.communication.inproc:Inproc",
    "zeromq": "decentnode.communication.zeromq:ZeroMQ",
}
