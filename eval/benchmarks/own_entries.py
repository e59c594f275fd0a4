"""What nodes would mix if each chose its entries for secure aggregation itself, as in CESAR (Biswas et al. 2024).

A node receives only entries that at least two of its neighbors chose, as masks need. Masks change no sum, so that these
rules add none. What they send is not what CESAR would send: those bytes are computed.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from decentnode.compression import indices
from decentnode.graph.base import RoundView
from decentnode.payload import Payload
from decentnode.sharing.secure_aggregation import PUBLIC_KEY_BYTES, RECORD
from decentnode.sharing.subsample import Subsample
from decentnode.sharing.topk import TopK

received_bytes: list[int] = []
"""What every mix of a rule `own ...` would have received."""


def common(received: Mapping[int, Payload], elements: int, coded: bool) -> dict[int, Payload]:
    """Returns the payloads without the entries that only one neighbor sent, and counts the bytes that nodes would send
    for them. coded: whether indices are sent, to the receiver and by it to each other neighbor."""
    sent_by = torch.zeros(elements, dtype=torch.int64)
    for payload in received.values():
        sent_by[payload.tensors["at"]] += 1
    kept: dict[int, Payload] = {}
    for uid, payload in received.items():
        at, values = payload.tensors["at"], payload.tensors["values"]
        shared: Tensor = sent_by[at] > 1
        kept[uid] = Payload({"at": at[shared], "values": values[shared]})
        times = len(received) if coded else 0
        received_bytes.append(PUBLIC_KEY_BYTES + RECORD.size * len(received) + 4 * int(shared.sum())
                              + times * indices.encode(at, elements).numel())  # fmt: skip
    return kept


class OwnRandom(Subsample):
    """Every node draws entries of its own; as the draws follow from the seed, no indices are sent."""

    def mix(self, model: Tensor, received: Mapping[int, Payload], view: RoundView) -> None:
        super().mix(model, common(received, model.numel(), coded=False), view)


class OwnTopK(TopK):
    """Every node chooses the entries that changed most."""

    def mix(self, model: Tensor, received: Mapping[int, Payload], view: RoundView) -> None:
        super().mix(model, common(received, model.numel(), coded=True), view)
