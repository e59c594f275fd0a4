"""Imported once by the fork server: what every node needs, so that forked nodes share its memory.

Nothing here may start a thread, run a tensor operation or touch a GPU: forks inherit only the calling thread.
"""

import gc
import importlib

MODULES = (
    "torch",
    "torch.nn.functional",
    "torch.optim",
    "torch._dynamo",  # every optimizer step imports it (torch.optim.optimizer)
    "torch.profiler",
    "networkx",
    "torch._dynamo",  # the first optimizer that a process makes imports it: half a second, once here
    "networkx",
    "numpy.random",
    "safetensors.torch",
    "yaml",
    "zmq",
    "msgpack",
    "decentnode.build",
    "decentnode.experiment",
    "decentnode.node.node",
    "decentnode.communication.inproc",
    "decentnode.communication.zeromq",
    "decentnode.data.digits",
    "decentnode.graph.families",
    "decentnode.graph.file",
    "decentnode.graph.schedules",
    "decentnode.mapping.linear",
    "decentnode.mapping.table",
    "decentnode.models.mlp",
    "decentnode.models.gn_lenet",
    "decentnode.sharing.full",
    "decentnode.training.supervised",
    "decentnode.launch.child",
    "decentnode.launch.in_process",
    "decentnode.launch.prepare",
)

for _module in MODULES:
    try:
        importlib.import_module(_module)
    except ImportError:  # a child that needs it reports it, with its node and log
        continue

gc.collect()
gc.freeze()
"""The collector of a child then leaves these objects, and so the shared pages they lie in, untouched."""
