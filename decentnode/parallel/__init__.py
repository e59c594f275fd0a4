"""Decentralized training in one's own script, under torchrun: wrap the model, or wrap the optimizer.

The sharing rules and graphs are those of the nodes (sharing/, graph/), and so are the forces of EASGD and LSGD
(sharing/forces.py). From communication/ comes shared memory alone: segments, their counters, who still lives
(communication/shared_memory/segment.py). All else that ranks send each other goes through the process group that
torchrun's script has joined, because it is there already, and knows the ranks and their devices; nodes have no such
group, but sessions and chunks, which ranks in lockstep do not need. So the two schedulers differ: nodes exchange a
payload per round, ranks exchange every bucket in every step, inside the backward pass, and end together. Where ranks
may die and come (membership/), they agree on it as nodes do (wire/membership/), and make a process group for each
generation.
"""

from decentnode.parallel.comm_optimizer import CommOptimizer
from decentnode.parallel.ddp import DecentralizedDataParallel
from decentnode.parallel.initialize import initialize_dist
from decentnode.parallel.membership.job import job_address
from decentnode.parallel.methods.base import DistOptimizer

__all__ = ["CommOptimizer", "DecentralizedDataParallel", "DistOptimizer", "initialize_dist", "job_address"]
