"""The compression operator of rules that send differences (choco, beer) or errors (deepsqueeze)."""

from __future__ import annotations

import torch

from decentnode.compression import indices
from decentnode.graph.base import view
from decentnode.sharing.operator import Operator
from tests.compression.contract import codec
from tests.graph.contract import make
from tests.sharing.contract import random_models

RING = make("ring", nodes=8)


def test_the_receiver_decodes_the_same_positions_and_values_as_the_sender_kept() -> None:
    vector, round_view = random_models(1, 501)[0], view(RING, 3, 2, 1)
    for choose in ("largest", "random", "all"):
        for name in (None, "int4", "qsgd", "zlib"):
            operator = Operator(0.2, choose, codec(name)() if name else None)
            coded, at, values = operator.encode(vector, round_view)
            decoded_at, decoded_values = operator.decode(coded, 501, vector.dtype)
            assert torch.equal(at, decoded_at) and torch.equal(values, decoded_values)
            if choose == "largest":
                assert torch.equal(at, indices.decode(coded["indices"], 501)) and at.numel() == 100
