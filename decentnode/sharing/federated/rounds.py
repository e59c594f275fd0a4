"""The base class of federated rules: the server sends its model to clients, these train and send their changes back.

Rules derive from `Federated` and define the server's step along the mean change (`step`), and what else server and
clients send.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar, Literal, Self

import torch
from pydantic import Field, model_validator
from torch import Tensor

from decentnode.config import component
from decentnode.errors import AssemblyError, PeerFault, PeerLost
from decentnode.graph.base import RoundView
from decentnode.mixing import mix_into
from decentnode.payload import Payload, ScalarSpec, TensorSpec
from decentnode.sharing.base import Sharing, SharingConfig
from decentnode.sharing.federated.sampling import count_of, sampled
from decentnode.sharing.requirements import Requirements

DOWN, UP, BETWEEN = range(3)
"""The phases of a round: from server to clients, from clients to server (clients train before it), and between several
servers."""
MAX_SAMPLES = 1 << 53


class FederatedConfig(SharingConfig):
    """The keys of all rules with a server."""

    fraction: float | None = Field(None, gt=0, le=1)
    """Fraction of a server's clients that take part in a round, at least `min_clients`, drawn anew for each round. The
    others neither train nor send. Default: all take part."""
    clients: int | None = Field(None, ge=1)
    """Number of a server's clients that take part in a round, instead of `fraction`."""
    weighted_by: Literal["samples", "equal"] = "samples"
    """Weight of a client's change in the mean: its number of training samples, or one for each client."""
    min_clients: int = Field(1, ge=1)
    """The run ends if fewer clients answer in a round."""
    deadline_seconds: float | None = Field(None, gt=0)
    """How long a server waits for further clients after the last answer; later clients are left out of the round, which
    needs `node.missing: return_weight`. Default: twice `communication.timeout_seconds`."""
    gossip_every: int | None = Field(None, ge=1)
    """With several servers: interval, in rounds, at which they mix their models over the graph that connects them."""

    @model_validator(mode="after")
    def _one_count(self) -> Self:
        if self.clients is not None and self.fraction is not None:
            raise ValueError("must have fraction or clients, got both")
        if self.clients is not None and self.min_clients > self.clients:
            raise ValueError(f"min_clients must be at most the {self.clients} clients of a round, "
                             f"got {self.min_clients}")  # fmt: skip
        return self


