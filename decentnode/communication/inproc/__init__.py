"""The in-process transport: each node's end (transport.py), and the state that all nodes of the process share
(hub.py)."""

from decentnode.communication.inproc.hub import Hub
from decentnode.communication.inproc.transport import Inproc, InprocConfig, InprocExchange

__all__ = ["Hub", "Inproc", "InprocConfig", "InprocExchange"]
