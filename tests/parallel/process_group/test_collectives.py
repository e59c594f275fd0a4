"""Errors of collective operations: gloo's message, shortened for a user, and the ranks whose processes are gone."""

from __future__ import annotations

import pytest

from decentnode.errors import PeerLost
from decentnode.parallel.process_group import agreement, collectives
from decentnode.parallel.process_group.collectives import failure_reason


@pytest.mark.parametrize(("message", "reason"), [
    ("[/build/third_party/gloo/gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:7824. This is "
     "typically caused by a remote worker crashing. Check the logs of the remote worker before reporting an error.",
     "Connection closed by peer [127.0.0.1]:7824"),
    ("[../unbound_buffer.cc:81] Timed out waiting 3000ms for recv operation to complete",
     "Timed out waiting 3000ms for recv operation to complete"),
    ("Application timeout caused pair closure", "Application timeout caused pair closure"), ("", "RuntimeError"),
])  # fmt: skip
def test_a_failure_reason_leaves_out_gloos_source_location_and_advice(message: str, reason: str) -> None:
    assert failure_reason(RuntimeError(message)) == reason


def test_a_failed_operation_looks_for_dead_ranks_only_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The search takes a fifth of a second if no rank is dead."""
    searches = []
    for module in (agreement, collectives):
        monkeypatch.setattr(module, "dead_ranks", lambda: searches.append(1) or [2])
    with pytest.raises(PeerLost, match=r"Connection closed; the process of rank 2 is gone$") as raised, \
            agreement.collective_operation("meet"):  # fmt: skip
        raise RuntimeError("Connection closed")
    assert raised.value.missing == (2,) and len(searches) == 1
