"""Decentralized training in one's own script, under torchrun."""

from decentnode.parallel.comm_optimizer import CommOptimizer
from decentnode.parallel.ddp import DecentralizedDataParallel
from decentnode.parallel.dist_optimizer import DistOptimizer
from decentnode.parallel.start import initialize_dist

__all__ = ["CommOptimizer", "DecentralizedDataParallel", "DistOptimizer", "initialize_dist"]
