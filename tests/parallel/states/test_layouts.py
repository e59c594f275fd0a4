"""States of sharing rules, converted to other buckets."""

from __future__ import annotations

import pytest
import torch

from decentnode.parallel.states.layouts import convert_rule_states


def test_rule_states_are_converted_to_another_layout_or_refused() -> None:
    saved = [[("b", 2)], [("a", 3)]]
    layout = [[("b", 2), ("a", 3)]]
    states = [{"m": torch.ones(2), "n": 1}, {"m": torch.zeros(3), "n": 1}]
    (converted,) = convert_rule_states(states, saved, layout)
    assert converted["m"].tolist() == [1, 1, 0, 0, 0] and converted["n"] == 1
    with pytest.raises(ValueError, match=r"sharing\.n differs from bucket to bucket"):
        convert_rule_states([states[0], {**states[1], "n": 2}], saved, layout)
    with pytest.raises(ValueError, match="elements of parameter c"):
        convert_rule_states(states, saved, [[("c", 5)]])
    with pytest.raises(ValueError, match="must be of 1 buckets, got 2"):
        convert_rule_states(states, None, layout)
    assert convert_rule_states([{}, {}], None, layout) == [{}]
