"""The exchange and mixing of all nodes: by one sparse product, or each node by its own rule."""

from __future__ import annotations

from decentnode.simulate.engines.exchange.base import Exchange, Sent
from decentnode.simulate.engines.exchange.rows import RowExchange
from decentnode.simulate.engines.exchange.stacked import StackedExchange
from decentnode.simulate.engines.forward import Unsuitable
from decentnode.simulate.engines.population import Population

__all__ = ["Exchange", "RowExchange", "Sent", "StackedExchange", "make_exchange"]


def make_exchange(population: Population) -> tuple[Exchange, str]:
    """Returns the exchange for a run, and why it is not the stacked one; "" where it is. Raises Unsuitable."""
    node = population.experiment.node
    options = {"overlapped": node.schedule == "overlapped", "buffers": node.buffers == "average"}
    try:
        return StackedExchange(population, **options), ""
    except Unsuitable as reason:
        return RowExchange(population, **options), str(reason)
