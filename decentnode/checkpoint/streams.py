"""Saves and restores the process-wide random generators for a checkpoint."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch


def streams(device: torch.device) -> dict[str, Any]:
    """Returns the state of the process-wide random generators of torch, NumPy and Python.

    The project's own random numbers follow from (seed, uid, purpose, round) and do not use them, but a user's own
    dataset or model may.
    """
    kind, keys, *rest = np.random.get_state(legacy=True)
    version, words, gauss = random.getstate()
    found: dict[str, Any] = {
        "torch": torch.get_rng_state(),
        "numpy": [kind, np.asarray(keys, np.int64), *rest],
        "python": [version, np.array(words, np.int64), gauss],
    }
    if device.type == "cuda":
        found["cuda"] = torch.cuda.get_rng_state(device)
    return found


def load_streams(state: Mapping[str, Any], device: torch.device) -> None:
    """Restores what `streams` returned. The CUDA generator is left as it is if `device` is not a GPU now."""
    torch.set_rng_state(state["torch"])
    kind, keys, *rest = state["numpy"]
    np.random.set_state((kind, np.asarray(keys, np.uint32), *rest))
    version, words, gauss = state["python"]
    random.setstate((version, tuple(int(word) for word in words), gauss))
    if device.type == "cuda" and "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"], device)
