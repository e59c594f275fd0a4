"""The ranks of a training that is recorded as a run: fixed ones, or a changing membership."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from decentnode.metrics.run_folder import folder_name
from decentnode.parallel.averages import consensus_distance
from decentnode.parallel.ddp import DecentralizedDataParallel
from decentnode.parallel.process_group.agreement import succeed_on_all_ranks
from decentnode.parallel.process_group.collectives import mean_over_ranks
from decentnode.parallel.process_group.default_group import device_of_group, num_ranks

Measure = Callable[[], Mapping[str, float]]


class RunRanks:
    """Fixed ranks: each is a node of the run, by its rank."""

    folder: str | None = None
    """The name of the run's directory, if all ranks know it without communication."""

    def __init__(self, model: DecentralizedDataParallel) -> None:
        self.model, self.uid = model, model.rank

    @property
    def members(self) -> tuple[int, ...]:
        """The uids of all current ranks."""
        return tuple(range(self.model.world_size))

    @property
    def joined_late(self) -> bool:
        """Whether this rank joined at the current step, when others had begun what they do between two epochs at this
        step, so that it takes no part in that."""
        return False

    def evaluate(self, measure: Measure | None) -> dict[str, float]:
        """Returns the metrics of an evaluation. Blocking, on all ranks."""
        found: dict[str, float] = {}
        if measure is not None:
            with succeed_on_all_ranks("evaluate the model"):
                own = measure()
            means = _tensor(own)
            if num_ranks() > 1:
                mean_over_ranks(means)
            with self.model.averaged(), succeed_on_all_ranks("evaluate the averaged model"):
                merged = measure()
            found = _figures(own, means, merged)
        return found | {"consensus_distance": self.model.consensus_distance(), "contributors": self.model.world_size}


class ElasticRunRanks(RunRanks):
    """Ranks with a changing membership: each is a node of the run, by the uid that it keeps. An evaluation is one
    average over all ranks, which is begun again if a rank dies; a rank that joins meanwhile takes no part in it."""

    def __init__(self, model: DecentralizedDataParallel) -> None:
        super().__init__(model)
        assert model._participant is not None
        self._participant, terms = model._participant, model._participant.job.terms
        self.uid = self._participant.job.control.uid
        self.folder = folder_name(terms.began, terms.run.hex()[:4])

    @property
    def members(self) -> tuple[int, ...]:
        return self._participant.job.members

    @property
    def joined_late(self) -> bool:
        return self._participant.joined_at == self.model.steps and self._participant.joined_late

    def evaluate(self, measure: Measure | None) -> dict[str, float]:
        model, failed = self.model, list[Exception]()
        own = {} if measure is None else measure()

        def evaluate_together(mean: Callable[[Tensor], Tensor]) -> dict[str, float]:
            means, merged = mean(_tensor(own)), own
            if measure is not None:
                model._average.replace_by_mean(keep=True, measure=False, mean_of=mean)
                try:
                    merged = measure()
                except Exception as error:  # of the script; raised later, as the others would wait for this rank
                    failed[:] = [error]
                finally:
                    model.revert_global_avg()
            distance = consensus_distance(model._gossip.buckets, mean)
            return _figures(own, means, merged) | {
                "consensus_distance": distance, "contributors": len(self._participant.exchange.averaging),
            }  # fmt: skip

        found = model._gossip.exchange.run_average("evaluation", evaluate_together)
        if failed:
            raise failed[0]
        return found


def _tensor(figures: Mapping[str, float]) -> Tensor:
    return torch.tensor([*figures.values()], dtype=torch.float64, device=device_of_group())


def _figures(own: Mapping[str, float], means: Tensor, merged: Mapping[str, float]) -> dict[str, float]:
    found: dict[str, float] = {}
    for (name, value), mean in zip(own.items(), means.tolist(), strict=True):
        found |= {name: value, f"{name}_mean": mean, f"{name}_merged": merged[name]}
    return found


def ranks_of(model: DecentralizedDataParallel) -> RunRanks:
    return RunRanks(model) if model._participant is None else ElasticRunRanks(model)
