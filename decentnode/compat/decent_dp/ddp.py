"""Decent-DP's module `ddp`."""

from decentnode.compat.decent_dp.wrapper import LR_SCHEDULER_FN_TYPE, OPTIM_FN_TYPE, DecentralizedDataParallel

__all__ = ["LR_SCHEDULER_FN_TYPE", "OPTIM_FN_TYPE", "DecentralizedDataParallel"]
