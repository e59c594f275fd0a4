"""The longest text and the largest number that each field of a message may have."""

from __future__ import annotations

from typing import Any

import pytest

from decentnode.wire import codec
from decentnode.wire.messages import FIELDS, MESSAGES, Message

KINDS: dict[str, type[Message]] = {kind.__name__: kind for kind in MESSAGES.values()}
LONGEST_TEXTS = [
    ("Hello", "digest", 64), ("Hello", "software", 128), ("Reject", "digest", 64), ("Reject", "reason", 512),
    ("Refused", "reason", 512), ("Absent", "reason", 8192), ("Part", "key", 96), ("Arrive", "key", 96),
    ("Fail", "reason", 512), ("Join", "digest", 64), ("Denied", "digest", 64), ("Denied", "reason", 512),
]  # fmt: skip
NUMBER_LIMITS = [
    ("Welcome", "generation", 1 << 32), ("Welcome", "source", 1 << 20), ("Hello", "version", 1 << 16),
    ("Hello", "num_nodes", 1 << 20), ("Chunk", "round", 1 << 40), ("Chunk", "phase", 256), ("Chunk", "tensor", 256),
    ("Chunk", "chunk", 1 << 32), ("Chunk", "total", 1 << 48), ("Part", "down", 2),
    ("Part", "contributors", (1 << 20) + 1),
    ("Ack", "plane", 2), ("Ack", "gap", 2), ("Depart", "rounds", 1 << 40), ("Fail", "uid", 1 << 20),
    ("Slot", "round", 1 << 40), ("Slot", "phase", 256), ("Promise", "position", 1 << 40),
    ("Commit", "first_round", 1 << 40), ("Suspect", "stopping", 2),
]  # fmt: skip


def make_message(kind: str, **values: Any) -> Message:
    """Returns a message of this kind; fields that are not given have their smallest value."""

    def smallest(rule: Any) -> Any:
        if "limit" in rule:
            return 0
        if "text" in rule:
            return ""
        if "blob" in rule:
            return bytes(rule["blob"] if rule["exact"] else 0)
        return {}

    return KINDS[kind](**{field.name: smallest(field.metadata) for field in FIELDS[KINDS[kind]]} | values)


@pytest.mark.parametrize(("kind", "name", "limit"), LONGEST_TEXTS)
def test_a_text_has_at_most_so_many_characters(kind: str, name: str, limit: int) -> None:
    longest = make_message(kind, **{name: "x" * limit})
    assert codec.decode(codec.encode(longest)) == longest
    with pytest.raises(ValueError, match=name):
        codec.encode(make_message(kind, **{name: "x" * (limit + 1)}))


@pytest.mark.parametrize(("kind", "name", "limit"), NUMBER_LIMITS)
def test_a_number_is_below_its_limit(kind: str, name: str, limit: int) -> None:
    largest = make_message(kind, **{name: limit - 1})
    assert codec.decode(codec.encode(largest)) == largest
    with pytest.raises(ValueError, match=name):
        codec.encode(make_message(kind, **{name: limit}))
