"""Captures the whole state of a node between two rounds for a checkpoint, and restores it bit for bit."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from decentnode.checkpoint.state import decode, encode, to_host
from decentnode.checkpoint.store import Cut, Manifest, Snapshot
from decentnode.checkpoint.streams import load_streams, streams
from decentnode.errors import CheckpointError
from decentnode.metrics.history import Digest
from decentnode.node.resumable import Resumable


def capture(node: Resumable, cut: Cut, identity: Mapping[str, Any]) -> Snapshot:
    """Returns a copy of the node's whole state. Blocks while the state is copied, and synchronizes once with the GPU.

    The sharing rule's `state_dict` consists of copies already. Nothing in flight has to be stored: between two rounds,
    every payload of this node has been delivered or given up, and every payload that arrived has been mixed, under
    every schedule.
    Raises CheckpointError if the state contains something that cannot be stored.
    """
    tensors: dict[str, Tensor] = {}
    training = node.training
    tree = {
        "model": encode(module_state(training.model.module), "model", tensors, copy=True),
        "training": encode(training.state_dict(), "training", tensors, copy=True),
        "sharing": encode(node.sharing_state(), "sharing", tensors, copy=False),
        "streams": encode(streams(training.model.device), "streams", tensors, copy=False),
        "progress": encode(node.progress(), "progress", tensors, copy=False),
    }
    to_host(tensors)
    return Snapshot(node.uid, cut, identity, tree, tensors)


class Restored:
    """The state of a node at a checkpoint, whose parts the `put_*` methods restore."""

    def __init__(
        self, tree: Any, tensors: Mapping[str, Tensor], source: str, members: Collection[int] = ()
    ) -> None:
        """tree, tensors: those of a `Snapshot`; the node that is restored may keep and change the tensors. source:
        where the state comes from, for error messages. members: the members of the generation in which it was made, if
        needed."""
        self._tree, self._tensors, self._source = tree, tensors, source
        self.members = frozenset(members)

    @classmethod
    def read(cls, manifest: Manifest) -> Restored:
        """Reads a checkpoint from disk. Raises CheckpointError if the tensors are not those that were written."""
        return cls(manifest.tree, manifest.load(), str(manifest.path), manifest.cut.members)

    def digest(self, *parts: str) -> str:
        """Returns the digest of some parts of the state (the keys of the tree that `capture` makes); it is the same for
        a checkpoint that was read and for the state that was written."""
        found = Digest()
        for part in parts:
            found.note(json.dumps(self._tree[part], separators=(",", ":")))
            for name in sorted(self._tensors):
                if name == part or name.startswith(f"{part}."):
                    found.note(name)
                    found.add(self._tensors[name])
        return found.value

    def _part(self, name: str, device: torch.device | None = None) -> Any:
        try:
            return decode(self._tree[name], self._tensors, device)
        except (KeyError, TypeError) as error:
            raise CheckpointError(f"{self._source} lacks {name!r}") from error

    def put_training(self, node: Resumable) -> None:
        """Restore the model, its buffers and the training state. Raises CheckpointError if they do not fit the node."""
        load_module_state(node.training.model.module, self._part("model"), self._source)
        node.training.load_state_dict(self._part("training"))

    def put_rule(self, node: Resumable) -> None:
        """Restore the state that the sharing rule keeps between rounds. Raises CheckpointError if it does not fit the
        rule."""
        try:
            node.load_sharing_state(self._part("sharing", node.training.model.device))
        except (KeyError, ValueError, TypeError) as error:
            rule = type(node.sharing).__name__
            raise CheckpointError(
                f"{self._source}: the state of the sharing rule does not fit {rule}: {error}"
            ) from error

    def put_progress(self, node: Resumable) -> None:
        """Restore figures and counters."""
        node.load_progress(self._part("progress"))

    def put_streams(self, node: Resumable) -> None:
        """Restore the process's random number streams; must be the last step before the node continues."""
        load_streams(self._part("streams"), node.training.model.device)

    @property
    def progress(self) -> Mapping[str, Any]:
        found: Mapping[str, Any] = self._part("progress")
        return found


def module_state(module: nn.Module) -> dict[str, Any]:
    """Returns all parameters and buffers by name, including those that are not trained or not in `state_dict`, and the
    extra state of submodules that have one. The tensors are the module's own, not copies."""
    found: dict[str, Any] = {f"p/{name}": value for name, value in module.named_parameters()}
    found |= {f"b/{name}": value for name, value in module.named_buffers()}
    for name, part in module.named_modules():
        if type(part).get_extra_state is not nn.Module.get_extra_state:
            found[f"x/{name}"] = part.get_extra_state()
    return found


def load_module_state(module: nn.Module, state: Mapping[str, Any], source: str) -> None:
    """Copy what `module_state` returned into a module, in place. Raises CheckpointError unless names, shapes and dtypes
    match those of the module."""
    own = module_state(module)
    if own.keys() != state.keys():
        odd = sorted(name.partition("/")[2] for name in own.keys() ^ state.keys())
        raise CheckpointError(f"{source} is of another model: it differs in {', '.join(odd[:5])}")
    parts = dict(module.named_modules())
    with torch.no_grad():
        for name, value in state.items():
            if name.startswith("x/"):
                parts[name[2:]].set_extra_state(value)
            elif own[name].shape != value.shape or own[name].dtype != value.dtype:
                what = f"{list(value.shape)} {value.dtype}, the model has {list(own[name].shape)} {own[name].dtype}"
                raise CheckpointError(f"{source} is of another model: {name[2:]} is {what}")
            else:
                own[name].copy_(value)
