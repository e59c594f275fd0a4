"""Decentralized training in one's own script, under torchrun."""

from decentnode.parallel.comm_optimizer import CommOptimizer, DistOptimizer
from decentnode.parallel.ddp import DecentralizedDataParallel
from decentnode.parallel.start import initialize_dist

__all__ = ["CommOptimizer", "DecentralizedDataParallel", "DistOptimizer", "initialize_dist"]
