"""Imports modules in the fork server once for all nodes, so that forked nodes share the memory.

Nothing here may start a thread, run a tensor operation or touch a GPU: forks inherit only the calling thread.
"""

import contextlib
import gc
import importlib
import json
import os
from importlib.resources import files

from decentnode.communication import COMMUNICATIONS
from decentnode.compression import CODECS
from decentnode.data import DATASETS
from decentnode.data.partition import PARTITIONS
from decentnode.graph import GRAPHS, WEIGHTS
from decentnode.launch.children.forkserver import COMPILES, EXPERIMENT, PRIVATE
from decentnode.launch.children.own_modules import local_modules
from decentnode.mapping import MAPPINGS
from decentnode.mixing import cpu
from decentnode.models import MODELS
from decentnode.sharing import SHARINGS
from decentnode.tasks import TASKS
from decentnode.training import TRAININGS

gc.disable()
TABLES = (COMMUNICATIONS, CODECS, DATASETS, PARTITIONS, GRAPHS, WEIGHTS, MAPPINGS, MODELS, SHARINGS, TASKS, TRAININGS)


def components() -> list[str]:
    """Returns the modules of all built-in components. Any other module is imported by each node itself, into its own
    memory."""
    return sorted({target.partition(":")[0] for table in TABLES for target in table.values()})


MODULES = (
    "torch",
    "torch.nn.functional",
    "torch.optim",
    "numpy.ma",
    "numpy.random",
    "safetensors.torch",
    "yaml",
    "zmq",
    "msgpack",
    "decentnode.build",
    "decentnode.launch.nodes.node_process",
    "decentnode.launch.one_process.in_process",
    "decentnode.launch.nodes.several_nodes",
    "decentnode.launch.supervising.prepare",
    *components(),
    "torch.profiler",
    "networkx",
)

COMPILER = ("torch._dynamo", "torch._inductor.compile_fx") if os.environ.pop(COMPILES, "") else ()
"""Measured with eight nodes on two busy cores: with these modules preloaded, all nodes are connected after 18 s and use
1.1 GB; if each node imports the first one itself, 42 s and 1.7 GB. Neither module starts a thread or touches a GPU
(torch 2.13), as long as there is no pool of compile processes."""
if COMPILER:
    with contextlib.suppress(ImportError):
        import torch._inductor.config as _inductor

        _inductor.compile_threads = 1

PRIVACY = ("torch._dynamo", "opacus.accountants") if os.environ.pop(PRIVATE, "") else ()
"""torch.func imports the first one when it computes the first gradient. They take 1 and 3 s of CPU time, and 70 MB
each."""

for _module in (*MODULES, *COMPILER, *PRIVACY):
    try:
        importlib.import_module(_module)
    except ImportError:  # a child that needs it reports it, with its node and log
        continue

with contextlib.suppress(Exception):  # warm-up: a first load imports modules and fills caches that children then share
    from decentnode.experiment import load

    _example = load(files("decentnode").joinpath("quickstart.yaml"), environ={}, check=False)  # type: ignore[arg-type]
    _example.open_data().shares()
    _example.make_fragment_graphs()

with contextlib.suppress(Exception):  # a child that loads the experiment reports its errors
    from decentnode.experiment.loading import parse_ahead

    if _given := os.environ.pop(EXPERIMENT, ""):
        parse_ahead(*json.loads(_given))

local_modules()  # finds none, but marks these modules as examined: children then look only at later ones
cpu.library()  # compiled here the first time, rather than by every child

gc.freeze()
"""Keeps a child's garbage collector from touching these objects, and so the memory pages that they share. No collection
runs before: children would fill the freed holes in shared pages, and each would get its own copy of the page."""
