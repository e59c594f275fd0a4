"""All nodes of a run in one process: what each is given (transport.py), and what they have in common (hub.py)."""

from decentnode.communication.inproc.hub import Hub
from decentnode.communication.inproc.transport import Inproc, InprocConfig, InprocExchange

__all__ = ["Hub", "Inproc", "InprocConfig", "InprocExchange"]
