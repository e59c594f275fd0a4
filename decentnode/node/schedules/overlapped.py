"""Schedule overlapped: the exchange of a round is in flight during its local steps."""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable

import torch
from torch import Tensor

from decentnode import clock
from decentnode.communication.run_state import Steps
from decentnode.graph.base import RoundView
from decentnode.node.schedules.background import BackgroundMixer, is_supported, is_worthwhile
from decentnode.node.schedules.fragment_exchange import ExchangeOutcome, FragmentExchange, RoundTimes, Slice
from decentnode.node.schedules.schedule import Schedule
from decentnode.tensors import blocks


class Overlapped(Schedule):
    """The exchange of x(r) is in flight during the local steps from x(r); then x <- W x + delta
    (docs/explanation/round.rst, "Overlapped").

    If there are several phases, the first is in flight during the local steps, and the others follow after them. W x is
    computed by a background thread during the local steps if the config demands it, or by default if it is worthwhile
    (background.py), for rules with one phase that do not replace gradients (`Requirements.gradient`); afterwards only
    delta is added. Parameters that are not exchanged in the round only get their update.
    """

    _local_update: Tensor | None = None
    """[P] the local update, kept while the phases of a round are mixed one after the other."""
    _background_mixer: BackgroundMixer | None = None
    """The background thread that mixes the current round."""
    _mixed_model: Tensor | None = None
    """[P] W x, if it is computed in the background."""
    _mixed_parts: list[tuple[FragmentExchange, int, int, RoundView]]
    """(fragment, start, stop, view) of each mixed part of `_mixed_model`; start and stop count from the fragment's
    first element."""

    def _begin(self, round: int, check: Callable[[], None]) -> Steps[None]:
        self._before = self.model.parameters
        if self._due:
            yield from self._begin_exchange()
        yield from self._train(round)
        check()

    def _begin_exchange(self) -> Steps[None]:
        elementwise = self.sharing.requirements.elementwise
        if not elementwise:  # such a rule may keep views of the sent model until it mixes
            self._before = self._before.clone()
        yield from self._send(self._before, 0)
        slot = yield from self._acquire_slot(self._before)
        started = clock.now()
        if slot is not None:
            self.model.rebind(slot.copy_(self._before))
        elif elementwise:
            self._before = self._before.clone()
        self.times.send += clock.now() - started
        if self._uses_background_mixing:
            self._begin_mixing()

    @functools.cached_property
    def _uses_background_mixing(self) -> bool:
        """Whether this schedule mixes in the background. Decided in the first round, as nothing that it depends on
        changes within a generation."""
        needs, model = self.sharing.requirements, self.model.parameters
        if needs.phases > 1 or needs.gradient or not is_supported(self.communication, model):
            return False
        return is_worthwhile(self.communication, model) if self.in_background is None else self.in_background

    def _begin_mixing(self) -> None:
        """Begin to mix in the background. Until `BackgroundMixer.join`, only the other thread uses the exchanges, the
        rules and `_mixed_model`."""
        if self._mixed_model is None:
            self._mixed_model = torch.empty_like(self._before)
        self._mixed_parts = []
        due, before, mixed, mixed_parts = self._due, self._before, self._mixed_model, self._mixed_parts

        def mix() -> None:
            with torch.no_grad():
                for fragment in due:
                    of_before, of_mixed = fragment.part(before), fragment.part(mixed)
                    for each in fragment.slices(self._timeout_of(fragment), RoundTimes()):
                        assert isinstance(each, Slice), "a transport with threads blocks"
                        used_view = each.mix(fragment.rule, of_before, of_mixed)
                        mixed_parts.append((fragment, each.start, each.stop, used_view))

        self.communication.blocked_since = math.inf
        self._background_mixer = BackgroundMixer(mix)

    def mix(self) -> Steps[list[ExchangeOutcome]]:
        if self._local_update is None and self._due:
            model = self.model.parameters
            self._local_update = model - self._before
            for fragment in self._due:
                fragment.part(model).copy_(fragment.part(self._before))
        yield from self._mix_in_place()
        return self._settle_all()

    def abandon(self) -> None:
        """Abandon the current round, as `Schedule.abandon` does. Blocks until the background thread has ended, which is
        soon, as the communication has ended its waits."""
        mixer, self._background_mixer = self._background_mixer, None
        if mixer is not None:
            self.communication.blocked_since = clock.now()
            with contextlib.suppress(Exception):
                mixer.join()
        super().abandon()
        update, self._local_update = self._local_update, None
        if update is None:
            return
        with torch.no_grad():  # between two phases the model does not contain the update
            for fragment in self._due:
                fragment.rule.advance(fragment.part(self.model.parameters), fragment.part(update), fragment.view)

    def finish(self) -> Steps[list[ExchangeOutcome]]:
        if self._background_mixer is not None:
            self._advance_mixed(self._background_mixer)
            return self._settle_all()
        if self._local_update is None:
            yield from self._mix_and_advance()
            return self._settle_all()
        yield from self._mix_in_place()
        mixed = self._settle_all()
        with torch.no_grad():
            for fragment, each in zip(self._due, mixed, strict=True):
                model, update = fragment.part(self.model.parameters), fragment.part(self._local_update)
                fragment.rule.advance(model, update, fragment.view.without(each.missing))
        self._local_update = None
        return mixed

    def _advance_mixed(self, mixer: BackgroundMixer) -> None:
        """Wait until the background thread has mixed all arrivals, then set the model to W x + delta. Blocking."""
        started = clock.now()
        self.communication.blocked_since = clock.now()
        mixer.join()
        self._background_mixer = None
        self.times.wait += (joined := clock.now()) - started
        assert self._mixed_model is not None
        whole_tensors = self.model.parameters, self._before, self._mixed_model
        with torch.no_grad():
            for fragment, start, stop, view in self._mixed_parts:
                model, before, mixed = map(fragment.part, whole_tensors)
                whole = not fragment.rule.requirements.elementwise
                for a, b in [(start, stop)] if whole else blocks(start, stop, model.device):
                    update = model[a:b] - before[a:b]
                    fragment.rule.advance(model[a:b].copy_(mixed[a:b]), update, view)
        self.times.mix += clock.now() - joined

    def _mix_and_advance(self) -> Steps[None]:
        """Mix and add the update slice by slice, as steps, so that neither the mixed model nor the update needs memory
        for all parameters."""
        started, waited = clock.now(), self.times.wait
        for fragment in self._due:
            model, before = fragment.part(self.model.parameters), fragment.part(self._before)
            for each in fragment.slices(self._timeout_of(fragment), self.times):
                if not isinstance(each, Slice):
                    yield each
                    continue
                with torch.no_grad():
                    x, old_x = model[each.start : each.stop], before[each.start : each.stop]
                    update = x - old_x
                    used_view = each.mix(fragment.rule, before, model)
                    fragment.rule.advance(x, update, used_view)
                fragment.mark_mixed(each.stop)
        self.times.mix += clock.now() - started - (self.times.wait - waited)
