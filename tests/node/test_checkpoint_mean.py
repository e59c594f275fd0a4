"""The means over nodes by which they agree on checkpoints fail: a node is gone, or the run is stopping."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from decentnode.errors import Interrupted, PeerLost
from decentnode.node.checkpoints.checkpoint_mean import mean_unless_ending


class FailingMean:
    """A mean that raises `error`."""

    ready = True

    def __init__(self, error: Exception) -> None:
        self.error = error

    def steps(self, timeout_seconds: float) -> Any:
        raise self.error
        yield


def agree(error: Exception, missing: str) -> Any:
    """Returns or raises what `mean_unless_ending` does when its mean raises `error`."""
    node: Any = SimpleNamespace(communication=SimpleNamespace(config=SimpleNamespace(timeout_seconds=1.0)),
                                config=SimpleNamespace(missing=missing))  # fmt: skip
    steps: Any = mean_unless_ending(node, FailingMean(error), "which checkpoint all of them have")  # type: ignore[arg-type]
    with pytest.raises(StopIteration) as ended:
        next(steps)
    return ended.value.value


def test_a_lost_peer_is_a_warning_or_an_error_depending_on_missing(caplog: pytest.LogCaptureFixture) -> None:
    assert agree(PeerLost("node 3 is gone"), "return_weight") is None
    assert caplog.messages == ["nodes do not agree which checkpoint all of them have: node 3 is gone"]
    with pytest.raises(PeerLost):
        agree(PeerLost("node 3 is gone"), "fail")


def test_a_stopping_run_causes_no_warning(caplog: pytest.LogCaptureFixture) -> None:
    assert agree(Interrupted("stopping"), "fail") is None and not caplog.messages
