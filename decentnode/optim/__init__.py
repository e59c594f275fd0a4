"""Optimizers torch lacks, and functions that make optimizers and learning-rate schedules for a model's parameters."""

from decentnode.optim.accum_adam import AccumAdam, AccumAdamW
from decentnode.optim.functions import (
    lr_scheduler_fn_cosine_with_warmup,
    optim_fn_accum_adam,
    optim_fn_accum_adamw,
    optim_fn_adam,
    optim_fn_adamw,
)

__all__ = [
    "AccumAdam", "AccumAdamW", "lr_scheduler_fn_cosine_with_warmup", "optim_fn_accum_adam", "optim_fn_accum_adamw",
    "optim_fn_adam", "optim_fn_adamw",
]  # fmt: skip
