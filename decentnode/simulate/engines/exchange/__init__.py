"""The exchange and mixing of all nodes: by one sparse matrix product, or by each node's own rule."""

from __future__ import annotations

from decentnode.simulate.engines.exchange.base import PopulationExchange, RoundTraffic
from decentnode.simulate.engines.exchange.rows import RowExchange
from decentnode.simulate.engines.exchange.stacked import StackedExchange
from decentnode.simulate.engines.forward import Unsuitable
from decentnode.simulate.engines.population import Population

__all__ = ["PopulationExchange", "RoundTraffic", "RowExchange", "StackedExchange", "make_exchange"]


def make_exchange(population: Population) -> tuple[PopulationExchange, str]:
    """Returns the exchange of a run, and the reason why it is not the stacked one, or "" if it is. Raises
    Unsuitable."""
    node = population.experiment.node
    options = {"overlapped": node.schedule == "overlapped", "buffers": node.buffers == "average"}
    try:
        return StackedExchange(population, **options), ""
    except Unsuitable as reason:
        return RowExchange(population, **options), str(reason)
