"""Writes which coefficients a rule chose to send in each round to nodes/<uid>/dumps/ of the run, up to a limit in
bytes.

    00000012-0.safetensors    of round 12 and fragment 0: sent [K] int64; change [C] and value [C] with `scores`
    counts.safetensors        by fragment: in how many rounds each coefficient was sent, [C] int32
    parameters.json           the names and shapes of the parameters, in their order in the model
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from decentnode.checkpoint import tensor_file
from decentnode.sharing.dump import DumpConfig

logger = logging.getLogger(__name__)

COUNTS = "counts.safetensors"
PARAMETERS = "parameters.json"


class Dumps:
    """Writes the dumps of one node. All methods belong to the training thread and block for disk writes; a dump that
    cannot be written is logged and left out."""

    def __init__(self, folder: Path, config: DumpConfig, parameters: Sequence[tuple[str, tuple[int, ...]]]) -> None:
        """parameters: the names and shapes of the parameters, in their order in the model."""
        self._folder, self._config = folder, config
        self._names = [{"name": name, "shape": list(shape)} for name, shape in parameters]
        self._bytes_left = config.most_megabytes * 1e6
        self._counts: dict[int, Tensor] = {}
        self._limit_reached = False

    def take(self, round: int, fragment: int, chosen: Mapping[str, Tensor], coefficients: int) -> None:
        """Write and count what a rule chose in a round. chosen: what `Sharing.chosen_entries` returned; in rounds in
        which all coefficients are sent it has no "sent", and they are not counted. coefficients: the number of
        coefficients C to choose from."""
        if "sent" in chosen and self._config.shared:
            counts = self._counts.setdefault(fragment, torch.zeros(coefficients, dtype=torch.int32))
            counts[chosen["sent"].cpu()] += 1
        wanted = {"sent"} if self._config.shared else set[str]()
        wanted |= {"change", "value"} if self._config.scores else set()
        tensors = {name: _to_storable(tensor) for name, tensor in chosen.items() if name in wanted}
        if round % self._config.every == 0 and tensors:
            self._write(f"{round:08d}-{fragment}.safetensors", tensors)

    def close(self) -> None:
        """Write the counts. Idempotent."""
        if self._counts:
            self._write(COUNTS, {str(fragment): counts for fragment, counts in self._counts.items()}, bounded=False)

    def _write(self, name: str, tensors: Mapping[str, Tensor], *, bounded: bool = True) -> None:
        size = sum(tensor.nbytes for tensor in tensors.values())
        if self._limit_reached and bounded:
            return
        if bounded and size > self._bytes_left:
            self._limit_reached = True
            logger.warning("dumps have reached sharing.dump.most_megabytes (%g): no more are written",
                           self._config.most_megabytes)  # fmt: skip
            return
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            names = self._folder / PARAMETERS
            if not names.exists():
                names.write_text(json.dumps(self._names) + "\n", encoding="utf-8")
            partial = self._folder / f".{name}"
            tensor_file.write(partial, tensors)
            partial.replace(self._folder / name)
        except OSError as error:
            logger.warning("a dump could not be written: %s", error)
            return
        self._bytes_left -= size if bounded else 0


def _to_storable(tensor: Tensor) -> Tensor:
    """Returns the tensor on the CPU and contiguous, with complex numbers as two columns; copies only if necessary."""
    storable = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    return storable.detach().to("cpu").contiguous()
