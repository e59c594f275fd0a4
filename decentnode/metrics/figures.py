"""What is measured, by name: the one place where names, units and meanings of figures stand."""

from __future__ import annotations

from typing import Literal, get_args

Purpose = Literal["data", "metadata", "protocol", "evaluation", "control"]
"""What bytes were sent for."""

PURPOSES: dict[Purpose, str] = {
    "data": "tensors of payloads that carry values, as the sharing rule gave them to the transport",
    "metadata": "what payloads carry beside values: indices, scales, scalars",
    "protocol": "what transports add: headers, doorbells, acknowledgements, checksums, whatever is sent again",
    "evaluation": "tensors of means over all nodes that evaluations ask for",
    "control": "messages about the run: joining, barriers, generations of members, reports, and their means",
}
"""The first two are the sharing rule's, and the same number on every transport."""

assert tuple(PURPOSES) == get_args(Purpose)
