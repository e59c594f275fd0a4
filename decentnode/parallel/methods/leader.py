"""LSGD and its variant: ranks are pulled toward the rank with the lowest loss."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from decentnode.parallel.methods.base import DistOptimizer, GatheredNumbers
from decentnode.parallel.process_group.collectives import wait
from decentnode.parallel.process_group.machines import agreed_per_machine
from decentnode.parallel.process_group.shutdown import new_group
from decentnode.sharing.forces import leader_of, toward_

logger = logging.getLogger(__name__)


@dataclass
class _LeaderExchange:
    """One exchange: the leader, and its model, which may still be in flight."""

    leader: int
    target: Tensor
    """[P] the leader's model."""
    total: Tensor | None = None
    """[P] the sum of all ranks' models, for LSGD+ only."""
    works: list[Any] = field(default_factory=list)

    def wait(self) -> list[Tensor]:
        """Waits until all tensors of this exchange have arrived and returns them. Blocking."""
        for work in self.works:
            wait(work)
        self.works.clear()
        return [self.target] if self.total is None else [self.target, self.total]


class LSGD(DistOptimizer):
    """Leader SGD (Teng et al. 2019, arXiv 1905.10395): ranks are pulled to the one with the lowest running loss.

    Every comm_period steps they are pulled to the leader of their machine, in every GLOBAL_EVERY-th of these exchanges
    to the leader of all ranks; in the steps between, local_pulling_strength / comm_period of the way to the leader's
    last model. The leader itself is not pulled. An exchange gathers one number per rank and broadcasts one model.
    """

    needs_loss = True
    GLOBAL_EVERY = 4

    def __init__(self, *args: Any, local_world_size: int | None = None, **kwargs: Any) -> None:
        """local_world_size: ranks per machine; torchrun's when not given, and without torchrun counted (all ranks count
        as one machine if machines have different numbers)."""
        super().__init__(*args, **kwargs)
        if local_world_size and self.world_size % local_world_size:
            raise ValueError(f"local_world_size must divide world_size, got {local_world_size} and {self.world_size}")
        self._given_ranks_per_machine = local_world_size
        self.ranks_per_machine = local_world_size or self.world_size
        """Ranks per machine, once all ranks agree on it."""
        self._peers = self._ranks_of_machine()
        self._group = None
        self.num_exchanges = 0
        self._has_leader_model = False
        """Whether `center` is a leader's model and no longer the mean of the initial parameters."""
        self._decrease = 0.0
        self._before: Tensor | None = None
        self._warned = False
        self.leader = self.rank
        self._scores: GatheredNumbers | None = None
        self._exchange: _LeaderExchange | None = None

    def _ranks_of_machine(self) -> list[int]:
        """Returns the ranks of this rank's machine; all ranks if `ranks_per_machine` does not divide their number."""
        local = self.world_size if self.world_size % self.ranks_per_machine else self.ranks_per_machine
        first = self.rank // local * local
        return list(range(first, first + local))

    def begin(self) -> None:
        super().begin()  # first, as it checks that all ranks have this method
        self.ranks_per_machine = local = agreed_per_machine(self._given_ranks_per_machine) or self.world_size
        if local < 1 or self.world_size % local:
            raise ValueError(f"local_world_size must divide world_size, got {local} and {self.world_size}")
        self.make_groups()

    def make_groups(self) -> None:
        self._peers = self._ranks_of_machine()
        local = len(self._peers)
        if 1 < local < self.world_size:
            for start in range(0, self.world_size, local):
                group = new_group(range(start, start + local))
                if self.rank in range(start, start + local):
                    self._group = group

    def reset_peers(self, num_exchanges: int) -> None:
        self.num_exchanges, self.leader, self._has_leader_model = num_exchanges, self.rank, False

    def before_step(self) -> None:
        exchange, scores = self._exchange, self._scores
        self._exchange = self._scores = None
        if exchange is not None:
            self._apply_exchange(exchange)
        if scores is not None:
            self._exchange = self._start_exchange(scores.wait())
        if not self.idle and ((not self._losses and self.steps == 0) or self._warned):
            self._before = self.flat_params()
            self._gradient = torch.cat([each.detach().reshape(-1) for each in self.dense_gradients(self.params)])

    def dist_train_step(self, loss: float | None) -> None:
        super().dist_train_step(loss)
        if loss is None:
            if not self._warned:
                self._warned = True
                logger.warning("LSGD without step(loss=...): the leader is the rank whose gradients predict the "
                               "largest improvement")
            if self._before is not None:
                kind = torch.complex128 if self._before.is_complex() else torch.float64
                change = (self._before - self.flat_params()).to(kind)
                gain = float((change * self._gradient.conj().to(kind)).real.sum())
                self._decrease = 0.9 * self._decrease + 0.1 * gain
        self._before = None

    def score(self) -> float:
        """Returns this rank's score, the lower the better: its mean loss, or minus the decrease that its gradients
        predict. A rank that has run out of inputs never leads."""
        if self.idle:
            return float("inf")
        if self._losses:
            return sum(self._losses) / len(self._losses)
        return -self._decrease

    def comm_train_step(self) -> None:
        scores = self.gather_numbers(self.score())
        if self.overlap:
            self._scores = scores
        else:
            self._apply_exchange(self._start_exchange(scores.wait()))

    def _start_exchange(self, scores: list[float]) -> _LeaderExchange:
        """Starts the broadcast of the leader's model. scores: by rank. Not blocking."""
        self.num_exchanges += 1
        everybody = len(self._peers) in (1, self.world_size) or self.num_exchanges % self.GLOBAL_EVERY == 0
        among = range(self.world_size) if everybody else self._peers
        leader = leader_of({rank: scores[rank] for rank in among})
        exchange = _LeaderExchange(leader, self.flat_params())
        if self.world_size > 1:
            group = None if everybody else self._group
            exchange.works.append(dist.broadcast(exchange.target, leader, group=group, async_op=True))
        return exchange

    def _apply_exchange(self, exchange: _LeaderExchange) -> None:
        """Pulls the parameters toward the leader's model. Blocking until it has arrived."""
        exchange.wait()
        self.leader, self.center = exchange.leader, exchange.target
        self.approach(exchange)
        self._has_leader_model = True

    def approach(self, exchange: _LeaderExchange) -> None:  # noqa: ARG002
        if self.leader != self.rank:
            self.pull(self.center, self.dist_pulling_strength)

    def local_pulling_step(self) -> None:
        if self.leader != self.rank and self._has_leader_model:
            super().local_pulling_step()

    def close(self) -> None:
        self._group = self._exchange = self._scores = None

    def state_dict(self) -> dict[str, Any]:
        """Waits for an exchange in flight, whose result is part of the state and still takes effect in its step."""
        exchange = self._exchange
        return super().state_dict() | {
            "meetings": self.num_exchanges, "decrease": self._decrease, "leader": self.leader,
            "followed": self._has_leader_model,
            "scores": None if self._scores is None else self._scores.wait(),
            "meeting": None if exchange is None else (exchange.leader, *(each.clone() for each in exchange.wait())),
        }  # fmt: skip

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self.num_exchanges, self._decrease = int(state["meetings"]), float(state["decrease"])
        self.leader, self._has_leader_model = int(state["leader"]), bool(state["followed"])
        self._scores = self._exchange = None
        if not self.has_same_world_size(state):
            self.reset_peers(self.num_exchanges)
            return
        if state["scores"] is not None:
            scores = [torch.tensor([each, 0, 0], dtype=torch.float64) for each in state["scores"]]
            self._scores = GatheredNumbers(scores)
        if state["meeting"] is not None:
            leader, *tensors = state["meeting"]
            self._exchange = _LeaderExchange(leader, *(each.clone() for each in tensors))


class LSGDPlus(LSGD):
    """LSGD whose target is between the mean of all ranks and the leader: mean + strength (leader - mean)."""

    def _start_exchange(self, scores: list[float]) -> _LeaderExchange:
        exchange = super()._start_exchange(scores)
        exchange.total = self.flat_params()
        if self.world_size > 1:
            exchange.works.append(dist.all_reduce(exchange.total, async_op=True))
        return exchange

    def approach(self, exchange: _LeaderExchange) -> None:
        assert exchange.total is not None
        toward_(self.center, exchange.total.div_(self.world_size), 1.0 - self.dist_pulling_strength)
        self.pull(self.center, self.dist_pulling_strength)