class Federated(Sharing):
    """Clients train from the server's model x, and the server takes a step along the mean of their changes d_k.

    Phase DOWN: a server sends to all of its clients; those that take part in the round get the model, the others a
    payload of empty tensors, so that no client runs ahead of the server. Phase UP: the clients that take part send the
    change that their local steps made, or an empty payload if they did not get the model. All payloads have the same
    tensors, with P or no values each.

    A client that did not get the model does not train in the round. An answer that arrives too late or not at all is
    left out, and the client is told so with the next model that it gets (`lost`), so that it can undo its state changes
    of that round.
    """

    Config: ClassVar[type[component.Config]] = FederatedConfig
    config: FederatedConfig
    requirements = Requirements(
        star=True, sequential=True, phases=2, steps_before=UP,
        scalars={"samples": ScalarSpec(int, low=0, high=MAX_SAMPLES, optional=True),
                 "lost": ScalarSpec(int, low=0, optional=True)},
    )  # fmt: skip
    NAMES: ClassVar[tuple[str, ...]] = ("x",)
    """The names of a payload's tensors; "x" is the model or its change."""
    TENSORS: ClassVar[tuple[str, ...]] = ()
    """The attributes that belong to the rule's state, each a tensor or None."""
    SURVIVING: ClassVar[tuple[str, ...]] = ()
    """Those of TENSORS that outlive a membership generation: the state of the server's optimizer."""
    KEEPS: ClassVar[bool] = False
    """Whether clients keep a state that is wrong after one of their answers was lost."""

    def __init__(self, config: FederatedConfig) -> None:
        super().__init__(config)
        if config.gossip_every is not None:
            self.requirements = replace(self.requirements, phases=3)
        self.samples = 0
        """The number of this client's training samples."""
        self.start: Tensor | None = None
        """[P] on a client: the model that it got in this round; None if it got none."""
        self._lost_answers: dict[int, int] = {}
        """On a server: client whose last answer did not arrive -> the round of that answer."""
        self._last_answer_round = -1
        """On a client: the round of its last answer."""
        self._elements = 0
        self._sizes: list[int] = []
        """Entries of each parameter tensor."""

    # -- methods that rules override --------------------------------------------------------------------------

    def step(self, model: Tensor, change: Tensor, view: RoundView) -> None:
        """Makes the server's step: changes model [P] in place. change: [P], the weighted mean of the clients'
        changes."""
        raise NotImplementedError

    def given(self, model: Tensor) -> dict[str, Tensor]:
        """Returns what a server sends to clients that take part: name -> tensor [P] for each of NAMES."""
        return {"x": model}

    def take(self, tensors: Mapping[str, Tensor], view: RoundView) -> None:
        """Called on a client that takes part, before it trains, with what the server's `given` returned. The model is
        set already."""

    def answer(self, change: Tensor, view: RoundView) -> dict[str, Tensor]:  # noqa: ARG002
        """Returns the tensors that a client sends after it has trained. change: [P], the change of the model by the
        local steps."""
        return {"x": change}

    def sum_up(self, means: Mapping[str, Tensor], answers: int, clients: int) -> None:
        """Called on a server before `step`. means: the means of all tensors by name. answers: the number of answers.
        clients: the number of the server's clients."""

    def gathered(self, received: Mapping[int, Payload]) -> None:
        """Called on a server with the answers that arrived, including empty ones."""

    def answer_lost(self) -> None:
        """Called on a client if its last answer was lost."""

    # -- who exchanges with whom ------------------------------------------------------------------------------

    def set_samples(self, count: int) -> None:
        self.samples = count

    def exchange_number(self, round: int) -> int:
        """Returns the number of the exchange between servers, which selects their edges; the star of a server and its
        clients never changes."""
        return round // (self.config.gossip_every or 1)

    def gossips(self, view: RoundView) -> bool:
        """Returns whether servers mix their models in this round."""
        every = self.config.gossip_every
        return every is not None and (view.round + 1) % every == 0

    def server_of(self, view: RoundView) -> int:
        """Returns the uid of the node's server; for a server its own."""
        if view.uid in view.servers:
            return view.uid
        return next(uid for uid, clients in view.servers.items() if view.uid in clients)

    def clients_of(self, server: int, view: RoundView) -> tuple[int, ...]:
        """Returns the clients of a server that are members, ascending."""
        clients = view.servers[server]
        members = set(view.members)
        return clients if members.issuperset(clients) else tuple(uid for uid in clients if uid in members)

    def takes_part(self, view: RoundView) -> frozenset[int]:
        """Returns the clients of the node's server that take part in the round."""
        server = self.server_of(view)
        clients = self.clients_of(server, view)
        count = max(count_of(len(clients), self.config.fraction, self.config.clients), self.config.min_clients)
        return sampled(clients, count, view.seed, server, view.purpose("clients of a round"), view.round)

    def plan(self, view: RoundView) -> RoundView:
        uid = view.uid
        if not view.servers:
            return view.alone()
        server = self.server_of(view)
        if view.phase == BETWEEN:
            return self._between(view)
        if uid == server:
            others = self.clients_of(uid, view) if view.phase == DOWN else tuple(sorted(self.takes_part(view)))
            neighbors, sources = (others, ()) if view.phase == DOWN else ((), others)
        else:
            there = server in view.members and (view.phase == DOWN or uid in self.takes_part(view))
            near = (server,) if there else ()
            neighbors, sources = ((), near) if view.phase == DOWN else (near, ())
        return _with_edges(view, neighbors, sources, {source: 1.0 / len(sources) for source in sources})

    def plan_buffers(self, view: RoundView) -> RoundView:
        """Returns a view without neighbors, as float buffers are not averaged."""
        return view.alone()

    def _between(self, view: RoundView) -> RoundView:
        if not self.gossips(view):
            return view.alone()
        others = tuple(sorted(uid for uid in view.between if uid != view.uid and uid in view.members))
        return _with_edges(view, others, others, {uid: view.between[uid] for uid in others})

    def wait_seconds(self, phase: int, timeout_seconds: float) -> float:
        """Returns the longest wait in a phase: a client waits for its server as long as the server may wait for slower
        clients."""
        deadline = self.config.deadline_seconds or 2 * timeout_seconds
        return {DOWN: timeout_seconds + deadline, UP: deadline}.get(phase, 2 * timeout_seconds + deadline)

    # -- the round ----------------------------------------------------------------------------------------------

    def trains(self, view: RoundView) -> bool:  # noqa: ARG002
        return self.start is not None

    def is_chosen(self, view: RoundView) -> bool:
        return view.uid in self.takes_part(view)

    def steps_are_for(self, view: RoundView) -> int | None:
        """Returns a client's server, which is the only node that uses its local steps: once the server is in a later
        round, the answer is discarded."""
        return None if view.uid in view.servers else self.server_of(view)

    def leave_out(self, view: RoundView) -> None:  # noqa: ARG002
        self.start = None

    def begin(self, model: Tensor, view: RoundView) -> None:  # noqa: ARG002
        self.start, self._elements = None, model.numel()

    def outgoing(self, model: Tensor, view: RoundView) -> dict[int, Payload]:
        self._elements = model.numel()
        if not view.neighbors:
            return {}
        if view.phase == DOWN:
            return self.down(model, view)
        if view.phase == BETWEEN:
            return dict.fromkeys(view.neighbors, Payload(self.given(model)))
        if self.start is None:
            return dict.fromkeys(view.neighbors, self.nothing(model))
        self._last_answer_round = view.round
        return dict.fromkeys(view.neighbors, self.reply(model, view))

    def nothing(self, model: Tensor) -> Payload:
        """Returns a payload of empty tensors. model: [P], determines their dtype and device."""
        return Payload({name: model.new_empty(0) for name in self.NAMES})

    def reply(self, model: Tensor, view: RoundView) -> Payload:
        """Returns the payload that a client sends after it has trained."""
        assert self.start is not None
        return Payload(self.answer(model - self.start, view), {"samples": self.samples})

    def down(self, model: Tensor, view: RoundView) -> dict[int, Payload]:
        """Returns the payloads that a server sends to its clients, the neighbors of `view`."""
        chosen, usual, nothing = self.takes_part(view), Payload(self.given(model)), self.nothing(model)
        found = {}
        for uid in view.neighbors:
            found[uid] = usual if uid in chosen else nothing
            if self.KEEPS and uid in chosen and uid in self._lost_answers:
                found[uid] = Payload(usual.tensors, {"lost": self._lost_answers[uid]})
        return found

    def unpack(self, payload: Payload, uid: int, view: RoundView) -> Payload:  # noqa: ARG002
        sizes = {tensor.numel() for tensor in payload.tensors.values()}
        if sizes not in ({0}, {self._elements}):
            raise PeerFault("malformed_payload", f"tensors of {sorted(sizes)} values from {uid}")
        return payload

    def mix(self, model: Tensor, received: Mapping[int, Payload], view: RoundView) -> None:
        full = {uid: each for uid, each in sorted(received.items())
                if any(tensor.numel() for tensor in each.tensors.values())}  # fmt: skip
        if view.phase == DOWN:
            for payload in full.values():
                self.hear(model, payload, view)
        elif view.phase == UP and view.uid in view.servers:
            self._gather(model, received, full, view)
        elif view.phase == BETWEEN:
            own = 1.0 - sum(view.between[uid] for uid in full)
            mix_into(model, model, own, [(each.tensors["x"], view.between[uid]) for uid, each in full.items()])

    def hear(self, model: Tensor, payload: Payload, view: RoundView) -> None:
        """Processes a non-empty payload from the server on a client. Sets model [P], and `start` if the client
        trains."""
        self.settle(payload)
        model.copy_(payload.tensors["x"])
        self.start = model.clone()
        self.take(payload.tensors, view)

    def settle(self, payload: Payload) -> None:
        """On a client, calls `answer_lost` if the payload from the server says that the last answer was lost."""
        lost = payload.scalars.get("lost")
        if lost is not None and lost == self._last_answer_round:
            self.answer_lost()
        self._last_answer_round = -1

    def dense(self, payload: Payload) -> Mapping[str, Tensor]:
        """Returns, on a server, the dense tensors [P] of a client's answer by NAMES."""
        return payload.tensors

    def _gather(
        self, model: Tensor, received: Mapping[int, Payload], full: Mapping[int, Payload], view: RoundView
    ) -> None:
        """Makes the server's step. Raises PeerLost if too few clients answered, and AssemblyError if too few take part
        because others died."""
        asked = self.takes_part(view)
        for uid in asked:
            if uid in full:
                self._lost_answers.pop(uid, None)
            elif uid not in received:
                self._lost_answers[uid] = view.round
        self.gathered(received)
        if len(full) < self.config.min_clients:
            what = (f"node {view.uid}: {len(full)} of {len(asked)} clients answered in round {view.round}, fewer than "
                    f"sharing.min_clients {self.config.min_clients}")  # fmt: skip
            if silent := sorted(asked - full.keys()):
                raise PeerLost(f"{what}; nothing from {silent}", silent)
            absent = sorted({*view.servers[view.uid]}.difference(view.members))
            raise AssemblyError(f"{what}; clients {absent} are not there", absent)  # all nodes end at once
        counts = {uid: float(each.scalars.get("samples", 0)) for uid, each in full.items()}
        if self.config.weighted_by == "equal" or not any(counts.values()):
            counts = dict.fromkeys(full, 1.0)
        means = _means([(self.dense(each), counts[uid]) for uid, each in full.items()])
        self.sum_up(means, len(full), len(self.clients_of(view.uid, view)))
        self.step(model, means["x"], view)

    def set_parameter_shapes(self, shapes: Sequence[tuple[int, ...]]) -> None:
        self._sizes = [math.prod(shape) for shape in shapes]

    def tensor_sizes(
        self, payload: Payload, source: int, target: int, view: RoundView  # noqa: ARG002
    ) -> Mapping[str, Sequence[int]]:
        """Returns the sizes of the model's parameter tensors for each tensor, or none if the payload is empty."""
        tensor = next(iter(payload.tensors.values()))
        return dict.fromkeys(self.NAMES, self._sizes if tensor.numel() else [])

    def payload_schema(self, elements: int, dtype: torch.dtype) -> dict[str, TensorSpec]:
        self._elements = elements
        return {name: TensorSpec(dtype, elements, exact=False) for name in self.NAMES}

    def succeed(self, former: Self) -> None:
        for name in self.SURVIVING:
            setattr(self, name, getattr(former, name))

    # -- state --------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        found = {name: tensor.clone() for name in self.TENSORS if (tensor := getattr(self, name)) is not None}
        return {**found, "unheard": {str(uid): round for uid, round in self._lost_answers.items()},
                "answered": self._last_answer_round}  # fmt: skip

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._lost_answers = {int(uid): int(round) for uid, round in state["unheard"].items()}
        self._last_answer_round = int(state["answered"])
        for name in self.TENSORS:
            setattr(self, name, state[name].clone() if name in state else None)


