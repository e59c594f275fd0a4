"""The means by which nodes agree on their checkpoints, where a node is gone or the run is stopping."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from decentnode.errors import Interrupted, PeerLost
from decentnode.node.checkpoints.checkpoint_mean import mean_unless_ending


class Pending:
    """A mean that ends in an error."""

    ready = True

    def __init__(self, error: Exception) -> None:
        self.error = error

    def steps(self, timeout_seconds: float) -> Any:
        raise self.error
        yield


def outcome(error: Exception, missing: str) -> Any:
    node: Any = SimpleNamespace(communication=SimpleNamespace(config=SimpleNamespace(timeout_seconds=1.0)),
                                config=SimpleNamespace(missing=missing))  # fmt: skip
    steps: Any = mean_unless_ending(node, Pending(error), "which checkpoint all of them have")  # type: ignore[arg-type]
    with pytest.raises(StopIteration) as ended:
        next(steps)
    return ended.value.value


def test_the_warning_names_what_nodes_do_not_agree_on(caplog: pytest.LogCaptureFixture) -> None:
    assert outcome(PeerLost("node 3 is gone"), "return_weight") is None
    assert caplog.messages == ["nodes do not agree which checkpoint all of them have: node 3 is gone"]
    with pytest.raises(PeerLost):
        outcome(PeerLost("node 3 is gone"), "fail")


def test_a_run_that_stops_is_no_warning(caplog: pytest.LogCaptureFixture) -> None:
    assert outcome(Interrupted("stopping"), "fail") is None and not caplog.messages
