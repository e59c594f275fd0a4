"""SocketExchange: what it says about a rank that sends nothing."""

from __future__ import annotations

import json
from contextlib import closing

import pytest
import torch
from torch.nn import Parameter

from decentnode.errors import PeerLost
from decentnode.parallel.buckets.bucket import Bucket
from decentnode.parallel.membership.control import Control
from decentnode.parallel.membership.keys import Access
from decentnode.parallel.planning.plan import Plan
from decentnode.parallel.planning.rules import make_sharing
from decentnode.parallel.planning.topologies import make_topology
from decentnode.parallel.transports import sockets
from decentnode.parallel.transports.host_memory import HostMemory
from decentnode.parallel.transports.sockets import SocketExchange

LARGE_PACKETS = "; if they run, large packets may get lost between the machines"


@pytest.mark.parametrize(("host", "hint"), [("127.0.0.1", "$"), ("192.0.2.1", LARGE_PACKETS)])
def test_a_rank_of_another_machine_that_sends_nothing_is_named_with_what_to_try(
    host: str, hint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sockets, "gather_texts", lambda own, *_: [own, json.dumps([f"tcp://{host}:9", "0" * 8])])
    plan = Plan(make_topology({"name": "ring"}, 2, 2), make_sharing("full"), 0)
    bucket = Bucket(0, [Parameter(torch.ones(4))], True, next(plan.rules()))
    with closing(Control("127.0.0.1", 0, Access())) as control:
        exchange = SocketExchange(plan, 0.2, control.sockets, "127.0.0.1", [bucket], HostMemory())
        exchange.launch([bucket], 0)
        said = rf"the exchange of step 0 with rank 1 took longer than 0.2 s \(waiting for its parameters\){hint}"
        with pytest.raises(PeerLost, match=said) as caught:
            exchange.arrive(bucket)
        assert caught.value.missing == (1,)
        exchange.abandon()
