"""Schedule sequential: local steps, then exchange, then mix."""

from __future__ import annotations

from collections.abc import Callable

import torch

from decentnode import clock
from decentnode.communication.run_state import Steps
from decentnode.node.schedules.fragment_exchange import ExchangeOutcome
from decentnode.node.schedules.schedule import Schedule


class Sequential(Schedule):
    """Local steps, then exchange, then mix: x <- W (x + delta)."""

    def _begin(self, round: int, check: Callable[[], None]) -> Steps[None]:
        with torch.no_grad():
            for fragment in self.fragments:
                fragment.begin_turn(self.model.parameters)
        self._round, self._check = round, check
        yield from self.send(0)

    def send(self, phase: int) -> Steps[None]:
        if phase == self.sharing.requirements.steps_before:
            yield from self._make_steps()
        yield from self._send(self.model.parameters, phase)

    def _make_steps(self) -> Steps[None]:
        yield from self._train(self._round)
        with torch.no_grad():
            for fragment in self.fragments:
                fragment.adjust(self.model.parameters, self.update.loss)
        self._check()

    def mix(self) -> Steps[list[ExchangeOutcome]]:
        yield from self._mix_in_place()
        return self._settle_all()

    def finish(self) -> Steps[list[ExchangeOutcome]]:
        yield from self._mix_in_place()
        started = clock.now()
        with torch.no_grad():
            for fragment in self._due:
                fragment.finish_turn(self.model.parameters)
        self.times.mix += clock.now() - started
        return self._settle_all()
