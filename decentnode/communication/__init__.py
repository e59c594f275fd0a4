"""Transports: how payloads move between nodes."""

COMMUNICATIONS: dict[str, str] = {
    "auto": "decentnode.communication.hybrid.transport:Hybrid",
    "collective": "decentnode.communication.hybrid.transport:Collective",
    "hybrid": "decentnode.communication.hybrid.transport:Hybrid",
    "inproc": "decentnode.communication.inproc.transport:Inproc",
    "shared_memory": "decentnode.communication.zeromq.transport:ZeroMQ",
    "zeromq": "decentnode.communication.zeromq.transport:ZeroMQ",
}

CONFIGS: dict[str, str] = {
    "auto": "decentnode.communication.hybrid.config:HybridConfig",
    "collective": "decentnode.communication.hybrid.config:CollectiveConfig",
    "hybrid": "decentnode.communication.hybrid.config:HybridConfig",
    "shared_memory": "decentnode.communication.zeromq.config:ZeroMQConfig",
    "zeromq": "decentnode.communication.zeromq.config:ZeroMQConfig",
}
"""The Configs of transports: commands that check an experiment need no transport, whose import takes 0.1 s."""

PATHS: dict[str, str] = {
    "collective": "decentnode.communication.torch_distributed.path:TorchDistributedPath",
    "same_process": "decentnode.communication.same_process:SameProcessPath",
    "cuda_ipc": "decentnode.communication.shared_memory.path:SharedMemoryPath",
    "shared_memory": "decentnode.communication.shared_memory.path:SharedMemoryPath",
}
"""Paths that edges of the networked transport may take, beside its own sockets (`path.Path`)."""
