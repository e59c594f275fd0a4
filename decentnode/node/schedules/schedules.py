"""The table of schedules (the values of `node.schedule`), and the payloads' schemas under each of them."""

from __future__ import annotations

import torch

from decentnode.communication.parts import Schema
from decentnode.node.schedules.asynchronous.ad_psgd import ADPSGD, pair_schemas
from decentnode.node.schedules.asynchronous.base import mailbox_schemas
from decentnode.node.schedules.asynchronous.epidemic import Epidemic
from decentnode.node.schedules.asynchronous.gossip_async import GossipAsync
from decentnode.node.schedules.asynchronous.push_sum import SUM_DTYPE, AsynchronousPushSum
from decentnode.node.schedules.overlapped import Overlapped
from decentnode.node.schedules.schedule import Schedule
from decentnode.node.schedules.sequential import Sequential
from decentnode.payload import TensorSpec
from decentnode.sharing.base import Sharing

SCHEDULES: dict[str, type[Schedule]] = {
    "sequential": Sequential, "overlapped": Overlapped, "gossip_async": GossipAsync, "ad_psgd": ADPSGD,
    "epidemic": Epidemic,
}  # fmt: skip


def schedule_of(name: str, rule: Sharing) -> type[Schedule]:
    """Returns the class of the schedule `name` for a rule."""
    shares = name == "gossip_async" and rule.requirements.column_stochastic
    return AsynchronousPushSum if shares else SCHEDULES[name]


def sent_dtype(name: str, rule: Sharing, model: torch.dtype) -> torch.dtype:
    """Returns the dtype in which a rule sends tensors of the model's dtype, under a schedule."""
    return SUM_DTYPE if schedule_of(name, rule) is AsynchronousPushSum else model


def payload_schema(name: str, rule: Sharing, elements: int, model: torch.dtype) -> dict[str, TensorSpec]:
    """Returns `Sharing.payload_schema` for a part of the model of `elements` parameters, under a schedule. model: the
    model's dtype."""
    return rule.payload_schema(elements, sent_dtype(name, rule, model))


def schemas_in(name: str, schemas: tuple[Schema, ...]) -> tuple[Schema, ...]:
    """Returns the schemas of a round's exchanges under a schedule. schemas: those under a synchronous schedule."""
    if name == "ad_psgd":
        return pair_schemas(schemas)
    return mailbox_schemas(schemas, 1) if SCHEDULES[name].asynchronous else schemas
