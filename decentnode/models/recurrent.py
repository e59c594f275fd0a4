"""Recurrent layers on a GPU, whose weights lie in a model's flat tensor."""

from __future__ import annotations

import logging
import warnings

import torch
from torch import nn

logger = logging.getLogger(__name__)

WARNING = "RNN module weights are not part of single contiguous chunk of memory"
"""How torch begins what it says of it, at every place that calls such a layer."""
_told: set[str] = set()
"""Kinds of layers that the log has named in this process."""


def expect_copies(module: nn.Module, device: torch.device) -> None:
    """Says in the log, once in a process and in the place of torch's warnings, that cuDNN copies the weights of
    recurrent layers before each forward pass.

    cuDNN takes weights where they lie only at the very beginning of their memory, all matrices before all biases. So at
    most one layer of a flat model could be laid out for it; and the order of parameters in it is what nodes send and
    checkpoints keep, on a CPU and on a GPU alike.
    """
    if device.type != "cuda":
        return
    kinds = {type(each).__name__ for each in module.modules() if isinstance(each, nn.RNNBase)}
    if not kinds:
        return
    warnings.filterwarnings("ignore", message=WARNING, category=UserWarning)
    if kinds - _told:
        _told.update(kinds)
        logger.info("the weights of %s are copied before each forward pass on the GPU: they are part of the model's "
                    "flat tensor, but cuDNN needs them at the start of a tensor", ", ".join(sorted(kinds)))  # fmt: skip
