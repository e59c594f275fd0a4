"""Decentralized training in one's own script, under torchrun: wrap the model, or wrap the optimizer.

The sharing rules and graphs are those of the nodes (sharing/, graph/), and so are the pulling steps of EASGD and LSGD
(sharing/forces.py). From communication/ exchanges use the shared memory (segments, their counters, and how they tell
whether their owner still lives: communication/shared_memory/segment.py), and the ZeroMQ sockets of membership/ and
transports/sockets.py use the keys of zeromq/. Everything else goes through the process group that torchrun's script has
initialized, because that group exists already and knows the ranks and their devices. Nodes have no process group; they
use sessions and chunks, which ranks in lockstep do not need. So the two schedulers differ: nodes exchange one payload
per round; ranks exchange every bucket in every step, inside the backward pass, and end together. Where ranks may die
and join (membership/), they agree on the membership with the protocol of the nodes (wire/membership/), and make a
process group for each generation.
"""

from decentnode.parallel.comm_optimizer import CommOptimizer
from decentnode.parallel.ddp import DecentralizedDataParallel
from decentnode.parallel.initialize import initialize_dist
from decentnode.parallel.membership.job import job_address
from decentnode.parallel.methods.base import DistOptimizer

__all__ = ["CommOptimizer", "DecentralizedDataParallel", "DistOptimizer", "initialize_dist", "job_address"]
