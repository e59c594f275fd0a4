"""Decent-DP's package under its names: scripts written for it run after changing the import.

`import decentnode.compat.decent_dp as decent_dp`, imports from the submodules ddp, optim, utils and topo, and
`sys.modules["decent_dp"] = decentnode.compat.decent_dp` all reach the same classes: the submodules only re-export what
the other modules define. Intended differences, and `faithful=True`: docs/coming_from/decent_dp.rst.
"""

from decentnode.compat.decent_dp import ddp, optim, topo, utils
from decentnode.compat.decent_dp.ddp import LR_SCHEDULER_FN_TYPE, OPTIM_FN_TYPE, DecentralizedDataParallel
from decentnode.compat.decent_dp.functions import as_there
from decentnode.compat.decent_dp.optim import (
    AccumAdam,
    AccumAdamW,
    lr_scheduler_fn_cosine_with_warmup,
    optim_fn_accum_adam,
    optim_fn_accum_adamw,
    optim_fn_adam,
    optim_fn_adamw,
)
from decentnode.compat.decent_dp.topo import Edge, Topology, TopologyReg
from decentnode.compat.decent_dp.utils import initialize_dist

__all__ = [
    "LR_SCHEDULER_FN_TYPE", "OPTIM_FN_TYPE", "AccumAdam", "AccumAdamW", "DecentralizedDataParallel", "Edge",
    "Topology", "TopologyReg", "as_there", "ddp", "initialize_dist", "lr_scheduler_fn_cosine_with_warmup", "optim",
    "optim_fn_accum_adam", "optim_fn_accum_adamw", "optim_fn_adam", "optim_fn_adamw", "topo", "utils",
]  # fmt: skip
