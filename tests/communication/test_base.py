"""Transports: a class without a method of the contract is refused, and keys are read from the configured folder."""

from __future__ import annotations

from pathlib import Path

import pytest

from decentnode.communication.base import Communication
from decentnode.communication.inproc import Inproc
from decentnode.communication.parts import TransportParts
from decentnode.communication.zeromq.sockets.security import write_keys
from decentnode.communication.zeromq.transport import ZeroMQ
from tests.communication.contract import flat_schema

METHODS = ["start", "exchange", "mean", "barrier", "report", "reports", "announce_stop", "stopping", "depart", "fail",
           "close"]  # fmt: skip


@pytest.mark.parametrize("name", METHODS)
def test_a_transport_without_a_method_of_the_contract_is_refused(name: str) -> None:
    """The error comes when it is constructed, not in the round in which the method is first called."""
    abstract = getattr(Communication, name)
    incomplete = type("Incomplete", (Inproc,), {name: abstract})
    with pytest.raises(TypeError, match=rf"abstract method '?{name}"):
        incomplete()


def test_keys_are_read_from_the_folder_that_the_config_names(tmp_path: Path) -> None:
    """The folder is relative to that of the config. Without `keys` the node has none."""
    write_keys(tmp_path / "keys", range(2))
    parts = TransportParts(1, dict.fromkeys(range(2), 0), flat_schema(8), "digest", tmp_path)
    for keys, secure in (({}, False), ({"keys": "keys"}, True)):
        config = ZeroMQ.Config.model_validate({"name": "zeromq", **keys})
        node = ZeroMQ.make(config, parts)
        try:
            assert (node._run.security is not None) == secure
            assert not secure or node._run.security.keyring.uid == 1  # type: ignore[union-attr]
        finally:
            node.close()
