"""Loads the experiment of a request, in any process."""

from __future__ import annotations

from decentnode.experiment import Experiment, load
from decentnode.graph.optima import take_optima
from decentnode.launch.children.messages import Request


def load_request(request: Request, check: bool = True) -> Experiment:
    """Returns the experiment of a request. Raises as `load` does. With `one_round` the check is made on the experiment
    with all its rounds, because with one round, events planned for later rounds would be refused."""
    take_optima(request.optima)
    file, environ, layers = request.config or None, request.environ, request.layers
    experiment = load(file, request.overrides, environ, check, layers, connected=not request.simulate,
                 found=request.found)
    if not request.one_round:
        return experiment
    found = load(file, [*request.overrides, "node.rounds=1"], environ, False, layers, found=request.found)
    found.take_warnings(experiment)
    return found
