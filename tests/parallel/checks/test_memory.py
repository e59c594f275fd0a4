"""The checks for tensors that share memory."""

from __future__ import annotations

import torch

from decentnode.parallel.checks.memory import overlaps, shares_elements


def test_shared_memory_is_detected_to_the_byte() -> None:
    base = torch.zeros(4, 6)
    columns = [("a", base[:, :3]), ("b", base[:, 3:])]
    assert overlaps(columns, []) is None and overlaps(columns, [("c", base[:1, 1])]) == ("a", "c")
    assert overlaps([("a", base[0])], [("z", base.view(torch.uint8)[0, 23:24])]) == ("a", "z")
    assert overlaps([], [("a", base), ("b", base)]) is None, "those of the second list may overlap each other"
    for distinct in (base.t(), base[:, ::2], base[:1].expand(1, 6), base.as_strided((2, 2), (3, 2))):
        assert not shares_elements(distinct)
    assert shares_elements(base[0].expand(2, 6)) and shares_elements(base.as_strided((3, 3), (1, 1)))
