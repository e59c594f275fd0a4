"""The compression operator of rules that send differences or errors."""

from __future__ import annotations

import torch

from decentnode.compression import indices
from decentnode.graph.base import view
from decentnode.sharing.operator import Operator
from tests.compression.contract import codec
from tests.graph.contract import make
from tests.sharing.contract import draw

RING = make("ring", nodes=8)


def test_an_operator_with_a_codec_decodes_what_it_encodes() -> None:
    vector, seen = draw(1, 501)[0], view(RING, 3, 2, 1)
    for choose in ("largest", "random", "all"):
        for name in (None, "int4", "qsgd", "zlib"):
            operator = Operator(0.2, choose, codec(name)() if name else None)
            coded, at, values = operator.encode(vector, seen)
            back_at, back = operator.decode(coded, 501, vector.dtype)
            assert torch.equal(at, back_at) and torch.equal(values, back)
            if choose == "largest":
                assert torch.equal(at, indices.decode(coded["indices"], 501)) and at.numel() == 100
