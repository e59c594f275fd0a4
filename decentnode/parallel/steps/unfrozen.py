"""Parameters that were frozen when their module was wrapped and are trained later, as in fine-tuning."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

Named = list[tuple[str, Parameter]]


class UnfrozenParameters:
    """Finds parameters that are trained now and were not before, and adds them to the optimizer.

    That needs no other rank. Until these parameters are exchanged, which all ranks have to begin together, they are
    in `pending`.
    """

    def __init__(
        self, named: Sequence[tuple[str, Parameter]], optimizer: Optimizer, make: Callable[[Named], Optimizer],
    ) -> None:
        """named: all parameters of the module, in its order. make: the function that made the optimizer."""
        self._named, self._optimizer, self._make = list(named), optimizer, make
        self._known = [(name, p) for name, p in named if p.requires_grad]
        self._frozen = [(name, p) for name, p in named if not p.requires_grad]
        self.pending: Named = []
        self.exchanged_groups: list[list[str]] = []
        """The names of the parameters that were pending, grouped as they began to be exchanged, in that order."""

    def find(self) -> Named:
        """Returns parameters that were frozen so far and no longer are, for `mark_pending`."""
        return [(name, p) for name, p in self._frozen if p.requires_grad]

    def mark_pending(self, names: set[str]) -> None:
        """Makes the so far frozen parameters of these names pending, whether they are still frozen or not. Raises
        RuntimeError if the optimizer has several groups and it is not clear which one they belong to."""
        known = {name for name, _ in self._known}
        fresh = [(name, p) for name, p in self._frozen if name in names and name not in known]
        if fresh:
            known.update(name for name, _ in fresh)
            self._add_to_optimizer(fresh, [(name, p) for name, p in self._named if name in known])
            self._known += fresh
            self.pending += fresh
        self._frozen = [(name, p) for name, p in self._frozen if name not in names or not p.requires_grad]

    def take_pending(self, names: Sequence[str] | None = None) -> Named:
        """Returns the pending parameters of these names, in that order, or all, which are exchanged from now on."""
        pending = dict(self.pending)
        found = [(name, pending.pop(name)) for name in (names or [*pending])]
        self.pending = [*pending.items()]
        self.exchanged_groups.append([name for name, _ in found])
        return found

    def withdraw_frozen(self) -> None:
        """Makes those pending parameters that are still frozen no longer pending."""
        back = {name for name, p in self.pending if not p.requires_grad}
        self._known = [(name, p) for name, p in self._known if name not in back]
        self.pending = [(name, p) for name, p in self.pending if name not in back]

    def _add_to_optimizer(self, fresh: Named, trained: Named) -> None:
        """Adds parameters to the optimizer's groups in which its maker puts them when it is called again with all
        trained parameters; those that the script has added itself stay where they are."""
        groups = self._optimizer.param_groups
        own = {p for group in groups for p in group["params"]}
        lacking = {p: name for name, p in fresh if p not in own}
        if not lacking:
            return
        made = self._make(trained)
        for number, theirs in enumerate(made.param_groups):
            if lacking.keys().isdisjoint(theirs["params"]):
                continue
            mine = [group for group in groups if not set(group["params"]).isdisjoint(theirs["params"])]
            if not mine and len(made.param_groups) == len(groups):  # all parameters of the group were frozen
                mine = groups[number : number + 1]
            if len(mine) != 1:
                name = next(lacking[p] for p in theirs["params"] if p in lacking)
                raise RuntimeError(f"parameter {name} is trained now but was frozen when the model was wrapped, and it "
                                   f"is not clear to which of the optimizer's {len(groups)} groups it belongs: add it "
                                   'with model.optimizer.add_param_group({"params": [...]})')  # fmt: skip
            _extend(mine[0], theirs, lacking.keys())
        for p in lacking:
            if p in made.state:  # for example Adagrad makes its state at construction
                self._optimizer.state[p] = made.state[p]


def _extend(mine: dict[str, Any], theirs: Mapping[str, Any], lacking: Collection[Tensor]) -> None:
    """Adds the parameters `lacking` of the group `theirs` to the group `mine`, in the order of a new optimizer."""
    names = {p: name for group in (mine, theirs)
             for p, name in zip(group["params"], group.get("param_names", ()), strict=False)}  # fmt: skip
    before = set(mine["params"])
    both = [p for p in theirs["params"] if p in before or p in lacking]
    mine["params"] = both + [p for p in mine["params"] if p not in set(both)]
    if "param_names" in mine:
        mine["param_names"] = [names[p] for p in mine["params"]]
