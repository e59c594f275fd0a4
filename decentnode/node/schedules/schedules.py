"""The values of `node.schedule`, and what each does to the payloads of a run."""

from __future__ import annotations

import torch

from decentnode.communication.parts import Schema
from decentnode.node.schedules.asynchronous.ad_psgd import ADPSGD, pair_schemas
from decentnode.node.schedules.asynchronous.base import mailboxes
from decentnode.node.schedules.asynchronous.epidemic import Epidemic
from decentnode.node.schedules.asynchronous.gossip_async import GossipAsync
from decentnode.node.schedules.asynchronous.push_sum import SUMS, AsynchronousPushSum
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
    """The class of a schedule for a rule."""
    shares = name == "gossip_async" and rule.requirements.column_stochastic
    return AsynchronousPushSum if shares else SCHEDULES[name]


def sent_dtype(name: str, rule: Sharing, model: torch.dtype) -> torch.dtype:
    """The dtype in which a rule sends what is of the model's dtype, in a schedule."""
    return SUMS if schedule_of(name, rule) is AsynchronousPushSum else model


def payload_schema(name: str, rule: Sharing, elements: int, model: torch.dtype) -> dict[str, TensorSpec]:
    """What `Sharing.payload_schema` says of a part of the model, in a schedule. model: the dtype of the model."""
    return rule.payload_schema(elements, sent_dtype(name, rule, model))


def schemas_in(name: str, schemas: tuple[Schema, ...]) -> tuple[Schema, ...]:
    """What the exchanges of a round look like in a schedule. schemas: in a synchronous one."""
    if name == "ad_psgd":
        return pair_schemas(schemas)
    return mailboxes(schemas, 1) if SCHEDULES[name].asynchronous else schemas
