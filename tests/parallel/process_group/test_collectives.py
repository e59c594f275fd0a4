"""What torch says of an operation that failed, in words for a user."""

from __future__ import annotations

import pytest

from decentnode.errors import PeerLost
from decentnode.parallel.process_group import agreement, collectives
from decentnode.parallel.process_group.collectives import failure_reason


@pytest.mark.parametrize(("said", "reason"), [
    ("[/build/third_party/gloo/gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:7824. This is "
     "typically caused by a remote worker crashing. Check the logs of the remote worker before reporting an error.",
     "Connection closed by peer [127.0.0.1]:7824"),
    ("[../unbound_buffer.cc:81] Timed out waiting 3000ms for recv operation to complete",
     "Timed out waiting 3000ms for recv operation to complete"),
    ("Application timeout caused pair closure", "Application timeout caused pair closure"), ("", "RuntimeError"),
])  # fmt: skip
def test_the_reason_without_gloos_source_and_guesses(said: str, reason: str) -> None:
    assert failure_reason(RuntimeError(said)) == reason


def test_who_is_gone_is_looked_for_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes a fifth of a second where nobody is."""
    asked = []
    for module in (agreement, collectives):
        monkeypatch.setattr(module, "dead_ranks", lambda: asked.append(1) or [2])
    with pytest.raises(PeerLost, match=r"Connection closed; the process of rank 2 is gone$") as raised, \
            agreement.collective_operation("meet"):  # fmt: skip
        raise RuntimeError("Connection closed")
    assert raised.value.missing == (2,) and len(asked) == 1
