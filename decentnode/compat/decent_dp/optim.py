"""Decent-DP's module `optim`."""

from decentnode.compat.decent_dp.functions import (
    lr_scheduler_fn_cosine_with_warmup,
    optim_fn_accum_adam,
    optim_fn_accum_adamw,
    optim_fn_adam,
    optim_fn_adamw,
)
from decentnode.optim.accum_adam import AccumAdam, AccumAdamW

__all__ = ["AccumAdam", "AccumAdamW", "lr_scheduler_fn_cosine_with_warmup", "optim_fn_accum_adam",
           "optim_fn_accum_adamw", "optim_fn_adam", "optim_fn_adamw"]  # fmt: skip