def _with_edges(
    view: RoundView, neighbors: tuple[int, ...], sources: tuple[int, ...], weights: Mapping[int, float]
) -> RoundView:
    """Returns the view with these edges; the rest of the weights up to one is the node's own."""
    row = dict(sorted({**weights, view.uid: 1.0 - sum(weights.values())}.items()))
    share = 1.0 / (1 + len(neighbors))
    return replace(view, neighbors=neighbors, sources=sources, weights=row, averaging_group=(),
                   out_weights=dict.fromkeys(sorted((view.uid, *neighbors)), share))  # fmt: skip


def _means(answers: Sequence[tuple[Mapping[str, Tensor], float]]) -> dict[str, Tensor]:
    """Returns sum_k n_k d_k / sum_k n_k of every tensor [P] by name, added in the order of the answers (d_k, n_k), at
    least in float32: in 16 bits, sums of many clients would no longer grow."""
    mean_count = sum(count for _, count in answers) / len(answers)
    totals: dict[str, Tensor] = {}
    for tensors, count in answers:
        for name, tensor in tensors.items():
            if name not in totals:
                totals[name] = torch.zeros_like(tensor, dtype=torch.promote_types(tensor.dtype, torch.float32))
            totals[name].add_(tensor, alpha=count / mean_count)
    return {name: totals[name].div_(len(answers)).to(tensor.dtype) for name, tensor in answers[0][0].items()}
