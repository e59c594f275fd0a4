"""From a request to its experiment, in whichever process it runs."""

from __future__ import annotations

from decentnode.experiment import Experiment, load
from decentnode.launch.children.messages import Request


def load_request(request: Request, check: bool = True) -> Experiment:
    """Returns the experiment of a request. Raises as `load` does."""
    return load(request.config or None, request.overrides, request.environ, check, request.layers)
