"""Recurrent layers on a GPU, whose weights are part of a model's flat tensor."""

from __future__ import annotations

import logging
import warnings

import torch
from torch import nn

logger = logging.getLogger(__name__)

WARNING = "RNN module weights are not part of single contiguous chunk of memory"
"""The beginning of torch's warning, which it issues at every call of such a layer."""
_logged_kinds: set[str] = set()
"""The kinds of layers that were logged in this process."""


def log_weight_copies(module: nn.Module, device: torch.device) -> None:
    """Logs, once per process and instead of torch's warnings, that cuDNN copies the weights of recurrent layers before
    each forward pass.

    cuDNN can use weights in place only at the beginning of their storage, all matrices before all biases. So at most
    one layer of a flat model could be laid out for it; and the order of parameters in the flat model is that of
    messages and checkpoints, and must be the same on CPUs and GPUs.
    """
    if device.type != "cuda":
        return
    kinds = {type(each).__name__ for each in module.modules() if isinstance(each, nn.RNNBase)}
    if not kinds:
        return
    warnings.filterwarnings("ignore", message=WARNING, category=UserWarning)
    if kinds - _logged_kinds:
        _logged_kinds.update(kinds)
        logger.info("the weights of %s are copied before each forward pass on the GPU: they are part of the model's "
                    "flat tensor, but cuDNN needs them at the start of a tensor", ", ".join(sorted(kinds)))  # fmt: skip
