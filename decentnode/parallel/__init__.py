"""Decentralized training in one's own script, under torchrun."""

from decentnode.parallel.comm_optimizer import CommOptimizer
from decentnode.parallel.ddp import DecentralizedDataParallel
from decentnode.parallel.methods.base import DistOptimizer
from decentnode.parallel.process_group import initialize_dist

__all__ = ["CommOptimizer", "DecentralizedDataParallel", "DistOptimizer", "initialize_dist"]
